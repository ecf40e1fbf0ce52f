"""Reads files in blocks and verifies the checksum of each block."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lt_zero.common.errors import CheckpointError
from lt_zero.io.pinned import aligned_buffer, checksum, checksum_weights, rounded, view_of
from lt_zero.io.sequential_writer import STEP, FileRecord

_THREADS = 4


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
        self._pool: ThreadPoolExecutor | None = None
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
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="lt_zero-load")
        self._fd(file)
        list(self._pool.map(lambda number: self._read_apart(file, number, start, out), numbers))

    def verify(self, file: str, tick: Callable[[int], object] = lambda _: None) -> None:
        record = self.files[file]
        for number in range(len(record.sums)):
            self._load(file, number, self._mine())
            tick(min(STEP, record.nbytes - number * STEP))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
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
