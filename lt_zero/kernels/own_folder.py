"""A folder to load code from: no other user can change it or its files.

Note [What is loaded]
    A loaded library runs with the rights of the process. So folder and file have to belong to this user, or to root,
    who has all rights anyway, and no other user may have the right to write (access control lists show in the group's
    bits). Links are refused, because another user could have chosen their targets. Owner and mode are read from the
    open descriptor, and the file is looked up through the descriptor of its folder, so that a folder or link that is
    put in its place afterwards changes nothing.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

_OPENED = Path("/proc/self/fd")  # Linux


class UntrustedError(OSError):
    """Another user can change, or has made, a file or folder with code to execute."""


class OwnFolder:
    """A folder that only this user and root can write to, kept open; a context manager that closes it.

    Args:
        path: the folder.
        create: make it, with the folders around it, if it does not exist.
        close: if it is this user's, end the right of its group to write. Other files in it are not trusted thereby.

    Raises:
        UntrustedError: others can write to it, it belongs to another user, or it is a link.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, create: bool = False, close: bool = False) -> None:
        self.path = path
        if create:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        if path.is_symlink():  # for the message: O_NOFOLLOW refuses it, too
            raise UntrustedError(f"{path} is a link; name the folder itself")
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            state = os.fstat(self._fd)
            mode = stat.S_IMODE(state.st_mode)
            if close and state.st_uid == os.geteuid() and mode & stat.S_IWGRP and not mode & stat.S_IWOTH:
                os.fchmod(self._fd, mode & ~stat.S_IWGRP)
                state = os.fstat(self._fd)
            _check(state, path)
        except OSError:
            os.close(self._fd)
            raise

    @property
    def inside(self) -> Path:
        """A path that leads to the open folder, whatever has taken its name, while it is open; elsewhere its name."""
        return _OPENED / str(self._fd) if _OPENED.is_dir() else self.path

    def names(self) -> list[str]:
        """The names in the folder, sorted."""
        return sorted(os.listdir(self._fd))

    def open(self, name: str) -> int:
        """A descriptor to read the file ``name``, to be closed by the caller.

        Raises:
            UntrustedError: others can write to it, it belongs to another user, or it is no file.
            OSError: it cannot be opened.
        """
        # O_NONBLOCK, as opening a pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(name, flags, dir_fd=self._fd)
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode):
                raise UntrustedError(f"{self.path / name} is no regular file")
            _check(state, self.path / name)
        except UntrustedError:
            os.close(file)
            raise
        return file

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return

    def __enter__(self) -> OwnFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _check(state: os.stat_result, path: Path) -> None:
    if state.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} belongs to another user (number {state.st_uid})")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(state.st_mode)
        raise UntrustedError(f"other users can write to {path} (mode {mode:03o}; `chmod go-w` would end that)")
