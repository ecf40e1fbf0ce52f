"""Files that are written and read in blocks, with O_DIRECT where possible, and the errors of disks.

``SwapFile`` (swap_file.py) and ``FileSink`` (checked_file.py) write through a ``BlockFile``, in the threads of an
``IoPool``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from torch import Tensor

from lt_zero.common.descriptors import fullness
from lt_zero.common.errors import CheckpointError
from lt_zero.common.units import exact_bytes
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.pinned import BLOCK, aligned_buffer, view_of

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
}


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write to the file system of ``path``."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def filesystem_of(path: Path) -> str:
    """The type of the file system under ``path``, such as "ext4"; "" if it is unknown."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == number:
            return rest.split()[0]
    return ""


def trouble(what: str, folder: Path, error: OSError, kind: type[RuntimeError] = SwapError) -> RuntimeError:
    """An error of type ``kind`` with the failure, its cause and the remedy.

    Args:
        what: the operation with its path.
        folder: whose free space is reported.
    """
    to = "set nvme_path to" if kind is SwapError else "save to"
    if error.errno == errno.EMFILE:
        return kind(f"{what}: {_reason(error)}. {fullness()}")
    remedy = _REMEDIES.get(error.errno or 0, "See dmesg; if the error persists, {to} another disk.").format(to=to)
    if error.errno == errno.ENOENT and folder.is_dir():
        remedy = f"Another program, or run, has removed something there: {to} a folder that no other one uses."
    if error.errno == errno.ENOSPC:
        try:
            free = f"{exact_bytes(free_bytes(folder))} are free"
        except OSError:
            free = "it is full"
        remedy = f"Free space there ({free} now), or {to} a larger disk."
    return kind(f"{what}: {_reason(error)}. {remedy}")


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """A ``CheckpointError`` with the file that cannot be read, the cause and the remedy."""
    if error.errno == errno.EMFILE:
        return CheckpointError(f"Cannot read {path}: {_reason(error)}. {fullness()}")
    remedy = {
        errno.ENOENT: "Is the checkpoint complete? Use another one.",
        errno.EACCES: "Check its permissions, or use another copy.",
        errno.EPERM: "Check its permissions, or use another copy.",
    }.get(error.errno or 0, "See dmesg if it is the disk, and use another copy.")
    return CheckpointError(f"Cannot read {path}: {_reason(error)}. {remedy}")


def _reason(error: OSError) -> str:
    code = error.errno or 0
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})" if code else str(error)


def read_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to read into ``view``; returns the bytes read. Tests replace this."""
    return os.preadv(fd, [view], offset)


def write_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to write ``view``; returns the bytes written. Tests replace this."""
    return os.pwritev(fd, [view], offset)


def logical_block(folder: Path) -> int:
    """The logical block size in bytes of the disk under ``folder``; ``BLOCK`` if it is unknown."""
    for queue in ("queue", "../queue"):  # a disk's, a partition's
        with contextlib.suppress(OSError, ValueError):
            device = os.stat(folder).st_dev
            node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
            return int(Path(node, queue, "logical_block_size").read_text())
    return BLOCK


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


class BlockFile:
    """A new file that threads write and read in blocks; requests that were short or interrupted are repeated.

    Args:
        path: the file to create; it must not exist.
        mode: its permissions.
        kind: type of errors.
        name: the file's name in messages; default: ``path``.
        retries: how often a request that failed for lack of resources, or moved nothing, is repeated.

    Attributes:
        unit: alignment of offsets and lengths in bytes.
        direct: O_DIRECT is on.

    Raises:
        SwapError: (or ``kind``) the file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        mode: int = 0o600,
        kind: type[RuntimeError] = SwapError,
        name: Path | None = None,
        retries: int = 5,
    ) -> None:
        self.path = name or path
        self._kind = kind
        self._retries = retries
        self._place = path
        self.unit = max(BLOCK, logical_block(path.parent))
        self.direct = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except OSError as error:
            raise self._trouble(f"Cannot create {self.path}", error) from error

    def allocate(self, nbytes: int) -> None:
        """Reserve all space, so that no later write fails for lack of it, and use O_DIRECT from here on if possible.

        Raises:
            SwapError: (or ``kind``) there is too little; the file is removed.
        """
        try:
            # Check before allocating: a failing fallocate would fill the disk.
            if nbytes > free_bytes(self._place.parent):
                raise OSError(errno.ENOSPC, "no space")
            if nbytes:
                reserve(self._fd, nbytes)
            self.direct = go_direct(self._fd, self.unit, nbytes)
        except OSError as error:
            self.close()
            self._place.unlink(missing_ok=True)
            raise self._trouble(f"Cannot create {self.path} with {exact_bytes(nbytes)}", error) from error

    def write(self, block: Tensor, offset: int) -> None:
        """Write a block (1D uint8, aligned).

        Raises:
            SwapError: (or ``kind``) the request failed.
        """
        self._move(True, view_of(block), offset)

    def read(self, block: Tensor, offset: int) -> None:
        """Fill a block (1D uint8, aligned).

        Raises:
            SwapError: (or ``kind``) the request failed, or the file is too short.
        """
        self._move(False, view_of(block), offset)

    def _move(self, writes: bool, view: memoryview, offset: int) -> None:
        done, failures = 0, 0
        # A short request can end within a sector, where the next one must not start.
        unit = self.unit if self.direct else 1
        while done < len(view):
            what = f"Cannot {'write' if writes else 'read'} {len(view) - done} bytes at offset {offset + done} of"
            try:
                count = (write_some if writes else read_some)(self._fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in _TRANSIENT or failures == self._retries:
                    raise self._trouble(f"{what} {self.path}", error) from None
                count = 0
            progress = count if done + count == len(view) else (done + count) // unit * unit - done
            if progress > 0:
                done, failures = done + progress, 0
                continue
            size, end = os.fstat(self._fd).st_size, offset + len(view)
            if not writes and size < end:
                raise self._kind(
                    f"{self.path} ends at byte {size}, and {end} bytes were written: another program truncated it."
                    " Keep other programs away from lt_zero's folders, and restart from a checkpoint."
                )
            if failures == self._retries:
                nothing = f"{failures + 1} requests moved nothing. See dmesg; the disk may hang."
                raise self._kind(f"{what} {self.path}: {nothing}")
            time.sleep(_PAUSE * 2**failures)
            failures += 1

    def drop_cached(self, offset: int, nbytes: int, written: bool) -> None:
        """Drop bytes from the page cache, where they would evict everything else; none are there with O_DIRECT.

        ``written``: write them back first. Raises OSError if that fails.
        """
        if not self.direct and nbytes:
            if written:
                os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def finish(self, nbytes: int) -> None:
        """Cut the file to its length, and make it durable.

        Raises:
            SwapError: (or ``kind``) the disk failed.
        """
        try:
            os.ftruncate(self._fd, nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise self._trouble(f"Cannot finish {self.path}", error) from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _trouble(self, what: str, error: OSError) -> RuntimeError:
        return trouble(what, self._place.parent, error, self._kind)
