"""A run that is resumed from a checkpoint goes on, bit by bit, like one that was never interrupted."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lt_zero import ZeroStrategy
from lt_zero.checkpoint.errors import CheckpointError
from lt_zero.progress import Progress
from tests.lightning_tools import QUIET, torchrun_env
from tests.pool import Pool

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


class Takes(Model):
    """Reads from the iterator itself, two batches in a step."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        (first, _, _), (second, _, _) = next(dataloader_iter), next(dataloader_iter)
        return super().training_step(torch.cat([first, second]), 0)


class Steps(Model):
    """Asks for the number of steps, which reads the loaders before anything is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Validated(Model):
    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(6), batch_size=3)


class Saver(pl.Callback):
    """Saves after each batch, as ModelCheckpoint does, and wherever else it may."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.where = folder, where
        self.seen: list[int] = []  # batches, at each save

    def save(self, trainer: pl.Trainer, where: str) -> None:
        if where == self.where:
            self.seen.append(len(trainer.lightning_module.seen))
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


def _trainer(**options: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore")
    if dist.is_initialized() and dist.get_world_size() > 1:
        os.environ.update(torchrun_env())
        options["devices"] = dist.get_world_size()
    else:
        options["use_distributed_sampler"] = False  # Lightning would put one in with one rank too
    block = {"stage": 2, "stage3_param_persistence_threshold": 0}
    how = {"format": options.pop("format", "auto")}
    strategy = ZeroStrategy(config={"zero_optimization": block, "checkpoint": how})
    return pl.Trainer(**{**QUIET, "devices": 1, "strategy": strategy, "num_sanity_val_steps": 1, **options})


def _fit(model: Model, seed: int, ckpt: Path | None = None, **options: Any) -> tuple[list[Any], list[Any]]:
    """What a run has seen, and its weights."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    trainer = _trainer(**options)
    trainer.fit(model, ckpt_path=ckpt)
    state = trainer.strategy.full_state_dict()
    return model.seen, [value.tolist() for value in state.values()]


def _compare(make: Callable[[], Model], folder: Path, where: str = "batch", stops: Any = None, **options: Any) -> None:
    """A run that is resumed from checkpoints of another, with other random numbers, ends like that one.

    By default from one inside of an epoch, at its end, and inside of the next.
    """
    options = {"max_epochs": 2, **options}
    saver = Saver(folder, where)
    want_seen, want = _fit(make(), 1, callbacks=[saver], **options)
    count = len(saver.seen)
    for number in stops or sorted({(count + 2) // 4, count // 2, count // 2 + 2} & {*range(1, count + 1)}):
        seen, got = _fit(make(), 2, folder / f"{number}.ckpt", **options)
        before, begin = saver.seen[number - 1], len(want_seen) - len(seen)
        window = options.get("accumulate_grad_batches", 1)
        assert before - window < begin <= before, f"other batches after {number} of {count}"
        assert seen == want_seen[begin:], f"other data after {number} of {count}"
        assert got == want, f"other weights after {number} of {count}"


def _loader(dataset: Any = None, **options: Any) -> DataLoader[Tensor]:
    data = Noisy() if dataset is None else dataset
    shuffle = None if isinstance(data, IterableDataset) else True
    return DataLoader(data, **{"batch_size": 4, "shuffle": shuffle, **options})


CASES: dict[str, Callable[[], Any]] = {
    "shuffled": _loader,
    "seeded by epoch": lambda: _loader(
        shuffle=None, sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0, shuffle=True)
    ),
    "samples": lambda: _loader(batch_size=None),
    "replacement": lambda: _loader(shuffle=None, sampler=RandomSampler(Noisy(), replacement=True, num_samples=40)),
    "own generator": lambda: _loader(generator=torch.Generator().manual_seed(5)),
    "sampler's generator": lambda: _loader(
        shuffle=None, sampler=RandomSampler(Noisy(), generator=torch.Generator().manual_seed(6))
    ),
    "iterable": lambda: _loader(Stream()),
    "stateful": lambda: Remembering(Noisy(), batch_size=4, shuffle=True),
    "dict": lambda: {"a": _loader(), "b": _loader(Noisy(10))},
    "min_size": lambda: CombinedLoader({"a": _loader(), "b": _loader(Noisy(17))}, "min_size"),
    "max_size": lambda: CombinedLoader({"b": _loader(Noisy(10)), "a": _loader()}, "max_size"),
    "iterables": lambda: {"a": _loader(Stream(9)), "b": _loader(Stream())},
}


def test_saving_changes_nothing(tmp_path: Path) -> None:
    options = {"max_epochs": 2, "val_check_interval": 3}
    assert _fit(Validated(_loader), 1, callbacks=[Saver(tmp_path, "batch")], **options) == _fit(
        Validated(_loader), 1, **options
    )
    saved = torch.load(tmp_path / "3.ckpt" / "meta.pt", weights_only=True)  # plain containers and tensors
    assert len(saved["lt_zero_progress"]) == 1


def test_otherwise_it_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: as Lightning does it, the epoch begins again and the random numbers are others."""
    monkeypatch.setattr(Progress, "load", lambda *args: None)
    for case in ("shuffled", "iterable"):
        with pytest.raises(AssertionError, match="other (data|batches|weights)"):
            _compare(lambda case=case: Model(CASES[case]), tmp_path)  # type: ignore[misc]


@pytest.mark.parametrize("case", CASES)
def test_after_each_batch(case: str, tmp_path: Path) -> None:
    _compare(lambda: Model(CASES[case]), tmp_path)


@pytest.mark.parametrize("where", ["epoch", "end"])
@pytest.mark.parametrize("case", ["shuffled", "dict", "iterable", "stateful"])
def test_at_the_end_of_an_epoch(case: str, where: str, tmp_path: Path) -> None:
    _compare(lambda: Model(CASES[case]), tmp_path, where)


@pytest.mark.parametrize("workers", [{}, {"persistent_workers": True}], ids=["workers", "persistent"])
def test_workers(workers: dict[str, Any], tmp_path: Path) -> None:
    stops = [2, 6] if workers else [2, 8]
    noise = 0.0 if workers else 0.1  # of workers that live on, the random numbers of earlier epochs are not known
    _compare(lambda: Model(lambda: _loader(Noisy(noise=noise), num_workers=2, **workers)), tmp_path, stops=stops)


def test_workers_iterable(tmp_path: Path) -> None:
    _compare(lambda: Model(lambda: _loader(Stream(), num_workers=2)), tmp_path, stops=[8])


@pytest.mark.parametrize("case", ["shuffled", "iterable", "dict", "iterables"])
def test_inside_a_window(case: str, tmp_path: Path) -> None:
    _compare(lambda: Model(CASES[case]), tmp_path, accumulate_grad_batches=4)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 4},
        {"overfit_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
        {"max_steps": 15, "max_epochs": -1},
        {"max_steps": 18, "max_epochs": -1},
        {"accumulate_grad_batches": 2, "max_steps": 8, "max_epochs": -1},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    _compare(lambda: Model(_loader), tmp_path, **options)


@pytest.mark.parametrize("where", ["batch", "validation"])
@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 3, "limit_val_batches": 1},
        {},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
    ],
    ids=str,
)
def test_with_validation(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    _compare(lambda: Validated(_loader), tmp_path, where, **options)


@pytest.mark.parametrize("case", ["shuffled", "iterable"])
def test_step_that_takes_the_iterator(case: str, tmp_path: Path) -> None:
    _compare(lambda: Takes(CASES[case]), tmp_path)


def test_steps_asked_for(tmp_path: Path) -> None:
    _compare(lambda: Steps(_loader), tmp_path)


@pytest.mark.parametrize("steps", [4, 6, 9, 12])
@pytest.mark.parametrize("case", ["shuffled", "iterable"])
def test_stopped_by_max_steps(case: str, steps: int, tmp_path: Path) -> None:
    want_seen, want = _fit(Model(CASES[case]), 1, max_steps=20)
    model = Model(CASES[case])
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = _trainer(max_steps=steps)
    first.fit(model)
    first.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    seen, got = _fit(Model(CASES[case]), 2, tmp_path / "x.ckpt", max_steps=20)
    assert model.seen + seen == want_seen
    assert got == want


def _ranks(stops: list[int], folder: Path) -> None:
    noise = 0.1 * (1 + dist.get_rank())
    _compare(
        lambda: Model(lambda: _loader(Noisy(27, noise), batch_size=3)),
        folder,
        stops=stops,
        accumulate_grad_batches=2,
    )


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _ranks, [3, 5], tmp_path)  # 5 batches in an epoch, steps after 2, 4 and 5


def _numbers(folder: Path, resume: bool) -> tuple[list[float], bytes]:
    """The samples that a rank has seen, and its generator's state."""
    model = Model(lambda: DataLoader(Noisy(48, 0.0), batch_size=2, shuffle=True))
    _fit(model, 3 + dist.get_rank(), folder / "x.ckpt" if resume else None, max_epochs=1, max_steps=99)
    return [row[0] for batch in model.seen for part in batch for row in part], bytes(torch.get_rng_state().tolist())


def _stop_early(folder: Path) -> list[float]:
    model = Model(lambda: DataLoader(Noisy(48, 0.0), batch_size=2, shuffle=True))
    torch.manual_seed(dist.get_rank())
    trainer = _trainer(max_steps=4)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "x.ckpt", weights_only=False)
    return [row[0] for batch in model.seen for part in batch for row in part]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_world_size(pool: Pool, before: int, after: int, tmp_path: Path) -> None:
    first = [number for seen in pool.run(before, _stop_early, tmp_path) for number in seen]
    results = pool.run(after, _numbers, tmp_path, True)
    rest = [number for seen, _ in results for number in seen]
    assert len({state for _, state in results}) == after  # every rank has random numbers of its own
    assert len(set(first)) == len(first) == 8 * before
    if 1 not in (before, after):  # one process shuffles otherwise than several
        missed = 48 - len(first) - len(rest)
        assert not set(first) & set(rest)
        assert 0 <= missed < 2 * after


class Shuffling(Stream):
    """Decides its order by the generator that dropout draws from."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.rand(WIDTH)


def _resumed_from(states: Any, tmp_path: Path, loader: Callable[[], Any] = _loader) -> None:
    _fit(Model(loader), 1, callbacks=[Saver(tmp_path, "batch")], max_epochs=1, format="full")
    checkpoint = torch.load(tmp_path / "2.ckpt", weights_only=False)
    checkpoint["lt_zero_progress"] = states(checkpoint["lt_zero_progress"])
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    trainer = _trainer(max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        trainer.fit(Model(loader), ckpt_path=tmp_path / "changed.ckpt")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: _loader(Shuffling()), r"DataLoader\(Shuffling\) draws from this process' random numbers \(torch\)"),
        (lambda: range(8), "range cannot be observed"),
    ],
    ids=["shuffles", "no object"],
)
def test_what_cannot_be_repeated_is_told(loader: Callable[[], Any], message: str, tmp_path: Path) -> None:
    class Any_(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(
                torch.full((2, WIDTH), float(batch)) if isinstance(batch, int) else batch, batch_idx
            )

    _fit(Any_(loader), 1, callbacks=[Saver(tmp_path, "batch")], max_epochs=1)
    trainer = _trainer(max_epochs=1)
    with pytest.warns(UserWarning, match=message):
        trainer.fit(Any_(loader), ckpt_path=tmp_path / "2.ckpt")


def test_nothing_is_told_of_what_is_repeated(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        for case in ("shuffled", "iterable", "dict"):
            _resumed_from(lambda states: states, tmp_path, CASES[case])
    assert not [str(warning.message) for warning in told if "training loader" in str(warning.message)]


def _spoil(*path: Any, value: Any = None) -> Callable[[Any], Any]:
    def change(states: Any) -> Any:
        place = states
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return states

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda states: [],
        lambda states: 3,
        _spoil(0, value="x"),
        _spoil(0, "version", value=7),
        _spoil(0, "back", value=-1),
        _spoil(0, "ended", value=None),
        _spoil(0, "now", value={}),
        _spoil(0, "now", "torch", value=torch.zeros(3)),
        _spoil(0, "states", 0, "python", "words", value=torch.zeros(5, dtype=torch.int64)),
        _spoil(0, "states", 0, "python", "words", value=torch.full((625,), -1)),
        _spoil(0, "states", 0, "numpy", "words", value=torch.full((624,), 2**40)),
        _spoil(0, "states", 0, "numpy", "position", value="x"),
        _spoil(0, "loaders", 0, "fetched", value=-3),
        _spoil(0, "loaders", 0, "unit", value=0),
        _spoil(0, "loaders", 0, value=None),
        _spoil(0, "loaders", 0, "start", value=5),
        _spoil(0, "loaders", 0, "generators", value=[1]),
    ],
)
def test_damaged_states_are_named(change: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lt_zero_progress"):
        _resumed_from(change, tmp_path)


class Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 7:
            raise ZeroDivisionError
        return loss


@pytest.mark.parametrize("case", ["shuffled", "iterable", "dict"])
def test_after_an_exception(case: str, tmp_path: Path) -> None:
    """The batch that was under way is read again, with the same random numbers."""
    want_seen, want = _fit(Model(CASES[case]), 1, max_epochs=3)
    model = Fails(CASES[case])
    callback = OnExceptionCheckpoint(tmp_path, "x")
    with pytest.raises(ZeroDivisionError):
        _fit(model, 1, max_epochs=3, callbacks=[callback], enable_checkpointing=True)
    seen, got = _fit(Model(CASES[case]), 2, tmp_path / "x.ckpt", max_epochs=3)
    assert model.seen[:7] + seen == want_seen
    assert got == want
