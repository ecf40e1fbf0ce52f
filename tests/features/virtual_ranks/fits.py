"""Fits of a small model with virtual ranks, and what each virtual rank has seen in them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.lightning_tools import sharded_trainer

COUNT = 6  # virtual ranks
RANKS = (1, 2, 3)
ROWS = 45  # padded to 48: four rounds of batches of two
Batch = tuple[Tensor, Tensor, Tensor]


class Rows(Dataset[Batch]):
    """Rows of which each draws a number when it is read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Batch:
        row = torch.randn(5, generator=torch.Generator().manual_seed(index))
        drawn = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])
        return row, drawn, torch.tensor(index)


class Module(pl.LightningModule):
    """Remembers what each of its micro-batches sees. ``lr`` 0: the weights stay, so that all else can be compared."""

    def __init__(self, lr: float = 0.0, **loader: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1)
        self.net = nn.Sequential(*layers)
        self.lr = lr
        self.loader = {"batch_size": 2, "shuffle": True, **loader}
        self.seen: list[tuple[Any, ...]] = []

    def loss(self, batch: Batch) -> Tensor:
        rows, drawn, _ = batch
        value: Tensor = (self.net(rows).squeeze(1) + drawn.mean(1)).square().mean()
        return value

    def drawn(self) -> tuple[float, float, float]:
        """One number of each generator."""
        return torch.rand(()).item(), random.random(), np.random.rand()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        mean = self.net[1].running_mean.tolist()  # type: ignore[union-attr, operator]
        loss = self.loss(batch)
        self.seen.append((batch_idx, batch[2].tolist(), batch[1].tolist(), mean, self.drawn(), loss.item()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), **self.loader)


class Run(NamedTuple):
    """What a rank has to tell: what its micro-batches have seen, the buffers in the end, and more."""

    seen: list[tuple[Any, ...]]
    buffers: dict[str, Tensor]
    more: Any = None


def fit(
    module: Module, count: int = COUNT, stage: int = 2, config: Any = None, path: Any = None, **kwargs: Any
) -> pl.Trainer:
    """Train ``module`` in this process, which is a rank."""
    torch.manual_seed(5 + dist.get_rank())  # rank 0's are taken
    random.seed(5 + dist.get_rank())
    np.random.seed(5 + dist.get_rank())
    keys = {"reproducible": {"virtual_ranks": count}, **(config or {})}
    trainer = sharded_trainer(stage, config=keys, **{"max_epochs": 2, **kwargs})
    trainer.fit(module, ckpt_path=path)
    return trainer


def told(module: Module, more: Any = None) -> Run:
    return Run(module.seen, {name: value.clone() for name, value in module.named_buffers()}, more)


def full_weights(trainer: pl.Trainer) -> Any:
    """The weights, on rank 0. Collective."""
    return trainer.strategy.full_state_dict()  # type: ignore[attr-defined]


def by_round(runs: list[Run], count: int = COUNT) -> list[tuple[Any, ...]]:
    """What all micro-batches have seen, in the order of rounds and, in them, of virtual ranks."""
    ranks = len(runs)
    turns = count // ranks
    rounds = len(runs[0].seen) // turns
    assert all(len(run.seen) == rounds * turns for run in runs)
    return [runs[v % ranks].seen[at * turns + v // ranks] for at in range(rounds) for v in range(count)]


def same(one: Any, other: Any) -> bool:
    """True if two trees of plain values and tensors have the same bits."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check(runs: dict[int, list[Run]], count: int = COUNT) -> None:
    """Compare runs of several numbers of ranks: what micro-batches saw, the buffers, and what rank 0 has to tell."""
    first, *others = sorted(runs)
    want = by_round(runs[first], count)
    for ranks in others:
        found = by_round(runs[ranks], count)
        assert len(found) == len(want)
        for at, (one, other) in enumerate(zip(want, found, strict=True)):
            assert same(one, other), f"{ranks} ranks, round {at // count}, virtual rank {at % count}: {one} != {other}"
        for rank, run in enumerate(runs[ranks]):
            assert same(runs[first][0].buffers, run.buffers), f"buffers of rank {rank} of {ranks}"
        assert same(runs[first][0].more, runs[ranks][0].more), f"{ranks} ranks"
