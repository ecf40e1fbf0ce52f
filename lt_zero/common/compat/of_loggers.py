"""Private APIs of Lightning's loggers. Checked on lightning 2.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_default_logger(logger: Any, root: str) -> bool:
    """True if ``Trainer(logger=None)`` or ``logger=True`` made this logger, or user code an equal one.

    Trainer does not record it, but a default logger that was not used yet equals a new one in all attributes.

    Args:
        root: the Trainer's ``default_root_dir``.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    if type(logger) is CSVLogger:
        return vars(logger) == vars(CSVLogger(save_dir=root))
    if type(logger) is TensorBoardLogger:
        return vars(logger) == vars(TensorBoardLogger(save_dir=root, version=SLURMEnvironment.job_id()))
    return False


class _InsteadOfGraph:
    """A method ``log_graph`` that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function()


def log_graph_by(logger: Any, function: Callable[[], object] | None) -> None:
    """Let a logger that traces the module when a run begins call ``function`` instead; None: let it trace."""
    if isinstance(vars(logger).get("log_graph"), _InsteadOfGraph):
        del logger.log_graph
    # That of ``fast_dev_run`` has an attribute of every name, a function.
    if function is not None and getattr(logger, "_log_graph", False) is True:
        logger.log_graph = _InsteadOfGraph(function)


class LoggedCheckpoints:
    """Checkpoints that a logger of Lightning has uploaded, and how it finds new ones.

    Args:
        logger: a WandbLogger, MLFlowLogger or LitLogger.
    """

    METHOD = "_scan_and_log_checkpoints"  # lists the checkpoints of a ModelCheckpoint, and uploads new files

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    @classmethod
    def of(cls, logger: Any) -> LoggedCheckpoints | None:
        """Return what ``logger`` keeps; None if it uploads no checkpoints, or not in the way of these loggers."""
        return cls(logger) if hasattr(type(logger), cls.METHOD) else None

    @property
    def uploads(self) -> bool:
        """True if the logger was asked to upload checkpoints."""
        return bool(self._logger._log_model)

    @property
    def times(self) -> dict[str, float]:
        """When the last uploaded checkpoint of a path was written."""
        return self._logger._logged_model_time  # type: ignore[no-any-return]

    def name(self, default: str) -> str:
        """The name of the artifact that checkpoints are versions of; ``default`` if the user gave none."""
        self._logger._checkpoint_name = self._logger._checkpoint_name or default
        return str(self._logger._checkpoint_name)

    def version(self, step: int | None) -> Any:
        """The version of an uploaded checkpoint of LitLogger."""
        return self._logger._model_version(None, step)

    def list_with(self, function: Callable[[Any], None]) -> None:
        """Call ``function`` with the ModelCheckpoint wherever Lightning would list its checkpoints."""
        vars(self._logger)[self.METHOD] = function

    def list_files(self, callback: Any) -> None:
        """Do what Lightning does: list the checkpoints of a ModelCheckpoint that are files, and upload new ones."""
        getattr(type(self._logger), self.METHOD)(self._logger, callback)
