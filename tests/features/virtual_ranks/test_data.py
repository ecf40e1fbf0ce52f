"""Loaders of virtual ranks: workers, samplers of the user, iterable data sets, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

import lt_zero
from lt_zero import ConfigError
from tests.features.virtual_ranks.fits import COUNT, RANKS, Batch, Module, Rows, Run, by_round, check, fit, told
from tests.support.pool import Pool


class _With(Module):
    """Reads a loader that a function makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()


def _workers() -> Any:
    return DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=2)


def _own_distributed() -> Any:
    sampler = DistributedSampler(Rows(), dist.get_world_size(), dist.get_rank(), seed=3)
    return DataLoader(Rows(), batch_size=2, sampler=sampler)


def _weighted() -> Any:
    """Lightning wraps it, so that ranks share out one order, which it draws."""
    return DataLoader(Rows(), batch_size=2, sampler=WeightedRandomSampler([1.0 + n % 3 for n in range(45)], 45))


def _generator() -> Any:
    sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(3))
    return DataLoader(Rows(), batch_size=2, sampler=sampler, drop_last=True, generator=torch.Generator().manual_seed(4))


class Stream(IterableDataset[Batch]):
    """Has its part of the rows, or ``uneven`` parts."""

    def __init__(self, uneven: bool = False) -> None:
        self.uneven = uneven

    def __iter__(self) -> Iterator[Batch]:
        part, parts = lt_zero.data_part()
        rows = range(part, 45 if self.uneven else 48, parts)
        info = torch.utils.data.get_worker_info()
        chosen = rows if info is None else rows[info.id :: info.num_workers]
        for index in chosen:
            yield Rows()[index]


def _stream(workers: int = 0, uneven: bool = False) -> Any:
    return DataLoader(Stream(uneven), batch_size=2, num_workers=workers, drop_last=True)


def _stream_of_workers() -> Any:
    return _stream(2)


def _seen(make: Any, sampler: bool = True) -> Run:
    module = _With(make)
    fit(module, use_distributed_sampler=sampler)
    return told(module)


@pytest.fixture(scope="module")
def parents() -> Iterator[Pool]:
    """Ranks that may start workers."""
    ranks = Pool(limit=600, parents=True)
    yield ranks
    ranks.close()


WORKERS = {"workers": (_workers, True), "a stream of workers": (_stream_of_workers, True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", WORKERS)
def test_workers_read_the_same_at_any_number_of_ranks(parents: Pool, case: str) -> None:
    check({ranks: parents.run(ranks, _seen, *WORKERS[case]) for ranks in RANKS})


CASES = {
    "a DistributedSampler of the user": (_own_distributed, True),
    "a sampler that draws": (_weighted, True),
    "no division": (_generator, False),
    "a stream": (_stream, True),
}


@pytest.mark.parametrize("case", CASES)
def test_virtual_ranks_read_the_same_at_any_number_of_ranks(pool: Pool, case: str) -> None:
    runs = {ranks: pool.run(ranks, _seen, *CASES[case]) for ranks in RANKS}
    check(runs)
    if case != "no division":
        first = by_round(runs[1])[:COUNT]
        assert case == "a sampler that draws" or len({str(micro[1]) for micro in first}) == COUNT


def _uneven() -> str:
    with pytest.raises(ConfigError) as caught:
        fit(_With(lambda: _stream(uneven=True)))
    return str(caught.value)


def test_parts_of_different_lengths_are_an_error_on_all_ranks(pool: Pool) -> None:
    for ranks in (1, 2):
        assert all("virtual ranks have data of different lengths" in text for text in pool.run(ranks, _uneven))


class _Divides:
    """A sampler of the user that divides samples among ranks."""

    num_replicas = 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def _refused() -> list[str]:
    texts = []
    for make in (lambda: DataLoader(Rows(), sampler=_Divides()), _Divides):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            fit(_With(make), use_distributed_sampler=False)
        texts.append(str(caught.value))
    return texts


def test_loaders_whose_parts_are_not_known_are_refused(pool: Pool) -> None:
    (divides, no_loader), *_ = pool.run(2, _refused)
    assert "reproducible.virtual_ranks=6: _Divides divides samples among ranks by itself" in divides
    assert "reproducible.virtual_ranks=6: the data of a _Divides cannot be divided" in no_loader
