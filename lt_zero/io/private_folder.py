"""A process's own folder on the disk, which vanishes with the process: at once, or when the next one starts.

Note [Leftovers]
    A folder is ``lt_zero-<host>-<pid>-<random>`` with a file ``lock`` that its process holds a lock on (flock: the
    kernel releases it with the process, however that ends). Who gets the lock of another's folder knows that its
    process is dead, and removes it. The process number is for people only: containers share numbers. Of a file
    system that may be shared with other hosts, whose locks nobody guarantees, only folders of this host's name go; on
    a local disk all do, since containers change their names and leave their folders.

    A folder is locked before it gets that name by a rename: nobody finds it without a lock. Until then it ends in
    ``.new``; such a folder is left over when it is old. Other names, other users' folders, links and folders in ours
    are never touched.

    The lock belongs to the open file, which a forked child has too: a data loader's worker that outlives its parent
    would keep the folder. A child therefore closes the file first of all; that does not unlock it for the parent.
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

from lt_zero.io.block_transfer import free_bytes, in_words, trouble
from lt_zero.io.thread_pool import SwapError, log

_LOCK = "lock"
_NEW = ".new"
_NEW_AGE = 3600.0  # seconds after which a folder that never got its name is left over
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCAL = {"ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs"}  # no other host mounts these at the same time
_told: set[str] = set()


class SwapFolder:
    """A private folder below ``nvme_path`` for the files of one process.

    Args:
        nvme_path: a folder on a local disk; it is made if it does not exist.
        rank: the process's rank, for the log and for people who look into the folder.

    Raises:
        SwapError: no folder can be made there.
    """

    def __init__(self, nvme_path: Path, rank: int) -> None:
        self.rank = rank
        self._base = Path(nvme_path).absolute()
        _make_base(self._base)
        _warn_of_memory(self._base)
        _remove_leftovers(self._base)
        try:
            self.path, lock = _make(self._base, rank)
        except OSError as error:
            raise trouble(f"Cannot make a folder in nvme_path={str(self._base)!r}", self._base, error) from error
        self._lock = [lock]  # what a child empties
        _folders.add(self)
        self._finalizer = weakref.finalize(self, _release, self.path, self._lock, os.getpid())

    def free_bytes(self) -> int:
        """How much may still be written."""
        return free_bytes(self.path)

    def require(self, nbytes: int) -> None:
        """Check that there is space for ``nbytes`` more.

        Raises:
            SwapError: there is not.
        """
        free = self.free_bytes()
        if free < nbytes:
            raise SwapError(
                f"nvme_path={str(self._base)!r} has too little space: rank {self.rank} needs {in_words(nbytes)}, and"
                f" {in_words(free)} are free (ranks of one host share them). Free {in_words(nbytes - free)} more, or"
                " set nvme_path to a larger disk."
            )

    def close(self) -> None:
        """Remove the folder and the files in it. Again a no-op."""
        self._finalizer()

    def _forget_lock(self) -> None:
        for lock in self._lock:
            os.close(lock)
        self._lock.clear()


_folders: weakref.WeakSet[SwapFolder] = weakref.WeakSet()


def _after_fork() -> None:
    for folder in list(_folders):
        folder._forget_lock()


os.register_at_fork(after_in_child=_after_fork)


def filesystem_of(path: Path) -> str:
    """The type of the file system under ``path``, such as "ext4"; "" if the system does not tell."""
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


def _make_base(base: Path) -> None:
    what = f"nvme_path={str(base)!r} cannot be used"
    try:
        if base.exists() and not base.is_dir():
            raise SwapError(f"{what}: it is not a folder. Set it to a folder on a local disk.")
        if not base.exists():
            base.mkdir(parents=True, exist_ok=True)
            log.warning("nvme_path %s did not exist; it was made, on the file system of %s.", base, base.parent)
        if not os.access(base, os.W_OK | os.X_OK):
            read_only = os.statvfs(base).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "no access")
    except OSError as error:
        raise trouble(what, base.parent, error) from error


def _warn_of_memory(base: Path) -> None:
    kind = filesystem_of(base)
    if kind in ("tmpfs", "ramfs") and str(base) not in _told:
        _told.add(str(base))
        log.warning(
            "nvme_path %s is on %s, which is memory and no disk: offload to it frees nothing. Set nvme_path to a disk.",
            base,
            kind,
        )


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())


def _make(base: Path, rank: int) -> tuple[Path, int]:
    """A locked folder, and the open file that holds the lock."""
    path = base / f"lt_zero-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    new = path.with_name(path.name + _NEW)
    new.mkdir(mode=0o700)
    try:
        lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(lock, f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}\n".encode())
            if not _lock(lock):
                log.warning("%s takes no locks: what killed runs leave there has to be removed by hand.", base)
            new.rename(path)
        except OSError:
            os.close(lock)
            raise
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return path, lock


def _lock(fd: int) -> bool:
    """Take the lock without waiting; False if the file system has none, BlockingIOError if another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _remove_leftovers(base: Path) -> None:
    """Remove what dead processes of this host left in ``base``. See Note [Leftovers]."""
    host = ".+" if filesystem_of(base) in _LOCAL else re.escape(_host())
    pattern = re.compile(rf"lt_zero-{host}-\d+-[0-9a-f]{{8}}({re.escape(_NEW)})?")
    count, freed = 0, 0
    try:
        names = [entry.name for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        log.warning("%s cannot be searched for what killed runs left there: %s", base, error)
        return
    for name in filter(pattern.fullmatch, names):
        try:
            if (size := _remove_if_dead(base / name)) is not None:
                count, freed = count + 1, freed + size
        except OSError as error:
            # Another rank was faster (then it is gone), or the disk is in trouble, which others will tell.
            if not isinstance(error, FileNotFoundError):
                log.warning("%s cannot be removed, though its process is dead: %s", name, error)
    if count:
        log.warning("Removed %d folder(s) of killed runs from %s: %s freed.", count, base, in_words(freed))


def _remove_if_dead(folder: Path) -> int | None:
    """The bytes freed; None if the folder is alive or not ours to remove."""
    state = folder.lstat()
    if state.st_uid != os.geteuid():
        return None
    if folder.name.endswith(_NEW) and time.time() - state.st_mtime < _NEW_AGE:
        return None
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # The lock is removed last: who did that was killed before it could remove the empty folder.
        return None if any(folder.iterdir()) else _clear(folder)
    try:
        return _clear(folder) if _lock(lock) else None
    except BlockingIOError:
        return None
    finally:
        os.close(lock)


def _clear(folder: Path) -> int:
    """Remove a folder and the files in it, its lock last; how many bytes that freed."""
    files = [Path(entry.path) for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False)]
    freed = 0
    for file in sorted(files, key=lambda file: file.name == _LOCK):
        state = file.lstat()
        freed += state.st_blocks * 512 if stat.S_ISREG(state.st_mode) else 0
        file.unlink(missing_ok=True)
    folder.rmdir()
    return freed


def _release(path: Path, lock: list[int], pid: int) -> None:
    if os.getpid() != pid:  # the parent's folder stays; see Note [Fork and exit] in thread_pool.py
        return
    try:
        with contextlib.suppress(FileNotFoundError):  # somebody removed it before
            _clear(path)
    except OSError as error:
        log.warning("%s cannot be removed: %s. Remove it by hand.", path, error)
    for fd in lock:
        os.close(fd)
    lock.clear()
