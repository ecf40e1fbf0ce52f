"""Threads that move blocks between memory and disk, and the transfers that they work on.

Note [Order of transfers]
    A transfer is a sequence of blocks, of which at most ``queue_depth`` are in the pool's queue at a time; each block
    that is done queues the next one. So a later transfer starts soon, not after gigabytes of an earlier one. A
    transfer that is chained behind another queues its first block when that one has ended. Threads never wait for a
    transfer, so one thread is enough for any number of chains.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch

from lt_zero.common.errors import CheckpointError
from lt_zero.common.worker import Worker
from lt_zero.core.stores.io_options import IoOptions, SwapError
from lt_zero.core.stores.pinned import BLOCK

log = logging.getLogger("lt_zero")

EXIT_PATIENCE = 30.0  # seconds to wait at exit for requests in the kernel
LOOK = 1.0  # seconds between checks whether a thread is alive


def check_alive(thread: threading.Thread | None) -> None:
    """Check that a thread lives. Call it every ``LOOK`` seconds while waiting for one.

    Raises:
        SwapError: the thread has died.
    """
    if thread is not None and not thread.is_alive():
        raise SwapError(f"The thread {thread.name} died before it finished its work. Please report this.")


End = Callable[[RuntimeError | None], None]


class Transfer:
    """Blocks that are moved, such as a read or write of one record; made by ``IoPool.submit``."""

    def __init__(self, pool: IoPool, count: int, move: Callable[[int], None], end: End) -> None:
        self._pool = pool
        self._move: Callable[[int], None] | None = move
        self._end: End | None = end
        self._count = self._left = count
        self._handed_out = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._follower: Transfer | None = None

    @property
    def done(self) -> bool:
        """True if the transfer has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the transfer has ended. May be called again.

        Raises:
            SwapError: a block could not be moved, or its checksum is wrong; or the ``CheckpointError`` of ``move``.
        """
        if not self.done:
            self._pool.check_process("wait for a transfer")
            while not self._ended.wait(LOOK):
                self._pool.check_threads()
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error.__cause__

    def begin(self, after: Transfer | None = None) -> None:
        """Queue the first blocks, now or when ``after`` has ended."""
        if after is not None:
            with after._lock:
                if not after.done:
                    assert after._follower is None
                    after._follower = self
                    return
        if self._count == 0:
            self._finish()
            return
        # Set first: a block that ends during the loop already queues the next one.
        self._handed_out = min(self._count, self._pool.queue_depth)
        for block in range(self._handed_out):
            self._pool.put(self, block)

    def run(self, block: int) -> None:
        """Move one block, in a thread of the pool."""
        error = None
        if self._error is None and self._move is not None:
            try:
                self._move(block)
            except BaseException as problem:  # the waiting thread has to get every error
                error = _bare(problem)
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
            following = self._handed_out
            if following < self._count:
                self._handed_out += 1
        if following < self._count:
            self._pool.put(self, following)
        if last:
            self._finish()

    def _finish(self) -> None:
        assert self._end is not None
        try:
            self._end(self._error)
        except BaseException as problem:
            self._error = self._error or _bare(problem)
        # A transfer that is still referenced must not keep the tensor and the file alive.
        self._move = self._end = None
        with self._lock:
            follower, self._follower = self._follower, None
            self._ended.set()
        if follower is not None:
            follower.begin()
        self._pool.ended()


def _bare(problem: BaseException) -> RuntimeError:
    """The error without its traceback, whose frames keep views of tensors alive."""
    if isinstance(problem, (SwapError, CheckpointError)):
        return type(problem)(str(problem))
    error = SwapError(f"A thread for disk I/O failed unexpectedly: {problem!r}. Please report this.")
    error.__cause__ = problem
    return error


def _nothing(error: RuntimeError | None) -> None:
    """Do nothing at the end of a transfer."""


class IoPool:
    """Threads that move blocks; one pool per process.

    Args:
        threads: number of concurrent requests.
        block_size: bytes per request, a multiple of ``BLOCK``.
        queue_depth: queued blocks per transfer. See Note [Order of transfers].
        checksum: keep a checksum of each written block and verify it on read.
        retries: attempts to repeat a request that found too few resources or made no progress.
    """

    def __init__(
        self, threads: int = 4, block_size: int = 4 << 20, queue_depth: int = 8, checksum: bool = True, retries: int = 5
    ) -> None:
        for name, value, least in (("threads", threads, 1), ("queue_depth", queue_depth, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}.")
        if block_size < BLOCK or block_size % BLOCK:
            raise ValueError(f"block_size={block_size}: must be a multiple of {BLOCK}, such as {4 << 20}.")
        self.threads = threads
        self.block_size = block_size
        self.queue_depth = queue_depth
        self.checksum = checksum
        self.retries = retries
        self._pid = os.getpid()
        self._closed = False
        self._running = 0  # transfers that have not ended
        self._idle = threading.Condition()
        self._workers: Worker[tuple[Transfer, int]] = Worker("io", _move, threads, _single_threaded, EXIT_PATIENCE)
        self._start()

    @classmethod
    def of(cls, options: IoOptions) -> IoPool:
        """Start the threads of ``options``."""
        return cls(options.threads, options.block_size, options.queue_depth, options.checksum)

    def check_process(self, what: str) -> None:
        """Raise SwapError in a process other than the pool's, which does not have its threads."""
        if os.getpid() != self._pid:
            raise SwapError(
                f"Process {os.getpid()} cannot {what}: the I/O threads belong to process {self._pid}, from which it was"
                " forked. Create an IoPool and files in the child, or start it with spawn."
            )

    def _start(self) -> None:
        # Read before the workers start: a thread's first call adopts the default, and workers change it.
        before = torch.get_num_threads()
        self._workers.start()
        torch.set_num_threads(before)

    def check_threads(self) -> None:
        """Raise SwapError if a thread of the pool has died."""
        for thread in self._workers.threads:
            check_alive(thread)

    def submit(
        self, count: int, move: Callable[[int], None], end: End = _nothing, after: Transfer | None = None
    ) -> Transfer:
        """Call ``move`` for each of ``count`` blocks in the threads, after ``after`` has ended, then ``end`` once.

        ``end`` gets the error, if there was one.

        Raises:
            SwapError: the pool is closed or belongs to another process; nothing is called then.
        """
        self.check_process("read or write")
        with self._idle:
            if self._closed:
                raise SwapError("The IoPool is closed: close files before it, and submit nothing afterwards.")
            if not self._workers.threads:
                self._start()
            self._running += 1
        transfer = Transfer(self, count, move, end)
        transfer.begin(after)
        return transfer

    def put(self, transfer: Transfer, block: int) -> None:
        """Queue a block."""
        self._workers.put((transfer, block))

    def ended(self) -> None:
        """Called by a transfer that has ended."""
        with self._idle:
            self._running -= 1
            self._idle.notify_all()

    def rest(self) -> None:
        """Wait for all transfers and end the threads; the next transfer starts new ones."""
        # A forked child has no threads, and its copy of the lock may be held forever.
        if os.getpid() != self._pid:
            return
        with self._idle:
            while self._running and not self._idle.wait(LOOK):
                self.check_threads()
            self._workers.stop()

    def close(self) -> None:
        """Wait for all transfers and end the threads for good. Idempotent."""
        self._closed = True
        self.rest()


def _move(item: tuple[Transfer, int]) -> None:
    item[0].run(item[1])


def _single_threaded() -> None:
    # Checksums run in these threads. torch must not start threads of its own there: OpenMP makes one team per calling
    # thread, and idle teams spin. ``torch.set_num_threads`` sets the calling thread's number and the default of later
    # threads, so each thread calls it, and the pool restores the default.
    torch.set_num_threads(1)
    # A thread's first call adopts the default, which is 1 only until the pool restores it.
    torch.get_num_threads()
