"""The interface of observers that print metrics, times and memory during a fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer


class RunObserver:
    """Callbacks during a fit, on every rank; no-ops by default."""

    def start(self, strategy: Any) -> None:
        """A fit begins."""

    def stop(self) -> None:
        """The fit has ended, maybe with an error."""

    def before_forward(self) -> None:
        """``training_step`` is about to be called."""

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        """``training_step`` has returned; with manual optimization backward and steps ran inside."""

    def before_backward(self) -> None:
        """A backward is about to begin."""

    def after_backward(self) -> None:
        """A backward has ended, its gradients are reduced."""

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """An optimizer has stepped or skipped its step; schedules and ``trainer.global_step`` are not updated yet."""

    def pause(self) -> None:
        """Validation begins."""

    def resume(self) -> None:
        """Training continues."""
