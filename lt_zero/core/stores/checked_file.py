"""Files with a checksum for each block, written front to back with several threads.

A block that lies within one tensor is copied by the thread that writes it; smaller data is copied at once into the
block that is being filled. Either way bytes are copied exactly once, into aligned memory for O_DIRECT, and the checksum
is computed from that copy, so it covers what the disk gets. O_DIRECT, because a checkpoint is as large as memory and is
not read soon. A tensor belongs to the threads until ``wait_written`` or ``close`` has returned. The reader
(block_reader.py) verifies each block.

Tensors of an accelerator reach a file through two pinned buffers in host memory (``StagingRing``): while the threads of
the file write what is in one, the other is filled. Copies to pageable memory, as ``Tensor.cpu`` makes them, would go
through a buffer of the driver's, and each would allocate memory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.errors import CheckpointError
from lt_zero.common.worker import Worker
from lt_zero.core.stores.direct_file import BlockFile
from lt_zero.core.stores.pinned import aligned_buffer, checksum, host_buffer, rounded, view_of

STEP = 4 << 20  # bytes of a block, which has one checksum
THREADS = 4
RING_BUFFER = 4 * STEP  # bytes of each of the two buffers
_ALIGN = 64  # bytes: where parts begin
_PATIENCE = 30.0  # seconds to wait at exit for requests in the kernel


@dataclass(frozen=True)
class FileRecord:
    """Length of a file in bytes, and the checksum of each block of ``STEP`` bytes (core/stores/pinned.py)."""

    nbytes: int
    sums: tuple[int, ...]


class ThreadBuffer(threading.local):
    """A buffer of ``STEP`` bytes per thread."""

    def __init__(self) -> None:
        self.buffer = aligned_buffer(STEP)


class BlockThreads:
    """Threads that move blocks between memory and a file; they start with the first block."""

    def __init__(self, count: int = THREADS) -> None:
        self._worker: Worker[tuple[Future[None], Callable[[], object]]] = Worker("io", _move, count, patience=_PATIENCE)

    def submit(self, move: Callable[[], object]) -> Future[None]:
        """Call ``move`` in a thread, after all that was submitted before has begun."""
        moved = Future[None]()
        self._worker.put((moved, move))
        return moved

    def close(self) -> None:
        """End the threads, after all that was submitted. Idempotent."""
        self._worker.stop()


def _move(job: tuple[Future[None], Callable[[], object]]) -> None:
    moved, move = job
    if not moved.set_running_or_notify_cancel():
        return
    try:
        move()
    except BaseException as error:  # the thread that waits for the block raises it
        moved.set_exception(error)
    else:
        moved.set_result(None)
    finally:
        # The error's traceback has this frame, which must not keep the error and what was moved alive.
        del job, moved, move


class WriterPool:
    """The threads and buffers that the open files of one process share."""

    def __init__(self, threads: int = THREADS) -> None:
        self.threads = BlockThreads(threads)
        self.own = ThreadBuffer()
        # Free buffers to fill. The threads must not take one: deadlock.
        self.free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(threads):
            self.free.put(aligned_buffer(STEP))

    def close(self) -> None:
        self.threads.close()


class Sink:
    """A file that is written in order. A subclass takes the blocks."""

    _filling: Tensor | None = None
    _fill = 0  # bytes in ``_filling``
    _number = 0  # index of the block that is being filled

    @property
    def position(self) -> int:
        return self._number * STEP + self._fill

    def write(self, data: bytes | Tensor) -> None:
        """Append bytes, or a 1D uint8 tensor on the CPU, which must not change until ``wait_written``."""
        size = data.numel() if isinstance(data, Tensor) else len(data)
        source: int | bytes = data.data_ptr() if isinstance(data, Tensor) else data
        if isinstance(data, Tensor):
            assert data.dtype == torch.uint8, data.dtype
            assert data.is_contiguous(), data.stride()
        if 0 < self._fill < STEP - size:  # it fits into the block, as most do
            assert self._filling is not None
            ctypes.memmove(self._filling.data_ptr() + self._fill, source, size)
            self._fill += size
            return
        # Blocks are copied in other threads, by address: the reference keeps the bytes alive until then.
        keep: object = data
        if isinstance(source, bytes):
            source = ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p).value or 0
        done = 0
        while done < size:
            if self._fill == 0 and size - done >= STEP and self._copy_later(source + done, keep):
                self._number += 1
                done += STEP
                continue
            if self._filling is None:
                self._filling = self._take()
            count = min(size - done, STEP - self._fill)
            ctypes.memmove(self._filling.data_ptr() + self._fill, source + done, count)
            self._fill += count
            done += count
            if self._fill == STEP:
                self._flush()

    def _flush(self) -> None:
        """Pass on the block that is being filled, with zeros up to a multiple of ``BLOCK``."""
        filling, fill = self._filling, self._fill
        if filling is not None and fill:
            filling[fill : rounded(fill)].zero_()
            # On an error the buffer stays, for ``abandon``.
            self._put(filling, fill)
            self._filling = None
            self._fill = 0
            self._number = self._number + 1

    def _take(self) -> Tensor:
        """A buffer of ``STEP`` bytes."""
        raise NotImplementedError

    def _put(self, buffer: Tensor, nbytes: int) -> None:
        """Write block ``_number``: the first ``nbytes`` of the buffer, which the file owns from here on."""
        raise NotImplementedError

    def _copy_later(self, address: int, keep: object) -> bool:
        """Write block ``_number`` from the ``STEP`` bytes at ``address``; False if they must be copied now."""
        return False

    def wait_written(self, until: int | None = None) -> None:
        """Wait until no tensor is in use any more, or none of those before byte ``until`` of the file."""

    def close(self) -> FileRecord:
        """Finish the file and make it durable."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Release everything after an error; the file stays incomplete."""
        raise NotImplementedError


class FileSink(Sink):
    """A local file.

    Args:
        path: the file to create; it must not exist.
        blocks: threads and buffers.
        expected: approximate size in bytes; if it is some blocks, space is reserved now, and O_DIRECT is used.
        name: the file's name in messages; default: ``path``.
        copies: copy all data in ``write``, so that tensors may change as soon as it returns.

    Raises:
        CheckpointError: the file cannot be created, for lack of space or permissions.
    """

    def __init__(
        self, path: Path, blocks: WriterPool, expected: int = 0, name: Path | None = None, copies: bool = False
    ) -> None:
        self._blocks, self._copies = blocks, copies
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, Future[None]]] = deque()  # writes, with the numbers of their blocks, which rise
        self._abandoned = False  # drop what is queued
        self._file = BlockFile(path, 0o666, CheckpointError, name)
        # A reserved file takes longer to sync, and a small one may stay in the page cache.
        if expected >= STEP:
            self._file.allocate(rounded(expected, self._file.unit))

    def _take(self) -> Tensor:
        return self._blocks.free.get()

    def _put(self, buffer: Tensor, nbytes: int) -> None:
        number = self._number

        def write() -> None:
            try:
                self._write_block(number, buffer[: rounded(nbytes)])
            finally:
                self._blocks.free.put(buffer)

        self._submit(write)

    def _copy_later(self, address: int, keep: object) -> bool:
        if self._copies:
            return False
        number, held = self._number, [keep]

        def write() -> None:
            buffer = self._blocks.own.buffer
            ctypes.memmove(buffer.data_ptr(), address, STEP)
            held.clear()
            self._write_block(number, buffer)

        self._submit(write)
        return True

    def _submit(self, write: Callable[[], None]) -> None:
        while self._pending and self._pending[0][1].done():
            self._pending.popleft()[1].result()  # raise errors early
        self._pending.append((self._number, self._blocks.threads.submit(write)))

    def _write_block(self, number: int, block: Tensor) -> None:
        """Write a block, in a thread, and keep its checksum."""
        if self._abandoned:
            return
        total = checksum(block)
        with self._lock:
            self._sums[number] = total
        self._file.write(block, number * STEP)

    def wait_written(self, until: int | None = None) -> None:
        while self._pending and (until is None or self._pending[0][0] * STEP < until):
            self._pending.popleft()[1].result()

    def close(self) -> FileRecord:
        nbytes = self.position
        try:
            self._flush()
            self.wait_written()
            self._file.finish(nbytes)
        finally:
            self.abandon()
        return FileRecord(nbytes, tuple(self._sums[i] for i in range(len(self._sums))))

    def abandon(self) -> None:
        self._abandoned = True
        # Only wait, without their errors: the writes still read the tensors' memory.
        futures.wait([written for _, written in self._pending])
        self._pending.clear()
        if self._filling is not None:
            self._blocks.free.put(self._filling)
            self._filling = None
        self._file.close()


class StreamSink(Sink):
    """A file on an fsspec file system, which can only be written sequentially. ``write`` copies all data."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._buffer = stream, aligned_buffer(STEP)
        self._sums: list[int] = []

    def _take(self) -> Tensor:
        return self._buffer

    def _put(self, buffer: Tensor, nbytes: int) -> None:
        self._sums.append(checksum(buffer[: rounded(nbytes)]))
        self._stream.write(bytes(view_of(buffer[:nbytes])))

    def close(self) -> FileRecord:
        nbytes = self.position
        self._flush()
        self._stream.close()
        return FileRecord(nbytes, tuple(self._sums))

    def abandon(self) -> None:
        # The first error is the one to report.
        with contextlib.suppress(Exception):
            self._stream.close()


class StagingRing:
    """The buffers of one save; they are allocated with the first tensor that needs them.

    ``nbytes``: of each buffer, a multiple of 64.
    """

    def __init__(self, nbytes: int = RING_BUFFER) -> None:
        self._nbytes, self._buffers = nbytes, list[Tensor]()
        self._number = self._used = 0  # the buffer that is being filled, and bytes in it
        self._read: list[tuple[Sink | None, int]] = [(None, 0), (None, 0)]  # the file of each, and where it ended there

    def parts(self, values: Tensor, sink: Sink) -> Iterator[Tensor]:
        """The elements of ``values`` (1D) in host memory, in order; each part has to be written before the next one.

        ``sink``: the file to which they go. What is on the host, or is no plain tensor, is one part.
        """
        staged = accelerator.holds(values) and accelerator.has_streams(values.device)
        if not staged or type(values) is not Tensor or values.is_quantized:
            yield values.cpu()
            return
        done, size = 0, values.dtype.itemsize
        while done < values.numel():
            room = self._room(size, sink)
            part = values[done : done + room // size]
            start, done = self._used, done + part.numel()
            self._used = rounded(start + part.nbytes, _ALIGN)
            target = self._buffers[self._number][start : start + part.nbytes].view(values.dtype)
            target.copy_(part, non_blocking=True)
            copied = accelerator.event(values.device, blocking=True)
            copied.record(accelerator.current_stream(values.device))
            copied.synchronize()
            yield target

    def _room(self, size: int, sink: Sink) -> int:
        """Bytes that are free in the current buffer, which has room for ``size`` at least."""
        if not self._buffers:
            self._buffers = [host_buffer(self._nbytes, pin=True)[: self._nbytes] for _ in self._read]
        if self._nbytes - self._used < size:
            self._read[self._number] = sink, sink.position
            self._number, self._used = 1 - self._number, 0
            reader, end = self._read[self._number]
            # A file that was closed reads nothing any more.
            if reader is sink:
                sink.wait_written(end)
        return self._nbytes - self._used
