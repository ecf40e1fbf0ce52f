"""Finds the checkpoint to resume a run from after it was ended."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import MANIFEST, find, published_name
from lt_zero.checkpoint.open import open_source
from lt_zero.common.arguments import expect_path
from lt_zero.common.errors import CheckpointError
from lt_zero.common.users_code import warn

_MOST = 20  # checkpoints that are opened to find a later one


def last_checkpoint(*folders: str | os.PathLike[str]) -> str | None:
    """The checkpoint that was completed last, to resume from: ``trainer.fit(model, ckpt_path=last_checkpoint(...))``.

    Args:
        folders: local folders that are searched with all folders below: ``*.ckpt`` of ``ModelCheckpoint``,
            ``OnExceptionCheckpoint`` and SLURM's requeue, of any version of a logger. Missing folders count as empty.

    Returns:
        Its path; None if there is none, as at the first start. Weights without a training state (``save_weights_only``)
        and incomplete checkpoints are passed over, the latter with a warning.
    """
    for folder in folders:
        expect_path(folder, "A folder of lt_zero.last_checkpoint")
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
            warn(f"Passed over an incomplete checkpoint: {error}")
    return None


def tell_of_newer(path: str | os.PathLike[str], step: Any) -> None:
    """Warn if the folder of ``path``, which is at ``step``, has a complete checkpoint of a later step.

    Lightning's ``ckpt_path="last"`` takes the path of that name, which may be a leftover of an earlier run.
    """
    try:
        found = dict(_candidates(Path(path).absolute().parent, below=False))
    except OSError:
        # A neighbour of other users, or on a failing disk, is no reason to end a run.
        return
    own = os.path.realpath(path)
    latest: tuple[int, str] | None = None
    for other in sorted(found, key=lambda name: (found[name], name), reverse=True)[:_MOST]:
        known = None if os.path.realpath(other) == own else _step_of(other)
        if known is not None and isinstance(step, int) and known > max(step, latest[0] if latest else step):
            latest = known, other
    if latest is not None:
        warn(
            f"{os.fspath(path)} (step {step}) is older than {latest[1]} (step {latest[0]}), which is complete. The "
            "former is loaded; pass the path of the latter, or lt_zero.last_checkpoint(folder), to resume from it.",
        )


def _step_of(path: str) -> int | None:
    """The steps of a complete checkpoint with a training state; None: it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = open_source(find(path), tell=False)
        step, whole = source.meta.get("global_step"), "lr_schedulers" in source.meta
        if isinstance(source, Archive):
            source.close()
        return step if whole and isinstance(step, int) else None
    except (CheckpointError, OSError):
        return None


def _candidates(folder: Path, below: bool = True) -> Iterator[tuple[str, int]]:
    """Paths that may be checkpoints, with the time of writing in ns; ``below``: in all folders below, too."""
    for place, folders, files in os.walk(folder):
        for name in list(folders):
            manifest = Path(place, name, MANIFEST)
            if manifest.is_file():
                folders.remove(name)
                final = Path(place, published_name(name) or name)
                # A process killed before the rename leaves a complete directory; ``find`` takes its final name.
                if final.name == name or not final.exists():
                    yield str(final), manifest.stat().st_mtime_ns
        for name in files:
            if name.endswith(".ckpt"):
                path = Path(place, name)
                with contextlib.suppress(FileNotFoundError):  # a link to what is gone
                    yield str(path), path.stat().st_mtime_ns
        if not below:
            return
