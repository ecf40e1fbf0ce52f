"""A private folder of one process. It is removed at exit, or, after a kill, by the next process that uses the disk.

Note [Leftovers]
    A folder is named ``lt_zero-<host>-<pid>-<random>``. Its process holds a flock on the file ``lock`` in it, which the
    kernel releases however the process ends. A process that can take the lock of another folder knows that its owner
    is dead, and removes the folder. The process number is informative only, since containers share numbers. On a file
    system that other hosts may share, where flock may not reach them, only folders of this host's name are removed; on
    a local disk all are, since containers change their host name and leave folders behind.

    A folder is locked before a rename gives it this name, so it is never visible without a lock. Before, its name ends
    in ``.new``; such a folder is removed once it is old. Other names, other users' folders, links and nested folders
    are never touched.

    The lock belongs to the open file, which forked children inherit: a data loader worker that outlives its parent
    would keep the folder locked. So a child closes the file right after the fork, which does not unlock the parent's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from pathlib import Path

from lt_zero.common.units import exact_bytes
from lt_zero.core.stores.direct_file import filesystem_of, free_bytes, trouble
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.thread_pool import log

_LOCK = "lock"
_NEW = ".new"
_NEW_AGE = 3600.0  # seconds after which a ``.new`` folder is removed
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCAL = {"ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs"}  # no other host mounts these at the same time
_told: set[str] = set()


class SwapFolder:
    """A private folder below ``nvme_path`` for the files of one process.

    Args:
        nvme_path: a folder on a local disk; created if it does not exist, but only inside of one that does.
        rank: the process's rank, for messages and the lock file.

    Raises:
        SwapError: the folder cannot be created.
    """

    def __init__(self, nvme_path: Path, rank: int) -> None:
        self.rank = rank
        self._base = Path(nvme_path).absolute()
        _make_base(self._base)
        kind = filesystem_of(self._base)
        if kind in ("tmpfs", "ramfs") and str(self._base) not in _told:
            _told.add(str(self._base))
            text = (
                "nvme_path %s is on %s, which is memory: offload to it frees nothing. Set nvme_path to a disk's folder."
            )
            log.warning(text, self._base, kind)
        _remove_leftovers(self._base, local=kind in _LOCAL)
        try:
            self.path, lock = _make(self._base, rank)
        except OSError as error:
            raise trouble(f"Cannot create a folder in nvme_path={str(self._base)!r}", self._base, error) from error
        self._lock = [lock]  # emptied in a forked child
        _folders.add(self)
        self._finalizer = weakref.finalize(self, _release, self.path, self._lock, os.getpid())

    def require(self, nbytes: int) -> None:
        """Check that the disk has space for ``nbytes`` more.

        Raises:
            SwapError: the free space is too small.
        """
        free = free_bytes(self.path)
        if free < nbytes:
            raise SwapError(
                f"nvme_path={str(self._base)!r} has too little space: rank {self.rank} needs {exact_bytes(nbytes)}, and"
                f" {exact_bytes(free)} are free (ranks of one host share them). Free {exact_bytes(nbytes - free)} more,"
                " or set nvme_path to a larger disk."
            )

    def close(self) -> None:
        """Remove the folder and the files in it. Idempotent."""
        self._finalizer()


_folders: weakref.WeakSet[SwapFolder] = weakref.WeakSet()


def _unlock_all() -> None:
    for folder in list(_folders):
        _close(folder._lock)


os.register_at_fork(after_in_child=_unlock_all)


def _make_base(base: Path) -> None:
    what = f"nvme_path={str(base)!r} cannot be used"
    try:
        if base.exists() and not base.is_dir():
            raise SwapError(f"{what}: it is not a folder. Set it to a folder on a local disk.")
        if not base.exists():
            if not base.parent.is_dir():
                # A path with a typing error, or whose disk is not mounted, would be made on the disk of the system.
                raise SwapError(
                    f"{what}: there is neither this folder nor a folder {base.parent}. Mount the disk, or set "
                    "nvme_path to a folder that exists."
                )
            base.mkdir(exist_ok=True)
            log.warning("nvme_path %s did not exist; it was created, on the file system of %s.", base, base.parent)
        if not os.access(base, os.W_OK | os.X_OK):
            read_only = os.statvfs(base).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "no access")
    except OSError as error:
        raise trouble(what, base.parent, error) from error


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())


def _make(base: Path, rank: int) -> tuple[Path, int]:
    """Create a locked folder; returns its path and the file descriptor that holds the lock."""
    path = base / f"lt_zero-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    new = path.with_name(path.name + _NEW)
    new.mkdir(mode=0o700)
    try:
        lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(lock, f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}\n".encode())
            if not _lock(lock):
                log.warning("%s does not support locks: remove the folders of killed runs there by hand.", base)
            new.rename(path)
        except OSError:
            os.close(lock)
            raise
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return path, lock


def _lock(fd: int) -> bool:
    """Take the lock without waiting; False if the file system does not support locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _remove_leftovers(base: Path, local: bool) -> None:
    """Remove the folders of dead processes in ``base``. See Note [Leftovers]."""
    host = ".+" if local else re.escape(_host())
    pattern = re.compile(rf"lt_zero-{host}-\d+-[0-9a-f]{{8}}({re.escape(_NEW)})?")
    count = 0
    freed = 0
    try:
        names = [entry.name for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        log.warning("Cannot search %s for folders of killed runs: %s", base, error)
        return
    for name in filter(pattern.fullmatch, names):
        try:
            if (size := _remove_if_dead(base / name)) is not None:
                count, freed = count + 1, freed + size
        except OSError as error:
            # Another rank may have removed it first.
            if not isinstance(error, FileNotFoundError):
                log.warning("Cannot remove %s of a dead process: %s", name, error)
    if count:
        log.warning("Removed %d folder(s) of killed runs from %s: %s freed.", count, base, exact_bytes(freed))


def _remove_if_dead(folder: Path) -> int | None:
    """Remove a folder if its process is dead; returns the bytes freed, or None if it must stay."""
    if folder.lstat().st_uid != os.geteuid():
        return None  # and may not be opened
    opened = _open(folder)
    try:
        state = os.fstat(opened)
        if state.st_uid != os.geteuid():
            return None
        if folder.name.endswith(_NEW) and time.time() - state.st_mtime < _NEW_AGE:
            return None
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
        except FileNotFoundError:
            # The lock is removed last: a process was killed before it removed the empty folder.
            return None if os.listdir(opened) else _clear(folder, opened)
        try:
            return _clear(folder, opened) if _lock(lock) else None
        except BlockingIOError:
            return None
        finally:
            os.close(lock)
    finally:
        os.close(opened)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _clear(folder: Path, opened: int) -> int:
    """Remove a folder and the files in it, its lock last; returns the bytes freed.

    Through its descriptor: where others can rename it, a link could lead to other files of this user.
    """
    with os.scandir(opened) as entries:
        files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    freed = 0
    for file in sorted(files, key=lambda file: file == _LOCK):
        with contextlib.suppress(FileNotFoundError):
            state = os.stat(file, dir_fd=opened, follow_symlinks=False)
            freed += state.st_blocks * 512 if stat.S_ISREG(state.st_mode) else 0
            os.unlink(file, dir_fd=opened)
    folder.rmdir()
    return freed


def _remove(folder: Path) -> None:
    opened = _open(folder)
    try:
        _clear(folder, opened)
    finally:
        os.close(opened)


def _release(path: Path, lock: list[int], pid: int) -> None:
    # The parent's folder stays; see Note [Fork and exit] in common/worker.py.
    if os.getpid() != pid:
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            _remove(path)
    except OSError as error:
        log.warning("Cannot remove %s: %s. Remove it by hand.", path, error)
    _close(lock)


def _close(files: list[int]) -> None:
    for fd in files:
        os.close(fd)
    files.clear()
