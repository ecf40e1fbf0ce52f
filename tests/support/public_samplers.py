"""Samplers as widely used packages have them, written anew: what they keep, and when they change it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler


class Endless(Sampler[int]):
    """As detectron2's TrainingSampler: begins the same endless stream with each pass."""

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        self._size = count
        self._seed = 5
        self._rank = rank
        self._world_size = ranks

    def rows(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self._size, generator=generator)

    def _indices(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            yield from self.rows(generator).tolist()

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(self._indices(), self._rank, None, self._world_size)


class RepeatFactor(Endless):
    """As detectron2's RepeatFactorTrainingSampler: rounds by chance how often each row is in a pass."""

    def rows(self, generator: torch.Generator) -> Tensor:
        factors = torch.arange(self._size) % 3 * 0.4 + 0.7
        more = (torch.rand(self._size, generator=generator) < factors - factors.trunc()).int()
        rows = torch.arange(self._size).repeat_interleave(factors.int() + more)
        return rows[torch.randperm(len(rows), generator=generator)]


class GoesOn(Endless):
    """As mmengine's InfiniteSampler: keeps its stream in a generator function, and goes on with it in the next pass."""

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        super().__init__(count, rank, ranks)
        self.indices = itertools.islice(self._indices(), rank, None, ranks)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices

    def __len__(self) -> int:
        return self._size


class Consumed:
    """As Megatron's MegatronPretrainingRandomSampler: counts samples of all ranks, and goes on there.

    NeMo gives the count of its own checkpoint to a new one.
    """

    def __init__(self, count: int, batch: int, rank: int, ranks: int, consumed: int = 0) -> None:
        self.total_samples = count
        self.consumed_samples = consumed
        self.micro_batch_size = batch
        self.data_parallel_rank, self.data_parallel_size = rank, ranks

    def __len__(self) -> int:
        return self.total_samples // (self.micro_batch_size * self.data_parallel_size)

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch_size * self.data_parallel_size
        self.epoch, done = divmod(self.consumed_samples, self.total_samples // step * step)
        bucket = self.total_samples // step * self.micro_batch_size
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(bucket, generator=generator)[done // self.data_parallel_size :]
        for first in range(0, len(order), self.micro_batch_size):
            self.consumed_samples += step
            yield (order[first : first + self.micro_batch_size] + self.data_parallel_rank * bucket).tolist()


class Buckets(Sampler[Any]):
    """As lhotse's DynamicBucketingSampler: its own iterator, with a buffer, that resumes by reading up to its state."""

    def __init__(self, count: int, batch: int, rank: int, ranks: int) -> None:
        self.count = count
        self.batch = batch
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0
        self.given = 0
        self._just_restored = False
        self.rng: Any = None
        self._batches: Any = None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._just_restored = False
            self.given = 0
        self.epoch = epoch

    def _draw(self) -> Iterator[list[int]]:
        rows, buckets = iter(range(self.count)), [[], []]  # type: ignore[var-annotated]
        for row in itertools.islice(rows, 3 * self.batch):
            buckets[row % 2].append(row)
        while any(len(bucket) >= self.batch for bucket in buckets):
            full = [bucket for bucket in buckets if len(bucket) >= self.batch]
            bucket = self.rng.choice(full)
            yield [bucket.pop(self.rng.randrange(len(bucket))) for _ in range(self.batch)]
            for row in itertools.islice(rows, self.batch):
                buckets[row % 2].append(row)

    def __iter__(self) -> Buckets:
        if not self._just_restored:
            self.given = 0
            self.rng = random.Random(7 + self.epoch)
            self._batches = self._draw()
        return self

    def __next__(self) -> list[int]:
        self._just_restored = False
        batches = [next(self._batches) for _ in range(self.ranks)]
        self.given += 1
        return batches[self.rank]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, given = state.pop("epoch"), state.pop("given")
        assert not state
        iter(self)
        for _ in range(given):
            next(self)
        self._just_restored = True


class Repeats(Sampler[int]):
    """As timm's RepeatAugSampler: is told the epoch, and gives each row several times, on different ranks."""

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        self.count = count
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count // self.ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.count, generator=generator).repeat_interleave(3)
        return iter(order[self.rank :: self.ranks][: len(self)].tolist())


class Balanced(Sampler[int]):
    """As catalyst's BalanceClassSampler: draws from numpy's global generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        half = self.count // 2
        rows = [*np.random.choice(half, half), *(half + np.random.choice(half, half))]
        np.random.shuffle(rows)
        return iter(int(row) for row in rows)


class Epochs:
    """As fairseq's EpochBatchIterator: no DataLoader; counts epochs, and shuffles the batches of each by that count."""

    def __init__(self, dataset: Any, batch: int, rank: int, ranks: int) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.rank = rank
        self.ranks = ranks
        self.frozen_batches = tuple(tuple(range(first, first + batch)) for first in range(0, len(dataset), batch))
        self.iterations_in_epoch = 0

    def __len__(self) -> int:
        return len(self.frozen_batches) // self.ranks

    def _read(self, offset: int) -> Iterator[Tensor]:
        batches = list(self.frozen_batches)
        np.random.RandomState(self.epoch).shuffle(batches)
        self.iterations_in_epoch = offset
        for batch in batches[self.rank :: self.ranks][offset:]:
            self.iterations_in_epoch += 1
            yield torch.stack([self.dataset[index] for index in batch])

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return self._read(0)


class EpochsWithState(Epochs):
    """The same with its ``state_dict``: of the end of an epoch it is the begin of the next one."""

    offset = 0

    def __iter__(self) -> Iterator[Tensor]:
        offset, self.offset = self.offset, 0
        self.epoch += 0 if offset else 1
        return self._read(offset)

    def state_dict(self) -> dict[str, Any]:
        ended = self.iterations_in_epoch == len(self)
        return {"epoch": self.epoch, "iterations_in_epoch": 0 if ended else self.iterations_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.offset = state["epoch"], state["iterations_in_epoch"]
