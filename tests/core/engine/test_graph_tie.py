"""Graphs that are kept do not keep their engine, and a backward without the model reduces all the same."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.engine import Engine
from tests.support.matrix import only
from tests.support.parity import RELEASE, STAGES, config_of
from tests.support.pool import Pool

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        self.auxiliary = hidden.square().mean()
        return x + self.outer(hidden)


class Keeper(nn.Module):
    """Keeps its loss, and those of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.loss = self.head(x).square().mean() + sum(block.auxiliary for block in self.blocks)
        return self.loss


def _data(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def _of_one_process(times: int = 1) -> list[Tensor]:
    """The gradients of the mean over two ranks."""
    model = Keeper()
    sum((model(_data(rank)) for rank in range(2)), torch.zeros(())).mul(times / 2).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _config(stage: int) -> Any:
    return config_of(stage, zero=RELEASE if stage == 3 else {})


def _step(stage: int, steps: int, way: str) -> weakref.ref[Engine]:
    model = Keeper()
    engine = lt_zero.shard(model, _config(stage))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        if way == "scope":
            with engine.forward_scope():
                loss = model(_data(dist.get_rank()))
            with engine.backward_pass():
                loss.backward()
        else:
            model(_data(dist.get_rank())).backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    return weakref.ref(engine)


def _forgets(stage: int, way: str) -> None:
    gc.collect()
    before = threading.active_count()
    known = [_step(stage, 2, way) for _ in range(3)]
    gc.collect()
    assert [engine() for engine in known] == [None] * 3
    assert threading.active_count() <= before + 2, "those of the process group live with it"


@pytest.mark.parametrize("way", ["hooks", "scope"])
@pytest.mark.parametrize("stage", only([0, 3], STAGES))
def test_a_model_that_keeps_its_losses_is_forgotten(pool: Pool, stage: int, way: str) -> None:
    pool.run(2, _forgets, stage, way)


def _starts(stage: int) -> tuple[list[nn.Parameter], Tensor, weakref.ref[Engine]]:
    model = Keeper()
    engine = lt_zero.shard(model, _config(stage))
    loss = model(_data(dist.get_rank()))
    model.loss = None
    return list(model.parameters()), loss, weakref.ref(engine)


def _without_its_model(retains: bool) -> None:
    parameters, loss, known = _starts(0)
    gc.collect()
    assert known() is not None, "the graph needs it"
    loss.backward(retain_graph=retains)
    if retains:
        gc.collect()
        assert known() is not None, "another backward may come"
        loss.backward()
    for parameter, wanted in zip(parameters, _of_one_process(1 + retains), strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    del loss
    gc.collect()
    assert known() is None
    # Nothing reduces what comes from here on.
    with pytest.raises(RuntimeError, match="a sharded model that is gone, .* Keep the model"):
        parameters[0].sum().backward()


@pytest.mark.parametrize("retains", [False, True])
def test_a_backward_without_the_model_is_reduced(pool: Pool, retains: bool) -> None:
    pool.run(2, _without_its_model, retains)


def _part_of_a_model() -> None:
    """A part by itself, which no unit hooks, and without an optimizer."""

    def head() -> tuple[nn.Module, weakref.ref[Engine]]:
        model = Keeper()
        return model.head, weakref.ref(lt_zero.shard(model, _config(0)))

    part, known = head()
    gc.collect()
    assert known() is not None
    part(_data(dist.get_rank())).mean().backward()
    wanted = torch.stack([_data(rank).mean(0) for rank in range(2)]).mean(0)
    torch.testing.assert_close(part.weight.grad, wanted[None])
    del part
    gc.collect()
    assert known() is None


def test_a_part_keeps_the_engine(pool: Pool) -> None:
    pool.run(2, _part_of_a_model)


def _another_loss(stage: int) -> list[Tensor]:
    """Two graphs at once; the second one's backward comes when the first is done, and its model is out of scope."""
    model = Keeper()
    engine = lt_zero.shard(model, _config(stage))
    parameters = list(model.parameters())
    first, second = (model(_data(dist.get_rank())) for _ in range(2))
    known = weakref.ref(engine)
    first.backward()
    del model, engine, first
    gc.collect()
    assert known() is not None
    second.backward()
    return [p.grad for p in parameters if p.grad is not None]


def test_a_graph_holds_until_its_own_backward(pool: Pool) -> None:
    for found in pool.run(2, _another_loss, 0):
        for grad, wanted in zip(found, _of_one_process(2), strict=True):
            torch.testing.assert_close(grad, wanted)
