"""What the strategy tells those who watch a run: the one protocol of printed lines, times and memory."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer


class RunObserver:
    """Is told where a fit is, on every rank. Nothing by itself."""

    def start(self, strategy: Any) -> None:
        """A fit begins."""

    def stop(self) -> None:
        """It has ended, maybe with an error."""

    def before_forward(self) -> None:
        """``training_step`` is about to be called."""

    def after_forward(self, module: pl.LightningModule, batch: Any, output: Any) -> None:
        """It has returned; with manual optimization backward and steps were inside."""

    def before_backward(self) -> None:
        """A backward is about to begin."""

    def after_backward(self) -> None:
        """It has ended, its gradients are reduced."""

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """An optimizer has stepped, or skipped its step; schedules and ``trainer.global_step`` are those of before."""

    def pause(self) -> None:
        """Validation begins."""

    def resume(self) -> None:
        """Training goes on."""
