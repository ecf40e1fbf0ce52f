"""Sends and receives between two ranks: waits that can never end are errors on both, and a late rank is none."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lt_zero.core.comm.point_to_point import PointToPoint, transfers_over
from lt_zero.core.comm.world import World
from tests.support.lightning_tools import quick
from tests.support.pool import Pool


def _world() -> tuple[World, PointToPoint, int]:
    with quick():
        world = World.join(torch.device("cpu"))
    transfers = transfers_over(world.new_group(None, closes=True), world)
    assert transfers is not None
    dist.barrier()  # both have the connections: a rank that fails closes its own
    return world, transfers, 1 - dist.get_rank()


def _crossing(late: float) -> list[float]:
    """Both ranks send and receive twice; rank 0 comes ``late``."""
    _, transfers, peer = _world()
    if dist.get_rank() == 0:
        time.sleep(late)
    found = [torch.zeros(3), torch.zeros(3)]
    works = [transfers.irecv(tensor, peer, f"{number}") for number, tensor in enumerate(found)]
    works += [transfers.isend(torch.full((3,), 10.0 * peer + number), peer, f"{number}") for number in range(2)]
    for work in reversed(works):  # in any order
        work.wait()
    return [float(tensor.sum() / 3) for tensor in found]


def test_transfers_are_matched_in_their_order_however_late(pool: Pool) -> None:
    assert pool.run(2, _crossing, 1.5) == [[0.0, 1.0], [10.0, 11.0]]


def _elsewhere() -> str:
    world, transfers, peer = _world()

    def wait() -> None:
        if dist.get_rank() == 0:
            transfers.irecv(torch.zeros(3), peer, "a tensor").wait()
        else:
            world.host_max(torch.zeros(1, dtype=torch.int64), "other flags").wait()

    with pytest.raises(RuntimeError) as caught:
        wait()
    return str(caught.value)


def test_a_rank_that_waits_elsewhere_is_named_on_both(pool: Pool) -> None:
    texts = pool.run(2, _elsewhere)
    assert texts[0] == texts[1]
    for part in ("The transfer of 'a tensor' was begun on rank 0", "not on rank 1, which waits in the flags of 'other"):
        assert part in texts[0]


def _fails(first: bool) -> tuple[str, str]:
    """Rank 1 fails after rank 0 has waited for it, if that is the ``first`` to come, or before."""
    world, transfers, peer = _world()

    def run() -> None:
        time.sleep(0.5 if (dist.get_rank() == 1) == first else 0.0)
        if dist.get_rank() == 1:
            raise ValueError("of rank 1")
        transfers.irecv(torch.zeros(3), peer, "a tensor").wait()

    with pytest.raises((RuntimeError, ValueError)) as caught, world.together("a step"):
        run()
    transfers.close()
    with pytest.raises(RuntimeError) as again:
        transfers.isend(torch.zeros(3), peer, "another")
    return str(caught.value), str(again.value)


@pytest.mark.parametrize("first", [True, False])
def test_an_error_ends_the_transfers_of_the_others(pool: Pool, first: bool) -> None:
    (other, again), (own, _) = pool.run(2, _fails, first)
    assert own == "of rank 1"
    assert "Rank 1 ended with ValueError: of rank 1" in other
    assert "'a tensor'" in other
    assert "closed after an error" in again
