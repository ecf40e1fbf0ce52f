"""Opens files of untrusted folders: regular files only, without blocking.

A pipe or a terminal in the place of a file would keep its reader waiting for ever, and a device has no end. The kind is
looked at before a file is opened, as opening a device may do something by itself, and again on the open descriptor: the
name may stand for something else by then. Links are followed by readers: caches of Hugging Face consist of them.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import IO, Any

_BLOCK = 1 << 16

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


def read_start(path: str | os.PathLike[str], count: int) -> bytes:
    """The first ``count`` bytes of a regular file, or all if it has fewer. Errors are those of ``open_regular``."""
    with open_bytes(path) as file:
        return file.read(count) or b""


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file, which may have ``most`` bytes: a file of no size on the disk can fill the memory.

    Raises:
        OSError: it has more, or as of ``open_regular``.
    """
    with open_bytes(path) as file:
        size = os.fstat(file.fileno()).st_size
        # The size is asked for first: it tells what is wrong. What has none, or grows, is not read beyond the limit.
        content = (file.read(max(size, _BLOCK) + 1) or b"") if size <= most else b""
    if (size := max(size, len(content))) > most:
        raise OSError(f"it has {size:,} bytes, and a file of its kind has {most:,} at most; is it the right file?")
    return content


def read_text(path: str | os.PathLike[str], most: int, encoding: str = "utf-8", errors: str = "strict") -> str:
    """``read_bytes`` as text, with the line breaks that it has.

    Raises:
        OSError: as of ``read_bytes``. ValueError: it is no text.
    """
    return read_bytes(path, most).decode(encoding, errors)


def read_json(path: str | os.PathLike[str], most: int) -> Any:
    """The value in a file of JSON.

    Raises:
        OSError: as of ``read_bytes``. ValueError: it is no JSON, or nested too deeply.
    """
    return parse_json(read_bytes(path, most))


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` of what a stranger may have written. Raises ValueError for all that is wrong."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply") from None


def open_for_update(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file that this package updates, and return its descriptor.

    With O_CREAT in ``flags`` a new file gets mode 666. Links are not followed: anyone who can write to the folder could
    redirect the write to another file.

    Raises:
        OSError: it is a link or no regular file, or cannot be opened.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _require_regular(os.fstat(fd), f"{os.fspath(path)} ")
    except BaseException:
        os.close(fd)
        raise
    return fd


def own_path(fd: int, path: str | os.PathLike[str]) -> str:
    """A path that leads to the open file ``fd``, whatever ``path`` stands for by now, as far as the system has one."""
    own = f"/proc/self/fd/{fd}"
    return own if Path(own).exists() else os.fspath(path)


def _require_regular(found: os.stat_result, what: str = "it ") -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{what}is no regular file, but {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}")
