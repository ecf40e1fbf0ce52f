"""On gloo all stages give the same bits, in fp32 and with bf16 compute copies, with and without shared memory.

Rank 1 is slowed down at the places where a missing wait would let another rank read too early.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.comm.windows import SharedMemoryTransport
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.grad_accumulator import GradAccumulator
from lt_zero.core.engine.grad_reducer import GradReducer
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import OPTIMIZERS, RELEASE, config_of, full_values
from tests.support.pool import Pool


def _slow(cls: type, name: str) -> None:
    """Delay a method on rank 1."""
    original = getattr(cls, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.003)
        return original(*args, **kwargs)

    setattr(cls, name, late)


def _run(stage: int, dtype: torch.dtype | None, zero: dict[str, Any], slow: bool, optimizer: str) -> Any:
    saved = [(cls, name, getattr(cls, name)) for cls, name in _DELAYED]
    try:
        for cls, name in _DELAYED if slow and dist.get_rank() == 1 else []:
            _slow(cls, name)
        return _train(stage, dtype, zero, optimizer)
    finally:
        for cls, name, method in saved:
            setattr(cls, name, method)


_DELAYED = [
    (Bucket, "refresh_after_step"),
    (Bucket, "launch_publish"),
    (GradAccumulator, "take"),
    (GradReducer, "_finish_oldest"),
    (SharedArena, "gather"),
]


def _train(stage: int, dtype: torch.dtype | None, zero: dict[str, Any], name: str) -> Any:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, zero, dtype))
    optimizer, seen = OPTIMIZERS[name](model.parameters()), dict[str, Any]()
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        with lt_zero.gathered(model):  # a rank that is slow to read meets one that steps already
            before = {f"before {step} {n}": p.detach().float().numpy().copy() for n, p in model.named_parameters()}
        seen.update(before)
        optimizer.step()
    return seen | {n: v.numpy() for n, v in full_values(engine).items()}


@pytest.mark.parametrize(
    ("shared", "dtype", "world"),
    only_rows([("0", torch.bfloat16, 3)], itertools.product(["1", "0"], [None, torch.bfloat16], [2, 3])),
    ids=str,
)
def test_all_stages_agree_bitwise(pool: Pool, world: int, dtype: torch.dtype | None, shared: str) -> None:
    env = {"LT_ZERO_SHARED_MEMORY": shared}
    reference = pool.run(world, _run, 0, dtype, {}, False, "adamw", env=env)[0]
    for stage, zero in [(1, {}), (2, {}), (3, {}), (3, RELEASE)]:
        for ranks in pool.run(world, _run, stage, dtype, zero, True, "adamw", env=env):
            for name, value in ranks.items():
                np.testing.assert_array_equal(value, reference[name], err_msg=f"stage {stage}: {name}")


def _shares() -> bool:
    return isinstance(lt_zero.shard(Net(), config_of(3)).groups[0].transport, SharedMemoryTransport)


def test_the_switch(pool: Pool) -> None:
    assert pool.run(2, _shares) == [True, True]
    assert pool.run(2, _shares, env={"LT_ZERO_SHARED_MEMORY": "0"}) == [False, False]


def _bf16_error(stage: int) -> tuple[float, float]:
    """Largest distance from an fp64 run: (ours with bf16 compute copies, the same in plain torch)."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def losses(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [next_token_loss(model, step, 0, r) / world for r in range(world)]

    exact, plain, mine = (torch.manual_seed(0) and Net() for _ in range(3))
    exact.double()
    engine = lt_zero.shard(mine, config_of(stage, dtype=torch.bfloat16))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (exact, plain, mine)]
    lt_zero.ShardedOptimizer(engine, optimizers[2])
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses(exact, step):
            loss.backward()
        # The same thing without an engine: 16-bit weights for forward and backward, fp32 weights for the update.
        low = torch.manual_seed(0) and Net()
        low.load_state_dict(plain.state_dict())
        low.bfloat16()
        for p, q in zip(plain.parameters(), low.parameters(), strict=True):
            p.grad = torch.zeros_like(p)
            q.grad = None
        for loss in losses(low, step):
            loss.backward()
            for p, q in zip(plain.parameters(), low.parameters(), strict=True):
                p.grad.add_(q.grad)
                q.grad = None
        next_token_loss(mine, step, 0, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    truth, got = dict(exact.named_parameters()), full_values(engine)
    ours = max(float((got[n].double() - truth[n]).abs().max()) for n in truth)
    theirs = max(float((p.double() - truth[n]).abs().max()) for n, p in plain.named_parameters())
    return ours, theirs


@pytest.mark.parametrize("stage", only([3], [0, 1, 2, 3]))
def test_bf16_copies_are_as_exact_as_plain_torch(pool: Pool, stage: int) -> None:
    ours, theirs = pool.run(2, _bf16_error, stage)[0]
    assert 0 < ours <= 2 * theirs
