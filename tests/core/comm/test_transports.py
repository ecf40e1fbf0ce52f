"""Transports that a package registers. One of those in use: tests/outside."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from lt_zero.core.comm import transports
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Alone, Backend
from lt_zero.core.comm.world import World
from tests.outside.counted import Counted
from tests.support.outside import transport
from tests.support.pool import Pool

CPU = torch.device("cpu")


def _of_one_rank() -> str:
    if dist.get_rank() == 1:
        with transport(Counted), pytest.raises(RuntimeError) as caught:
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

    with transport(Mine, before="backend"):
        assert ShardGroup.of_all(World(None, CPU)).transport.name == "none", "one that is asked earlier fits"
    with transport(Mine):
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
