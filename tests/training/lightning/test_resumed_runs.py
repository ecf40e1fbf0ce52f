"""A resumed run shows what the run that was not interrupted shows: samples, losses, rates, counters, hooks and logs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, WeightedRandomSampler

from tests.support.matrix import only
from tests.support.pool import Pool
from tests.support.resumed_runs import ROWS, Recorded, Rows, Stream, check_a_save_in_the_rest, check_resumes


def _sized() -> Any:
    return DataLoader(Rows(), batch_size=4, shuffle=True)


def _stream() -> Any:
    return DataLoader(Stream(), batch_size=4)


def _plateau(monitor: str, interval: str = "epoch") -> Callable[[Any], Any]:
    """A schedule that multiplies the rate at each of its steps, whatever the metric does."""

    def schedule(optimizer: Any) -> Any:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"scheduler": plateau, "monitor": monitor, "interval": interval, "strict": False}

    return schedule


# ---- what is left of the iteration -----------------------------------------------------------------------------------

LOOPS: dict[str, tuple[Callable[[], Recorded], list[str], dict[str, Any]]] = {
    "loss plateau": (partial(Recorded, _sized, _plateau("loss_epoch")), ["b2", "e1"], {"max_epochs": 2}),
    "stopping": (
        partial(Recorded, _stream, validated=True),
        ["b3", "v1"],
        {"max_epochs": 2, "callbacks": lambda: [EarlyStopping("v")]},
    ),
    "steps": (partial(Recorded, _sized), ["e1"], {"max_epochs": -1, "max_steps": 5}),
    "sized": (partial(Recorded, _sized), ["b1", "b2", "b3", "b5", "b6", "e1", "e2"], {}),
    "stream": (partial(Recorded, _stream), ["b1", "b2", "b3", "b5", "b6", "e1", "e2"], {}),
    "validated": (partial(Recorded, _sized, validated=True), ["b2", "b3", "b6", "v1", "v2", "e1"], {}),
    "validated stream": (partial(Recorded, _stream, validated=True), ["b2", "b3", "b6", "v1", "v2", "e1"], {}),
    "validated often": (
        partial(Recorded, _sized, validated=True),
        ["b1", "b2", "b3", "v1", "v2", "v3", "e1"],
        {"val_check_interval": 1},
    ),
    "validated across epochs": (
        partial(Recorded, _sized, validated=True),
        ["b2", "b4", "v1", "v2", "e1"],
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
    ),
    "validation plateau": (
        partial(Recorded, _sized, _plateau("v"), validated=True),
        ["b2", "b3", "v1", "v2", "e1", "e2"],
        {},
    ),
    "step plateau": (
        partial(Recorded, _sized, _plateau("v", "step"), validated=True),
        ["b1", "b2", "b3", "v1", "v2", "e1", "e2"],
        {"val_check_interval": 2},
    ),
    "stopping between": (
        partial(Recorded, _sized, validated=True),
        ["b1", "b2", "v1", "v2", "e1"],
        {"val_check_interval": 1, "callbacks": lambda: [EarlyStopping("v", patience=2, min_delta=10.0)]},
    ),
    "steps stream": (partial(Recorded, _stream), ["b2", "b3", "b5", "e1", "e2"], {"max_epochs": -1, "max_steps": 8}),
    "steps validated": (
        partial(Recorded, _sized, validated=True),
        ["b3", "b4", "v1", "e1", "e2"],
        {"max_epochs": -1, "max_steps": 8},
    ),
    "ended by steps": (partial(Recorded, _sized), ["e2"], {"first": {"max_steps": 4}}),
    "ended by steps, more steps": (
        partial(Recorded, _sized),
        ["e2"],
        {"first": {"max_steps": 4}, "max_epochs": -1, "max_steps": 8},
    ),
    "window": (
        partial(Recorded, _sized, validated=True),
        ["b1", "b2", "b3", "b4", "e1"],
        {"accumulate_grad_batches": 2, "repeats": True},
    ),
    "one file": (
        partial(Recorded, _sized, _plateau("v"), validated=True),
        ["b2", "v1", "e1"],
        {"format": "full", "stage": 1},
    ),
}


def _check_loops(name: str, folder: Path) -> None:
    make, points, options = LOOPS[name]
    check_resumes(folder, make, points, **options)


@pytest.mark.parametrize("name", only(["loss plateau", "stopping", "steps"], LOOPS))
def test_what_was_left_of_the_iteration_is_done(pool: Pool, name: str, tmp_path: Path) -> None:
    pool.run(2, _check_loops, name, tmp_path)


def _check_saves_in_the_rest(folder: Path) -> None:
    often: dict[str, Any] = {"val_check_interval": 1, "max_epochs": 2}
    for name, loader, point, again, options in (
        ("in the epoch", _sized, "b1", "v1", often),
        ("at its end", _sized, "b3", "v1", {"max_epochs": 2}),
        ("after it", _sized, "b3", "e1", {"max_epochs": 2}),
        ("stream", _stream, "b3", "v1", {"max_epochs": 2}),
        ("own state", LOADERS["weighted"][0], "b2", "v1", often),
    ):
        (folder / name).mkdir(exist_ok=True)
        check_a_save_in_the_rest(folder / name, partial(Recorded, loader, validated=True), point, again, **options)


@pytest.mark.slow
def test_a_resumed_run_saves_before_it_reads_a_batch(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _check_saves_in_the_rest, tmp_path)


# ---- private state of samplers and data ------------------------------------------------------------------------------


def _seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Batches(Sampler[list[int]]):
    """Batches of this rank, from an order of all rows for each pass."""

    def order(self) -> list[int]:
        raise NotImplementedError

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        order = self.order()
        for first in range(dist.get_rank() * 4, ROWS, 4 * dist.get_world_size()):
            yield order[first : first + 4]


class Drawn(Batches):
    """Draws the order from a generator: numpy's old or new one."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def order(self) -> list[int]:
        return [int(index) for index in self.generator.permutation(ROWS)]


class Late(Batches):
    """Makes its generator with the first pass."""

    generator: torch.Generator | None = None

    def __init__(self) -> None:
        self.generator = None

    def order(self) -> list[int]:
        if self.generator is None:
            self.generator = _seeded()
        return list(torch.randperm(ROWS, generator=self.generator))


class Counting(Batches):
    """Seeds a generator with the number of the pass."""

    def __init__(self) -> None:
        self.passes = 0

    def order(self) -> list[int]:
        self.passes += 1
        return [int(index) for index in torch.randperm(ROWS, generator=_seeded(self.passes))]


class Shuffling(Batches):
    """Shuffles its order in place with the generator of the process, which is the same on all ranks."""

    def __init__(self) -> None:
        self.rows = list(range(ROWS))

    def order(self) -> list[int]:
        random.shuffle(self.rows)
        return self.rows


class Telling(Batches):
    """Hides its count of passes where no walk finds it, but tells it."""

    def __init__(self) -> None:
        counts = {"passes": 0}
        self.counts = lambda: counts

    def order(self) -> list[int]:
        self.counts()["passes"] += 1
        return [int(index) for index in torch.randperm(ROWS, generator=_seeded(self.counts()["passes"]))]

    def state_dict(self) -> dict[str, int]:
        return dict(self.counts())

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts().update(state)


class Reseeded(Drawn):
    """Is told the epoch by a callback."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = np.random.default_rng(epoch)


class TellsEpoch(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        loader.batch_sampler.set_epoch(trainer.current_epoch)


class Wrapping(Sampler[int]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        return iter(list(self.sampler))


class Noisy(Rows):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.tensor([0.0, float(self.generator.normal()), 0.0])


class Shuffled(Stream):
    """Shuffles with a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(4)

    def order(self) -> list[int]:
        order = super().order()
        self.generator.shuffle(order)
        return order


class Counted(Stream):
    def __init__(self) -> None:
        self.passes = 0

    def order(self) -> list[int]:
        self.passes += 1
        return [int(index) for index in torch.randperm(ROWS, generator=_seeded(self.passes))]


class Plain(Counting):
    """No DataLoader: collates the batches itself."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield torch.stack([Rows()[index] for index in batch])


def _weighted() -> Any:
    return WeightedRandomSampler(torch.arange(1.0, 1.0 + ROWS), ROWS, generator=_seeded())


def _sampled(sampler: Any) -> Any:
    return DataLoader(Rows(), batch_size=4, sampler=sampler)


OWN = {"use_distributed_sampler": False}
LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "weighted": (lambda: _sampled(_weighted()), {}),
    "wrapped": (lambda: _sampled(Wrapping(Wrapping(_weighted()))), {}),
    "subset": (lambda: _sampled(SubsetRandomSampler(range(ROWS), generator=_seeded())), {}),
    "numpy": (lambda: DataLoader(Rows(), batch_sampler=Drawn(np.random.default_rng(5))), OWN),
    "old numpy": (lambda: DataLoader(Rows(), batch_sampler=Drawn(np.random.RandomState(5))), OWN),
    "late": (lambda: DataLoader(Rows(), batch_sampler=Late()), OWN),
    "counting": (lambda: DataLoader(Rows(), batch_sampler=Counting()), OWN),
    "in place": (lambda: DataLoader(Rows(), batch_sampler=Shuffling()), OWN),
    "telling": (lambda: DataLoader(Rows(), batch_sampler=Telling()), OWN),
    "reseeded": (
        lambda: DataLoader(Rows(), batch_sampler=Reseeded(np.random.default_rng(0))),
        {**OWN, "callbacks": lambda: [TellsEpoch()]},
    ),
    "noise": (lambda: DataLoader(Noisy(), batch_size=4, shuffle=True), {}),
    "stream": (lambda: DataLoader(Shuffled(), batch_size=4), {}),
    "counted stream": (lambda: DataLoader(Counted(), batch_size=4), {}),
    "plain": (Plain, {}),
}


def _check_loaders(names: list[str], points: list[str], folder: Path, **options: Any) -> None:
    for name in names:
        make, more = LOADERS[name]
        (folder / name).mkdir(exist_ok=True)
        check_resumes(folder / name, lambda make=make: Recorded(make), points, **options, **more)  # type: ignore[misc]


def _check_noise(folder: Path) -> None:
    check_resumes(
        folder,
        lambda: Recorded(lambda: DataLoader(Noisy(), batch_size=2, shuffle=True)),
        ["b1", "b3", "b6", "e1"],
        accumulate_grad_batches=4,
        repeats=True,
    )


def test_samplers_go_on_with_their_private_state(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, partial(_check_loaders, max_epochs=2), ["in place"], ["e1"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_go_on_with_their_private_state(pool: Pool, name: str, tmp_path: Path) -> None:
    pool.run(2, _check_loaders, [name], ["b2", "b3", "b5", "e1", "e2"], tmp_path)


@pytest.mark.slow
def test_noise_of_repeated_batches_is_repeated(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _check_noise, tmp_path)
