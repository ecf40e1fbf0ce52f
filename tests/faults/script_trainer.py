"""The run of script.py under a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lt_zero
from tests.faults.script_nets import MICRO, batch_of
from tests.faults.script_points import CALLS, PLAN, at, phase

Make = Callable[[], nn.Module]
OptimizerOf = Callable[[nn.Module], Any]


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, mesh: str, count: int) -> None:
        self.mesh, self.count = mesh, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in batch_of(self.mesh, index).items()}


class Model(pl.LightningModule):
    def __init__(self, make: Make, optimizer_of: OptimizerOf) -> None:
        super().__init__()
        self.make, self.optimizer_of = make, optimizer_of
        self.net: Any = None if PLAN.mesh == "pipeline" else make()

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.make()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.net(**batch)
        return result

    def sequence_batch(self, batch: dict[str, Tensor]) -> dict[str, int]:
        found: dict[str, int] = self.net.sequence_batch(batch)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        at("clip")
        super().configure_gradient_clipping(*args, **kwargs)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(PLAN.mesh, 28 * PLAN.ranks), MICRO, shuffle=True)

    val_dataloader = train_dataloader


class Points(Callback):
    """Saves every second step, and tells of the points of the run."""

    def __init__(self, keep: Callable[[int], None]) -> None:
        self.keep = keep

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        CALLS["save"] = partial(trainer.save_checkpoint, PLAN.alone)
        CALLS["export"] = partial(strategy.export, f"{PLAN.alone}.safetensors")
        CALLS["barrier"] = strategy.barrier
        CALLS["broadcast"] = partial(strategy.broadcast, 1)
        at("set-up")

    def on_train_start(self, *args: Any) -> None:
        at("ready")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        with phase("save"):
            trainer.save_checkpoint(PLAN.last)
        self.keep(trainer.global_step)

    def teardown(self, *args: Any, **named: Any) -> None:
        at("teardown")


def fit(make: Make, optimizer_of: OptimizerOf, tell: Any, keep: Callable[[int], None]) -> None:
    from lt_zero.checkpoint.native.directory import find

    pl.seed_everything(1)
    callbacks: list[Callback] = [Points(keep)]
    saves = ModelCheckpoint(PLAN.folder, "alone-{step}", every_n_train_steps=1, save_top_k=-1)
    CALLS["callback"] = partial(callbacks.append, saves)
    at("callbacks")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=PLAN.ranks,
        strategy=lt_zero.ZeroStrategy(config={"zero_optimization": PLAN.zero, **PLAN.more}),
        max_steps=PLAN.until,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, found = Model(make, optimizer_of), find(PLAN.last)
    with phase("load"):
        trainer.fit(model, ckpt_path=found if Path(found).exists() else None)
    with phase("export"):
        trainer.strategy.export(f"{PLAN.folder}/weights.safetensors")  # type: ignore[attr-defined]
    tell(model, trainer.global_step)
