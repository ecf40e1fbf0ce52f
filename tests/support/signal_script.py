"""Trains until a signal stops it; started by the launchers in test_signals.py. Arguments: a folder."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

import lt_zero


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01)
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 100_000))


class Tells(Callback):
    """Which process this is, once it trains, and how it ends."""

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == 2:
            Path(FOLDER, f"{trainer.global_rank}.tmp").write_text(str(os.getpid()), encoding="utf-8")
            os.rename(f"{FOLDER}/{trainer.global_rank}.tmp", f"{FOLDER}/{trainer.global_rank}.pid")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, error: BaseException) -> None:
        end = f"{type(error).__name__} {trainer.global_step}"
        Path(FOLDER, f"{trainer.global_rank}.end").write_text(end, encoding="utf-8")


FOLDER = sys.argv[1]

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lt_zero.ZeroStrategy(stage=3),
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Tells(), OnExceptionCheckpoint(FOLDER, "stopped")],
    ).fit(Model())
