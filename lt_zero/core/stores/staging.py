"""Hidden folders in which files are written before they get their final names.

Note [Staging]
    What is written to replace a file or a folder is written into ``.<name>.tmp-<host>-<pid>-<random>`` beside it, and
    what is replaced may wait for its removal as ``.<name>.old-...`` or ``.<name>.out-...``. The folder is made, never
    opened, so nothing that lies there is followed or written to, and two processes never have the same. Its process
    holds a flock on it, which the kernel releases with the process: so the next one that writes beside it removes those
    of dead processes. Names without room for this are cut, and end in a digest. Lightning numbers the checkpoints of
    SLURM's requeues by the digits after ``ckpt_`` of all names in a folder: names here have none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|out)-(?P<host>[^-]+(?:-[^-]+)*)-(?P<pid>\d+)-[0-9a-f]{8}")
_OLD_AGE = 86400.0  # seconds after which another host's folder is removed
_LOCKED_AGE = 2.0  # seconds after which a process has surely locked the empty folder that it made
_LONGEST = 150  # bytes of a name: file systems allow 255, and a host's name may have 64
_DIGEST = 16  # characters


class Staging:
    """A new hidden folder, locked.

    Args:
        path: of the file or folder whose place is taken at the end, or that stands for several. It is not touched.
        mode: permissions of the folder.

    Attributes:
        folder: the hidden folder, beside ``path``.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, mode: int = 0o700) -> None:
        self.folder = staging_path(path)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # raises for an invalid name now, before anything is written
        os.mkdir(self.folder, mode)
        self._lock = -1
        try:
            self._lock = open_folder(self.folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
            raise
        # Without locks, leftovers are kept for ``_OLD_AGE``.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Give the lock up: the folder has another name now, or is gone. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """Remove the folder with its files. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.unlock()


class Leftover(NamedTuple):
    """A folder of a process that is gone."""

    path: Path
    hidden: str  # ``hidden_name`` of what it was made for
    kind: str  # tmp: was being written; old: was being removed; out: was moved out, and would have moved back


def hidden_name(name: str) -> str:
    """The part of a hidden folder's name that tells what it is for. See Note [Staging]."""
    escaped = name.replace("ckpt_", "ckpt%5F")
    encoded = os.fsencode(escaped)
    if len(encoded) <= _LONGEST:
        return escaped
    start = encoded[: _LONGEST - _DIGEST - 1].decode(errors="ignore")  # not through the middle of a character
    return f"{start}~{hashlib.sha256(encoded).hexdigest()[:_DIGEST]}"


def whole_name(hidden: str) -> str | None:
    """The name of which ``hidden_name`` made ``hidden``; None if it was cut."""
    cut = len(os.fsencode(hidden)) > _LONGEST - 5 and re.search(rf"~[0-9a-f]{{{_DIGEST}}}\Z", hidden)
    return None if cut else hidden.replace("ckpt%5F", "ckpt_")


def staging_path(path: Path, kind: str = "tmp") -> Path:
    """A new path beside ``path`` for a hidden folder."""
    process = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{hidden_name(path.name)}.{kind}-{process}")


def staged(name: str) -> tuple[str, str] | None:
    """The ``hidden_name`` and the kind of a hidden folder with this name; None: it is none."""
    match = _NAME.fullmatch(name)
    return (match["name"], match["kind"]) if match is not None else None


def leftovers(folder: Path) -> Iterator[Leftover]:
    """The hidden folders in ``folder`` whose processes are gone, and that this user may look into.

    One may vanish at any time, as other processes remove it, too.
    """
    for path in folder.glob(".*-*-*"):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if (
                match is not None
                and not path.is_symlink()
                and path.is_dir()
                and not _may_be_in_use(path, match["host"])
            ):
                yield Leftover(path, match["name"], match["kind"])


def _may_be_in_use(folder: Path, host: str) -> bool:
    """True if a process of this host holds a folder's lock, or the folder is too young to tell."""
    age = time.time() - folder.stat().st_mtime
    if host == socket.gethostname() and (age > _LOCKED_AGE or any(folder.iterdir())):
        with contextlib.suppress(OSError):
            fd = open_folder(folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            finally:
                os.close(fd)
    return age < _OLD_AGE


def open_folder(folder: str | Path) -> int:
    """A descriptor of a folder. Raises OSError if there is none."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = open_folder(folder)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems do not support it
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)
