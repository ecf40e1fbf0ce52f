"""Trains from the last checkpoint in a folder, or dies on the way; started by tests/e2e/test_restarts.py.

Arguments: a folder, the stage, and how lives end, e.g. ``{"0": ["kill", 7]}``: the first by a kill of rank 1 in step 7.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lt_zero

STEPS = 20


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, labels = batch
        return nn.functional.cross_entropy(self.net(rows), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        source = torch.Generator().manual_seed(1)
        rows, labels = torch.randn(56, 16, generator=source), torch.randint(3, (56,), generator=source)
        return DataLoader(TensorDataset(rows, labels), 4, shuffle=True)  # 7 batches an epoch on each of two ranks


class Ends(Callback):
    """Ends this life as it is told, and tells where it began."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with open(f"{FOLDER}/began.txt", "a", encoding="utf-8") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        how, step = LIVES.get(LIFE, ("", -1))
        if how == "wait" and trainer.global_step >= step:  # for a signal
            Path(FOLDER, "waits").touch()
            time.sleep(1)
        if trainer.global_step != step:
            return
        if trainer.global_rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 1 and how == "raise":
            raise ValueError("broken on purpose")


def main() -> None:
    warnings.filterwarnings("ignore")
    pl.seed_everything(1)
    saver = ModelCheckpoint(every_n_train_steps=2, save_last=True, save_top_k=1, save_on_exception=True)
    config = {"zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0}}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lt_zero.ZeroStrategy(config=config),
        max_steps=STEPS,
        default_root_dir=FOLDER,
        callbacks=[saver, Ends()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, ckpt_path=lt_zero.last_checkpoint(FOLDER))
    with torch.no_grad(), lt_zero.gathered(model):
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    line = {"rank": trainer.global_rank, "step": trainer.global_step, "sum": hashlib.sha256(values).hexdigest()}
    print("RESULT " + json.dumps(line), flush=True)


if __name__ == "__main__":
    FOLDER, STAGE, LIVES = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT", "0")
    main()
