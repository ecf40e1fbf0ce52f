"""A small model for tests on a GPU: trained by an engine, and by plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.engine import Engine
from tests.support.parity import config_of

WIDTH, DEPTH, STEPS = 64, 4, 4
LOW = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def net(width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Feed(width) for _ in range(depth)))


def batch(device: torch.device, step: int, rank: int = 0, width: int = WIDTH) -> Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, x: Tensor, mode: str) -> Tensor:
    x = x.to(LOW[mode]) if mode.endswith("true") and mode in LOW else x
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False) if mode == "bf16-mixed" else nullcontext():
        return model(x).float().square().mean()


def plain(device: torch.device, mode: str = "32-true", ranks: int = 1, clip: float | None = None) -> dict[str, Tensor]:
    """One process, plain PyTorch; in ``mode`` with weights of that dtype."""
    model = net().to(device)
    model = model.to(LOW[mode]) if mode.endswith("true") and mode in LOW else model
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, batch(device, step, rank), mode) / ranks for rank in range(ranks)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def started(
    device: torch.device,
    stage: int,
    mode: str = "32-true",
    group: ShardGroup | None = None,
    clip: float | None = None,
    **zero: Any,
) -> tuple[Engine, Callable[[Tensor], None]]:
    """An engine, and a step of it on this rank's batch."""
    config = config_of(stage, zero)
    engine = lt_zero.shard(net(), config, device, policy=dtype_policy(config, mode), group=group)
    optimizer = sgd(engine.root)
    owner = lt_zero.ShardedOptimizer(engine, optimizer)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(engine.root, x, mode).backward()
        if clip is not None:
            owner.grads.clip_norm(clip)
        optimizer.step()

    return engine, step


def sharded(
    device: torch.device,
    stage: int,
    mode: str = "32-true",
    group: ShardGroup | None = None,
    rank: int = 0,
    clip: float | None = None,
    **zero: Any,
) -> Engine:
    engine, step = started(device, stage, mode, group, clip, **zero)
    for number in range(STEPS):
        step(batch(device, number, rank))
    return engine


def far(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name].float().cpu() - value.cpu()).abs().max()) for name, value in want.items())
