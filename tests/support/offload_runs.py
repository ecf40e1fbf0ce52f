"""Training with states in files, for tests of offload."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
}


def blocks(path: str | None, params: bool = True, **more: Any) -> dict[str, Any]:
    """The offload blocks of ``zero_optimization``."""
    if path is None:
        return {}
    found: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": path, **more}}
    if params:
        found["offload_param"] = {"device": "nvme", "nvme_path": path, "max_in_cpu": 0}
    return found


def train(
    stage: int,
    path: str | None,
    optimizer: str = "AdamW",
    steps: int = 3,
    dtype: torch.dtype | None = None,
    params: bool = True,
    clip: float | None = 0.5,
    keys: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[dict[str, Tensor], Any, Any]:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(
        model,
        config_of(stage, zero=zero or blocks(path, params and stage == 3, **more), dtype=dtype, **(keys or {})),
    )
    opt = getattr(torch.optim, optimizer)(model.parameters(), **OPTIMIZERS[optimizer])
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    for step in range(steps):
        opt.zero_grad()
        for micro in range(2):
            next_token_loss(model, step, micro, dist.get_rank()).float().backward()
        if clip is not None:
            sharded.grads.clip_norm(clip)
        opt.step()
    return full_values(engine), engine, sharded


_IN_MEMORY: dict[Any, dict[str, Tensor]] = {}  # of this worker


def in_memory(stage: int, optimizer: str = "AdamW", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The weights that ``train`` ends with when nothing is offloaded; trained once, kept for all tests of the pool."""
    key = (stage, optimizer, dtype, dist.get_world_size())
    known = torch.tensor(int(key in _IN_MEMORY))
    dist.all_reduce(known, dist.ReduceOp.MIN)  # a worker may have been replaced, or be another rank now
    if not known:
        _IN_MEMORY[key] = train(stage, None, optimizer, dtype=dtype)[0]
    return _IN_MEMORY[key]


def same(got: dict[str, Tensor], want: dict[str, Tensor], what: Any) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), (what, name, (got[name].float() - value.float()).abs().max().item())
