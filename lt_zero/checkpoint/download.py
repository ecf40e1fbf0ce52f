"""Copies checkpoints of other formats from URLs, since their files are memory-mapped."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import file_system, inside, is_url, naming_url, plain_path
from lt_zero.checkpoint.open import LATEST, found_at, read_latest
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.common.units import exact_bytes
from lt_zero.core.stores.direct_file import free_bytes


@contextmanager
def local_copy(path: str | os.PathLike[str], tag: str | None = None, progress: bool = False) -> Iterator[str]:
    """Context that gives a checkpoint that ``open_source`` reads: ``path`` itself, or a local copy of what is there.

    A URL of a checkpoint directory of lt_zero is read where it is. What else is at a URL is copied into a temporary
    folder (``TMPDIR``), which is removed at the end: of a folder with the checkpoints of several steps only that of
    ``tag``; default: the one in its file ``latest``.

    Raises:
        CheckpointError: there is nothing at the URL, or it cannot be read, or does not fit into the folder.
    """
    path = plain_path(path)
    if not is_url(path) or Archive.is_at(found_at(path, tag)):
        yield os.fspath(path)
        return
    with tempfile.TemporaryDirectory(prefix="lt-zero-") as folder:
        url = path.rstrip("/")
        target = Path(folder, url.rpartition("/")[2] or "checkpoint")
        with progress_bar(f"Copying {url}", rank=0, shown=progress):
            _copy(url, tag, target)
        yield str(target)


def _copy(url: str, tag: str | None, target: Path) -> None:
    fs = file_system(url)
    remedy = "Check the address and your credentials, or copy it to a local path, and name that."
    with naming_url(lambda: f"Cannot read {url}", remedy):
        if not fs.exists(url):
            raise CheckpointError(f"There is no checkpoint at {url}: no such file or folder.")
        if fs.isfile(url):
            _fetch(fs, url, target)
            return
        target.mkdir()
        tag = tag if tag is not None else read_latest(url)
        if tag and Path(tag).name == tag and fs.isdir(inside(url, tag)):
            (target / LATEST).write_text(tag, encoding="utf-8")
            _fetch(fs, inside(url, tag), target / tag)
        else:
            _fetch(fs, url, target)


def _fetch(fs: Any, url: str, target: Path) -> None:
    """Copy a file or a folder with all in it."""
    needs = 0
    with contextlib.suppress(NotImplementedError):
        needs = int(fs.du(url) or 0)
    free = free_bytes(target.parent)
    if needs > free:
        raise CheckpointError(
            f"{url} has {exact_bytes(needs)}, and its copy would be in {target.parent}, which has {exact_bytes(free)} "
            "left. Set TMPDIR to a folder with more space."
        )
    if fs.isfile(url):
        fs.get_file(url, str(target))
    else:
        fs.get(f"{url}/", str(target), recursive=True)
