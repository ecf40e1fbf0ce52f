"""examples/engine_loop.py, its configuration in a file; and plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from engine_loop import CONFIG, EPOCHS, main, make

__all__ = ["CONFIG", "plain", "train"]


def train(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    config["optimizer"]["params"]["eps"] = 1e-4  # a small one blows up the rounding of small gradients
    file = Path(folder, f"ds_config_{dist.get_rank()}.json")
    file.write_text(json.dumps(config))
    return main(["--local_rank=0", "--deepspeed", "--deepspeed_config", str(file), "--folder", folder])


def plain(world: int) -> dict[str, Tensor]:
    model, data = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    samplers = [DistributedSampler(data, world, rank) for rank in range(world)]
    size, rates = 24 // 2 // world, (0.0, 0.0, 0.01 * math.log(2) / math.log(3), 0.01)
    step = 0
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for number, batches in enumerate(zip(*(DataLoader(data, size, sampler=s) for s in samplers), strict=True)):
            for inputs, labels in batches:
                (F.cross_entropy(model(inputs), labels) / (2 * world)).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.param_groups[0]["lr"] = rates[min(step, 3)]
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    return {name: p.detach() for name, p in model.named_parameters()}
