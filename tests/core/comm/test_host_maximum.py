"""Maxima of small tensors over gloo in few hops."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lt_zero.core.comm import ranks
from lt_zero.core.comm.world import World
from tests.support.pool import Pool


def _maxima(dtype: torch.dtype) -> tuple[list[list[int]], int]:
    """The results of four exchanges that are open at a time, and the number of messages of this rank."""
    rank, size, sent, send = dist.get_rank(), dist.get_world_size(), list[int](), dist.isend

    def note(tensor: torch.Tensor, peer: int, *args: object) -> object:
        sent.append(peer)
        return send(tensor, peer, *args)  # type: ignore[arg-type]

    with (
        mock.patch.dict(os.environ, {"LT_ZERO_SHARED_MEMORY": "0"}),
        mock.patch.object(ranks, "RING", 1),
    ):
        world = World.join(torch.device("cpu"))
        with mock.patch.object(dist, "isend", note):
            # Each element is largest on another rank, and in each exchange on another one.
            tensors = [torch.tensor([(rank + k + i) % size + 10 * k for i in range(7)], dtype=dtype) for k in range(4)]
            for work in [world.host_max(tensor, "test") for tensor in tensors]:
                work.wait()
        world.end_run()
    return [tensor.tolist() for tensor in tensors], len(sent)


@pytest.mark.parametrize(("world", "dtype", "hops"), [(2, torch.uint8, 1), (3, torch.int64, 2), (5, torch.uint8, 3)])
def test_all_ranks_get_the_maximum_in_few_hops(pool: Pool, world: int, dtype: torch.dtype, hops: int) -> None:
    expected = [[world - 1 + 10 * k] * 7 for k in range(4)]
    assert pool.run(world, _maxima, dtype) == [(expected, 4 * hops)] * world


def _lost() -> str:
    """What the others are told of a rank that ends before an exchange."""
    with mock.patch.dict(os.environ, {"LT_ZERO_SHARED_MEMORY": "0"}), mock.patch.object(ranks, "RING", 1):
        world = World.join(torch.device("cpu"))
        world.begin_run()
        world.host_max(torch.zeros(3, dtype=torch.uint8), "first").wait()
        if dist.get_rank() == 1:
            world.post_error(ValueError("broken on purpose"))
            return ""
        with pytest.raises(RuntimeError, match="broken on purpose") as error:
            world.host_max(torch.zeros(3, dtype=torch.uint8), "second").wait()
    return str(error.value)


def test_a_rank_that_has_ended_is_named(pool: Pool) -> None:
    first, _, last = pool.run(3, _lost)
    assert "Rank 1" in first
    assert "Rank 1" in last
