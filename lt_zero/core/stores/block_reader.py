"""Reads files that have a checksum for each block (checked_file.py), in any order, with several threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from functools import partial
from typing import Any

from torch import Tensor

from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.checked_file import STEP, BlockThreads, FileRecord, ThreadBuffer
from lt_zero.core.stores.direct_file import unreadable
from lt_zero.core.stores.pinned import aligned_buffer, checksum, rounded, view_of
from lt_zero.core.stores.regular_file import open_regular

_REMEDY = "Restore it from a copy, or resume from another checkpoint."


def _missing(path: str) -> CheckpointError:
    return CheckpointError(f"{path} is missing. {_REMEDY}")


class BlockReader:
    """Reads the files of a directory in verified blocks.

    The last block of each file is cached, since small tensors share blocks.

    Args:
        folder: the directory.
        fs: its fsspec file system; None for a local directory.
    """

    def __init__(self, folder: str, fs: Any = None) -> None:
        self.files: Mapping[str, FileRecord] = {}  # lengths and checksums
        self._folder = folder
        self._fs = fs
        self._fds: dict[str, int] = {}
        self._last: dict[str, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()
        self._threads: BlockThreads | None = None  # of the process that reads, which may be a forked child
        self._own = ThreadBuffer()

    def read(self, file: str, start: int, out: Tensor) -> None:
        """Fill ``out`` (1D uint8) from byte ``start`` on."""
        stop = start + out.numel()
        numbers = range(start // STEP, -(-stop // STEP)) if out.numel() else range(0)

        def copy(number: int, block: Tensor) -> None:
            first = max(start, number * STEP)
            end = min(stop, (number + 1) * STEP)
            source = block.data_ptr() + first - number * STEP
            ctypes.memmove(out.data_ptr() + first - start, source, end - first)

        def read(index: int) -> None:
            number = numbers[index]
            first = number * STEP - start
            aligned = (out.storage_offset() + first) % 8 == 0  # a checksum reads words
            if first >= 0 and aligned and first + STEP <= out.numel():  # the block is in ``out``
                self._load(file, number, out[first : first + STEP])
            else:
                copy(number, self._load(file, number, self._own.buffer))

        if len(numbers) >= 3 and self._fs is None:
            self._threads = self._threads or BlockThreads()
            reads = [self._threads.submit(partial(read, index)) for index in range(len(numbers))]
            futures.wait(reads, return_when=futures.FIRST_EXCEPTION)
            for after_error in reads:
                after_error.cancel()
            futures.wait(reads)  # those that have begun write to ``out``
            for done in reads:
                # Those after the error, and one before it that a thread had taken, but not begun.
                if not done.cancelled():
                    done.result()
            return
        for number in numbers:
            known, buffer = self._last.pop(file) if file in self._last else (-1, aligned_buffer(STEP))
            if known != number:
                self._load(file, number, buffer)
            self._last[file] = (number, buffer)
            copy(number, buffer)

    def check_length(self, file: str) -> None:
        """Check that a file is there, and is as long as it was written.

        Raises:
            CheckpointError: it is not; names it.
        """
        path = f"{self._folder}/{file}"
        try:
            size = os.stat(path).st_size if self._fs is None else self._fs.size(path)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise unreadable(path, error) from error
        self._require_length(file, size)

    def _require_length(self, file: str, size: int) -> None:
        wanted = self.files[file].nbytes
        if size != wanted:
            raise CheckpointError(
                f"{self._folder}/{file} has {size} bytes, and {wanted} were written: something cut or changed it. "
                f"{_REMEDY}"
            )

    def verify(self, file: str, tick: Callable[[int], object] = lambda _: None) -> None:
        record = self.files[file]
        for number in range(len(record.sums)):
            self._load(file, number, self._own.buffer)
            tick(min(STEP, record.nbytes - number * STEP))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        self._threads = None
        self._last = {}

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _load(self, file: str, number: int, buffer: Tensor) -> Tensor:
        """Read one block into the buffer and check it."""
        record = self.files[file]
        path = f"{self._folder}/{file}"
        offset = number * STEP
        length = min(STEP, record.nbytes - offset)
        view = view_of(buffer[:length])
        done = 0
        try:
            if self._fs is not None:
                data = self._fs.cat_file(path, start=offset, end=offset + length)
                done = len(data)
                view[:done] = data
            else:
                with self._lock:
                    if file not in self._fds:
                        self._fds[file] = open_regular(os.path.join(self._folder, file))
                        self._require_length(file, os.fstat(self._fds[file]).st_size)
                    fd = self._fds[file]
                while done < length and (count := os.preadv(fd, [view[done:]], offset + done)):
                    done += count
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise unreadable(path, error) from None
        full = rounded(length)
        buffer[length:full].zero_()
        if done != length or checksum(buffer[:full]) != record.sums[number]:
            raise CheckpointError(
                f"{path} is damaged, or a file of another save: bytes {offset} to {offset + length} have a wrong "
                f"checksum. {_REMEDY}"
            )
        return buffer
