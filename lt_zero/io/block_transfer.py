"""Reads and writes whole blocks, repeating requests that were short, interrupted or refused for lack of resources."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from lt_zero.io.thread_pool import SwapError

# Worth a retry. EIO is not: the kernel has retried already.
_TRANSIENT = {errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.EBUSY}
_PAUSE = 0.01  # seconds before the first retry; doubles with each

_REMEDIES = {
    errno.EIO: "The disk failed: see dmesg and smartctl, set nvme_path to another disk, and restart from a checkpoint.",
    errno.EROFS: "The file system is read-only (if it was writable before, see dmesg): use a writable one.",
    errno.EFBIG: "The file is too large: raise the limit (ulimit -f), or set nvme_path to another file system.",
    errno.EDQUOT: "The user's quota is exceeded: remove files, or set nvme_path to another file system.",
    errno.EACCES: "Give the user write permission, or set nvme_path to a folder of the user.",
    errno.EPERM: "Give the user write permission, or set nvme_path to a folder of the user.",
    errno.ENOENT: "Create the folder first.",
    errno.EEXIST: "A file of that name exists; remove it if it is left over.",
    errno.ENOTDIR: "Set nvme_path to a folder.",
    errno.ENAMETOOLONG: "Set nvme_path to a shorter path.",
    errno.EMFILE: "The process has too many files open: raise the limit (ulimit -n).",
}


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write to the file system of ``path``."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def in_words(nbytes: int) -> str:
    """A number of bytes as text, also in GiB if it is large."""
    return f"{nbytes} bytes" + (f" ({nbytes / 2**30:.2f} GiB)" if nbytes >= 2**27 else "")


def trouble(what: str, folder: Path, error: OSError) -> SwapError:
    """An error that says what failed, why, and what to do; ``folder``: whose free space is reported."""
    code = error.errno or 0
    remedy = _REMEDIES.get(code, "See dmesg; if the error persists, set nvme_path to another disk.")
    if code == errno.ENOSPC:
        try:
            free = f"{in_words(free_bytes(folder))} are free"
        except OSError:
            free = "it is full"
        remedy = f"Free space there ({free} now), or set nvme_path to a larger disk."
    return SwapError(f"{what}: {os.strerror(code)} ({errno.errorcode.get(code, code)}). {remedy}")


def read_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to read into ``view``; returns the bytes read. Tests replace this."""
    return os.preadv(fd, [view], offset)


def write_some(fd: int, view: memoryview, offset: int) -> int:
    """One request to write ``view``; returns the bytes written. Tests replace this."""
    return os.pwritev(fd, [view], offset)


class Blocks:
    """Moves whole blocks of one open file.

    Args:
        fd: the open file.
        path: for messages.
        unit: alignment of offsets in bytes (1 without O_DIRECT).
        retries: how often a request that failed for lack of resources, or moved nothing, is repeated.
    """

    def __init__(self, fd: int, path: Path, unit: int, retries: int) -> None:
        self.fd = fd
        self.path = path
        self.unit = unit
        self.retries = retries

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of ``view``.

        Raises:
            SwapError: the write failed.
        """
        self._move(True, view, offset)

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view``.

        Raises:
            SwapError: the read failed, or the file is too short.
        """
        self._move(False, view, offset)

    def _move(self, writes: bool, view: memoryview, offset: int) -> None:
        done, failures = 0, 0
        while done < len(view):
            try:
                call = write_some if writes else read_some
                count = call(self.fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in _TRANSIENT or failures == self.retries:
                    what = self._what(writes, len(view) - done, offset + done)
                    raise trouble(what, self.path.parent, error) from None
                count = 0
            # A short request can end within a sector, where the next one must not start.
            progress = count if done + count == len(view) else (done + count) // self.unit * self.unit - done
            if progress > 0:
                done, failures = done + progress, 0
                continue
            if not writes:
                self._check_length(offset + len(view))
            if failures == self.retries:
                what = self._what(writes, len(view) - done, offset + done)
                raise SwapError(f"{what}: {failures + 1} requests moved nothing. See dmesg; the disk may hang.")
            time.sleep(_PAUSE * 2**failures)
            failures += 1

    def _check_length(self, end: int) -> None:
        size = os.fstat(self.fd).st_size
        if size < end:
            raise SwapError(
                f"{self.path} ends at byte {size}, and {end} bytes were written: another program truncated it. Keep"
                " other programs away from lt_zero's folders, and restart from a checkpoint."
            )

    def _what(self, writes: bool, length: int, offset: int) -> str:
        return f"Cannot {'write' if writes else 'read'} {length} bytes at offset {offset} of {self.path}"
