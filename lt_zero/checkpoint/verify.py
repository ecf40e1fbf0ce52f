"""Verifies a checkpoint directory, and summarizes its contents."""

from __future__ import annotations

import os
from typing import Any

from lt_zero.checkpoint.native import manifest
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import found_at
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar

_SHOWN = ("stage", "ranks", "precision", "created", "imported_from", "torch")  # facts of the run


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read every byte of a checkpoint directory and compare it with its checksums.

    Args:
        path: the directory, its URL, or a path inside it.

    Returns:
        A summary: facts of the run, ``step``, ``epoch``, ``weights``, the number of ``optimizers`` and ``files``,
        ``bytes``.

    Raises:
        CheckpointError: there is none, or a file is missing or damaged; names it.
    """
    found = found_at(path)
    if not Archive.is_at(found):
        raise CheckpointError(
            f"{found} is not a checkpoint directory of lt_zero, or not a complete one: it has no {manifest.NAME}, which"
            " is written last. To check other formats, convert them with `lt-zero import`."
        )
    archive = Archive(found)
    try:
        total = sum(record.nbytes for record in archive.manifest.files.values())
        with progress_bar(f"Reading all of {found}", total, rank=0, in_bytes=True) as work:
            nbytes = archive.verify(work.advance)
        run, meta = archive.manifest.run, archive.meta
        facts: dict[str, Any] = {key: run[key] for key in _SHOWN if key in run}
        facts |= {name: meta[key] for name, key in (("step", "global_step"), ("epoch", "epoch")) if key in meta}
        numel = sum(spec.numel for name, spec in archive.weights.items() if name not in archive.aliases)
        facts["weights"] = f"{len(archive.weights)} tensors, {numel} elements"
        facts["optimizers"] = len(archive.optimizers)
        facts["files"] = len(archive.manifest.files) + 1
        facts["bytes"] = nbytes
        return facts
    finally:
        archive.close()
