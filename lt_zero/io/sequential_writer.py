"""Writes a new file front to back, in large aligned blocks, with several threads.

A block that lies within one tensor is copied by the thread that writes it; smaller data is copied at once into the
block that is being filled. Either way bytes are copied exactly once, into aligned memory for O_DIRECT, and the checksum
is computed from that copy, so it covers what the disk gets. O_DIRECT, because a checkpoint is as large as memory and is
not read soon. A tensor belongs to the threads until ``wait_written`` or ``close`` has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from lt_zero.common.errors import CheckpointError
from lt_zero.io.direct_file import go_direct, logical_block, reserve
from lt_zero.io.pinned import BLOCK, aligned_buffer, checksum, checksum_weights, rounded, view_of

STEP = 4 << 20  # bytes of a block, which has one checksum
THREADS = 4


@dataclass(frozen=True)
class FileRecord:
    """Length of a file in bytes, and the checksum of each block of ``STEP`` bytes (io/pinned.py)."""

    nbytes: int
    sums: tuple[int, ...]


class Sink(Protocol):
    """A file that is written in order."""

    def write(self, data: bytes | Tensor) -> None:
        """Append bytes, or a 1D uint8 tensor on the CPU, which must not change until ``wait_written``."""

    def wait_written(self) -> None:
        """Wait until no tensor is in use any more."""

    def close(self) -> FileRecord:
        """Finish the file and make it durable."""

    def abandon(self) -> None:
        """Release everything after an error; the file stays incomplete."""


class Blocks:
    """The threads and buffers that the open files of one process share."""

    def __init__(self, threads: int = THREADS) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="lt_zero-save")
        self.weights = checksum_weights(STEP)  # 1D
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(threads):
            self._free.put(aligned_buffer(STEP))
        self._own = threading.local()

    def take(self) -> Tensor:
        """A free buffer of ``STEP`` bytes; blocks until there is one. Not for the threads: deadlock."""
        return self._free.get()

    def mine(self) -> Tensor:
        """The calling thread's buffer."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_buffer(STEP)
        buffer: Tensor = self._own.buffer
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._free.put(buffer)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


class FileSink:
    """A local file.

    Args:
        path: the file to create; it must not exist.
        blocks: threads and buffers.
        expected: approximate size in bytes, which is allocated now.
        name: the file's name in messages; default: ``path``.
        copies: copy all data in ``write``, so that tensors may change as soon as it returns.

    Raises:
        CheckpointError: the file cannot be created, for lack of space or permissions.
    """

    def __init__(
        self, path: Path, blocks: Blocks, expected: int = 0, name: Path | None = None, copies: bool = False
    ) -> None:
        self.path, self._blocks, self._copies = name or path, blocks, copies
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._pending: deque[Future[None]] = deque()
        self._filling: Tensor | None = None
        self._fill = 0  # bytes in ``_filling``
        self._number = 0  # index of the block that is being filled
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise trouble("Cannot create", self.path, error) from None
        try:
            if expected >= STEP:
                reserve(self._fd, rounded(expected))
            self._direct = go_direct(self._fd, max(BLOCK, logical_block(path.parent)), expected)
        except OSError as error:
            os.close(self._fd)
            raise trouble("Cannot allocate", self.path, error) from None

    @property
    def position(self) -> int:
        return self._number * STEP + self._fill

    def write(self, data: bytes | Tensor) -> None:
        size = len(data)
        address, keep = _address_of(data)
        done = 0
        while done < size:
            left = size - done
            if self._fill == 0 and left >= STEP and not self._copies:
                self._submit(self._copy_and_write, self._number, address + done, keep)
                self._number += 1
                done += STEP
                continue
            if self._filling is None:
                self._filling = self._blocks.take()
            count = min(left, STEP - self._fill)
            ctypes.memmove(self._filling.data_ptr() + self._fill, address + done, count)
            self._fill += count
            done += count
            if self._fill == STEP:
                self._submit(self._write_filled, self._number, self._filling)
                self._filling, self._fill, self._number = None, 0, self._number + 1

    def wait_written(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> FileRecord:
        nbytes = self.position
        try:
            if self._filling is not None:
                filling, self._filling = self._filling, None
                length = rounded(self._fill)
                filling[self._fill : length].zero_()
                self._submit(self._write_filled, self._number, filling, length)
            self.wait_written()
            os.ftruncate(self._fd, nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise trouble("Cannot finish", self.path, error) from None
        finally:
            self.abandon()
        return FileRecord(nbytes, tuple(self._sums[i] for i in range(len(self._sums))))

    def abandon(self) -> None:
        for future in self._pending:
            future.cancel()
        for future in self._pending:
            if not future.cancelled():
                future.exception()  # wait: it still reads the tensor's memory
        self._pending.clear()
        if self._filling is not None:
            self._blocks.give_back(self._filling)
            self._filling = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- in the threads ----------------------------------------------------------------------------------------

    def _submit(self, work: Any, *args: Any) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()  # raise errors early
        self._pending.append(self._blocks.pool.submit(work, *args))

    def _copy_and_write(self, number: int, address: int, keep: object) -> None:
        buffer = self._blocks.mine()
        ctypes.memmove(buffer.data_ptr(), address, STEP)
        del keep
        self._write_block(number, buffer)

    def _write_filled(self, number: int, buffer: Tensor, length: int = STEP) -> None:
        try:
            self._write_block(number, buffer[:length])
        finally:
            self._blocks.give_back(buffer)

    def _write_block(self, number: int, block: Tensor) -> None:
        with torch.inference_mode(False):
            total = checksum(block, self._blocks.weights)
        with self._lock:
            self._sums[number] = total
        self._pwrite(view_of(block), number * STEP)

    def _pwrite(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = write_some(self._fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise trouble("Cannot write", self.path, error) from None
            if count <= 0:
                raise CheckpointError(f"Cannot write {self.path}: the system wrote 0 bytes. See dmesg.")
            # A short request can end within a sector, where the next one must not start.
            done += count if done + count == len(view) or not self._direct else max(0, count // BLOCK * BLOCK)


class StreamSink:
    """A file on an fsspec file system, which can only be written sequentially."""

    def __init__(self, path: str, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream
        self._buffer, self._fill = aligned_buffer(STEP), 0
        self._weights = checksum_weights(STEP)
        self._sums: list[int] = []
        self.position = 0

    def write(self, data: bytes | Tensor) -> None:
        size, done = len(data), 0
        address, keep = _address_of(data)
        while done < size:
            count = min(size - done, STEP - self._fill)
            ctypes.memmove(self._buffer.data_ptr() + self._fill, address + done, count)
            self._fill, done = self._fill + count, done + count
            if self._fill == STEP:
                self._flush()
        self.position += size
        del keep

    def _flush(self) -> None:
        if not self._fill:
            return
        length = rounded(self._fill)
        self._buffer[self._fill : length].zero_()
        self._sums.append(checksum(self._buffer[:length], self._weights))
        self._stream.write(bytes(view_of(self._buffer[: self._fill])))
        self._fill = 0

    def wait_written(self) -> None:
        """A no-op: ``write`` copies all data."""

    def close(self) -> FileRecord:
        self._flush()
        self._stream.close()
        return FileRecord(self.position, tuple(self._sums))

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # the first error is the one to report
            self._stream.close()


def write_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to write ``view``; returns the bytes written. Tests replace this."""
    return os.pwritev(fd, [view], offset)


def _address_of(data: bytes | Tensor) -> tuple[int, object]:
    """The address of the bytes, and the object that keeps them alive."""
    if isinstance(data, Tensor):
        assert data.dtype == torch.uint8, data.dtype
        assert data.is_contiguous(), data.stride()
        return data.data_ptr(), data
    pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return pointer or 0, data


_REMEDIES = {
    errno.ENOSPC: "Free space there, or save to another disk.",
    errno.EDQUOT: "The user's quota is exceeded: remove files, or save to another disk.",
    errno.EACCES: "Give the user write permission, or save elsewhere.",
    errno.EROFS: "The file system is read-only: save elsewhere.",
    errno.EIO: "The disk failed: see dmesg and smartctl, and save to another disk.",
    errno.EFBIG: "The file is too large: raise the limit (ulimit -f), or save to another file system.",
}


def trouble(what: str, path: Path | str, error: OSError) -> CheckpointError:
    """An error that says what failed, why, and what to do."""
    code = error.errno or 0
    remedy = _REMEDIES.get(code, "See dmesg; if the error persists, save to another disk.")
    name = errno.errorcode.get(code, str(code))
    return CheckpointError(f"{what} {path}: {error.strerror or error} ({name}). {remedy}")
