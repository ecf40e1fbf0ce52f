"""Trainers whose gradients overflow when a test says so."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lt_zero import ZeroPrecision, ZeroStrategy
from tests.support.lightning_tools import GPT, QUIET, torchrun_env

CALM = {"initial_scale_power": 6}  # no overflow with the small models of these tests


def make_trainer(mode: str, stage: int, config: dict[str, Any] | None = None, **kwargs: Any) -> pl.Trainer:
    import os

    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ.update(torchrun_env())
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    strategy = ZeroStrategy(config={"zero_optimization": block, "fp16": CALM, **(config or {})})
    options = {"strategy": strategy, "devices": dist.get_world_size(), "plugins": [ZeroPrecision(mode)]}
    return pl.Trainer(**{**QUIET, **options, **kwargs})


def plugin_of(trainer: pl.Trainer) -> ZeroPrecision:
    assert isinstance(trainer.precision_plugin, ZeroPrecision)
    return trainer.precision_plugin


class Overflowing(GPT):
    """Its loss overflows on rank 1 at the given steps."""

    def __init__(self, world: int, bad: set[int]) -> None:
        super().__init__(world, "adamw")
        self.bad, self.rates = bad, list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        schedule: Any = self.lr_schedulers()
        self.rates.append(schedule.get_last_lr()[0])
        loss = self.loss(batch)
        return loss * float("inf") if self.global_step in self.bad and self.global_rank == 1 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Tensor]:
        rows = torch.randint(0, 11, (16, 6), generator=torch.Generator().manual_seed(7))
        return DataLoader(rows[self.global_rank :: 2], batch_size=2)  # type: ignore[arg-type]
