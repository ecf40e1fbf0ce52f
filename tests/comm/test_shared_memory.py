"""Gradients that are averaged through shared memory on one host."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.comm import shared_memory
from lt_zero.comm.communicator import Comm
from lt_zero.comm.work import Work
from lt_zero.common.flat_storage import flat_empty
from tests.support.pool import Pool

PART = 90_001  # elements per rank; several chunks in all


def _averages(dtype: torch.dtype, add: bool) -> None:
    comm, (rank, world) = Comm.for_world(torch.device("cpu")), (dist.get_rank(), dist.get_world_size())
    assert comm.shares_sends
    numel = world * PART
    sends = [comm.allocate_send(numel, dtype) for _ in range(comm.send_buffers)]
    flying: deque[tuple[Work, Tensor, Tensor]] = deque()  # two at a time, as in backward
    for turn in range(2 * len(sends)):  # buffers are written again
        seeds = [torch.Generator().manual_seed(100 * turn + other) for other in range(world)]
        drawn = [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]
        send, out, mean = sends[turn % len(sends)], torch.full((numel,), 0.5), drawn[0].to(torch.float32, copy=True)
        for other in drawn[1:]:
            mean += other
        mean *= 1 / world
        if world > 3:  # each rounds the mean of its part to the dtype on the wire
            mean = mean.to(dtype).float()
        work = comm.all_reduce(out, send.copy_(drawn[rank]), send.new_empty(0), add, "gradients")
        flying.append((work, out, 0.5 + mean if add else mean))
        while len(flying) > 1 or (flying and turn == 2 * len(sends) - 1):
            work, out, expected = flying.popleft()
            work.wait()
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("ranks", "dtype", "add"),
    [(2, torch.float32, False), (3, torch.bfloat16, True), (4, torch.float32, True), (4, torch.bfloat16, False)],
)
def test_all_ranks_get_the_average(pool: Pool, ranks: int, dtype: torch.dtype, add: bool) -> None:
    pool.run(ranks, _averages, dtype, add)


def test_a_barrier_is_complete_once_all_have_entered() -> None:
    arenas = [shared_memory.SharedArena() for _ in range(3)]
    addresses = [arena.address() for arena in arenas]
    assert all(arena.connect(rank, addresses, range(3)) for rank, arena in enumerate(arenas))
    place, soon = shared_memory.REDUCTIONS, timedelta(milliseconds=1)
    first = [shared_memory.Barrier(arena, place) for arena in arenas]
    second = [shared_memory.Barrier(arena, place) for arena in arenas[:2]]
    shared_memory.Barrier(arenas[2], shared_memory.FENCES)  # another barrier
    for barrier in first:
        barrier.wait()
    for barrier in second:
        assert not barrier.is_completed()
        with pytest.raises(RuntimeError, match="Not all ranks have entered"):
            barrier.wait(soon)
    shared_memory.Barrier(arenas[2], place).wait(soon)
    for barrier in second:
        barrier.wait(soon)


def test_memory_of_dropped_windows_is_not_taken_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers would read the file, in which this rank's values are not."""
    monkeypatch.setattr(shared_memory, "_SEGMENT", 1 << 20)
    arena, numel, cpu = shared_memory.SharedArena(), 1 << 18, torch.device("cpu")
    windows = [arena.allocate(numel, torch.float32) for _ in range(2)]  # each fills a segment
    windows.clear()  # an engine is gone
    assert not any(arena.has(tensor) for tensor in [flat_empty(numel, torch.float32, cpu) for _ in range(3)])
