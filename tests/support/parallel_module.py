"""A LightningModule that is parallelized in ``configure_model``, and its data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import SumMetric

ROWS, BATCH = 48, 12  # samples, and samples per step of all ranks


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Module(pl.LightningModule):
    """``data``: ranks that see different data."""

    def __init__(self, optimizer: str = "sgd", data: int = 1) -> None:
        super().__init__()
        self.optimizer, self.data, self.losses = optimizer, data, list[float]()
        self.count = SumMetric()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 3)

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.blocks[0].up.weight, DTensor):
            return  # not to be parallelized, or parallelized in an earlier run: Lightning calls this in each
        for block in self.blocks:
            parallelize_module(
                block, self.device_mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.log("rows", float(len(batch)), sync_dist=True, reduce_fx="sum")
        self.count(float(len(batch)))
        self.log("count", self.count, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Not shuffled, as Lightning's own sampler would: the samples of a step are those of the single process.
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return DataLoader(
            Rows(), batch_size=BATCH // self.data, sampler=DistributedSampler(Rows(), shuffle=False, **ranks)
        )
