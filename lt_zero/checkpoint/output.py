"""Writes files and folders atomically.

A file is written into a hidden folder beside its path, synced and renamed. The files of a folder are written into a
hidden folder inside it; once all are complete, the old files move out and the new ones in, an index (which names the
others) out first and in last. If a move fails, all move back. A killed process leaves the old files, and its hidden
folder, which the next export removes. See Note [Staging] in core/stores/staging.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lt_zero.checkpoint.native.directory import remove_leftovers
from lt_zero.checkpoint.native.torchfile import Write
from lt_zero.common.errors import CheckpointError
from lt_zero.common.units import exact_bytes
from lt_zero.core.stores.checked_file import FileSink, WriterPool
from lt_zero.core.stores.direct_file import free_bytes, trouble
from lt_zero.core.stores.staging import Staging, leftovers, staging_path, sync_folder

_THREADS = 3  # threads that write one file
_EXPORT = "export"  # the part of the hidden folders' names that tells what they are for


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a CheckpointError naming ``path``."""
    try:
        yield
    except OSError as error:
        what = f"Cannot write {path} (existing files are unchanged)"
        raise trouble(what, path.parent, error, CheckpointError) from error


def check_space(folder: Path, nbytes: int, what: str = "export", instead: str = " or a smaller dtype") -> None:
    """Check that ``nbytes`` are free on the file system of ``folder``, which need not exist.

    What killed processes were writing there is removed first.

    Raises:
        CheckpointError: they are not; nothing was written.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with naming(folder):
        if existing.is_dir():
            remove_leftovers(existing)
        free = free_bytes(existing)
    if nbytes > free:
        raise CheckpointError(
            f"{folder} has {exact_bytes(free)} left, and the {what} needs {exact_bytes(nbytes)}. Free some space, or "
            f"choose another path{instead}. Nothing was written."
        )


@contextmanager
def whole_file(path: Path, expected: int = 0) -> Iterator[Write]:
    """Context that yields a function to write a file with; unless there is an error, the file then replaces ``path``.

    Args:
        path: of the file.
        expected: its approximate size in bytes. Threads write while the next bytes are read.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Staging(path)
    temporary = staging.folder / "file"
    try:
        with contextlib.closing(WriterPool(_THREADS)) as blocks:
            sink = FileSink(temporary, blocks, expected, name=path, copies=True)
            try:
                yield sink.write
                sink.close()
            finally:
                sink.abandon()
            with naming(path):
                os.replace(temporary, path)
                sync_folder(path.parent)
    finally:
        staging.remove()


@contextmanager
def whole_folder(folder: Path, new: Sequence[str], earlier: Sequence[str]) -> Iterator[Path]:
    """Context that yields a folder for the files ``new``, which at the end replace the files ``earlier`` in ``folder``.

    An index is the last of ``new`` and the first of ``earlier``.

    Raises:
        CheckpointError: the files cannot be written.
    """
    created = not folder.exists()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        staging = Staging(folder / _EXPORT)
    retired = staging_path(folder / _EXPORT, "out")
    moves = [(folder / name, retired / name) for name in earlier]
    moves += [(staging.folder / name, folder / name) for name in new]
    moved: list[tuple[Path, Path]] = []
    try:
        yield staging.folder
        with naming(folder):
            retired.mkdir()
            for old, target in moves:
                os.rename(old, target)
                moved.append((old, target))
            sync_folder(folder)
    except BaseException:
        for old, target in reversed(moved):
            os.rename(target, old)
        staging.remove()
        for empty in (retired, folder) if created else (retired,):
            with contextlib.suppress(OSError):  # files are left in it
                empty.rmdir()
        raise
    staging.remove()
    shutil.rmtree(retired, ignore_errors=True)
    # What a killed export had moved out may have been the only whole copy; now there is another.
    for left in leftovers(folder):
        shutil.rmtree(left.path, ignore_errors=True)
