"""A checkpoint directory: its manifest, and how it is created under a temporary name and published with one rename.

``manifest.json`` has the contents of a directory, and the length and checksums of every other file; its own checksum is
that of its text without the checksum's line. It is written last: a directory without it is not a checkpoint.

Note [Publishing a directory]
    A checkpoint is written into a hidden folder beside its path, see Note [Staging]. Once all files are durable, the
    manifest is written last, and a rename publishes the directory; an older checkpoint of that name is removed
    afterwards. So ``<name>`` is at any moment the complete old or the complete new checkpoint. If ``<name>`` exists,
    both are exchanged atomically (renameat2, Linux). File systems without it need two renames; a kill between them
    leaves the new checkpoint under its temporary name, where ``find`` looks for it. For the same reason a checkpoint is
    renamed before its files are removed. The next save publishes, or removes, what dead processes have left.

Object stores have neither directories nor renames. Files are written there under their final names, after those of an
older checkpoint are removed; until the manifest is written, they are not a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from lt_zero.checkpoint.source import Spec
from lt_zero.common.boxes import Box
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.checked_file import STEP, FileRecord, FileSink, Sink, StreamSink, WriterPool
from lt_zero.core.stores.direct_file import filesystem_of, free_bytes, trouble
from lt_zero.core.stores.staging import Staging, hidden_name, leftovers, staged, staging_path, sync_folder, whole_name

MANIFEST = "manifest.json"
README = "README.txt"  # not in the manifest: it may be edited or missing
VERSION = 1  # of the manifest
_FILES = re.compile(r"(weights|moments)-\d+\.pt|(meta|extras)\.pt|objects\.pkl|\.metadata|manifest\.json|README\.txt")
_ABOUT = """\
This directory is one checkpoint of lt_zero (ZeRO for PyTorch Lightning). All of its files belong together.

Resume or evaluate   trainer.fit(model, ckpt_path=DIRECTORY), also at another stage or number of ranks;
                     likewise trainer.validate, test and predict
Load a module        import lt_zero
                     model = Model.load_from_checkpoint(DIRECTORY)
With torch.load      lt-zero export DIRECTORY model.pt --dtype same
                     state_dict = torch.load("model.pt")
Check every byte     lt-zero verify DIRECTORY

This text is for readers only: programs do not need it.
"""
_EXCHANGE, _AT_FDCWD = 2, -100  # of renameat2
_ATTEMPTS = 5  # to replace a directory that other processes replace, too


def is_url(path: str | os.PathLike[str]) -> bool:
    """True if a path is on a remote file system (``s3://...``, ``memory://...``)."""
    return "://" in str(path) and not str(path).startswith("file://")


def plain_path(path: str | os.PathLike[str]) -> str:
    """A path or URL as text; of ``file://`` URLs the local path."""
    return os.fspath(path).removeprefix("file://")


def file_system(url: str) -> Any:
    """The fsspec file system of a URL, an instance that others share.

    Raises:
        CheckpointError: its protocol is unknown, or needs a package that is not installed; names it.
    """
    return _file_system(url)


def own_file_system(url: str) -> Any:
    """A new file system for a URL: what is set on it, such as a transaction, concerns no other caller.

    Raises what ``file_system`` raises.
    """
    return _file_system(url, skip_instance_cache=True)


@contextmanager
def naming_url(problem: Callable[[], str], remedy: str) -> Iterator[None]:
    """Context that turns an error of a URL's file system into a CheckpointError.

    Args:
        problem: what failed, with the URL; called after the error.
        remedy: what to do.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # clients of object stores have exceptions of their own
        raise CheckpointError(f"{problem()}: {type(error).__name__}: {error}. {remedy}") from error


def is_in_memory(path: str | os.PathLike[str]) -> bool:
    """True if a URL is in the memory of a process (``memory://``), where no other process sees it."""
    return is_url(path) and isinstance(file_system(str(path)), MemoryFileSystem)


def _file_system(url: str, **options: Any) -> Any:
    try:
        return fsspec.core.url_to_fs(url, **options)[0]
    except (ImportError, ValueError) as error:
        protocol = url.partition("://")[0]
        package = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
        needs = f" It is in the package {package}: pip install {package}" if isinstance(error, ImportError) else ""
        instead = ", or use a local path." if needs else " Use a local path, or a protocol that fsspec knows."
        raise CheckpointError(f"{url} cannot be opened: {error}.{needs}{instead}") from error


def inside(folder: str | os.PathLike[str], name: str) -> str:
    """The path, or URL, of ``name`` in a folder."""
    return f"{str(folder).rstrip('/')}/{name}" if is_url(folder) else str(Path(plain_path(folder), name))


class Chunk(NamedTuple):
    """A box of a tensor: its elements, row-major and contiguous, begin at byte ``start`` of ``file``."""

    box: Box
    file: str
    start: int


@dataclass(frozen=True)
class ManifestEntry(Spec):
    """A tensor that is saved in chunks."""

    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint directory.

    ``tensors``: by full name, ``model.<name>`` and ``optimizer_<i>.state.<name>.<key>``. ``order``: all names of the
    module's state dict. ``aliases``: tied name -> the name in ``tensors``. ``left_out``: frozen parameters that were
    deliberately not saved. ``run``: stage, ranks and precision, for information. ``checksum``: of the manifest's text,
    and so of the checksums of all files.
    """

    tensors: Mapping[str, ManifestEntry]
    files: Mapping[str, FileRecord]
    order: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    checksum: str = field(default="", compare=False)

    def dump(self) -> str:
        names = sorted(self.files)
        number = {name: i for i, name in enumerate(names)}
        body = {
            "format": "lt_zero",
            "version": VERSION,
            "block": STEP,
            "run": self.run,
            "order": self.order,
            "aliases": self.aliases,
            "left_out": self.left_out,
            "files": [{"name": n, "bytes": self.files[n].nbytes, "sums": self.files[n].sums} for n in names],
        }
        # One line per key keeps the beginning readable, and one per tensor lets the reader leave out its chunks.
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
        entries = ",\n".join(_line_of(name, entry, number) for name, entry in self.tensors.items())
        text = ",\n".join([*lines, f'"tensors": {{\n{entries}\n}}'])
        return f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}",\n{text}}}\n'


def _line_of(name: str, entry: ManifestEntry, number: Mapping[str, int]) -> str:
    """The line of a tensor. ``number``: of each file."""
    dtype = str(entry.dtype).removeprefix("torch.")
    listed = [(*c.box, number[c.file], c.start) for c in entry.chunks]
    return f"{json.dumps(name)}: {json.dumps({'dtype': dtype, 'shape': entry.shape, 'chunks': listed})}"


def _is_ours(path: str | os.PathLike[str]) -> bool:
    """True if a file begins like a manifest of lt_zero."""
    from lt_zero.core.stores.regular_file import read_start

    try:
        return b'"format": "lt_zero"' in read_start(path, 200)
    except OSError:
        return False


class PendingDirectory:
    """The directory of one checkpoint while it is written. Rank 0 creates it with ``make``.

    Args:
        name: the final path of the checkpoint, or its URL.
        folder: the directory that files are written to.
        staging: the same, as its maker has it.
    """

    def __init__(self, name: str, folder: str, staging: Staging | None = None) -> None:
        self.name, self.folder = name, folder
        self._staging = staging
        self._fs: Any = file_system(name) if is_url(name) else None
        self._blocks: WriterPool | None = None
        self._published = False

    @classmethod
    def make(cls, name: str) -> PendingDirectory:
        """Create the directory.

        Raises:
            CheckpointError: it cannot be created, or ``name`` is a directory with other files.
        """
        if is_url(name):
            place, fs = cls(name, name), file_system(name)
            if fs.exists(name):
                if fs.isdir(name):
                    _refuse_others(name, [os.path.basename(p.rstrip("/")) for p in fs.ls(name, detail=False)])
                fs.rm(name, recursive=True)
            fs.makedirs(name, exist_ok=True)
            return place
        path = Path(plain_path(name)).absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink() and not _is_ours(path / MANIFEST):
                _refuse_others(name, os.listdir(path))
            remove_leftovers(path.parent)
            staging = Staging(path, mode=0o777)
        except OSError as error:
            raise _trouble(f"Cannot make a folder beside {path}", path, error) from None
        return cls(str(path), str(staging.folder), staging)

    def check_visible(self) -> None:
        """Check that this rank sees the directory: its name is random, so no other one has it.

        Raises:
            CheckpointError: it does not.
        """
        if isinstance(self._fs, MemoryFileSystem):
            raise CheckpointError(
                f"{self.name} is in the memory of one process, and each rank has its own. Save to a file system that "
                "all ranks share."
            )
        if self._fs is None and not Path(self.folder).is_dir():
            raise CheckpointError(
                f"{self.folder}, which rank 0 created, is not visible: {Path(self.folder).parent} is a disk of one "
                'node. Save to a file system that all nodes share, or set checkpoint.format="full".'
            )

    def free_bytes(self) -> int | None:
        """Free space, in memory at most what the host and the control groups have left; None if unknown."""
        if self._fs is not None:
            return None
        kind = self.kind_of_memory()
        free = free_bytes(Path(self.folder))
        if kind is None:
            return free
        from lt_zero.common.host_memory import host_memory

        left = host_memory().nbytes
        # A ramfs has no size of its own, and reports that nothing is free.
        return left if kind == "ramfs" else min(free, left)

    def kind_of_memory(self) -> str | None:
        """The type of the file system if its files are in memory (tmpfs, ramfs), else None."""
        kind = filesystem_of(Path(self.folder)) if self._fs is None else ""
        return kind if kind in ("tmpfs", "ramfs") else None

    def sink(self, name: str, expected: int = 0) -> Sink:
        """A sink for a new file in the directory; ``expected``: its approximate size in bytes."""
        if self._fs is not None:
            return StreamSink(self._fs.open(f"{self.folder}/{name}", "wb"))
        if self._blocks is None:
            self._blocks = WriterPool()
        return FileSink(Path(self.folder, name), self._blocks, expected)

    def close(self) -> None:
        """Stop the writer threads; ``sink`` restarts them."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = None

    def seal(self, content: Manifest) -> None:
        """Write the text for readers, then the manifest, once all files are durable."""
        for name, text in ((README, _ABOUT), (MANIFEST, content.dump())):
            sink = self.sink(name)
            sink.write(text.encode())
            sink.close()
        if self._fs is None:
            try:
                sync_folder(Path(self.folder))
            except OSError as error:
                raise _trouble(f"Cannot write {self.name}", Path(self.name), error) from error

    def commit(self) -> None:
        """Publish the directory, and remove an older one. See Note [Publishing a directory]."""
        self._published = True  # at a URL with its manifest; elsewhere under another name
        if self._fs is not None:
            return
        path = Path(self.name)
        try:
            _replace(Path(self.folder), path)
            sync_folder(path.parent)
        except OSError as error:
            raise _trouble(f"Cannot name {path}", path, error) from None
        finally:
            self.unlock()

    def discard(self) -> None:
        """Remove the directory after an error, unless it is published."""
        if self._fs is not None:
            if self._published:
                return
            with contextlib.suppress(Exception):  # the first error is reported
                self._fs.rm(self.folder, recursive=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.unlock()

    def unlock(self) -> None:
        """Let others remove the directory under its temporary name, if it still has it. Idempotent."""
        if self._staging is not None:
            self._staging.unlock()


def _trouble(what: str, path: Path, error: OSError) -> RuntimeError:
    return trouble(what, path.parent, error, CheckpointError)


def _refuse_others(path: str, names: list[str]) -> None:
    """Refuse to replace a directory that has files other than a checkpoint's."""
    others = sorted(name for name in names if not _FILES.fullmatch(name))
    if others:
        raise CheckpointError(
            f"{path} is a directory with {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}, which saving a "
            f"checkpoint there would remove. Save to {path.rstrip('/')}/<name>, or to another path."
        )


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint directory or file. See Note [Publishing a directory]."""
    target = gone = Path(plain_path(path))
    if target.is_dir() and not target.is_symlink():
        gone = staging_path(target, "old")
        os.rename(target, gone)
    _remove(gone)


def find(path: str | os.PathLike[str]) -> str:
    """The checkpoint that ``path`` refers to: itself, or the checkpoint directory around it."""
    if is_url(path):
        return str(path).rstrip("/")
    path = plain_path(path)
    target = Path(path).absolute()
    if (target / MANIFEST).is_file():
        return str(target)
    for folder in target.parents[:2]:
        if _is_ours(folder / MANIFEST):  # other programs may use the same file name
            return str(folder)
    if not target.exists():
        # See Note [Publishing a directory]: the save was killed between two renames.
        pattern = f".{glob.escape(hidden_name(target.name))}.tmp-*/{MANIFEST}"
        beside = target.parent.glob(pattern) if target.parent.is_dir() else ()
        newest = max(beside, key=lambda found: found.stat().st_mtime, default=None)
        if newest is not None:
            return str(newest.parent)
    return str(path)


def published_name(folder: str) -> str | None:
    """The name under which a save would have published its temporary directory; None: that is not known."""
    hidden, kind = staged(folder) or ("", "")
    return whole_name(hidden) if kind == "tmp" else None


def remove_leftovers(folder: Path) -> None:
    """Remove temporary directories of dead processes; complete checkpoints among them are published.

    One whose whole name is not known stays, where ``find`` looks for it, until another of its name is published. Files
    that an export has moved out stay, too: they may be the only whole ones.
    """
    for left in leftovers(folder):
        # Another process may have just published or removed it.
        with contextlib.suppress(FileNotFoundError):
            if left.kind == "out":
                continue
            if left.kind == "tmp" and (left.path / MANIFEST).is_file():
                name = whole_name(left.hidden)
                if name is None and all(hidden_name(other) != left.hidden for other in os.listdir(folder)):
                    continue
                if name is not None and not (folder / name).exists():
                    # The directory is complete: its process was killed before publishing it.
                    os.rename(left.path, folder / name)
                    continue
            shutil.rmtree(left.path, ignore_errors=True)


def _replace(new: Path, path: Path) -> None:
    """Give ``new`` the name ``path``, and remove the directory or file that has it."""
    for attempt in range(_ATTEMPTS):
        try:
            if not os.path.lexists(path):
                os.rename(new, path)
                return
            old = staging_path(path, "old")
            if path.is_dir() and not path.is_symlink() and _exchange(new, path):
                # After a kill here, the new directory must not be mistaken for a new checkpoint.
                with contextlib.suppress(FileNotFoundError):  # another run has removed it as a leftover
                    os.rename(new, old)
            else:
                os.rename(path, old)
                os.rename(new, path)
            _remove(old)
            return
        except OSError as error:
            # Another run that saves under this name has taken it, or what it stood for, since we looked.
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if not taken or attempt == _ATTEMPTS - 1 or not new.exists():
                raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False if the system or file system does not support it. Tests replace this."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Context that gives a name to write a file to; after it the file is durable, and replaces ``path`` at once.

    Raises:
        CheckpointError: an OSError in it; names ``path``.
    """
    final = Path(plain_path(path)).absolute()
    staging: Staging | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(final.parent)
        staging = Staging(final)
        temporary = staging.folder / "file"  # a suffix would make others take it for a checkpoint
        yield str(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, final)
        sync_folder(final.parent)
    except OSError as error:
        raise _trouble(f"Cannot write {path}", final, error) from error
    finally:
        if staging is not None:
            staging.remove()
