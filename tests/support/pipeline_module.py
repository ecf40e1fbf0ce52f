"""A LightningModule with a pipeline, and its data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import SumMetric

from lt_zero.parallel import Pipeline
from tests.support.pipelines import LENGTH, VOCABULARY, mean_loss, specs

ROWS, BATCH = 28, 8  # samples, and samples per step of all ranks: the last batch is short


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


class Module(pl.LightningModule):
    """``data``: ranks that see different data."""

    def __init__(self, optimizer: str = "sgd", data: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.optimizer, self.data, self.dropout = optimizer, data, dropout
        self.losses, self.validated = list[float](), list[float]()
        self.count = SumMetric()
        self.pipe: Any = None

    def configure_model(self) -> None:
        if self.pipe is None:
            torch.manual_seed(0)
            self.pipe = Pipeline(specs(dropout=self.dropout), loss_fn=mean_loss)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.pipe(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss, sync_dist=True)
        self.log("rows", float(len(batch)), sync_dist=True, reduce_fx="sum")
        self.count(float(len(batch)))
        self.log("count", self.count, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("validated", self.pipe(batch[:, :-1], batch[:, 1:]), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        logits: Tensor = self.pipe(batch[:, :-1])
        return logits

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_validation_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["validated"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Not shuffled, as Lightning's own sampler would: the samples of a step are those of the single process.
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(Texts(), shuffle=False, **ranks)
        return DataLoader(Texts(), batch_size=BATCH // self.data, sampler=sampler)

    val_dataloader = predict_dataloader = train_dataloader
