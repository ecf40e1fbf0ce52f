"""A module without an optimizer, and a run of it with a configuration."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero import ZeroStrategy
from tests.support.lightning_tools import QUIET


class Plain(pl.LightningModule):
    """Two layers; no optimizer."""

    def __init__(self, batch: int = 4, **hparams: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.save_hyperparameters()
        for name, value in hparams.items():
            setattr(self, name, value)
        self.net = nn.Sequential(nn.Linear(32, 6), nn.Linear(6, 2))
        self.batch, self.built = batch, 0
        self.data = RandomDataset(32, 64)
        self.rates: list[float] = []
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1

    def train_dataloader(self) -> DataLoader[Tensor]:
        self.built += 1
        return DataLoader(self.data, batch_size=self.batch)


class Own(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def run(module: pl.LightningModule, config: dict[str, Any], **kwargs: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **config.pop("zero_optimization", {})}
    strategy = ZeroStrategy(config={"zero_optimization": zero, **config})
    trainer = pl.Trainer(
        **{**QUIET, "devices": 1, "max_steps": 2, "use_distributed_sampler": False, "strategy": strategy, **kwargs}
    )
    trainer.fit(module)
    return trainer


SGD = {"type": "SGD", "params": {"lr": 0.25, "momentum": 0.5}}


AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage3_param_persistence_threshold": "auto",
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
    },
}
