"""Transports that a package registers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero.core.comm import transports
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Alone, Backend, Connections, Gloo, Group, Reduction, Transport
from lt_zero.core.comm.work import CollectiveId, Work
from lt_zero.core.comm.world import World
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

CPU = torch.device("cpu")


class Counted(Transport):
    """Lets gloo move what it counts."""

    name = "counted"
    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._gloo = Gloo(connections)
        self.sends = self._gloo.sends
        self.sums_wide = self._gloo.sums_wide

    @classmethod
    def fits(cls, connections: Connections) -> bool:
        return connections.backend == "gloo"

    def all_gather(
        self, flat: Tensor, own: Tensor | None, launch: CollectiveId | None, group: Group | None = None
    ) -> Work:
        self.calls.append(("all_gather", flat.numel()))
        return self._gloo.all_gather(flat, own, launch, group)

    def reduce_scatter(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        self.calls.append(("reduce_scatter", reduction.flat.numel()))
        return self._gloo.reduce_scatter(reduction, launch)

    def all_reduce(self, reduction: Reduction, launch: CollectiveId | None) -> Work:
        self.calls.append(("all_reduce", reduction.flat.numel()))
        return self._gloo.all_reduce(reduction, launch)


@contextmanager
def registered(transport: type[Transport], before: str | None = None) -> Iterator[None]:
    transports.register(transport, before)
    try:
        yield
    finally:
        transports.unregister(transport.name)


def _trained() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in full_values(engine).items()}


def _trained_outside() -> tuple[dict[str, np.ndarray], set[str], list[tuple[str, int]]]:
    Counted.calls.clear()
    with registered(Counted):
        values = _trained()
    return values, {name for name, _ in Counted.calls}, list(Counted.calls)


def test_a_transport_from_outside_trains_to_the_same_weights(pool: Pool) -> None:
    want = pool.run(2, _trained, env={"LT_ZERO_SHARED_MEMORY": "0"})[0]
    (first, names, calls), (other, _, same) = pool.run(2, _trained_outside)
    assert {"all_gather", "reduce_scatter"} <= names
    assert calls == same, "ranks move the same in the same order"
    for name, value in want.items():
        np.testing.assert_array_equal(first[name], value, err_msg=name)
        np.testing.assert_array_equal(other[name], value, err_msg=name)


def _of_one_rank() -> str:
    if dist.get_rank() == 1:
        with registered(Counted), pytest.raises(RuntimeError) as caught:
            ShardGroup.of_all(World.join(CPU))
    else:
        with pytest.raises(RuntimeError) as caught:
            ShardGroup.of_all(World.join(CPU))
    return str(caught.value)


def test_a_transport_that_one_rank_has_not_is_refused_on_all(pool: Pool) -> None:
    for text in pool.run(3, _of_one_rank, env={"LT_ZERO_SHARED_MEMORY": "0"}):
        assert "(rank 0: 'gloo', rank 1: 'counted', rank 2: 'gloo')" in text
        assert "on all ranks" in text


def test_the_order_of_transports() -> None:
    assert isinstance(ShardGroup.of_all(World(None, CPU)).transport, Alone)

    class Mine(Alone):
        name = "mine"

    with registered(Mine, before="backend"):
        assert ShardGroup.of_all(World(None, CPU)).transport.name == "none", "one that is asked earlier fits"
    with registered(Mine):
        group = ShardGroup.of_all(World(None, CPU))
    assert group.transport.name == "mine"
    group.configure(shards=1, topology=1, scatters=True, sums_gradients=False, predivide=None)
    assert group.transport.name == "none", "it is not registered any more"


def test_a_transport_of_sums_that_is_replaced_is_closed_and_forgotten() -> None:
    closed: list[str] = []

    class Summing(Alone):
        def __init__(self, name: str) -> None:
            self.title = name

        def close(self) -> None:
            closed.append(self.title)

    group = ShardGroup.of_all(World(None, CPU))
    first = Summing("first")
    known = weakref.ref(first)
    group.sum_by(first)
    del first
    group.sum_by(Summing("second"))
    gc.collect()
    assert closed == ["first"]
    assert known() is None
    assert isinstance(group.sums, Summing)
    group.sum_by(None)
    assert closed == ["first", "second"]
    assert group.sums is group.transport
    group.sum_by(Summing("third"))
    del group
    gc.collect()
    assert closed == ["first", "second", "third"]


def test_names_of_transports_are_checked() -> None:
    with pytest.raises(ValueError, match=r"register\(Backend\): a transport named 'backend' exists: rename one"):
        transports.register(Backend)
    with pytest.raises(
        ValueError, match=r"register\(before='tcp'\): .*Name one of none, hierarchy, windows, gloo, backend"
    ):
        transports.register(Counted, before="tcp")
