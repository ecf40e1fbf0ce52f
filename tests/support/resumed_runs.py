"""Runs of two ranks that are interrupted and resumed, compared in all that can be seen with the run that was not.

A model records what happens to it in one list: samples, losses, rates, counters, ends of epochs and validations, and
what is logged under which step. A saver saves at points of the run and remembers how long the list was. What a resumed
run records has to be the rest of the list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from tests.support.lightning_tools import sharded_trainer

ROWS = 24  # three batches of four rows on each of two ranks


class Rows(Dataset[Tensor]):
    """Rows that begin with their number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index * 7 % 5, index * 3 % 11], dtype=torch.float32)


class Stream(IterableDataset[Tensor]):
    """The rows of this rank; their number is not known."""

    def order(self) -> list[int]:
        return list(range(ROWS))

    def __iter__(self) -> Any:
        for index in self.order()[dist.get_rank() :: dist.get_world_size()]:
            yield Rows()[index]


class Recorded(pl.LightningModule):
    """A small network with dropout that records what happens.

    Args:
        loader: makes the training loader.
        schedule: makes the schedule of an optimizer, as a dictionary of Lightning.
        validated: whether there is a validation loader.
    """

    def __init__(self, loader: Callable[[], Any], schedule: Any = None, validated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.mean = MeanMetric()
        self.loader, self.schedule, self.validated = loader, schedule, validated
        self.events: list[Any] = []

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch / 10) - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.events.append(("batch", batch_idx, batch[:, 0].int().tolist(), float(loss)))
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return (
            optimizer if self.schedule is None else {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}
        )

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=6) if self.validated else []


class Recorder(pl.Callback):
    """Records hooks. It is the first callback: the saver is called after it."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.events.append(("epoch start", trainer.current_epoch, trainer.global_step))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        module.events.append(("batch end", trainer.current_epoch, trainer.global_step, rate))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.events.append(("epoch end", trainer.current_epoch, trainer.global_step))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.events.append(("validation end", trainer.current_epoch, trainer.global_step))


class Saver(pl.Callback):
    """Saves at ``points``: "b2" is after the second batch of the run, "v" after validations, "e" after epochs."""

    def __init__(self, folder: Path, points: Sequence[str]) -> None:
        self.folder, self.points = folder, points
        self.passed: dict[str, int] = {}
        self.reached: dict[str, int] = {}  # with the number of events

    def save(self, trainer: pl.Trainer, kind: str) -> None:
        self.passed[kind] = self.passed.get(kind, 0) + 1
        if (point := f"{kind}{self.passed[kind]}") in self.points:
            self.reached[point] = len(trainer.lightning_module.events)
            trainer.save_checkpoint(self.folder / f"{point}.ckpt", weights_only=False)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "b")

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "v")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "e")

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "end")


class Journal(Logger):
    """Records what is logged in the list of a model."""

    name = "journal"
    version = 0

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.events.append(("log", step, dict(sorted(metrics.items()))))


def run(
    model: Recorded, seed: int, callbacks: Sequence[pl.Callback] = (), ckpt: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Train; return all that is left at the end."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    options = {"max_epochs": 3, "log_every_n_steps": 1, **options}
    config = {"checkpoint": {"format": options.pop("format", "auto")}}
    callbacks = [Recorder(), *callbacks]
    trainer = sharded_trainer(
        options.pop("stage", 3), config=config, logger=Journal(model.events), callbacks=callbacks, **options
    )
    trainer.fit(model, ckpt_path=ckpt, weights_only=False)
    return {
        "epochs": trainer.fit_loop.epoch_progress.state_dict()["current"],
        "steps": (trainer.global_step, trainer.fit_loop.epoch_loop.total_batch_idx),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.tolist() for name, value in trainer.strategy.full_state_dict().items()},
    }


def check_resumes(
    folder: Path,
    make: Callable[[], Recorded],
    points: Sequence[str],
    callbacks: Callable[[], list[pl.Callback]] = list,
    repeats: bool = False,
    first: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """A run that is resumed from any of ``points`` records what is left of the run that was not interrupted.

    Args:
        callbacks: make callbacks of the runs.
        repeats: whether batches before the save may be repeated, inside of an accumulation window.
        first: options of the run that saves, if it is not the one to compare with.
    """
    whole, saver = make(), Saver(folder, points)
    want = run(whole, 1, [*callbacks(), saver], **{**options, **(first or {})})
    if first is not None:
        whole = make()
        want = run(whole, 1, callbacks(), **options)
    assert saver.reached.keys() == set(points)
    for point in points:
        model = make()
        got = run(model, 2, callbacks(), folder / f"{point}.ckpt", **options)
        begin = saver.reached[point]
        if repeats or first is not None:
            begin = len(whole.events) - len(model.events)
        assert model.events == whole.events[begin:], f"{point}: other events"
        assert got == want, f"{point}: another end"


def check_a_save_in_the_rest(
    folder: Path, make: Callable[[], Recorded], point: str, again: str, **options: Any
) -> None:
    """A run that is resumed from a run that was itself resumed, and that saved before it read a batch.

    Args:
        point: where the first run saves.
        again: where the resumed run saves, while it does what was left of the iteration.
    """
    whole, saver = make(), Saver(folder, [point])
    want = run(whole, 1, [saver], **options)
    second, resaver = make(), Saver(folder / "again", [again])
    run(second, 2, [resaver], folder / f"{point}.ckpt", **options)
    assert not [event for event in second.events[: resaver.reached[again]] if event[0] == "batch"]
    model = make()
    got = run(model, 3, [], folder / "again" / f"{again}.ckpt", **options)
    assert model.events == whole.events[saver.reached[point] + resaver.reached[again] :], f"{point}, {again}: events"
    assert got == want, f"{point}, {again}: another end"
