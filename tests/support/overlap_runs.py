"""Training with steps beside backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.optim import Lamb, Lion
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values

LAZY = 0.002  # seconds that each kernel call in the background takes longer
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "plain SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "Lion": partial(Lion, lr=1e-3, weight_decay=0.1),
    "Lamb": partial(Lamb, lr=1e-2, weight_decay=0.1),
}
_KERNELS = ("adam_step", "sgd_step", "adagrad_step", "lion_step", "lamb_apply")


class Watch:
    """Where the kernel ran."""

    def __init__(self) -> None:
        self.beside = 0  # calls in the background
        self.here = 0


@contextmanager
def slowed(apart: bool) -> Iterator[Watch]:
    """The kernel is slow in the background; with ``apart`` host memory counts as apart from the device's."""
    watch, patch = Watch(), pytest.MonkeyPatch()

    def slow(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "lt_zero-step":
                watch.beside += 1
                time.sleep(LAZY)
            else:
                watch.here += 1
            return kernel(*args, **kwargs)

        return step

    for name in _KERNELS:
        patch.setattr(ops, name, slow(getattr(ops, name)))
    patch.setattr(accelerator, "_apart", apart)
    try:
        yield watch
    finally:
        patch.undo()


def offload(path: str | None, overlap: Any, params: bool) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": path} if path else {"device": "cpu"}
    found: dict[str, Any] = {"offload_optimizer": {**where, "overlap_step": overlap}}
    if params:
        found["offload_param"] = {**where, "max_in_cpu": 0}
    return found


def train(
    stage: int,
    zero: dict[str, Any],
    beside: bool = False,
    clip: float | None = None,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    model: type[Net] = Net,
    kind: str = "AdamW",
) -> tuple[dict[str, Tensor], Any, Any]:
    torch.manual_seed(0)
    net = model()
    engine = lt_zero.shard(net, config_of(stage, zero=zero, dtype=dtype))
    optimizer = OPTIMIZERS[kind](net.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        next_token_loss(net, step, 0, dist.get_rank()).float().backward()
        with sharded.overlap.beside_backward() if beside else nullcontext():
            next_token_loss(net, step, 1, dist.get_rank()).float().backward()
        if clip is not None:
            sharded.grads.clip_norm(clip)
        optimizer.step()
        schedule.step()
    return full_values(engine), engine, sharded


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("no gradient today")
