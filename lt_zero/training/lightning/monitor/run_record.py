"""``lt_zero.jsonl`` of a Trainer: times of steps, memory and collectives, beside the metrics that its loggers write."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.optim import Optimizer

from lt_zero.common.compat import logged_step
from lt_zero.training.lightning.monitor.comm_log import bus_factor
from lt_zero.training.lightning.monitor.step_metrics import RunObserver
from lt_zero.training.lightning.monitoring import CommRecord
from lt_zero.training.lightning.setup import RunSnapshot
from lt_zero.training.run_file import RunFile


class RunRecord(RunObserver):
    """Writes the file on rank 0, if a logger of the Trainer writes to a local folder. Steps are those of the loggers.

    On a GPU the times are the host's. It runs ahead of the device: medians are those of the device, a single time may
    not be.
    """

    def __init__(self) -> None:
        self._file: RunFile | None = None
        self._new: Callable[[int], RunFile] | None = None
        self._last = -1  # the step that was noted last
        self._paused: float | None = None

    def start(self, run: RunSnapshot) -> None:
        self._file, self._last, self._paused, self._new = None, -1, None, None
        folder = _folder(run.trainer) if run.trainer is not None and run.rank == 0 else None
        if folder is not None:
            self._ranks, stage = run.engine.world.size, run.config.zero_optimization.stage
            about: dict[str, Any] = {"ranks": self._ranks, "stage": stage, "mode": run.engine.policy.mode}
            self._new = partial(RunFile, folder, **about)

    def before_forward(self, module: pl.LightningModule) -> None:
        if self._new is not None:  # the first: a checkpoint was loaded after the start
            self._file, self._new = self._new(logged_step(module.trainer)), None

    def stop(self) -> None:
        if self._file is not None:
            self._file.flush()

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        step = logged_step(module.trainer)
        if self._file is not None and step != self._last:  # several optimizers may step in one batch
            self._last = step
            self._file.end_step(step)

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        if self._paused is not None and self._file is not None:
            self._file.leave_out(time.perf_counter() - self._paused)
        self._paused = None

    def write_memory(self, step: int, rank: int, moments: Mapping[str, Mapping[str, int]]) -> None:
        """Write the bytes of each place at the moments of a step; ``step``: of the loggers."""
        if self._file is not None:
            self._file.write_memory(step, rank, moments)

    def write_collectives(self, records: Sequence[CommRecord], rank: int) -> None:
        """Write the collectives of the run, after ``stop``, too."""
        if self._file is None:
            return
        rows = []
        for each in records:
            sent = each.sent or round(each.nbytes * each.calls * bus_factor(each.operation, self._ranks))
            facts = {"operation": each.operation, "name": each.name, "nbytes": each.nbytes, "calls": each.calls}
            rows.append({**facts, "seconds": each.seconds, "waited": each.waited, "sent": sent})
        self._file.write_collectives(rows, rank)


def _folder(trainer: pl.Trainer) -> Path | None:
    """The folder of the first logger that writes to a local one."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger) and "://" not in logger.log_dir:
            logger.experiment  # noqa: B018 - made now: a CSVLogger warns of a folder with files
            return Path(logger.log_dir)
    return None
