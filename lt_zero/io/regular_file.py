"""Opens files of untrusted folders: regular files only, without blocking.

A pipe or a terminal in the place of a file would keep its reader waiting for ever, and a device has no end. The kind is
looked at before a file is opened, as opening a device may do something by itself, and again on the open descriptor: the
name may stand for something else by then. Links are followed: caches of Hugging Face consist of them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, for reading.

    Raises:
        OSError: there is none, or it is of another kind, which the error tells.
    """
    _require_regular(os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_bytes(path: str | os.PathLike[str]) -> IO[bytes]:
    """``open(path, "rb")`` of a regular file. Errors are those of ``open_regular``."""
    return open(open_regular(path), "rb")  # noqa: SIM115


def read_bytes(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """The content of a regular file, or its first ``most`` bytes. Errors are those of ``open_regular``."""
    with open_bytes(path) as file:
        return file.read(most)


def own_path(fd: int, path: str | os.PathLike[str]) -> str:
    """A path that leads to the open file ``fd``, whatever ``path`` stands for by now, as far as the system has one."""
    own = f"/proc/self/fd/{fd}"
    return own if Path(own).exists() else os.fspath(path)


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"it is no regular file, but {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}")
