"""Threads that move blocks between memory and disk, and the transfers that they work on.

Note [Order of transfers]
    A transfer is a row of blocks. At most ``queue_depth`` of them stand in the pool's queue at a time, and the next
    one joins at the end when one is done: transfers that begin later have their turn soon, not after gigabytes.
    A transfer that was chained behind another hands out no block before that one has ended. Threads never wait for a
    transfer, so any number of chains makes progress with one thread.

Note [Threads and torch]
    Checksums run in the pool's threads. There torch must not start its own: OpenMP makes one team per calling
    thread, and idle teams spin. ``torch.set_num_threads`` counts for the calling thread and for threads that do not
    exist yet, so each of ours calls it, and their creator then gives the second meaning back.

Note [Fork and exit]
    A forked child has the objects and not the threads. Whatever would wait for them asks ``check_process`` first, and
    what ends with the process (finalizers run in children too) does nothing in another process. At exit finalizers
    run newest first: files give up what is queued, then the pool stops, then the folder is removed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from lt_zero.io.pinned import BLOCK

log = logging.getLogger("lt_zero")

_EXIT_PATIENCE = 30.0  # seconds at exit for requests that are with the kernel
LOOK = 1.0  # seconds from one look at whether a thread lives to the next


class SwapError(RuntimeError):
    """Something on the disk cannot be written, read or trusted. The text says what to do."""


def check_alive(thread: threading.Thread | None) -> None:
    """Who waits for what a thread does asks this every ``LOOK`` seconds.

    Raises:
        SwapError: it is gone.
    """
    if thread is not None and not thread.is_alive():
        raise SwapError(f"The thread {thread.name} is gone, and did not do what it had to. Please report this.")


class Transfer:
    """The blocks of one record on their way. ``IoPool.submit`` makes it."""

    def __init__(
        self, pool: IoPool, count: int, move: Callable[[int], None], end: Callable[[SwapError | None], None]
    ) -> None:
        self._pool = pool
        self._move: Callable[[int], None] | None = move
        self._end: Callable[[SwapError | None], None] | None = end
        self._count = count
        self._handed_out = 0
        self._left = count
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: SwapError | None = None
        self._follower: Transfer | None = None

    @property
    def done(self) -> bool:
        """Whether all blocks were moved, or it failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the last block is moved. May be called again.

        Raises:
            SwapError: a block could not be moved or is not what was written.
        """
        if not self.done:
            self._pool.check_process("wait for a transfer")
            while not self._ended.wait(LOOK):
                self._pool.check_threads()
        if self._error is not None:
            raise SwapError(str(self._error)) from self._error.__cause__

    def begin(self, after: Transfer | None) -> None:
        """Hand out the first blocks, or leave that to the end of ``after``."""
        if after is None or not after._chain(self):
            self._hand_out()

    def run(self, block: int) -> None:
        """Move one block, in a thread of the pool."""
        error = None
        if self._error is None and self._move is not None:
            try:
                self._move(block)
            except BaseException as problem:  # somebody waits for this transfer
                error = _bare(problem)
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last, following = self._left == 0, self._handed_out
            if following < self._count:
                self._handed_out += 1
        if following < self._count:
            self._pool.put(self, following)
        if last:
            self._finish()

    def _hand_out(self) -> None:
        if self._count == 0:
            self._finish()
            return
        # Blocks that end meanwhile hand out those behind these.
        self._handed_out = min(self._count, self._pool.queue_depth)
        for block in range(self._handed_out):
            self._pool.put(self, block)

    def _chain(self, follower: Transfer) -> bool:
        with self._lock:
            if self.done:
                return False
            assert self._follower is None
            self._follower = follower
            return True

    def _finish(self) -> None:
        assert self._end is not None
        try:
            self._end(self._error)
        except BaseException as problem:
            self._error = self._error or _bare(problem)
        # Who keeps the transfer must not keep the tensor and the file.
        self._move = self._end = None
        with self._lock:
            follower, self._follower = self._follower, None
            self._ended.set()
        if follower is not None:
            follower._hand_out()
        self._pool.ended()


def _bare(problem: BaseException) -> SwapError:
    """An error without the frames that it came through: they hold views of tensors."""
    if isinstance(problem, SwapError):
        return SwapError(str(problem))
    error = SwapError(f"A thread for disk I/O failed unexpectedly: {problem!r}. Please report this.")
    error.__cause__ = problem
    return error


Queue = queue.SimpleQueue[tuple[Transfer, int] | None]


class IoPool:
    """Threads that move blocks; one pool per process.

    Args:
        threads: how many blocks are with the kernel at a time.
        block_size: bytes per request, a multiple of ``BLOCK``.
        queue_depth: how many blocks of one transfer stand in line. See Note [Order of transfers].
        checksum: keep a sum of each block that is written, and compare when it is read.
        retries: how often a request is tried again that failed for want of resources or made no progress.
    """

    def __init__(
        self,
        threads: int = 4,
        block_size: int = 4 << 20,
        queue_depth: int = 8,
        checksum: bool = True,
        retries: int = 5,
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
        self._running = 0  # transfers that were submitted and have not ended
        self._idle = threading.Condition()
        self._begin()

    def check_process(self, what: str) -> None:
        """Raise SwapError in a process that has not made the pool: its threads do not exist there."""
        if os.getpid() != self._pid:
            raise SwapError(
                f"Process {os.getpid()} cannot {what}: the I/O threads belong to process {self._pid}, from which it was"
                " forked. Make an IoPool and files of its own there, or start it with spawn."
            )

    def _begin(self) -> None:
        self._queue: Queue = queue.SimpleQueue()
        self._workers = _start(self._queue, self.threads)
        self._finalizer = weakref.finalize(self, _stop, self._queue, self._workers, self._pid)

    def check_threads(self) -> None:
        """Raise SwapError if a thread is gone that had to move something."""
        for worker in self._workers:
            check_alive(worker)

    def submit(
        self,
        count: int,
        move: Callable[[int], None],
        end: Callable[[SwapError | None], None],
        after: Transfer | None,
    ) -> Transfer:
        """Call ``move`` for each of ``count`` blocks in the threads, when ``after`` has ended, then ``end`` once.

        Raises:
            SwapError: the pool is closed, or belongs to another process. Nothing is called then.
        """
        self.check_process("read or write")
        with self._idle:
            if self._closed:
                raise SwapError("The IoPool is closed: close files before it, and submit nothing afterwards.")
            if not self._finalizer.alive:
                self._begin()
            self._running += 1
        transfer = Transfer(self, count, move, end)
        transfer.begin(after)
        return transfer

    def put(self, transfer: Transfer, block: int) -> None:
        """Stand a block in line."""
        self._queue.put((transfer, block))

    def ended(self) -> None:
        """A transfer has ended."""
        with self._idle:
            self._running -= 1
            self._idle.notify_all()

    def rest(self) -> None:
        """Wait for what was submitted, and end the threads; the next transfer starts others."""
        if os.getpid() != self._pid:  # nothing moves there, and the lock may be held for ever
            return
        with self._idle:
            while self._running and not self._idle.wait(LOOK):
                self.check_threads()
            self._finalizer()

    def close(self) -> None:
        """``rest``, for good. Again a no-op."""
        self._closed = True
        self.rest()


def _start(line: Queue, count: int) -> list[threading.Thread]:
    before = torch.get_num_threads()  # here, not below: a thread's first use takes over what ours are about to set
    ready = threading.Barrier(count + 1)
    workers = []
    try:
        for index in range(count):
            # Daemons: the interpreter joins others before it runs the finalizers that would end them.
            worker = threading.Thread(target=_serve, args=(line, ready), name=f"lt_zero-io-{index}", daemon=True)
            worker.start()
            workers.append(worker)
    except RuntimeError:  # no more threads
        ready.abort()
        raise
    ready.wait()
    torch.set_num_threads(before)  # see Note [Threads and torch]
    return workers


def _serve(line: Queue, ready: threading.Barrier) -> None:
    # Holds no pool: a pool that nobody has any more ends its threads.
    torch.set_num_threads(1)
    torch.get_num_threads()  # the first use in a thread takes over what counts for new threads; now that is 1 too
    ready.wait()
    while (item := line.get()) is not None:
        item[0].run(item[1])
        del item  # or an idle thread keeps the last tensor alive


def _stop(line: Queue, workers: list[threading.Thread], pid: int) -> None:
    if os.getpid() != pid:
        return
    for _ in workers:
        line.put(None)
    for worker in workers:
        if worker is not threading.current_thread():  # the pool's last user may be one of its threads
            worker.join(_EXIT_PATIENCE)
