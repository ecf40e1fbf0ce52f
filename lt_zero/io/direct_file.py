"""Files of fixed-size records that are written and read in the background, with O_DIRECT where possible.

Requests for one record run in order: a read sees the write before it, and a write waits for the reads before it.
Requests for different records overlap. A request's tensor belongs to the threads until ``Transfer.wait`` has returned;
bytes that the caller changes meanwhile make the checksum fail at the next read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lt_zero.common.units import exact_bytes
from lt_zero.io.pinned import BLOCK, aligned_buffer, check_buffer, checksum, checksum_weights, rounded, view_of
from lt_zero.io.thread_pool import EXIT_PATIENCE, IoPool, SwapError, Transfer, log

__all__ = ["IoPool", "Nowhere", "SwapError", "SwapFile", "Transfer"]

_told: set[str] = set()

# Worth a retry. EIO is not: the kernel has retried already.
_TRANSIENT = {errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.EBUSY}
_PAUSE = 0.01  # seconds before the first retry; doubles with each

_REMEDIES = {
    errno.EIO: "The disk failed: see dmesg and smartctl, {to} another disk, and restart from a checkpoint.",
    errno.EROFS: "The file system is read-only (if it was writable before, see dmesg): {to} a writable one.",
    errno.EFBIG: "The file is too large: raise the limit (ulimit -f), or {to} another file system.",
    errno.EDQUOT: "The user's quota is exceeded: remove files, or {to} another file system.",
    errno.EACCES: "Give the user write permission, or {to} a folder of the user.",
    errno.EPERM: "Give the user write permission, or {to} a folder of the user.",
    errno.ENOENT: "Create the folder first.",
    errno.EEXIST: "A file of that name exists; remove it if it is left over.",
    errno.ENOTDIR: "A part of the path is no folder: {to} a folder.",
    errno.ENAMETOOLONG: "The path is too long: {to} a shorter one.",
    errno.EMFILE: "The process has too many files open: raise the limit (ulimit -n).",
}


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write to the file system of ``path``."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def trouble(what: str, folder: Path, error: OSError, kind: type[RuntimeError] = SwapError) -> RuntimeError:
    """An error of type ``kind`` with the failure, its cause and the remedy.

    Args:
        what: the operation with its path.
        folder: whose free space is reported.
    """
    code, to = error.errno or 0, "set nvme_path to" if kind is SwapError else "save to"
    remedy = _REMEDIES.get(code, "See dmesg; if the error persists, {to} another disk.").format(to=to)
    if code == errno.ENOSPC:
        try:
            free = f"{exact_bytes(free_bytes(folder))} are free"
        except OSError:
            free = "it is full"
        remedy = f"Free space there ({free} now), or {to} a larger disk."
    reason = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})" if code else str(error)
    return kind(f"{what}: {reason}. {remedy}")


def read_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to read into ``view``; returns the bytes read. Tests replace this."""
    return os.preadv(fd, [view], offset)


def write_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to write ``view``; returns the bytes written. Tests replace this."""
    return os.pwritev(fd, [view], offset)


class BlockMover:
    """Moves whole blocks of one open file; repeats requests that were short, interrupted or refused for a moment.

    Args:
        fd: the open file.
        path: for messages.
        unit: alignment of offsets in bytes (1 without O_DIRECT).
        retries: how often a request that failed for lack of resources, or moved nothing, is repeated.
        kind: type of errors.
    """

    def __init__(self, fd: int, path: Path, unit: int, retries: int, kind: type[RuntimeError] = SwapError) -> None:
        self.fd, self._path, self._unit, self._retries, self._kind = fd, path, unit, retries, kind

    def move(self, writes: bool, view: memoryview, offset: int) -> None:
        """Write all of ``view``, or fill it.

        Raises:
            SwapError: (or ``kind``) the request failed, or the file is too short.
        """
        done, failures = 0, 0
        while done < len(view):
            what = f"Cannot {'write' if writes else 'read'} {len(view) - done} bytes at offset {offset + done} of"
            try:
                count = (write_some if writes else read_some)(self.fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in _TRANSIENT or failures == self._retries:
                    raise trouble(f"{what} {self._path}", self._path.parent, error, self._kind) from None
                count = 0
            # A short request can end within a sector, where the next one must not start.
            progress = count if done + count == len(view) else (done + count) // self._unit * self._unit - done
            if progress > 0:
                done, failures = done + progress, 0
                continue
            size, end = os.fstat(self.fd).st_size, offset + len(view)
            if not writes and size < end:
                raise self._kind(
                    f"{self._path} ends at byte {size}, and {end} bytes were written: another program truncated it."
                    " Keep other programs away from lt_zero's folders, and restart from a checkpoint."
                )
            if failures == self._retries:
                nothing = f"{failures + 1} requests moved nothing. See dmesg; the disk may hang."
                raise self._kind(f"{what} {self._path}: {nothing}")
            time.sleep(_PAUSE * 2**failures)
            failures += 1


class _RecordState:
    """A record of the file, and the state of its content."""

    def __init__(self, index: int, offset: int, nbytes: int, blocks: int) -> None:
        self.index, self.offset, self.nbytes = index, offset, nbytes
        self.sums = [0] * blocks  # checksums of the last write
        self.last: Transfer | None = None  # the latest request; the next one is chained behind it
        self.written = False  # a write was submitted
        self.problem = ""  # why the last write failed


class _Handle:
    """The open file and its running requests. Outlives the SwapFile at exit."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path, self.pid = fd, path, os.getpid()
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
            os.close(self.fd)
            return
        with self.idle:
            self.closed = self.given_up = True
            quiet = self.idle.wait_for(lambda: self.running == 0, EXIT_PATIENCE)
        # Close only then: a thread might write to another file that reuses the descriptor.
        if quiet:
            os.close(self.fd)
        self.path.unlink(missing_ok=True)


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
        self.path, self._pool = path, pool
        unit = max(BLOCK, logical_block(path.parent))
        self._step = rounded(pool.block_size, unit)
        self._weights = checksum_weights(self._step)  # 1D
        lengths = [rounded(size, unit) for size in sizes]
        self.nbytes = sum(lengths)
        fd = _allocate(path, self.nbytes)
        offsets = itertools.accumulate(lengths, initial=0)
        self._records = [
            _RecordState(index, offset, nbytes, -(-nbytes // self._step))
            for index, (offset, nbytes) in enumerate(zip(offsets, lengths, strict=False))
        ]
        self._lock = threading.Lock()  # guards `_Record.last`
        self.direct = go_direct(fd, unit, self.nbytes)
        if not self.direct and "direct" not in _told:
            _told.add("direct")
            log.warning("%s does not support O_DIRECT: NVMe offload is slower there.", path.parent)
        self._blocks = BlockMover(fd, path, unit if self.direct else 1, pool.retries)
        self._handle = _Handle(fd, path)
        self._finalizer = weakref.finalize(self, self._handle.release)

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
            record.sums[index] = checksum(block, self._weights)
        self._blocks.move(True, view_of(block), offset)

    def _read_block(self, record: _RecordState, tensor: Tensor, index: int) -> None:
        if record.problem:
            raise SwapError(
                f"Cannot read record {record.index} of {self.path}: its last write failed. {record.problem}"
            )
        block, offset = self._block(record, tensor, index)
        self._blocks.move(False, view_of(block), offset)
        if self._pool.checksum and (found := checksum(block, self._weights)) != record.sums[index]:
            raise SwapError(
                f"Wrong checksum of {block.numel()} bytes at offset {offset} of {self.path} (record {record.index}):"
                f" {found:#x}, expected {record.sums[index]:#x}. The disk, its driver or another program changed the"
                " data or lost a write (or the source was changed before wait()). See dmesg and smartctl, set nvme_path"
                " to another disk, and restart from a checkpoint."
            )

    def _end(self, record: _RecordState, writes: bool, error: RuntimeError | None) -> None:
        """Complete a transfer, in the thread that moved its last block."""
        try:
            if error is None and not self.direct and record.nbytes:
                # Without O_DIRECT the file would evict everything else from the page cache.
                if writes:
                    os.fdatasync(self._handle.fd)  # also reports errors
                os.posix_fadvise(self._handle.fd, record.offset, record.nbytes, os.POSIX_FADV_DONTNEED)
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
        self._sizes, self._error = sizes, error

    def size_of(self, record: int) -> int:
        return rounded(self._sizes[record])

    def read(self, record: int, target: Tensor) -> Transfer:
        raise self._error

    write = read

    def close(self) -> None:
        """Nothing to do."""


def logical_block(folder: Path) -> int:
    """The logical block size in bytes of the disk under ``folder``; ``BLOCK`` if it is unknown."""
    for queue in ("queue", "../queue"):  # a disk's, a partition's
        with contextlib.suppress(OSError, ValueError):
            device = os.stat(folder).st_dev
            node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
            return int(Path(node, queue, "logical_block_size").read_text())
    return BLOCK


def _allocate(path: Path, nbytes: int) -> int:
    """Create a file with all its space allocated, so that no later write fails for lack of space."""
    what = f"Cannot create {path} with {exact_bytes(nbytes)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise trouble(what, path.parent, error) from error
    try:
        # Check before allocating: a failing fallocate would fill the disk.
        if nbytes > free_bytes(path.parent):
            raise OSError(errno.ENOSPC, "no space")
        if nbytes:
            reserve(fd, nbytes)
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise trouble(what, path.parent, error) from error
    return fd


def reserve(fd: int, nbytes: int) -> None:
    """Allocate the file's space where the file system supports it. Tests replace this."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def go_direct(fd: int, unit: int, nbytes: int) -> bool:
    """Turn on O_DIRECT if the file system supports it for requests of ``unit`` bytes. Tests replace this."""
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | os.O_DIRECT)
        # Try a request: some file systems accept the flag and refuse requests.
        if nbytes:
            zeros = aligned_buffer(unit)
            os.pwritev(fd, [view_of(zeros)], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, before)
        return False
    return True
