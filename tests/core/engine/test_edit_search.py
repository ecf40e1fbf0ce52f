"""The search for edits before a step moves few bytes, and none where parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.inplace_edits import InplaceEdits
from lt_zero.core.step import sharded_optimizer
from tests.support.parity import full_values
from tests.support.simulated_device import machine

CPU = torch.device("cpu")
NUMEL = 64 * 64


class Bytes(TorchDispatchMode):
    """Counts what operators read and, apart from ``take_edits``, which writes edited elements only, write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = tree_leaves((args, kwargs)) if "take_edits" in str(func) else tree_leaves((args, kwargs, result))
            self.moved += sum(one.nbytes for one in moved if isinstance(one, Tensor))
            self.launches += 1
        return result


@contextmanager
def _counted() -> Iterator[Bytes]:
    """Context in which the bytes are counted that the search moves."""
    count, nested = Bytes(), [False]

    def counts(of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if nested[0]:
                return of(*args, **options)
            nested[0] = True
            try:
                with count:
                    return of(*args, **options)
            finally:
                nested[0] = False

        return call

    edits = InplaceEdits
    places = [(edits, "check"), (edits, "note"), (edits, "seen"), (sharded_optimizer, "check_all")]
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, counts(getattr(owner, name))))
        yield count


def _no_edit(model: nn.Module) -> None:
    pass


def _train(stage: int, edit: Callable[[nn.Module], None] = _no_edit) -> tuple[Bytes, list[Tensor]]:
    """Train two layers on a device with streams, with a last step by 0 after ``edit``: its search, and all weights."""
    config = ZeroConfig.of({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    with machine(), _counted() as count:
        engine = lt_zero.shard(model, config, CPU, policy=dtype_policy(config, "bf16-mixed"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(4):
            count.moved = count.launches = 0
            model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            if step == 3:
                edit(model)
                optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return count, list(full_values(engine).values())


@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_of_a_step(stage: int) -> None:
    found, _ = _train(stage)
    if stage == 3:
        assert (found.moved, found.launches) == (0, 0), "no search after the first forwards"
    else:
        assert (found.moved, found.launches) == (2 * NUMEL * 6, 1), "fp32 and bf16 weights are read once, together"


def test_what_is_found() -> None:
    def edit(model: nn.Module) -> None:
        for p in model.parameters():
            p.data[::2] = 0.3

    _, unedited = _train(1)
    _, values = _train(1, edit)
    for value, before in zip(values, unedited, strict=True):
        assert (value[::2] == torch.tensor(0.3).bfloat16()).all()
        assert torch.equal(value[1::2], before[1::2]), "rows that were not edited keep their precision"
        assert not torch.equal(before, before.bfloat16().float()), "there is precision to lose"
