"""Files and folders that appear whole or not at all.

Note [Whole or not at all]
    A file is written beside its place under a hidden name, forced to the disk and renamed. The files of a folder are
    written into a hidden folder inside of it; when all are there, the old ones move out and the new ones in, an index
    (which names the others) out first and in last. If anything fails meanwhile, they move back. A process that is
    killed leaves what was there before, and its hidden files, which are named when they are in the way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lt_zero.checkpoint.native.directory import sync_folder
from lt_zero.checkpoint.native.torchfile import Write
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.io.block_transfer import free_bytes, in_words
from lt_zero.io.sequential_writer import Blocks, FileSink

_THREADS = 3  # that write one file


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns the system's errors into one that says what could not be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {path}: {error.strerror or error}. Nothing that was there has changed. Choose another place,"
            " or see to its space and rights."
        ) from error


def check_space(folder: Path, nbytes: int, what: str = "export", instead: str = " or a smaller dtype") -> None:
    """See that ``nbytes`` fit below ``folder``, which need not exist.

    Raises:
        CheckpointError: they do not; nothing was written.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with told(folder):
        free = free_bytes(existing)
    if nbytes > free:
        raise CheckpointError(
            f"{folder} has {in_words(free)} left, and the {what} needs {in_words(nbytes)}: free some, or choose another"
            f" place{instead}. Nothing was written."
        )


@contextmanager
def whole_file(path: Path, expected: int = 0) -> Iterator[Write]:
    """Gives what to write a file with. It takes the place of ``path`` at the end, unless there was an error.

    Args:
        path: of the file.
        expected: bytes that it will have, about. They are written by threads, while the next ones are read.

    Raises:
        CheckpointError: the system cannot write it.
    """
    temporary = path.with_name(f".{path.name[:200]}.{_stamp()}")
    blocks = Blocks(_THREADS)
    try:
        with told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        sink = FileSink(temporary, blocks, expected, name=path, copies=True)
        try:
            yield sink.write
            sink.close()
        finally:
            sink.abandon()
        with told(path):
            os.replace(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        blocks.close()


@contextmanager
def whole_folder(folder: Path, new: Sequence[str], earlier: Sequence[str]) -> Iterator[Path]:
    """Gives a folder to write the files ``new`` into. At the end they take the place of ``earlier`` in ``folder``.

    The last of ``new`` and the first of ``earlier`` are those that name the others.

    Raises:
        CheckpointError: the system cannot write there.
    """
    made = not folder.exists()
    staging, retired = folder / f".{_stamp()}", folder / f".old-{_stamp()}"
    try:
        with told(folder):
            staging.mkdir(parents=True)
        yield staging
        with told(folder):
            retired.mkdir()
            _move([(folder, retired, name) for name in earlier] + [(staging, folder, name) for name in new])
            sync_folder(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            retired.rmdir()  # not with files in it
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    for rest in (staging, retired):
        shutil.rmtree(rest, ignore_errors=True)


def _move(moves: Sequence[tuple[Path, Path, str]]) -> None:
    """Move files from one folder to another, all or none."""
    done: list[tuple[Path, Path, str]] = []
    try:
        for old, new, name in moves:
            os.rename(old / name, new / name)
            done.append((old, new, name))
    except BaseException:
        for old, new, name in reversed(done):
            os.rename(new / name, old / name)
        raise


def _stamp() -> str:
    return f"tmp-{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def bar(what: str, shown: bool) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Gives what to call with all bytes at first, and with those of each piece."""
    with progress_bar(what, rank=0, in_bytes=True, shown=shown) as work:
        yield work.expect, work.advance
