"""A loop of one's own that knows nothing of its launcher; prints ``RESULT <rank> of <ranks>``."""

from __future__ import annotations

import sys

import torch
from torch import nn

import lt_zero

if __name__ == "__main__":
    torch.manual_seed(0)
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = lt_zero.initialize(model=nn.Linear(4, 3), config=config)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(sys.argv[1])
    print(f"RESULT {engine.global_rank} of {engine.world_size}", flush=True)
