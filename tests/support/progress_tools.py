"""What the tests of progress share: data with noise, models that remember it, runs that are saved and resumed."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lt_zero import ZeroStrategy
from tests.support.lightning_tools import QUIET, torchrun_env

WIDTH = 4


class Noisy(Dataset[Tensor]):
    """Rows with noise from all three of the host's generators."""

    def __init__(self, count: int = 24, noise: float = 0.1) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        return torch.full((WIDTH,), index / self.count) + self.noise * noise


class Stream(IterableDataset[Tensor]):
    """Rows of unknown number, shared out among workers."""

    def __init__(self, count: int = 24) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(first, self.count, step):
            yield torch.full((WIDTH,), index / self.count)


class Remembering(DataLoader[Tensor]):
    """A loader that resumes by itself, as torchdata's."""

    position = 0

    def __iter__(self) -> Any:
        batches, start = super().__iter__(), self.position % len(self)
        for _ in range(start):
            next(batches)
        return self._count(batches, start)

    def _count(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, start):
            self.position = number + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Plain:
    """An iterable that is no DataLoader, and begins anew with each pass."""

    def __init__(self, count: int = 6) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            yield torch.full((2, WIDTH), index / self.count)


class Placed(Plain):
    """One that knows its place: Lightning's loops save and load it."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.position % self.count, self.count):
            self.position = index + 1
            yield torch.full((2, WIDTH), -index / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Model(pl.LightningModule):
    """Dropout, and a memory of what it has seen."""

    def __init__(self, loaders: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.4), nn.Linear(6, 1))
        self.loaders = loaders
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        parts = [part for part in parts if part is not None]
        self.seen.append([part.tolist() for part in parts])
        return sum((self.layers(part).square().mean() for part in parts), torch.zeros(()))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        F.dropout(batch, 0.5)
        self.log("val", self.layers(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def train_dataloader(self) -> Any:
        return self.loaders()


class Validated(Model):
    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(6), batch_size=3)


class Saver(pl.Callback):
    """Saves after batches, as ModelCheckpoint does, or elsewhere: at all of these points, or ``only`` at some."""

    def __init__(self, folder: Path, where: str, only: Any = None) -> None:
        self.folder, self.where, self.only = folder, where, only
        self.seen: list[int] = []  # batches, at each point

    def save(self, trainer: pl.Trainer, where: str) -> None:
        if where != self.where:
            return
        self.seen.append(len(trainer.lightning_module.seen))
        if self.only is None or len(self.seen) in self.only:
            trainer.save_checkpoint(self.folder / f"{len(self.seen)}.ckpt", weights_only=False)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "batch")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "epoch")

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "end")


def new_trainer(**options: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore")
    # Of a pass that is read again.
    warnings.filterwarnings("error", ".*is another one now")
    warnings.filterwarnings("error", ".*samples at the checkpoint, and has")
    if dist.is_initialized() and dist.get_world_size() > 1:
        os.environ.update(torchrun_env())
        options["devices"] = dist.get_world_size()
    else:
        options["use_distributed_sampler"] = False  # Lightning would put one in with one rank too
    block = {"stage": options.pop("stage", 2), "stage3_param_persistence_threshold": 0}
    how = {"format": options.pop("format", "auto")}
    strategy = ZeroStrategy(config={"zero_optimization": block, "checkpoint": how})
    return pl.Trainer(**{**QUIET, "devices": 1, "strategy": strategy, "num_sanity_val_steps": 1, **options})


def fit(model: Model, seed: int, ckpt: Path | None = None, **options: Any) -> tuple[list[Any], list[Any]]:
    """What a run has seen, and its weights."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    trainer = new_trainer(**options)
    trainer.fit(model, ckpt_path=ckpt)
    state = trainer.strategy.full_state_dict()
    return model.seen, [value.tolist() for value in state.values()]


def compare(make: Callable[[], Model], folder: Path, where: str = "batch", stops: Any = None, **options: Any) -> None:
    """A run that is resumed from checkpoints of another, with other random numbers, ends like that one.

    ``stops`` are the numbers of these checkpoints; by default one inside of an epoch, at its end, and inside of the
    next. A run that is told its stops saves nowhere else, which is most of its time.
    """
    options = {"max_epochs": 2, **options}
    saver = Saver(folder, where, stops)
    want_seen, want = fit(make(), 1, callbacks=[saver], **options)
    count = len(saver.seen)
    for number in stops or sorted({(count + 2) // 4, count // 2, count // 2 + 2} & {*range(1, count + 1)}):
        seen, got = fit(make(), 2, folder / f"{number}.ckpt", **options)
        before, begin = saver.seen[number - 1], len(want_seen) - len(seen)
        window = options.get("accumulate_grad_batches", 1)
        assert before - window < begin <= before, f"other batches after {number} of {count}"
        assert seen == want_seen[begin:], f"other data after {number} of {count}"
        assert got == want, f"other weights after {number} of {count}"


def new_loader(dataset: Any = None, **options: Any) -> DataLoader[Tensor]:
    data = Noisy() if dataset is None else dataset
    shuffle = None if isinstance(data, IterableDataset) else True
    return DataLoader(data, **{"batch_size": 4, "shuffle": shuffle, **options})


CASES: dict[str, Callable[[], Any]] = {
    "shuffled": new_loader,
    "seeded by epoch": lambda: new_loader(
        shuffle=None, sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0, shuffle=True)
    ),
    "samples": lambda: new_loader(batch_size=None),
    "replacement": lambda: new_loader(shuffle=None, sampler=RandomSampler(Noisy(), replacement=True, num_samples=40)),
    "own generator": lambda: new_loader(generator=torch.Generator().manual_seed(5)),
    "sampler's generator": lambda: new_loader(
        shuffle=None, sampler=RandomSampler(Noisy(), generator=torch.Generator().manual_seed(6))
    ),
    "iterable": lambda: new_loader(Stream()),
    "stateful": lambda: Remembering(Noisy(), batch_size=4, shuffle=True),
    "dict": lambda: {"a": new_loader(), "b": new_loader(Noisy(10))},
    "min_size": lambda: CombinedLoader({"a": new_loader(), "b": new_loader(Noisy(17))}, "min_size"),
    "max_size": lambda: CombinedLoader({"b": new_loader(Noisy(10)), "a": new_loader()}, "max_size"),
    "plain": Plain,
    "stateful beside plain": lambda: CombinedLoader({"a": Plain(), "b": Placed(), "c": Plain(4)}),
    "iterables": lambda: {"a": new_loader(Stream(9)), "b": new_loader(Stream())},
}
