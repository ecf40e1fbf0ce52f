"""A run that is resumed from a checkpoint goes on, bit by bit, like one that was never interrupted."""

from __future__ import annotations

import gc
import inspect
import itertools
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, WeightedRandomSampler

from lt_zero.training.lightning.data_position.position import DataPosition, tracked
from tests.support.matrix import cover, only, only_rows
from tests.support.pool import Pool
from tests.support.progress_tools import (
    CASES,
    Model,
    Noisy,
    Saver,
    Stream,
    Validated,
    compare,
    fit,
    new_loader,
    new_trainer,
)
from tests.support.resumes import Stateful, seeded


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


class PassesBy(BatchSampler):
    """Passes by as many batches as Lightning has counted: Lightning alone begins the pass anew."""

    trainer: Any = None

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.trainer.fit_loop.epoch_loop.batch_progress.current.ready:
                yield batch


class PassesByAtOnce(PassesBy):
    """Looks at the counter when it is opened."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(BatchSampler.__iter__(self))
        return iter(batches[self.trainer.fit_loop.epoch_loop.batch_progress.current.ready :])


class GoesOnByItself(Model):
    """Gives its Trainer to the batch sampler, for which ``loaders`` is a class."""

    def train_dataloader(self) -> Any:
        data = Noisy()
        sampler = self.loaders(RandomSampler(data, generator=seeded()), 4, False)  # type: ignore[call-arg]
        sampler.trainer = self.trainer
        return DataLoader(data, batch_sampler=sampler)


class ShuffledStream(Stream):
    """Draws its order, from the random states of the process, when its first row is read."""

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(self.count).tolist():
            yield torch.full((4,), index / self.count)


class DrawsBatches(PassesBy):
    """Draws each batch out of what is left, from the random states of the process."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(self.sampler)
        for _ in range(len(self)):
            yield [left.pop(int(torch.randint(len(left), ()))) for _ in range(self.batch_size)]


class BeginsByStep(Model):
    """Leaves out the samples of the steps that were taken, as programs for plain Lightning do."""

    def train_dataloader(self) -> Any:
        rows = range(4 * self.trainer.global_step, 24)
        return DataLoader(Subset(Noisy(), rows), batch_size=4, num_workers=self.loaders())  # type: ignore[arg-type]


def rows(count: int) -> DataLoader[Tensor]:
    """Rows in their order."""
    return DataLoader(Subset(Noisy(), [index % 24 for index in range(count)]), batch_size=4)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    options = {"max_epochs": 2, "val_check_interval": 3}
    assert fit(Validated(new_loader), 1, callbacks=[Saver(tmp_path, "batch")], **options) == fit(
        Validated(new_loader), 1, **options
    )
    saved = torch.load(tmp_path / "3.ckpt" / "meta.pt", weights_only=True)  # plain containers and tensors
    assert len(saved["lt_zero_progress"]) == 1


def test_otherwise_it_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: as Lightning does it, the epoch begins again and the random numbers are others."""
    monkeypatch.setattr(DataPosition, "load", lambda *args: None)
    for case in ("shuffled", "iterable"):
        with pytest.raises(AssertionError, match="other (data|batches|weights)"):
            compare(lambda case=case: Model(CASES[case]), tmp_path, stops=[3])  # type: ignore[misc]


BATCHES = {
    "samples": 24,
    "replacement": 10,
    "min_size": 5,
    "stateful beside plain": 4,
}  # in an epoch; the others have 6
PLACES = {"inside": lambda count: count // 2, "end": lambda count: count, "in the next": lambda count: count + 1}


@pytest.mark.parametrize(("case", "place"), cover([*CASES], [*PLACES]))
def test_after_a_batch(case: str, place: str, tmp_path: Path) -> None:
    compare(lambda: Model(CASES[case]), tmp_path, stops=[PLACES[place](BATCHES.get(case, 6))])


@pytest.mark.parametrize(("case", "where"), cover(["shuffled", "dict", "iterable", "stateful"], ["epoch", "end"]))
def test_at_the_end_of_an_epoch(case: str, where: str, tmp_path: Path) -> None:
    compare(lambda: Model(CASES[case]), tmp_path, where)


@pytest.mark.parametrize("kind", [PassesBy, PassesByAtOnce])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["batches", "windows"])
def test_samplers_that_pass_by_what_was_counted(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    compare(lambda: GoesOnByItself(kind), tmp_path, stops=[3, 6, 11], **options)


def test_a_stream_that_draws_its_order_with_its_first_batch(tmp_path: Path) -> None:
    compare(lambda: Model(lambda: new_loader(ShuffledStream())), tmp_path, stops=[1, 3])


@pytest.mark.parametrize(
    ("make", "stop"),
    [
        (lambda: GoesOnByItself(DrawsBatches), 3),
        (lambda: BeginsByStep(lambda: 0), 4),
        pytest.param(lambda: BeginsByStep(lambda: 1), 2, marks=pytest.mark.slow),
    ],
    ids=["draws between batches", "begins so late that it ends", "workers"],
)
def test_another_order_is_told(make: Any, stop: int, tmp_path: Path) -> None:
    fit(make(), 1, callbacks=[Saver(tmp_path, "batch", [stop])], max_epochs=1)
    with pytest.raises(UserWarning, match=f"batch {stop} is another one now.*random numbers.*global_step"):
        fit(make(), 2, tmp_path / f"{stop}.ckpt", max_epochs=1)


@pytest.mark.parametrize(
    ("saved", "resumed", "sizes"),
    [
        (lambda: BeginsByStep(lambda: 0), lambda: BeginsByStep(lambda: 0), "24 samples at the checkpoint, and has 16"),
        (lambda: Model(lambda: rows(24)), lambda: Model(lambda: rows(32)), "24 samples at the checkpoint, and has 32"),
    ],
    ids=["begins by the step", "has grown"],
)
def test_another_number_of_samples_is_told(saved: Any, resumed: Any, sizes: str, tmp_path: Path) -> None:
    """The indices of the batches are the same."""
    fit(saved(), 1, callbacks=[Saver(tmp_path, "batch", [2])], max_epochs=1)
    with pytest.raises(UserWarning, match=f"had {sizes} now.*same.*global_step"):
        fit(resumed(), 2, tmp_path / "2.ckpt", max_epochs=1)


@pytest.mark.parametrize("workers", only([{}], [{}, {"persistent_workers": True}]), ids=["workers", "persistent"])
def test_workers(workers: dict[str, Any], tmp_path: Path) -> None:
    stops = [2, 6] if workers else [2, 8]
    noise = 0.0 if workers else 0.1  # of workers that live on, the random numbers of earlier epochs are not known
    compare(lambda: Model(lambda: new_loader(Noisy(noise=noise), num_workers=2, **workers)), tmp_path, stops=stops)


@pytest.mark.slow
def test_workers_with_a_sampler_that_has_a_generator(tmp_path: Path) -> None:
    def loader() -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(6)
        sampler = WeightedRandomSampler(torch.arange(1.0, 25.0), 24, generator=generator)
        return new_loader(shuffle=None, sampler=sampler, num_workers=2)

    compare(lambda: Model(loader), tmp_path, stops=[2, 6, 8])


def test_workers_iterable(tmp_path: Path) -> None:
    compare(lambda: Model(lambda: new_loader(Stream(), num_workers=2)), tmp_path, stops=[8])


@pytest.mark.parametrize("case", only(["shuffled", "iterables"], ["shuffled", "iterable", "dict", "iterables"]))
def test_inside_a_window(case: str, tmp_path: Path) -> None:
    compare(lambda: Model(CASES[case]), tmp_path, stops=[3, 8], accumulate_grad_batches=4)


OPTIONS: list[tuple[dict[str, Any], list[int]]] = [
    ({"limit_train_batches": 4}, [4, 6]),
    ({"overfit_batches": 3}, [2, 5]),
    ({"reload_dataloaders_every_n_epochs": 1}, [3, 6]),
    ({"max_steps": 15, "max_epochs": -1}, [7]),
    ({"max_steps": 18, "max_epochs": -1}, [9]),
    ({"accumulate_grad_batches": 2, "max_steps": 8, "max_epochs": -1}, [5]),
]


@pytest.mark.parametrize(("options", "stops"), only_rows([*OPTIONS[:3], OPTIONS[5]], OPTIONS), ids=str)
def test_options(options: dict[str, Any], stops: list[int], tmp_path: Path) -> None:
    compare(lambda: Model(new_loader), tmp_path, stops=stops, **options)


VALIDATIONS: list[dict[str, Any]] = [
    {"val_check_interval": 2},
    {"val_check_interval": 3, "limit_val_batches": 1},
    {},
    {"val_check_interval": 4, "check_val_every_n_epoch": None},
]


@pytest.mark.parametrize(
    ("options", "where"),
    only_rows(
        [(VALIDATIONS[1], "batch"), (VALIDATIONS[3], "validation")],
        itertools.product(VALIDATIONS, ["batch", "validation"]),
    ),
    ids=str,
)
def test_with_validation(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    stops = [4, 6] if where == "batch" else None
    compare(lambda: Validated(new_loader), tmp_path, where, stops, **options)


@pytest.mark.parametrize("case", only(["shuffled"], ["shuffled", "iterable"]))
def test_step_that_takes_the_iterator(case: str, tmp_path: Path) -> None:
    compare(lambda: Takes(CASES[case]), tmp_path, stops=[1, 4])  # two batches each, three in an epoch


def test_steps_asked_for(tmp_path: Path) -> None:
    compare(lambda: Steps(new_loader), tmp_path, stops=[3])


@pytest.mark.parametrize(
    ("case", "steps"),
    only_rows([("shuffled", 4), ("iterable", 12)], itertools.product(["shuffled", "iterable"], [4, 6, 9, 12])),
)
def test_stopped_by_max_steps(case: str, steps: int, tmp_path: Path) -> None:
    want_seen, want = fit(Model(CASES[case]), 1, max_steps=20)
    model = Model(CASES[case])
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = new_trainer(max_steps=steps)
    first.fit(model)
    first.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    seen, got = fit(Model(CASES[case]), 2, tmp_path / "x.ckpt", max_steps=20)
    assert model.seen + seen == want_seen
    assert got == want


def _ranks(stops: list[int], folder: Path) -> None:
    noise = 0.1 * (1 + dist.get_rank())
    compare(
        lambda: Model(lambda: new_loader(Noisy(27, noise), batch_size=3)),
        folder,
        stops=stops,
        accumulate_grad_batches=2,
    )


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _ranks, [3, 5], tmp_path)  # 5 batches in an epoch, steps after 2, 4 and 5


def _numbers(folder: Path, resume: bool) -> tuple[list[float], bytes]:
    """The samples that a rank has seen, and its generator's state."""
    model = Model(lambda: DataLoader(Noisy(48, 0.0), batch_size=2, shuffle=True))
    fit(model, 3 + dist.get_rank(), folder / "x.ckpt" if resume else None, max_epochs=1, max_steps=99)
    return [row[0] for batch in model.seen for part in batch for row in part], bytes(torch.get_rng_state().tolist())


def _stop_early(folder: Path, steps: int = 4, resume: bool = False) -> list[float]:
    model = Model(lambda: DataLoader(Noisy(48, 0.0), batch_size=2, shuffle=True))
    torch.manual_seed(dist.get_rank())
    trainer = new_trainer(max_steps=steps)
    trainer.fit(model, ckpt_path=folder / "x.ckpt" if resume else None)
    trainer.save_checkpoint(folder / "x.ckpt", weights_only=False)
    return [row[0] for batch in model.seen for part in batch for row in part]


@pytest.mark.parametrize(("before", "after"), only_rows([(2, 1), (2, 3)], [(1, 2), (2, 1), (2, 3), (3, 2)]))
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


def _other_ranks(folder: Path, kinds: list[str], resume: bool) -> list[tuple[list[int], list[str]]]:
    """The numbers of the samples that a rank has seen of each kind of loader, and warnings of the loader."""
    found = []
    for kind in kinds:
        model = Model(OTHER_RANKS[kind])
        trainer = new_trainer(max_epochs=1, max_steps=99 if resume else 4, use_distributed_sampler=kind != "own order")
        path = folder / f"{kind}.ckpt"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(model, ckpt_path=path if resume else None)
        if not resume:
            trainer.save_checkpoint(path, weights_only=False)
        texts = [str(warning.message) for warning in told if "The training loader" in str(warning.message)]
        found.append(([round(row[0] * 48) for batch in model.seen for part in batch for row in part], texts))
    return found


OTHER_RANKS: dict[str, Callable[[], Any]] = {
    "stateful": lambda: Stateful(Noisy(48, 0.0), batch_size=2, shuffle=True),
    "weighted": lambda: new_loader(
        Noisy(48, 0.0), batch_size=2, shuffle=None, sampler=RandomSampler(Noisy(48), generator=seeded())
    ),
    "in order": lambda: DataLoader(Noisy(48, 0.0), batch_size=2),
    "stream": lambda: DataLoader(Stream(48), batch_size=2),
    "own order": lambda: DataLoader(Noisy(48, 0.0), batch_size=2, shuffle=True),
}


@pytest.mark.parametrize(("before", "after"), only_rows([(2, 3)], [(2, 3), (3, 2), (1, 2), (2, 1)]))
def test_loaders_on_another_number_of_ranks_go_on_or_are_named(
    pool: Pool, before: int, after: int, tmp_path: Path
) -> None:
    kinds = [*OTHER_RANKS]
    first = pool.run(before, _other_ranks, tmp_path, kinds, False)
    second = pool.run(after, _other_ranks, tmp_path, kinds, True)
    # One process orders samples otherwise than Lightning's DistributedSampler, which always shuffles.
    shared = set[str]() if 1 in (before, after) else {"in order", "stateful", "weighted"}
    for number, kind in enumerate(kinds):
        told = second[0][number][1]
        assert [f"goes on with {after} ranks" in text for text in told] == ([] if kind in shared else [True]), kind
        seen = [row for rank in first + second for row in rank[number][0]]
        if kind in shared:
            assert len(seen) == len(set(seen)) > 48 - 2 * after, kind


def test_saved_again_on_another_world_size(pool: Pool, tmp_path: Path) -> None:
    """The second resume, on the same ranks as the first one, repeats no batch and misses none."""
    first = [number for seen in pool.run(2, _stop_early, tmp_path) for number in seen]
    second = [number for seen in pool.run(3, _stop_early, tmp_path, 5, True) for number in seen]
    rest = [number for seen, _ in pool.run(3, _numbers, tmp_path, True) for number in seen]
    assert (len(first), len(second), len(rest)) == (4 * 4, 6, 48 - 3 * 6 - 6)
    assert len({*first, *second, *rest}) == len(first) + len(second) + len(rest)


class Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 7:
            raise ZeroDivisionError
        return loss


@pytest.mark.parametrize("case", only(["iterable"], ["shuffled", "iterable", "dict"]))
def test_after_an_exception(case: str, tmp_path: Path) -> None:
    """The batch that was under way is read again, with the same random numbers."""
    want_seen, want = fit(Model(CASES[case]), 1, max_epochs=3)
    model = Fails(CASES[case])
    callback = OnExceptionCheckpoint(tmp_path, "x")
    with pytest.raises(ZeroDivisionError):
        fit(model, 1, max_epochs=3, callbacks=[callback], enable_checkpointing=True)
    seen, got = fit(Model(CASES[case]), 2, tmp_path / "x.ckpt", max_epochs=3)
    assert model.seen[:7] + seen == want_seen
    assert got == want


def test_a_loader_keeps_its_slots() -> None:
    class Counted(DataLoader[Any]):
        __slots__ = ("passes",)

        def __iter__(self) -> Any:
            self.passes += 1
            return super().__iter__()

    loader = Counted(range(3))
    loader.passes = 0
    clone: Any = tracked(loader, lambda make: make())
    assert [int(batch) for batch in clone] == [0, 1, 2]
    assert (loader.passes, clone.passes) == (1, 1)


def test_a_loader_is_freed_after_somebody_has_looked_at_its_attributes() -> None:
    """Python 3.12 keeps the classes of all objects that ``inspect.getattr_static`` has seen."""

    class Owner:
        def open(self, make: Any) -> Any:
            return make()

    owner = Owner()
    loader = tracked(DataLoader(torch.arange(3)), owner.open)
    assert isinstance(loader, DataLoader)
    assert [int(batch) for batch in loader] == [0, 1, 2]
    inspect.getattr_static(loader, "state_dict", None)
    alive = weakref.ref(owner)
    del loader, owner
    gc.collect()
    assert alive() is None
