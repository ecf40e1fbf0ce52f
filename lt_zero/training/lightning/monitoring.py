"""Monitors of a run, as its strategy asks them, and the keys that ask for some (monitor/)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.common.garbage import gc_disabled
from lt_zero.common.places import load
from lt_zero.common.progress_bar import set_local_rank
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.ranks import NewLog
from lt_zero.core.comm.world import World
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.session import TimedRun

T = TypeVar("T")
_PLACE = "lt_zero.training.lightning.monitor.run_monitor:Monitors"
_KEYS = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "gradient_noise_scale",
    "dump_state",
    "flops_profiler.enabled",
    "comms_logger.enabled",
    "csv_monitor.enabled",
    "tensorboard.enabled",
    "wandb.enabled",
    "comet.enabled",
)


class CommRecord(NamedTuple):
    """All collectives of one kind and size on this rank. See monitor/comm_log.py, Note [What is measured].

    Attributes:
        operation: its name in torch.distributed.
        name: of the unit or bucket, or its purpose; "" unless recorded by name.
        nbytes: bytes of one message.
        calls: number of calls.
        seconds, waited: of all calls together.
        shortest, longest: seconds of one call.
        algbw, busbw: bytes per second.
        dense, sent: bytes to other ranks of all calls, as they would be uncompressed and as they were; 0 where nothing
            is compressed.
        coding: seconds of all calls in which this rank encoded and decoded, on the host.
    """

    operation: str
    name: str
    nbytes: int
    calls: int
    seconds: float
    shortest: float
    longest: float
    waited: float
    algbw: float
    busbw: float
    dense: int = 0
    sent: int = 0
    coding: float = 0.0


class RunMonitor:
    """The monitors of a run: this one has none.

    Attributes:
        watches: there are monitors; otherwise a step need not be run through this object.
        new_log: makes the log of the run's collectives; None: they are not recorded.
    """

    watches = False
    new_log: NewLog | None = None

    def __init__(self, config: ZeroConfig) -> None:
        self._config = config
        self._for_this_run = ExitStack()  # closed at the end of a run

    def attach(self, trainer: pl.Trainer, rank: int, local_rank: int) -> None:
        """Begin a run on this rank, before anything uses the folder of its loggers."""
        self._for_this_run.close()
        self._for_this_run.enter_context(logger_level(self._config.log_level, rank))
        set_local_rank(local_rank)  # spawned processes do not have it in their environment

    def record(self, world: World, new: bool) -> None:
        """Start recording the collectives of a run; ``new``: the process groups were just made."""

    def collectives(self, world: World) -> list[CommRecord] | None:
        """The cost of this rank's collectives; None: they are not recorded."""
        return None

    def start(self, run: RunSnapshot, new: bool) -> None:
        """Start the monitors of a fit; ``new``: its engine was just built. Collective."""
        self._for_this_run.enter_context(gc_disabled(run.config.disable_python_gc))

    def stop(self, clean: bool) -> None:
        """Stop the monitors of a run; ``clean``: it ended without an error."""
        self._for_this_run.close()

    def training_step(self, module: pl.LightningModule, batch: Any, call: Callable[[], T]) -> T:
        """Run a training step."""
        return call()

    def backward(self, module: pl.LightningModule, loss: Tensor, call: Callable[[], T]) -> T:
        """Run the backward of a loss."""
        return call()

    def optimizer_step(self, module: pl.LightningModule, optimizer: Optimizer, call: Callable[[], T]) -> T:
        """Run the step of an optimizer, with forward and backward inside."""
        return call()

    def before_validation(self) -> None:
        """Validation begins."""

    def after_validation(self) -> None:
        """Training continues."""


def monitor_of(config: ZeroConfig, trial: TimedRun | None = None) -> RunMonitor:
    """The monitors that a configuration, or a trial of ``lt-zero tune``, asks for.

    Raises:
        ConfigError: monitoring, which is asked for, is not installed; names the key.
    """
    key = next((key for key in _KEYS if attrgetter(key)(config)), None)
    if key is None and trial is None:
        return RunMonitor(config)
    made: RunMonitor = load(_PLACE, key or "LT_ZERO_TRIAL", "monitoring")(config, trial)
    return made


@contextmanager
def logger_level(level: str | None, rank: int = 0) -> Iterator[None]:
    """``log_level``: context that sets the level of the logger "lt_zero"; None changes nothing.

    Without a handler, Python shows warnings only, so a handler to stderr is added if there is none; on ranks other than
    0 it shows warnings only. Handlers of the user get all messages on all ranks.
    """
    if level is None:
        yield
        return
    logger = logging.getLogger("lt_zero")
    before, handler = logger.level, None
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        handler.setLevel(logging.NOTSET if rank == 0 else logging.WARNING)
        logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        if handler is not None:
            logger.removeHandler(handler)
