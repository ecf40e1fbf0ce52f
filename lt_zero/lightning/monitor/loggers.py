"""The loggers that the configuration asks for: Lightning's own, from DeepSpeed's keys.

Note [Loggers come before everything else]
    A Trainer is complete before a strategy hears of it. The first call of a run in which all ranks know who they are
    is ``setup_environment``; what asks a logger (``trainer.log_dir``, ``setup`` of ModelCheckpoint and of callbacks,
    hyperparameters, LearningRateMonitor) comes after it, in fit, validate, test and predict alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from lt_zero.common.compat import is_default_logger
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.blocks.monitor import Comet, CsvMonitor, TensorBoard, Wandb

MonitorBlock = CsvMonitor | TensorBoard | Wandb | Comet


@dataclass(frozen=True)
class _Kind:
    key: str  # of the block
    logger: type[Logger]
    package: str
    make: Callable[[Any, str], Logger]  # (block, default_root_dir)
    place: Callable[[Any, str], tuple[str | None, str | None]]  # (save_dir, name) that it is to have; None: any


def _folder(block: CsvMonitor | TensorBoard, root: str) -> str:
    return os.path.expanduser(block.output_path) or root


def _wandb(block: Wandb, root: str) -> Logger:
    chosen = {"group": block.group, "entity": block.team}
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    return WandbLogger(project=block.project, save_dir=_local(root), **given)


def _comet(block: Comet, root: str) -> Logger:
    given = {"name": block.experiment_name} if block.experiment_name is not None else {}
    if block.samples_log_interval != type(block)().samples_log_interval:
        rank_zero_info(
            f"comet.samples_log_interval={block.samples_log_interval} is not used: Trainer(log_every_n_steps=...) says "
            "how often metrics are sent."
        )
    return CometLogger(
        api_key=block.api_key.get_secret_value() if block.api_key is not None else None,
        workspace=block.workspace,
        project=block.project,
        experiment_key=block.experiment_key,
        mode=block.mode,
        online=block.online,
        offline_directory=_local(root),
        **given,
    )


def _local(root: str) -> str:
    return "." if "://" in root else root


# The first one says where checkpoints and other files go (trainer.log_dir). Comet is last: its constructor opens an
# experiment on a server, so nothing must fail after it.
_KINDS: dict[type[Any], _Kind] = {
    TensorBoard: _Kind(
        "tensorboard",
        TensorBoardLogger,
        "tensorboard",
        lambda block, root: TensorBoardLogger(_folder(block, root), name=block.job_name),
        lambda block, root: (_folder(block, root), block.job_name),
    ),
    CsvMonitor: _Kind(
        "csv_monitor",
        CSVLogger,
        "lightning",
        lambda block, root: CSVLogger(_folder(block, root), name=block.job_name),
        lambda block, root: (_folder(block, root), block.job_name),
    ),
    Wandb: _Kind("wandb", WandbLogger, "wandb", _wandb, lambda block, root: (None, block.project)),
    Comet: _Kind("comet", CometLogger, "comet_ml", _comet, lambda block, root: (None, block.project)),
}


def attach_loggers(trainer: pl.Trainer, config_blocks: Iterable[MonitorBlock]) -> list[Logger]:
    """Give the Trainer a logger for each block that is enabled and whose kind it does not have yet.

    See Note [Loggers come before everything else]. A logger that Trainer made because nobody named one is replaced.
    ``Trainer(logger=False)`` turns that default off, not what the configuration asks for by name. ``fast_dev_run``
    turns off all.

    Returns:
        The new loggers: [] in a second run.

    Raises:
        ConfigError: a package is missing, or the Trainer is a ``barebones`` one; nothing was attached then.
    """
    order = list(_KINDS)
    wanted = sorted((b for b in config_blocks if b.enabled), key=lambda block: order.index(type(block)))
    if not wanted or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return []
    root = str(trainer.default_root_dir)
    known = list(trainer.loggers)
    if len(known) == 1 and is_default_logger(known[0], root):
        known = []
    made: list[Logger] = []
    problems: list[Problem] = []
    for block in wanted:
        kind = _KINDS[type(block)]
        own = next((logger for logger in known if isinstance(logger, kind.logger)), None)
        if own is not None:
            _tell_unused(kind, kind.place(block, root), own)
        elif trainer.barebones:
            problems.append(
                _problem(kind, "contradicts Trainer(barebones=True), which logs nothing: remove one of them")
            )
        elif not (problems and isinstance(block, Comet)):
            try:
                with _rank_announced(trainer.global_rank):
                    made.append(kind.make(block, root))
            except ModuleNotFoundError:
                need = f"needs the package {kind.package}, which is missing or too old"
                problems.append(_problem(kind, f"{need}: `pip install -U {kind.package}`, or {kind.key}.enabled=false"))
    if problems:
        raise ConfigError(problems)
    trainer.loggers = known + made
    return made


def _problem(kind: _Kind, message: str) -> Problem:
    return Problem(f"{kind.key}.enabled", f"{kind.key}.enabled=true {message}.")


def _tell_unused(kind: _Kind, place: tuple[str | None, str | None], own: Logger) -> None:
    """The first logger of a kind wins; say so if it writes to another place than the block names."""
    if any(want is not None and want != got for want, got in zip(place, (own.save_dir, own.name), strict=True)):
        rank_zero_info(
            f"{kind.key}: the Trainer has a {type(own).__name__} of its own, which is used as it is. Remove it to use "
            "the block."
        )


@contextmanager
def _rank_announced(rank: int) -> Generator[None, None, None]:
    """CometLogger opens one experiment per process that has no rank in its environment, as spawned ones have not."""
    known = any(name in os.environ for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    if not known:
        os.environ["LOCAL_RANK"] = str(rank)
    try:
        yield
    finally:
        if not known:
            del os.environ["LOCAL_RANK"]
