"""What is at a path: a checkpoint directory of ours, or something that others wrote."""

from __future__ import annotations

import os
from pathlib import Path

from lt_zero.checkpoint import manifest
from lt_zero.checkpoint.archive import Archive
from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.checkpoint.place import find, is_url
from lt_zero.checkpoint.source import Source


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a path means a checkpoint that is a directory (itself, or something inside of it)."""
    if is_url(path):
        return Archive.is_at(find(path))
    found = Path(find(path))
    return found.is_dir()


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint, whoever wrote it, for reading.

    Raises:
        CheckpointError: there is none; it is damaged, or of a kind that is not known.
    """
    found = find(path)
    if is_url(found) or Path(found, manifest.NAME).is_file():
        return Archive(found)
    target = Path(found)
    if not target.exists():
        raise CheckpointError(f"There is no checkpoint at {target}: no such file or directory.")
    raise CheckpointError(
        f"{target} is not a checkpoint: {_contents(target)}. Expected a directory with {manifest.NAME}, which is "
        "written last: a kill while saving leaves none."
    )


def _contents(target: Path) -> str:
    if not target.is_dir():
        return "a file of an unknown kind"
    names = sorted(path.name for path in target.iterdir())
    return f"a directory with {', '.join(names[:5]) or 'nothing'}{', ...' if len(names) > 5 else ''}"
