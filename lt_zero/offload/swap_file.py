"""Files of fixed-size records that are written and read in the background, with O_DIRECT where possible.

Requests for one record run in order: a read sees the write before it, and a write waits for the reads before it.
Requests for different records overlap. A request's tensor belongs to the threads until ``Transfer.wait`` has returned;
bytes that the caller changes meanwhile make the checksum fail at the next read.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lt_zero.core.stores.direct_file import BlockFile, trouble
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.pinned import check_buffer, checksum, rounded
from lt_zero.core.stores.thread_pool import EXIT_PATIENCE, IoPool, Transfer, log

_told: set[str] = set()


class _RecordState:
    """A record of the file, and the state of its content."""

    def __init__(self, index: int, offset: int, nbytes: int, blocks: int) -> None:
        self.index = index
        self.offset = offset
        self.nbytes = nbytes
        self.sums = [0] * blocks  # checksums of the last write
        self.last: Transfer | None = None  # the latest request; the next one is chained behind it
        self.written = False  # a write was submitted
        self.problem = ""  # why the last write failed


class _Handle:
    """The open file and its running requests. Outlives the SwapFile at exit."""

    def __init__(self, file: BlockFile) -> None:
        self.file = file
        self.pid = os.getpid()
        self.idle = threading.Condition()
        self.running = 0  # requests that have not ended
        self.closed = False  # accepts no new requests
        self.given_up = False  # drops queued requests

    def count(self, requests: int) -> None:
        """Add to the number of running requests."""
        with self.idle:
            self.running += requests
            self.idle.notify_all()

    def release(self) -> None:
        """Close and remove the file; at exit, drop queued requests."""
        # The parent's file stays; see Note [Fork and exit] in common/worker.py.
        if os.getpid() != self.pid:
            self.file.close()
            return
        with self.idle:
            self.closed = self.given_up = True
            quiet = self.idle.wait_for(lambda: self.running == 0, EXIT_PATIENCE)
        # Close only then: a thread might write to another file that reuses the descriptor.
        if quiet:
            self.file.close()
        self.file.path.unlink(missing_ok=True)


class SwapFile:
    """A preallocated file with ``len(sizes)`` records; it is removed with this object, at the latest at exit.

    Args:
        path: the file to create; it must not exist.
        sizes: bytes of each record, rounded up to full blocks; see ``size_of``.
        pool: the threads that read and write.

    Raises:
        SwapError: the file cannot be created, for lack of space or permissions.
    """

    def __init__(self, path: Path, sizes: Sequence[int], pool: IoPool) -> None:
        pool.check_process("make a file")
        if any(size < 0 for size in sizes):
            raise ValueError(f"{path}: sizes of records must not be negative, not {min(sizes)}.")
        self.path = path
        self._pool = pool
        self._file = BlockFile(path, retries=pool.retries)
        self._step = rounded(pool.block_size, self._file.unit)
        lengths = [rounded(size, self._file.unit) for size in sizes]
        self.nbytes = sum(lengths)
        self._file.allocate(self.nbytes)
        offsets = itertools.accumulate(lengths, initial=0)
        self._records = [
            _RecordState(index, offset, nbytes, -(-nbytes // self._step))
            for index, (offset, nbytes) in enumerate(zip(offsets, lengths, strict=False))
        ]
        self._lock = threading.Lock()  # guards `_Record.last`
        if not self._file.direct and "direct" not in _told:
            _told.add("direct")
            log.warning("%s does not support O_DIRECT: NVMe offload is slower there.", path.parent)
        self._handle = _Handle(self._file)
        self._finalizer = weakref.finalize(self, self._handle.release)

    @property
    def direct(self) -> bool:
        """True if the page cache is not used."""
        return self._file.direct

    def size_of(self, record: int) -> int:
        """Bytes of a record, in full blocks; tensors to write or read must have this size."""
        return self._record(record).nbytes

    def write(self, record: int, source: Tensor) -> Transfer:
        """Write a record. ``source`` (1D) must not change until the transfer is waited for.

        Raises:
            ValueError: ``source`` is not an aligned buffer of the record's size.
            SwapError: the file or the pool is closed.
        """
        return self._submit(self._record(record), source, writes=True)

    def read(self, record: int, target: Tensor) -> Transfer:
        """Read a record, after a pending write of it. ``target`` (1D) is undefined until the transfer is waited for.

        Raises:
            ValueError: ``target`` is not an aligned buffer of the record's size.
            SwapError: the record was never written; the file or the pool is closed.
        """
        return self._submit(self._record(record), target, writes=False)

    def close(self) -> None:
        """Wait for pending requests and remove the file. Idempotent."""
        handle = self._handle
        if os.getpid() == handle.pid:
            with handle.idle:
                handle.closed = True
                handle.idle.wait_for(lambda: handle.running == 0)
        self._finalizer()

    def _record(self, index: int) -> _RecordState:
        if not 0 <= index < len(self._records):
            raise IndexError(f"{self.path} has records 0 to {len(self._records) - 1}, not {index}.")
        return self._records[index]

    def _submit(self, record: _RecordState, tensor: Tensor, writes: bool) -> Transfer:
        what = f"Cannot {'write' if writes else 'read'} record {record.index} of {self.path}"
        check_buffer(tensor, record.nbytes, what)
        if not writes and not record.written:
            raise SwapError(f"{what} (offset {record.offset}, {record.nbytes} bytes): it was never written.")
        self._pool.check_process("read or write")
        with self._handle.idle:
            if self._handle.closed:
                raise SwapError(f"{what}: the file is closed.")
            self._handle.running += 1
        move = functools.partial(self._write_block if writes else self._read_block, record, tensor)
        end = functools.partial(self._end, record, writes)
        try:
            with self._lock:
                record.last = self._pool.submit(len(record.sums), move, end, after=record.last)
                record.written = record.written or writes
                return record.last
        except SwapError:
            self._handle.count(-1)
            raise

    def _block(self, record: _RecordState, tensor: Tensor, index: int) -> tuple[Tensor, int]:
        """The slice of the tensor for a block, and its offset in the file."""
        if self._handle.given_up:
            raise SwapError(f"{self.path} was closed at exit before record {record.index} was transferred.")
        first = index * self._step
        return tensor[first : first + self._step], record.offset + first

    def _write_block(self, record: _RecordState, tensor: Tensor, index: int) -> None:
        block, offset = self._block(record, tensor, index)
        if self._pool.checksum:
            record.sums[index] = checksum(block)
        self._file.write(block, offset)

    def _read_block(self, record: _RecordState, tensor: Tensor, index: int) -> None:
        if record.problem:
            raise SwapError(
                f"Cannot read record {record.index} of {self.path}: its last write failed. {record.problem}"
            )
        block, offset = self._block(record, tensor, index)
        self._file.read(block, offset)
        if self._pool.checksum and (found := checksum(block)) != record.sums[index]:
            raise SwapError(
                f"Wrong checksum of {block.numel()} bytes at offset {offset} of {self.path} (record {record.index}):"
                f" {found:#x}, expected {record.sums[index]:#x}. The disk, its driver or another program changed the"
                " data or lost a write (or the source was changed before wait()). See dmesg and smartctl, set nvme_path"
                " to another disk, and restart from a checkpoint."
            )

    def _end(self, record: _RecordState, writes: bool, error: RuntimeError | None) -> None:
        """Complete a transfer, in the thread that moved its last block."""
        try:
            if error is None:
                self._file.drop_cached(record.offset, record.nbytes, writes)
        except OSError as problem:
            error = trouble(f"Cannot write back record {record.index} of {self.path}", self.path.parent, problem)
            raise error from None
        finally:
            if writes:
                record.problem = str(error) if error is not None else ""
            self._handle.count(-1)


class Nowhere:
    """Stands in for a file that could not be created; every access raises the error."""

    def __init__(self, sizes: list[int], error: SwapError) -> None:
        self._sizes = sizes
        self._error = error

    def size_of(self, record: int) -> int:
        return rounded(self._sizes[record])

    def read(self, record: int, target: Tensor) -> Transfer:
        raise self._error

    write = read

    def close(self) -> None:
        """Nothing to do."""
