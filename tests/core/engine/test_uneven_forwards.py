"""Ranks that run different numbers of forwards inside of ``synced``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of
from tests.support.features import skip_without
from tests.support.matrix import only_rows
from tests.support.models import Net, tokens
from tests.support.pool import Pool

ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}


def _model(stage: int = 3, **zero: Any) -> tuple[nn.Module, Tensor]:
    """A sharded model, and what it makes of ``tokens(0, 0, 0)``."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        want = model(tokens(0, 0, 0))
    config = {"zero_optimization": {**ZERO, **zero, "stage": stage}}
    return lt_zero.inference(model, config), want


def _run(model: nn.Module, want: Tensor, times: int) -> None:
    for _ in range(times):
        assert torch.equal(model(tokens(0, 0, 0)), want)


def _uneven(counts: list[list[int]], stage: int, folder: str) -> None:
    """Different numbers of forwards in each of several contexts, the same number between them."""
    offload = {"offload_param": {"device": "nvme", "nvme_path": folder}} if folder else {}
    model, want = _model(stage, **offload)
    with torch.no_grad():
        for count in counts:
            with lt_zero.synced(model):
                _run(model, want, count[dist.get_rank()])
            _run(model, want, 2)
    engine: Any = owner_of(next(model.parameters()))
    assert isinstance(engine, Engine)
    assert not [b.name for b in engine.buckets if b.sharding.params and not b.released]


@pytest.mark.parametrize(("stage", "files"), only_rows([(3, True), (2, False)], [(3, False), (3, True), (2, False)]))
def test_ranks_that_are_done_follow_the_others(pool: Pool, tmp_path: Any, stage: int, files: bool) -> None:
    """None at all, as the first forwards ever, and after others; prefetches and files included."""
    if files:
        skip_without("offload")
    pool.run(3, _uneven, [[0, 3, 1], [2, 0, 0], [1, 1, 1], [0, 0, 4]], stage, str(tmp_path) if files else "")


def _nested() -> None:
    """Inside of a forward scope, as in a ``predict_step``: parameters of the root stay readable after it."""
    model, want = _model()
    engine: Any = owner_of(next(model.parameters()))
    with torch.no_grad():
        for _ in range(2):
            with engine.forward_scope():
                with lt_zero.synced(model):
                    _run(model, want, 2 * dist.get_rank())
                _run(model, want, 1)


def test_inside_of_a_forward_scope(pool: Pool) -> None:
    pool.run(2, _nested)


def _failing() -> str:
    model, want = _model()
    with torch.no_grad():
        with pytest.raises((KeyError, RuntimeError)) as caught, lt_zero.synced(model):  # noqa: PT012
            _run(model, want, 1)
            if dist.get_rank() == 1:
                raise KeyError("mine")
            _run(model, want, dist.get_rank())
        _run(model, want, 2)
    return str(caught.value)


def test_an_error_of_one_rank_reaches_the_others(pool: Pool) -> None:
    others = "Rank 1 failed inside of `lt_zero.synced`; its own error says why."
    assert pool.run(3, _failing) == [others, "'mine'", others]


def _other_modules() -> str:
    model: Any = _model()[0]
    with torch.no_grad(), pytest.raises(RuntimeError) as caught, lt_zero.synced(model):
        model.blocks[dist.get_rank()](torch.zeros(1, 10))
    return str(caught.value)


def test_ranks_that_run_different_modules(pool: Pool) -> None:
    assert all("One rank gathers 'blocks.0', another 'blocks.1'" in text for text in pool.run(2, _other_modules))


def _inside_a_unit() -> None:
    model: Any = _model()[0]
    unit = model.blocks[0]

    def use(*_: Any) -> None:
        with lt_zero.synced(model):
            pass

    unit.register_forward_pre_hook(use)
    with pytest.raises(RuntimeError, match=r"cannot be used inside of the forward of 'blocks\.0'"), torch.no_grad():
        model(tokens(0, 0, 0))


def test_not_inside_of_a_unit(pool: Pool) -> None:
    pool.run(2, _inside_a_unit)


def test_a_model_that_is_not_sharded_needs_nothing() -> None:
    layer = nn.Linear(2, 2)
    want = layer(torch.ones(2))
    with lt_zero.synced(layer):
        assert torch.equal(layer(torch.ones(2)), want)
