"""Trainers inside pool workers, launched as torchrun would, and the same run in one process to compare with."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.utilities import registry
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lt_zero import ZeroStrategy
from lt_zero.core.health import hang_detection
from lt_zero.core.health.hang_detection import Patience
from tests.support.models import VOCAB, Net

# Each Trainer asks for callbacks of other packages, for which all that are installed are looked through.
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,  # a seventh of a short run
    "accelerator": "cpu",
}
ROWS, BATCH = 24, 4  # rows of data, rows per optimizer step over all ranks (before accumulation)


def trust(weights_only: bool | None) -> dict[str, Any]:
    """The argument ``weights_only`` of ``Trainer.fit``."""
    return {"weights_only": weights_only}


def torchrun_env() -> dict[str, str]:
    """What torchrun sets, for this pool worker."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    return {k: str(v) for k, v in numbers.items()} | {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "pool"}


FULL: dict[str, Any] = {"checkpoint": {"format": "full"}}


def sharded_trainer(
    stage: int, zero: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **kwargs: Any
) -> pl.Trainer:
    """``zero``: keys of the zero_optimization block; ``config``: of the top level."""
    warnings.filterwarnings("ignore")
    os.environ.update(torchrun_env())
    block = {"stage3_param_persistence_threshold": 0, "stage": stage, **(zero or {})}
    strategy = ZeroStrategy(config={"zero_optimization": block, **(config or {})})
    return pl.Trainer(**{**QUIET, "strategy": strategy, "devices": dist.get_world_size(), **kwargs})


def single_trainer(**kwargs: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore")
    return pl.Trainer(**{**QUIET, "devices": 1, "strategy": "auto", **kwargs})


@contextmanager
def quick(**seconds: float) -> Iterator[None]:
    """Process groups that are made inside find out soon who does not come; ``seconds`` are fields of ``Patience``."""
    patience = Patience(**{"poll": 0.05, "ask": 0.1, "stuck": 0.3, **seconds})
    with mock.patch.object(hang_detection, "PATIENCE", patience):
        yield


def error_of_fit(stage: int, callback: pl.Callback) -> str:
    """The message with which a fit ends on this rank, whose callback diverges from that of others."""
    with quick():
        trainer = sharded_trainer(stage, max_epochs=1, callbacks=[callback])
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(GPT(dist.get_world_size()))
    return str(caught.value)


class Rows(Dataset[Tensor]):
    def __init__(self, count: int = ROWS) -> None:
        self.rows = torch.randint(0, VOCAB, (count, 6), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class GPT(pl.LightningModule):
    """The small Net as a LightningModule with a parameter of its own."""

    def __init__(self, world: int = 1, optimizer: str = "sgd", rows: int = ROWS, **net: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Net(**net)
        self.temperature = nn.Parameter(torch.ones(3, VOCAB))
        self.world, self.optimizer, self.rows = world, optimizer, rows
        self.seen: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.net(batch) * self.temperature.mean(0)
        return F.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True, add_dataloader_idx=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def loader(self) -> DataLoader[Tensor]:
        # Lightning's own sampler would shuffle the training rows; with this one the ranks' batches of a step are
        # together the batch of the single process.
        rows = Rows(self.rows)
        sampler = DistributedSampler(rows, shuffle=False) if self.world > 1 else None
        return DataLoader(rows, batch_size=BATCH * 3 // self.world, sampler=sampler, shuffle=False)

    train_dataloader = loader

    def val_dataloader(self) -> list[DataLoader[Tensor]]:
        return [self.loader(), self.loader()]

    test_dataloader = loader
    predict_dataloader = loader


def weights(trainer: pl.Trainer) -> dict[str, np.ndarray[Any, Any]]:
    """The full state dict, as numpy arrays (rank 0; {} elsewhere)."""
    strategy = trainer.strategy
    whole = isinstance(strategy, ZeroStrategy) and strategy.run.built is not None and strategy.engine.attached
    state = strategy.full_state_dict() if whole else strategy.lightning_module_state_dict()
    return {name: value.numpy() for name, value in state.items()}


def assert_same(got: dict[str, Any], want: dict[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol, err_msg=name)


__all__ = [
    "BATCH",
    "FULL",
    "GPT",
    "ROWS",
    "BoringModel",
    "Path",
    "RandomDataset",
    "assert_same",
    "sharded_trainer",
    "weights",
]
