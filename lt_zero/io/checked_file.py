"""Files with a checksum for each block, written front to back and read in any order, with several threads.

A block that lies within one tensor is copied by the thread that writes it; smaller data is copied at once into the
block that is being filled. Either way bytes are copied exactly once, into aligned memory for O_DIRECT, and the checksum
is computed from that copy, so it covers what the disk gets. O_DIRECT, because a checkpoint is as large as memory and is
not read soon. A tensor belongs to the threads until ``wait_written`` or ``close`` has returned. The reader verifies
each block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from lt_zero.common.errors import CheckpointError
from lt_zero.io import direct_file
from lt_zero.io.direct_file import go_direct, logical_block, reserve
from lt_zero.io.pinned import BLOCK, aligned_buffer, checksum, checksum_weights, rounded, view_of
from lt_zero.io.thread_pool import IoPool, Transfer

STEP = 4 << 20  # bytes of a block, which has one checksum
THREADS = 4
_RETRIES = 5


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
        self.pool = IoPool(threads)
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
        self.pool.close()


class _Blocks(direct_file.Blocks):
    kind = CheckpointError

    def trouble(self, what: str, error: OSError) -> RuntimeError:
        return trouble(what, self.path, error)


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
        self._pending: deque[Transfer] = deque()
        self._abandoned = False  # drop what is queued
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
            unit = max(BLOCK, logical_block(path.parent))
            direct = go_direct(self._fd, unit, expected)
            self._file = _Blocks(self._fd, self.path, unit if direct else 1, _RETRIES)
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
            self._pending.popleft().wait()

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
        self._abandoned = True
        for transfer in self._pending:
            with contextlib.suppress(RuntimeError):  # only wait: it still reads the tensor's memory
                transfer.wait()
        self._pending.clear()
        if self._filling is not None:
            self._blocks.give_back(self._filling)
            self._filling = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- in the threads ----------------------------------------------------------------------------------------

    def _submit(self, work: Any, *args: Any) -> None:
        while self._pending and self._pending[0].done:
            self._pending.popleft().wait()  # raise errors early
        self._pending.append(self._blocks.pool.submit(1, lambda block: work(*args), lambda error: None, after=None))

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
        if self._abandoned:
            return
        with torch.inference_mode(False):
            total = checksum(block, self._blocks.weights)
        with self._lock:
            self._sums[number] = total
        self._file.write(view_of(block), number * STEP)


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
    """An error that says what failed (in ``path``, if ``what`` does not name it), why, and what to do."""
    code = error.errno or 0
    remedy = _REMEDIES.get(code, "See dmesg; if the error persists, save to another disk.")
    name = errno.errorcode.get(code, str(code))
    where = "" if str(path) in what else f" {path}"
    return CheckpointError(f"{what}{where}: {error.strerror or error} ({name}). {remedy}")


class BlockReader:
    """Reads the files of a directory in verified blocks.

    The last block of each file is cached, since small tensors share blocks.

    Args:
        folder: the directory.
        fs: its fsspec file system; None for a local directory.
    """

    def __init__(self, folder: str, fs: Any = None) -> None:
        self.files: Mapping[str, FileRecord] = {}  # lengths and checksums
        self._folder, self._fs = folder, fs
        self._weights = checksum_weights(STEP)  # 1D
        self._fds: dict[str, int] = {}
        self._last: dict[str, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()
        self._pool: IoPool | None = None
        self._own = threading.local()

    def read(self, file: str, start: int, out: Tensor) -> None:
        """Fill ``out`` (1D uint8) from byte ``start`` on."""
        nbytes = out.numel()
        numbers = range(start // STEP, -(-(start + nbytes) // STEP)) if nbytes else range(0)
        if len(numbers) < 3 or self._fs is not None:
            for number in numbers:
                self._copy(file, number, self._block(file, number), start, out)
            return
        if self._pool is None:
            self._pool = IoPool(THREADS)
        self._fd(file)

        def read(index: int) -> None:
            self._read_apart(file, numbers[index], start, out)

        self._pool.submit(len(numbers), read, lambda error: None, after=None).wait()

    def verify(self, file: str, tick: Callable[[int], object] = lambda _: None) -> None:
        record = self.files[file]
        for number in range(len(record.sums)):
            self._load(file, number, self._mine())
            tick(min(STEP, record.nbytes - number * STEP))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds, self._pool, self._last = {}, None, {}

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _read_apart(self, file: str, number: int, start: int, out: Tensor) -> None:
        buffer = self._mine()
        self._load(file, number, buffer)
        self._copy(file, number, buffer, start, out)

    def _copy(self, file: str, number: int, block: Tensor, start: int, out: Tensor) -> None:
        first, end = max(start, number * STEP), min(start + out.numel(), (number + 1) * STEP)
        source = block.data_ptr() + first - number * STEP
        ctypes.memmove(out.data_ptr() + first - start, source, end - first)

    def _mine(self) -> Tensor:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_buffer(STEP)
        buffer: Tensor = self._own.buffer
        return buffer

    def _block(self, file: str, number: int) -> Tensor:
        known = self._last.get(file)
        if known is not None and known[0] == number:
            return known[1]
        buffer = known[1] if known is not None else aligned_buffer(STEP)
        self._last.pop(file, None)
        self._load(file, number, buffer)
        self._last[file] = (number, buffer)
        return buffer

    def _fd(self, file: str) -> int:
        with self._lock:
            if file not in self._fds:
                self._fds[file] = os.open(os.path.join(self._folder, file), os.O_RDONLY | os.O_CLOEXEC)
            return self._fds[file]

    def _load(self, file: str, number: int, buffer: Tensor) -> None:
        """Read one block and check it."""
        record, path = self.files[file], f"{self._folder}/{file}"
        length = min(STEP, record.nbytes - number * STEP)
        try:
            got = self._fill(file, number * STEP, view_of(buffer[:length]))
        except OSError as error:
            raise CheckpointError(
                f"Cannot read {path}: {error}. See dmesg, or resume from another checkpoint."
            ) from None
        full = rounded(length)
        buffer[length:full].zero_()
        if got != length or checksum(buffer[:full], self._weights) != record.sums[number]:
            raise CheckpointError(
                f"{path} is damaged: bytes {number * STEP} to {number * STEP + length} have a wrong checksum. Restore "
                "it from a copy, or resume from another checkpoint."
            )

    def _fill(self, file: str, offset: int, view: memoryview) -> int:
        if self._fs is not None:
            data = self._fs.cat_file(f"{self._folder}/{file}", start=offset, end=offset + len(view))
            view[: len(data)] = data
            return len(data)
        done, fd = 0, self._fd(file)
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done
