"""The run of script.py under a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lt_zero


class Model(pl.LightningModule):
    def __init__(self, net: nn.Module, optimizer_of: Callable[[nn.Module], Any], at: Callable[[str], None]) -> None:
        super().__init__()
        self.net, self.optimizer_of, self.at = net, optimizer_of, at

    def loss(self, batch: Any) -> Tensor:
        rows, labels = batch
        return nn.functional.cross_entropy(self.net(rows), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.at("clip")
        super().configure_gradient_clipping(*args, **kwargs)

    def train_dataloader(self) -> Any:
        source = torch.Generator().manual_seed(1)
        rows, labels = torch.randn(56, 17, generator=source), torch.randint(3, (56,), generator=source)
        return DataLoader(TensorDataset(rows, labels), 4, shuffle=True)

    val_dataloader = train_dataloader


class Points(Callback):
    """Saves every second step, and tells of the points of the run."""

    def __init__(self, plan: Any, at: Callable[[str], None], phase: Any, keep: Callable[[int], None]) -> None:
        self.plan, self.at, self.phase, self.keep = plan, at, phase, keep

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.at("set-up")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        with self.phase("save"):
            trainer.save_checkpoint(self.plan.last)
        self.keep(trainer.global_step)

    def teardown(self, *args: Any, **named: Any) -> None:
        self.at("teardown")


def fit(
    plan: Any, at: Callable[[str], None], phase: Any, net: nn.Module, optimizer_of: Any, tell: Any, keep: Any
) -> None:
    from lt_zero.checkpoint.native.directory import find

    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lt_zero.ZeroStrategy(config={"zero_optimization": plan.zero, **plan.more}),
        max_steps=plan.until,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[Points(plan, at, phase, keep)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, found = Model(net, optimizer_of, at), find(plan.last)
    with phase("load"):
        trainer.fit(model, ckpt_path=found if Path(found).exists() else None)
    with phase("export"):
        trainer.strategy.export(f"{plan.folder}/weights.safetensors")  # type: ignore[attr-defined]
    tell(model, trainer.global_step)
