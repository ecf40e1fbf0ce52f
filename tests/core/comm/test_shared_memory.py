"""Gradients that are averaged through shared memory on one host."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common.flat_storage import flat_empty
from lt_zero.core.comm import shared_memory, work
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.shared_memory import SEND_BUFFERS
from lt_zero.core.comm.transport import SendBuffer
from lt_zero.core.comm.windows import SharedMemoryTransport
from lt_zero.core.comm.work import CollectiveMonitor, Work
from lt_zero.core.comm.world import World
from lt_zero.core.health import hang_detection
from tests.support.matrix import only_rows
from tests.support.pool import Pool

PART = 90_001  # elements per rank; several chunks in all


def _averages(dtype: torch.dtype, add: bool) -> None:
    group, (rank, world) = ShardGroup.of_all(World.join(torch.device("cpu"))), (dist.get_rank(), dist.get_world_size())
    assert group.sends.in_place
    numel = world * PART
    buffers, turns = group.send_buffers({dtype: numel}), 2 * SEND_BUFFERS  # buffers are written again
    flying: deque[tuple[Work, SendBuffer, Tensor, Tensor]] = deque()  # two at a time, as in backward
    for turn in range(turns):
        seeds = [torch.Generator().manual_seed(100 * turn + other) for other in range(world)]
        drawn = [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]
        send = buffers.take(numel, dtype)
        out = torch.full((numel,), 0.5)
        mean = drawn[0].to(torch.float32, copy=True)
        for other in drawn[1:]:
            mean += other
        mean *= 1 / world
        if world > 3:  # each rounds the mean of its part to the dtype on the wire
            mean = mean.to(dtype).float()
        send.flat.copy_(drawn[rank])
        flying.append((group.all_reduce(out, send, add, "gradients"), send, out, 0.5 + mean if add else mean))
        while len(flying) > 1 or (flying and turn == turns - 1):
            launched, send, out, expected = flying.popleft()
            launched.wait()
            buffers.give_back(send)
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("ranks", "dtype", "add"),
    only_rows(
        [(2, torch.float32, False), (3, torch.bfloat16, True)],
        [(2, torch.float32, False), (3, torch.bfloat16, True), (4, torch.float32, True), (4, torch.bfloat16, False)],
    ),
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
        with pytest.raises(RuntimeError, match="Rank 2 has not entered"):
            barrier.wait(soon)
    shared_memory.Barrier(arenas[2], place).wait(soon)
    for barrier in second:
        barrier.wait(soon)
    for turn in range(600):  # counts are bytes
        ahead = shared_memory.Barrier(arenas[0], place)
        assert ahead.absent() == [1, 2], turn
        for arena in arenas[1:]:
            shared_memory.Barrier(arena, place)
        assert ahead.is_completed()


def test_maxima_are_exchanged_in_any_order_of_waits() -> None:
    """Some are waited for later than others that follow, and some never; their windows are written again."""
    arenas = [shared_memory.SharedArena() for _ in range(3)]
    assert all(a.connect(rank, [other.address() for other in arenas], range(3)) for rank, a in enumerate(arenas))
    problems: list[BaseException] = []

    def exchange(rank: int) -> None:
        maxima, launched = shared_memory.Maxima(arenas[rank]), list[tuple[shared_memory.Maximum, Tensor, Tensor]]()
        for turn in range(60):
            dtype, size = (torch.uint8, 5 + turn) if turn % 3 else (torch.int64, 2)
            drawn = [(torch.arange(size) + 7 * turn) * (other + 2) % 251 for other in range(3)]
            mine, expected = drawn[rank].to(dtype), torch.stack(drawn).amax(0).to(dtype)
            launched.append((maxima.launch(mine, lambda barrier: barrier.wait(timedelta(minutes=1))), mine, expected))
            waits = {4: (-1, -2, -3), 9: (-1,)}.get(turn % 15, ())  # of the others none
            for number in waits:
                launched[number][0].wait()
        launched[-1][0].wait()  # has read all before it
        assert all(torch.equal(result, expected) for _, result, expected in launched)

    def run(rank: int) -> None:
        try:
            exchange(rank)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_forked_process_enters_no_barrier() -> None:
    """It would count as its parent's entry."""
    arenas = [shared_memory.SharedArena() for _ in range(2)]
    assert arenas[1].connect(1, [arena.address() for arena in arenas], range(2))
    waiting = shared_memory.Barrier(arenas[1], shared_memory.FENCES)
    child = os.fork()
    if child == 0:
        try:
            shared_memory.Barrier(arenas[0], shared_memory.FENCES)
            os._exit(0)
        except RuntimeError as error:
            os._exit(7 if "no rank" in str(error) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not waiting.is_completed()


def _late(seconds: float) -> str:
    group = ShardGroup.of_all(World.join(torch.device("cpu"), timeout=timedelta(seconds=seconds)))
    if dist.get_rank() == 1:
        time.sleep(2 * seconds)
        return ""
    transport = group.transport
    assert isinstance(transport, SharedMemoryTransport)
    with pytest.raises(RuntimeError, match="Timed out after . s of waiting for rank 1") as caught:
        transport.fence()
    return str(caught.value)


def test_a_barrier_has_the_timeout_of_the_group(pool: Pool) -> None:
    assert pool.run(2, _late, 1.0)[0]


def test_hang_detection_sees_where_a_barrier_is_waited_for() -> None:
    """Of ranks that wait in two engines, neither knows of the other's wait but by the place where its thread is."""
    arenas = [shared_memory.SharedArena(timedelta(seconds=0.4)) for _ in range(2)]
    assert arenas[0].connect(0, [arena.address() for arena in arenas], range(2))
    barrier, watch = shared_memory.Barrier(arenas[0], shared_memory.FENCES), CollectiveMonitor()

    def wait() -> None:
        with suppress(RuntimeError):
            watch.wait(barrier, None)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)  # the first slice is longer than this, and the samples
    reporter = object.__new__(hang_detection._Reporter)
    reporter._thread, reporter.layers = thread.ident, []
    seen = set()
    for _ in range(2000):
        frame = reporter._frame()
        seen.add((frame.f_code.co_filename, frame.f_code.co_name) if frame else None)
    thread.join()
    assert seen == {(work.__file__, "wait")}


class _EntersLate(shared_memory.Barrier):
    """A barrier of which the absent rank enters, and ends, while it is asked whether it has ended."""

    def __init__(self) -> None:
        self.answers = [[1], []]
        self.timeout = timedelta(seconds=60)
        self.ask_after = 0.0

    def absent(self) -> list[int]:
        return self.answers.pop(0) if self.answers else []


def test_a_rank_that_entered_and_ended_is_not_missed() -> None:
    watch, detector = CollectiveMonitor(), SimpleNamespace(ends=SimpleNamespace(has_ended=lambda rank: True))
    watch.detector = lambda: detector
    watch._examine_barrier(_EntersLate(), 1.0)
    gone = _EntersLate()
    gone.answers = [[1], [1]]
    with pytest.raises(RuntimeError, match="closed by rank 1"):
        watch._examine_barrier(gone, 1.0)


def test_memory_of_dropped_windows_is_not_taken_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers would read the file, in which this rank's values are not."""
    monkeypatch.setattr(shared_memory, "_SEGMENT", 1 << 20)
    arena = shared_memory.SharedArena()
    numel = 1 << 18
    cpu = torch.device("cpu")
    windows = [arena.allocate(numel, torch.float32) for _ in range(2)]  # each fills a segment
    windows.clear()  # an engine is gone
    assert not any(arena.has(tensor) for tensor in [flat_empty(numel, torch.float32, cpu) for _ in range(3)])


def test_a_limit_of_files_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ulimit -f`` holds for windows, too; what only makes a run faster must not end it."""
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda kind: (1 << 20, 1 << 30))
    assert not shared_memory.supported()
