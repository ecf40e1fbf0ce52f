"""Makes Lightning's loggers from DeepSpeed's configuration keys.

Note [When loggers are attached]
    A Trainer is complete before it calls a strategy. ``setup_environment`` is the first call of a run in which ranks
    are known; all uses of loggers (``trainer.log_dir``, ``setup`` of ModelCheckpoint and other callbacks,
    hyperparameters, LearningRateMonitor) come later, in fit, validate, test and predict alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from lt_zero.common.compat.of_loggers import is_default_logger
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.blocks import Comet, CsvMonitor, TensorBoard, Wandb

MonitorBlock = CsvMonitor | TensorBoard | Wandb | Comet


# Key, logger and package of each block. The first one decides where checkpoints and other files go (trainer.log_dir).
# Comet is last: its constructor opens an experiment on a server, so nothing must fail after it.
_KINDS: dict[type[MonitorBlock], tuple[str, type[Logger], str]] = {
    TensorBoard: ("tensorboard", TensorBoardLogger, "tensorboard"),
    CsvMonitor: ("csv_monitor", CSVLogger, "lightning"),
    Wandb: ("wandb", WandbLogger, "wandb"),
    Comet: ("comet", CometLogger, "comet_ml"),
}


def _make(block: MonitorBlock, root: str) -> Logger:
    """The logger of a block; ``root``: the Trainer's default_root_dir."""
    if isinstance(block, TensorBoard | CsvMonitor):
        logger = TensorBoardLogger if isinstance(block, TensorBoard) else CSVLogger
        return logger(_folder(block, root), name=block.job_name)
    local = "." if "://" in root else root
    if isinstance(block, Wandb):
        optional: dict[str, Any] = {"group": block.group, "entity": block.team}
        given = {name: value for name, value in optional.items() if value is not None}
        return WandbLogger(project=block.project, save_dir=local, **given)
    if block.samples_log_interval != type(block)().samples_log_interval:
        rank_zero_info(
            f"comet.samples_log_interval={block.samples_log_interval} is not used. Set Trainer(log_every_n_steps=...), "
            "which decides how often metrics are sent."
        )
    return CometLogger(
        api_key=block.api_key.get_secret_value() if block.api_key is not None else None,
        workspace=block.workspace,
        project=block.project,
        experiment_key=block.experiment_key,
        mode=block.mode,
        online=block.online,
        offline_directory=local,
        **({"name": block.experiment_name} if block.experiment_name is not None else {}),
    )


def _folder(block: CsvMonitor | TensorBoard, root: str) -> str:
    return os.path.expanduser(block.output_path) or root


def attach_loggers(trainer: pl.Trainer, config_blocks: Iterable[MonitorBlock]) -> list[Logger]:
    """Attach a logger for each enabled block, unless the Trainer has one of that kind.

    See Note [When loggers are attached]. The Trainer's default logger is replaced. ``Trainer(logger=False)`` disables
    the default logger only, not those of the configuration. ``fast_dev_run`` disables all.

    Returns:
        The new loggers: [] in a second run.

    Raises:
        ConfigError: a package is missing, or the Trainer is a ``barebones`` one; nothing was attached then.
    """
    order = list(_KINDS)
    enabled = sorted((b for b in config_blocks if b.enabled), key=lambda block: order.index(type(block)))
    if not enabled or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return []
    root = str(trainer.default_root_dir)
    known = list(trainer.loggers)
    if len(known) == 1 and is_default_logger(known[0], root):
        known = []
    made: list[Logger] = []
    problems: dict[str, str] = {}
    for block in enabled:
        key, logger_class, package = _KINDS[type(block)]
        own = next((logger for logger in known if isinstance(logger, logger_class)), None)
        if own is not None:
            if not _writes_there(own, block, root):
                rank_zero_info(
                    f"{key}: the Trainer has a {type(own).__name__} of its own, which is used instead. Remove it to "
                    "use the block."
                )
        elif trainer.barebones:
            problems[key] = "contradicts Trainer(barebones=True), which logs nothing. Remove one of them"
        elif not (problems and isinstance(block, Comet)):
            try:
                with _rank_announced(trainer.global_rank):
                    made.append(_make(block, root))
            except ModuleNotFoundError:
                need = f"needs the package {package}, which is missing or too old"
                problems[key] = f"{need}. Run `pip install -U {package}`, or set it to false"
    if problems:
        raise ConfigError(Problem(f"{key}.enabled", f"{key}.enabled=true {text}.") for key, text in problems.items())
    trainer.loggers = known + made
    return made


def _writes_there(logger: Logger, block: MonitorBlock, root: str) -> bool:
    """True if a logger of the Trainer writes where the block says."""
    if isinstance(block, TensorBoard | CsvMonitor):
        return (logger.save_dir, logger.name) == (_folder(block, root), block.job_name)
    return logger.name == block.project


@contextmanager
def _rank_announced(rank: int) -> Iterator[None]:
    """Set the rank in the environment: without it, as in spawned processes, CometLogger opens an experiment each."""
    known = any(name in os.environ for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    if not known:
        os.environ["LOCAL_RANK"] = str(rank)
    try:
        yield
    finally:
        if not known:
            del os.environ["LOCAL_RANK"]
