"""Uploads of checkpoint directories by Lightning's loggers: ``WandbLogger(log_model=...)``, MLFlowLogger, LitLogger.

Note [When directories are uploaded]
    Lightning's loggers list the checkpoints of a ModelCheckpoint after each save, or at the end of a run, and upload
    those that are files; a directory is none. So on rank 0, which has the experiment, the method that lists them is
    replaced in each logger. Directories that are complete are uploaded at once. The one that is being written in the
    background is uploaded when its save has ended well, on the main thread (``Saver.after_pending``). It has the score
    and the aliases of the moment when it was listed, because ModelCheckpoint may drop it from its list before that.
    Removals are put off in the same way, so an upload comes before the removal of what it uploads.

Every rank has found the directory before it writes into it (``PendingDirectory.check_visible``), so rank 0 finds the
files of all hosts there.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lt_zero.checkpoint.native.directory import MANIFEST, is_url
from lt_zero.common.compat.of_loggers import LoggedCheckpoints
from lt_zero.training.checkpoints import Saver
from lt_zero.training.lightning.setup import RunSnapshot

log = logging.getLogger("lt_zero")
# Attributes of a ModelCheckpoint that Lightning's loggers upload beside a checkpoint.
_SHOWN = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


@dataclass(frozen=True)
class Listed:
    """A checkpoint directory as a ModelCheckpoint listed it.

    Attributes:
        callback: the class of the ModelCheckpoint.
        shown: the settings of the ModelCheckpoint that are uploaded beside the directory.
        step: the step of the ModelCheckpoint's last save.
    """

    path: str
    score: float | None
    best: bool
    callback: str
    shown: dict[str, Any]
    step: int | None

    @property
    def aliases(self) -> list[str]:
        """The aliases that Lightning gives to a file."""
        return ["latest", "best"] if self.best else ["latest"]

    @property
    def written(self) -> float | None:
        """When the directory was completed; None if it is none, or not complete."""
        try:
            return Path(self.path, MANIFEST).stat().st_mtime
        except OSError:
            return None


def upload_directories(run: RunSnapshot) -> None:
    """Let the Trainer's loggers upload checkpoint directories on rank 0, and warn where a logger cannot.

    See Note [When directories are uploaded].
    """
    trainer = run.trainer
    if trainer is None or run.rank != 0 or not trainer.checkpoint_callbacks:
        return
    for logger in trainer.loggers:
        held = LoggedCheckpoints.of(logger)
        upload = _upload_of(logger)
        if held is not None and upload is not None:
            held.list_with(DirectoryUploads(held, upload, run.session.saver))
            if held.uploads:
                _warn_of_urls(trainer, logger)
        elif trainer.training and _is_told(logger):
            _warn_of_directories(run, logger)


def _warn_of_urls(trainer: pl.Trainer, logger: Logger) -> None:
    """Warn that checkpoints at a URL are not uploaded; Lightning's loggers do not upload files there, either."""
    for callback in trainer.checkpoint_callbacks:
        folder = str(getattr(callback, "dirpath", None) or "")
        if is_url(folder):
            log.warning(
                "%s(log_model=...) uploads local checkpoints only, and %s saves to %s: these are not uploaded. Set its "
                "dirpath to a local folder, which all nodes share.",
                type(logger).__name__,
                type(callback).__name__,
                folder,
            )


def _warn_of_directories(run: RunSnapshot, logger: Logger) -> None:
    """Warn that a logger that lt_zero does not know gets paths of directories."""
    early = ", and it is called before they are complete, because of checkpoint.async"
    log.warning(
        "%s.after_save_checkpoint gets the paths of directories, which checkpoints at stage %d are%s. If it uploads "
        "files only, nothing is uploaded. Set checkpoint.format: full, with which a checkpoint is one file.",
        type(logger).__name__,
        run.config.zero_optimization.stage,
        early if run.config.checkpoint.async_save else "",
    )


def _is_told(logger: Logger) -> bool:
    """True if a logger does something when a checkpoint was saved."""
    idle = (Logger.after_save_checkpoint, loggers.TensorBoardLogger.after_save_checkpoint)
    return getattr(type(logger), "after_save_checkpoint", idle[0]) not in idle


class DirectoryUploads:
    """Replaces the method by which a logger lists a ModelCheckpoint's checkpoints and uploads them.

    Args:
        held: what the logger keeps of checkpoints.
        upload: uploads one directory.
        saver: that of the run.
    """

    def __init__(self, held: LoggedCheckpoints, upload: Callable[[Listed], None], saver: Saver) -> None:
        self._held = held
        self._upload_one = upload
        self._saver: Saver | None = saver

    def __getstate__(self) -> dict[str, Any]:
        """Without the saver: a copy of a logger belongs to no run."""
        return {**vars(self), "_saver": None}

    def __call__(self, callback: Any) -> None:
        """Upload what is new, files and directories; what is being written later."""
        self._held.list_files(callback)
        listed = _directories(callback)
        writing = os.path.realpath(self._saver.writing) if self._saver is not None and self._saver.writing else None
        self._upload([found for found in listed if os.path.realpath(found.path) != writing])
        later = [found for found in listed if os.path.realpath(found.path) == writing]
        if later and self._saver is not None:
            self._saver.after_pending(partial(self._upload, later))

    def _upload(self, listed: list[Listed]) -> None:
        times = [(written, found) for found in listed if (written := found.written) is not None]
        uploaded = self._held.times
        for written, found in sorted(times, key=lambda pair: pair[0]):
            # The time tells whether a path was written again: "last.ckpt" is.
            if found.path not in uploaded or uploaded[found.path] < written:
                self._upload_one(found)
                uploaded[found.path] = written


def _directories(callback: Any) -> list[Listed]:
    """All local paths that a ModelCheckpoint lists, in the order and with the scores of Lightning's loggers."""
    scores: dict[str, Any] = {}
    if hasattr(callback, "last_model_path") and hasattr(callback, "current_score"):
        scores[callback.last_model_path] = callback.current_score
    if hasattr(callback, "best_model_path") and hasattr(callback, "best_model_score"):
        scores[callback.best_model_path] = callback.best_model_score
    scores |= getattr(callback, "best_k_models", {})
    shown = {name: getattr(callback, name) for name in _SHOWN if hasattr(callback, name)}
    kind = callback.__class__.__name__
    step = getattr(callback, "_last_global_step_saved", None)
    best = getattr(callback, "best_model_path", "")
    return [
        Listed(path, score.item() if isinstance(score, Tensor) else score, path == best, kind, shown, step)
        for path, score in scores.items()
        if path and not is_url(path)
    ]


# ---- the loggers -----------------------------------------------------------------------------------------------------


def _upload_of(logger: Logger) -> Callable[[Listed], None] | None:
    """Return how a logger uploads a directory; None: unknown, or a subclass has a way of its own."""
    for name, upload in (("WandbLogger", _to_wandb), ("MLFlowLogger", _to_mlflow), ("LitLogger", _to_lightning)):
        kind = getattr(loggers, name, None)  # the last one is not in every version of Lightning
        if kind is not None and isinstance(logger, kind):
            method = LoggedCheckpoints.METHOD
            return partial(upload, logger) if getattr(type(logger), method) is getattr(kind, method) else None
    return None


def _to_wandb(logger: Any, found: Listed) -> None:
    import wandb

    name = LoggedCheckpoints(logger).name(f"model-{logger.experiment.id}")
    metadata = {"score": found.score, "original_filename": Path(found.path).name, found.callback: found.shown}
    artifact = wandb.Artifact(name=name, type="model", metadata=metadata)
    # With the policy "mutable" the files are copied first, so that the upload survives a removal of the directory.
    artifact.add_dir(found.path, name="model.ckpt", policy=logger.add_file_policy)
    logger.experiment.log_artifact(artifact, aliases=found.aliases)


def _to_mlflow(logger: Any, found: Listed) -> None:
    path = Path(found.path)
    metadata = {"score": found.score, "original_filename": path.name, "Checkpoint": found.shown}
    client = logger.experiment
    run = logger.run_id
    client.log_artifacts(run, found.path, f"{path.stem}/{path.name}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metadata.yaml").write_text(yaml.dump(metadata, default_flow_style=False))
        Path(folder, "aliases.txt").write_text(str(found.aliases))
        client.log_artifacts(run, folder, path.stem)


def _to_lightning(logger: Any, found: Listed) -> None:
    from litlogger import Model

    held = LoggedCheckpoints(logger)
    experiment = logger.experiment
    experiment[held.name(experiment.name)] = Model(found.path, version=held.version(found.step))
