"""Finds the checkpoint from which a run that was ended goes on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import MANIFEST, find, published_name
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import CheckpointError


def last_checkpoint(*folders: str | os.PathLike[str]) -> str | None:
    """The checkpoint that was completed last, to resume from: ``trainer.fit(model, ckpt_path=last_checkpoint(...))``.

    Args:
        folders: local folders that are searched with all folders below: ``*.ckpt`` of ``ModelCheckpoint``,
            ``OnExceptionCheckpoint`` and SLURM's requeue, of any version of a logger. Missing folders count as empty.

    Returns:
        Its path; None if there is none, as at the first start. Weights without a training state (``save_weights_only``)
        and incomplete checkpoints are passed over, the latter with a warning.
    """
    found = {path: written for folder in folders for path, written in _candidates(Path(folder))}
    for path in sorted(found, key=lambda name: (found[name], name), reverse=True):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = open_source(find(path), tell=False)
            whole = "lr_schedulers" in source.meta  # Lightning saves them, if only [], unless it saves weights only
            if isinstance(source, Archive):
                source.close()
            if whole:
                return path
        except CheckpointError as error:
            warnings.warn(f"Passed over an incomplete checkpoint: {error}", stacklevel=2)
    return None


def _candidates(folder: Path) -> Iterator[tuple[str, int]]:
    """What may be a checkpoint, with the time in ns when it was written."""
    for place, folders, files in os.walk(folder):
        for name in list(folders):
            manifest = Path(place, name, MANIFEST)
            if manifest.is_file():
                folders.remove(name)
                final = Path(place, published_name(name) or name)
                if final.name == name or not final.exists():  # killed before its rename: ``find`` takes the final name
                    yield str(final), manifest.stat().st_mtime_ns
        for name in files:
            if name.endswith(".ckpt"):
                path = Path(place, name)
                yield str(path), path.stat().st_mtime_ns
