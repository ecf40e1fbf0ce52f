"""Collectives through shared memory: ranks of one host read each other's memory instead of using sockets.

Note [Shared windows]
    Each rank has one anonymous in-memory file (memfd). All ranks allocate the same sizes in the same order, so a
    window has the same offset in every rank's file. A rank writes its own windows through a mapping and reads its
    peers' with ``pread``, which copies once and maps nothing: peers' pages do not count as resident memory. The files
    are removed when their processes end.

    Only barriers protect a window. ``SharedMemoryTransport.fence`` (windows.py) is one; it is called between a write of
    a window and the next reads, and between reads and the next write (``before_write``, ``after_write``). A send
    buffer is rewritten four launches later with at most two in flight: a rank that launches has passed the barrier of
    two launches ago, which every rank entered after reading the buffer that is rewritten now.

    Barriers are counters, too: each rank counts its entries in a byte at the beginning of its file (one byte is read
    whole; ranks are never 128 entries apart), and polls those of the peers. gloo's would wake a thread in each rank,
    which competes with the computation for the same cores. As no connection is involved, none is closed when a peer
    ends, and no group times out: ``CollectiveMonitor.wait`` looks after both.

Note [Maxima]
    Small tensors on the host are exchanged the same way: a rank writes its own to a window and enters a barrier.
    After the barrier it reads the windows of the peers. Exchanges take turns with ``_OPEN`` windows. Each rank counts
    the exchanges that it has read, in their order, and writes a window again once all ranks have read it. If the caller
    does not wait for an exchange, the rank reads it when the window is needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.common.variables import switched
from lt_zero.kernels.flat import store, wide

_SEGMENT = 1 << 30  # bytes of address space per mapping; pages are allocated when they are written
_PAGE = mmap.ALLOCATIONGRANULARITY
_CHUNK = 1 << 17  # elements that are summed at a time, to stay in the cache
# Barriers of several orders: where in a rank's file their entries are counted, after the posts.
REDUCTIONS = 16
FENCES = 17
MAXIMA = 18
READ = 19
_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two polls
_YIELDS = 5e-5  # seconds in which a wait only lets others run between two polls
_LATE = 0.05  # how much later than possible a wait may end, relative to its length
SEND_BUFFERS = 4
_OPEN = 4  # exchanges of small tensors that may be open at a time


def supported() -> bool:
    """True if this system supports windows, and they are not disabled (``LT_ZERO_SHARED_MEMORY=0``).

    A limit of the size of files (``ulimit -f``) holds for windows, too: the run goes on without, more slowly.
    """
    wanted = switched("LT_ZERO_SHARED_MEMORY", True)
    wanted = wanted and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    return wanted and sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "preadv")


def host_identity() -> str:
    """A string that is equal for processes that can open each other's ``/proc`` entries."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


_lock = threading.Lock()


def _order_memory() -> None:
    """Complete this thread's reads and writes before those that follow; Arm's CPUs would reorder them."""
    # The first release comes after all reads and writes before it; the second acquire comes before all that follow.
    # With one of the pair alone, a CPU may move accesses into the locked region and across each other.
    with _lock:
        pass
    with _lock:
        pass


class Barrier:
    """This rank's entry into a barrier of an arena's ranks, complete once all have entered; a work as gloo's are.

    ``number``: of a barrier that this rank has entered; None: it enters the next.
    """

    def __init__(self, arena: SharedArena, place: int, number: int | None = None) -> None:
        self._arena, self._place = arena, place
        self._number = arena.enter(place) if number is None else number
        self._complete = False
        self.timeout = arena.timeout
        self.ask_after = 0.0  # seconds of a wait, after which to ask whether ranks have ended

    def absent(self) -> list[int]:
        """The ranks that have not entered."""
        absent = [] if self._complete else self._arena.behind(self._place, self._number)
        self._complete = not absent
        return absent

    def is_completed(self) -> bool:
        return self._complete or not self.absent()

    def wait(self, patience: timedelta | None = None) -> None:
        """Wait until all ranks have entered.

        Raises:
            RuntimeError: not all have after ``patience``.
        """
        started = time.monotonic()
        while absent := self.absent():
            waited = time.monotonic() - started
            if patience is not None and waited > patience.total_seconds():
                raise RuntimeError(f"Rank {absent[0]} has not entered a barrier.")
            # Short waits yield, because a sleep takes several times as long as asked for.
            if waited < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(min(max(_SHORTEST, _LATE * waited), _LONGEST))


class SharedArena:
    """This rank's windows, and the peers' files.

    ``timeout``: of a barrier; None: 30 minutes, as gloo's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.timeout, self._process = timeout or timedelta(minutes=30), os.getpid()
        self._peers: dict[int, int] = {}  # rank -> file
        self._file = -1  # if there is none for it, nothing has to be closed
        self._file = os.memfd_create("lt_zero")
        self._size = 0
        # Never unmapped: what was then allocated at the address of a window would be taken for it.
        self._segments: list[mmap.mmap] = []
        self._used = 0  # bytes of the current segment
        self._start = 0  # offset of the current segment in the file
        self._offsets: dict[int, int] = {}  # address of a window -> offset in the file
        self.rank = 0
        # The first window: peers read posts (two numbers) and counts of entries (other bytes) at fixed offsets in it.
        self.allocate(4, torch.int64)
        self._entries = {REDUCTIONS: 0, FENCES: 0, MAXIMA: 0, READ: 0}

    @classmethod
    def made(cls, timeout: timedelta | None = None) -> SharedArena | None:
        """An arena; None if this system has none, or no descriptor or memory for it now: sockets do the same."""
        try:
            return cls(timeout) if supported() else None
        except OSError:
            return None

    def address(self) -> tuple[str, str]:
        """The host, and the path by which peers open this rank's file."""
        return host_identity(), f"/proc/{os.getpid()}/fd/{self._file}"

    def connect(self, rank: int, addresses: Sequence[Any], ranks: Iterable[int]) -> bool:
        """Open the files of ``ranks``; False if one cannot be opened (another host, another container)."""
        mine, self.rank = addresses[rank], rank
        for peer in ranks:
            address = addresses[peer]
            if address is None or mine is None or address[0] != mine[0]:
                return False
            if peer == rank:
                continue
            try:
                self._peers[peer] = os.open(address[1], os.O_RDONLY)
            except OSError:
                return False
        return True

    def __del__(self) -> None:
        for file in [self._file, *self._peers.values()]:
            if file >= 0:
                os.close(file)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1D window of zeros. Every rank must allocate the same in the same order."""
        nbytes = -(-max(1, numel * dtype.itemsize) // _PAGE) * _PAGE
        if not self._segments or self._used + nbytes > len(self._segments[-1]):
            length = max(_SEGMENT, nbytes)
            self._start, self._used = self._size, 0
            self._size += length
            os.ftruncate(self._file, self._size)
            self._segments.append(mmap.mmap(self._file, length, offset=self._start))
        window = torch.frombuffer(self._segments[-1], dtype=dtype, count=max(1, numel), offset=self._used)[:numel]
        self._offsets[window.data_ptr()] = self._start + self._used
        self._used += nbytes
        return window

    def post(self, index: int, value: int) -> None:
        """Post a number, which peers may read after the next barrier; indices 0 and 1 take turns."""
        self._refuse_fork()
        self._segments[0][8 * index : 8 * index + 8] = value.to_bytes(8, sys.byteorder, signed=True)

    def posted(self, index: int) -> list[int]:
        """The peers' numbers."""
        files = self._peers.values()
        return [int.from_bytes(os.pread(file, 8, 8 * index), sys.byteorder, signed=True) for file in files]

    def enter(self, place: int) -> int:
        """Enter the next barrier of a ``place``; returns its number. In the same order on all ranks."""
        self._refuse_fork()
        _order_memory()
        number = self._entries[place] + 1
        self._entries[place] = number
        self._segments[0][place] = number % 256
        return number

    def behind(self, place: int, number: int) -> list[int]:
        """The peers that have not entered that barrier."""
        files = self._peers.items()
        found = [peer for peer, file in files if (os.pread(file, 1, place)[0] - number) % 256 >= 128]
        # What follows may read what the peers wrote before they entered.
        if not found:
            _order_memory()
        return found

    def peers(self) -> list[int]:
        """The other ranks."""
        return list(self._peers)

    def _refuse_fork(self) -> None:
        """Raise in a forked child, which writes to its parent's file."""
        if os.getpid() != self._process:
            raise RuntimeError("A forked process is no rank. Call what needs all ranks in rank processes only.")

    def has(self, tensor: Tensor) -> bool:
        """True if ``tensor`` starts at the start of a window."""
        return tensor.data_ptr() in self._offsets

    def read(self, peer: int, window: Tensor, first: int, out: Tensor) -> None:
        """Copy elements [first, first + out.numel()) of the peer's counterpart of ``window`` into ``out`` (1D).

        Raises:
            RuntimeError: the peer's file ends before them.
        """
        # Not through numpy: the storage of a tensor that was exported to numpy can not be freed.
        target = memoryview((ctypes.c_char * out.nbytes).from_address(out.data_ptr())).cast("B")
        offset = self._offsets[window.data_ptr()] + first * window.element_size()
        done = 0
        while done < len(target):
            count = os.preadv(self._peers[peer], [target[done:]], offset + done)
            if count <= 0:
                raise RuntimeError(f"Rank {peer}'s shared memory ends early: ranks allocated different windows.")
            done += count

    def gather(self, own: Tensor, flat: Tensor, ranks: list[int]) -> None:
        """Fill the shards of ``flat`` (1D) that ``ranks`` have from their counterparts of ``own``, casting if needed.

        ``own`` is a window as large as a shard, or as large as ``flat`` (then a peer's shard is read at its offset).
        """
        for number, (peer, shard) in enumerate(zip(ranks, flat.chunk(len(ranks)), strict=True)):
            if peer not in self._peers:
                continue  # this rank
            first = number * shard.numel() if own.numel() == flat.numel() else 0
            if own.dtype == flat.dtype:
                self.read(peer, own, first, shard)
                continue
            received = torch.empty(min(_CHUNK, shard.numel()), dtype=own.dtype)
            for lo in range(0, shard.numel(), _CHUNK):
                chunk = shard[lo : lo + _CHUNK]
                self.read(peer, own, first + lo, received[: chunk.numel()])
                chunk.copy_(received[: chunk.numel()])

    def sum(self, send: Tensor, base: int, out: Tensor, add: bool, factor: float) -> None:
        """Write ``factor`` times the ranks' sum of ``send`` from element ``base`` on to ``out``, or add it.

        Added in rank order, in fp32 if ``out`` has 16 bits.
        """
        first, *others = sorted([self.rank, *self._peers])
        sums, received = (torch.empty(min(_CHUNK, out.numel()), dtype=d) for d in (wide(out.dtype), send.dtype))
        if first == self.rank and others and sums.dtype == send.dtype:
            # The sum of the first two is the same in either order. Beginning with the peer saves a copy: its chunk is
            # read right into the sum, and the own one is added.
            first, others[0] = others[0], first
        for lo in range(0, out.numel(), _CHUNK):
            hi = min(lo + _CHUNK, out.numel())
            total, chunk = sums[: hi - lo], received[: hi - lo]
            for source in (first, *others):
                if source == self.rank:
                    shard = send[base + lo : base + hi]
                else:
                    shard = total if source == first and total.dtype == chunk.dtype else chunk
                    self.read(source, send, base + lo, shard)
                if source == first:
                    total.copy_(shard)  # does nothing if the sum was read in place
                else:
                    total.add_(shard)
            store(out[lo:hi], total, add, factor)


class Maxima:
    """Element-wise maxima of small tensors over the ranks of an arena. See Note [Maxima]."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._windows: list[Tensor] = []  # 1D uint8
        self._launched = 0
        self._open: deque[Maximum] = deque()  # not read yet

    def launch(self, tensor: Tensor, wait: Callable[[Barrier], object]) -> Maximum:
        """Start the maximum of contiguous ``tensor``, in place, of the same size on all ranks, in the same order.

        ``wait`` waits for a barrier of the ranks.
        """
        number = self._launched + 1
        if number > _OPEN:
            self.read(number - _OPEN)
            wait(Barrier(self._arena, READ, number - _OPEN))
        if not self._windows or tensor.nbytes > self._windows[0].nbytes:
            self._windows = [self._arena.allocate(2 * tensor.nbytes, torch.uint8) for _ in range(_OPEN)]
        window = self._windows[number % _OPEN]
        window[: tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
        # Set only now: after an error of ``wait`` above it still equals the number of barriers that were entered.
        self._launched = number
        self._open.append(Maximum(self, number, tensor, window, Barrier(self._arena, MAXIMA), wait))
        return self._open[-1]

    def read(self, number: int) -> None:
        """Wait for the exchanges up to ``number``, and write their results."""
        while self._open and self._open[0].number <= number:
            first = self._open[0]
            first.await_peers(first.barrier)
            theirs = torch.empty_like(first.tensor)
            for peer in self._arena.peers():
                self._arena.read(peer, first.window, 0, theirs)
                torch.maximum(first.tensor, theirs, out=first.tensor)
            self._open.popleft()
            self._arena.enter(READ)


class Maximum(NamedTuple):
    """An exchange that was launched; a work as others are."""

    of: Maxima
    number: int
    tensor: Tensor
    window: Tensor
    barrier: Barrier
    await_peers: Callable[[Barrier], object]

    def wait(self) -> None:
        """Wait until ``tensor`` has the maximum."""
        self.of.read(self.number)
