"""examples/lora.py, and plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lora as example

CONFIG, STEPS = example.CONFIG, 3


def train(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    full = example.main(config, STEPS, folder)
    saved = torch.load(Path(folder, "pytorch_model.bin"), weights_only=True)
    assert all(torch.equal(saved[name], value.half()) for name, value in full.items())
    return full


def plain(world: int) -> dict[str, Tensor]:
    model = example.adapted(example.make()).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-4)
    for step in range(STEPS):
        for rank in range(world):
            batch = example.tokens(step, rank)
            (model(input_ids=batch, labels=batch).loss / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
