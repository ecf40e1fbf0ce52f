"""The interface of observers that print metrics, times and memory during a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer


@dataclass(frozen=True)
class RunInfo:
    """What observers know of a run.

    Attributes:
        device: of the model.
        rank, world: of this process, and how many there are.
        loggers: of the Trainer.
        gather: the values of all ranks, given one and a name for it. Collective.
        model_states: ``ZeroStrategy.memory_report``.
    """

    device: torch.device
    rank: int
    world: int
    loggers: tuple[Logger, ...]
    gather: Callable[[Any, str], list[Any]]
    model_states: Callable[[], dict[str, tuple[int, int]]]


class RunObserver:
    """Callbacks during a fit, on every rank; no-ops by default."""

    def start(self, info: RunInfo) -> None:
        """A fit begins."""

    def stop(self) -> None:
        """The fit has ended, maybe with an error."""

    def before_forward(self, module: pl.LightningModule) -> None:
        """``training_step`` is about to be called."""

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        """``training_step`` has returned; with manual optimization backward and steps ran inside."""

    def before_backward(self, module: pl.LightningModule) -> None:
        """A backward is about to begin."""

    def after_backward(self, module: pl.LightningModule) -> None:
        """A backward has ended, its gradients are reduced."""

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """An optimizer has stepped or skipped its step; schedules and ``trainer.global_step`` are not updated yet."""

    def pause(self) -> None:
        """Validation begins."""

    def resume(self) -> None:
        """Training continues."""
