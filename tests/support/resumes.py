"""Runs of several ranks that are saved and resumed: the same samples, losses, rates, weights and counters, bit for bit.

A table of loaders is crossed with points. "bN" is a checkpoint saved after batch N, counted over epochs; "eN" one saved
in ``on_train_epoch_end`` of epoch N. A resumed run begins with other random states and with new loaders.
"""

from __future__ import annotations

import copy
import io
import itertools
import operator
import os
import random
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from tests.support.progress_tools import WIDTH, Model, new_trainer
from tests.support.public_samplers import (
    Balanced,
    Buckets,
    Consumed,
    Endless,
    Epochs,
    EpochsWithState,
    RepeatFactor,
    Repeats,
)

BATCH = 2


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Rows(Dataset[Tensor]):
    """Numbered rows; the first element of a row is its number, the others have noise of all three generators."""

    def __init__(self, count: int, first: int = 0, noise: float = 0.05) -> None:
        self.count = count
        self.first = first
        self.noise = noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        row = torch.full((WIDTH,), self.noise * noise)
        row[0] = (self.first + index) / 100
        return row


class Noisy(Rows):
    """Rows with noise from a generator of their own."""

    def __init__(self, count: int, first: int = 0, noise: float = 0.05) -> None:
        super().__init__(count, first, noise)
        self.generator = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.noise * float(self.generator.normal())


class Numbers(IterableDataset[Tensor]):
    """Rows of unknown number, shared out among ranks and workers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rank = _rank()
        self.world = _ranks()

    def order(self) -> Sequence[int]:
        return range(self.count)

    def own(self) -> Sequence[int]:
        """The numbers of this rank and worker, in order."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        return self.order()[self.rank * workers + worker :: self.world * workers]

    def __iter__(self) -> Iterator[Tensor]:
        for number in self.own():
            yield torch.full((WIDTH,), number / 100)


class ByEpoch(Numbers):
    """Shuffled by an epoch that the user's callback sets, as iterable datasets of Hugging Face."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def order(self) -> Sequence[int]:
        return random.Random(7 + self._epoch).sample(range(self.count), self.count)


class Placed(ByEpoch):
    """One whose iterator goes on where the state of the dataset says."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        start, self.place = self.place, 0
        for number in self.own()[start:]:
            start += 1
            self.place = start
            yield torch.full((WIDTH,), number / 100)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self._epoch = state["place"], state["epoch"]


class _Pass(Iterator[Any]):
    """A pass of a loader that resumes by itself; batches that were given before are passed by at the first read."""

    def __init__(self, loader: Stateful, open: Callable[[], Iterator[Any]], state: dict[str, Any] | None) -> None:
        self.generator = loader.sampler_generator.get_state() if state is None else state["generator"]
        loader.sampler_generator.set_state(self.generator)
        self.given = self._behind = state["given"] if state is not None else 0
        self.over = bool(state is not None and state["over"])
        self._loader, self._workers = loader, loader.num_workers > 0
        self._batches: Iterator[Any] = open() if self._workers else iter(loader.batch_sampler)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        for _ in range(self._behind):
            next(self._batches)
        self._behind = 0
        try:
            batch = next(self._batches)
        except StopIteration:
            self.over = True
            raise
        self.given += 1
        return batch if self._workers else torch.stack([self._loader.dataset[index] for index in batch])


class Stateful(DataLoader[Tensor]):
    """A loader that resumes by itself as torchdata's: a loaded state waits for the next pass, which is lazy.

    As there, asking a loader without a pass for its state begins one, and a state of a pass that is over is passed by.
    """

    _pass: _Pass | None = None
    _loaded: dict[str, Any] | None = None
    _begun = False

    @property
    def sampler_generator(self) -> torch.Generator:
        """Of the order, which is no matter of the process' random states."""
        if getattr(self.sampler, "generator", 0) is None:
            self.sampler.generator = torch.Generator().manual_seed(1)  # type: ignore[attr-defined]
        return getattr(self.sampler, "generator", None) or torch.Generator()

    def _new_pass(self) -> _Pass:
        state, self._loaded = self._loaded, None
        return _Pass(self, super().__iter__, state)

    def __iter__(self) -> Any:
        if self._begun:
            self._begun = False
        else:
            self._pass = self._new_pass()
        assert self._pass is not None
        if self._pass.over:
            self._pass = self._new_pass()
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        if self._pass is None:
            self._pass, self._begun = self._new_pass(), True
        state = {"given": self._pass.given, "over": self._pass.over, "generator": self._pass.generator}
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pass = None
        self._begun = False
        self._loaded = state


class Reopening(Stateful):
    """One that opens its sampler, as torchdata's, again and again: twice for each pass, four times for a loaded one."""

    def _new_pass(self) -> _Pass:
        for _ in range(1 if self._loaded is None else 3):
            iter(self.sampler)
        return super()._new_pass()


class Forgetful(Stateful):
    """One that forgets its place when Lightning takes its iterator away at the end of a run, as torchdata's."""

    @property
    def _iterator(self) -> Any:
        return self._pass

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._pass = value


class Restoring(DataLoader[Tensor]):
    """A loader that restores what its sampler counts, as those of Megatron do."""

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.sampler.consumed}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.consumed = state["consumed"]  # type: ignore[attr-defined]


class Late(DataLoader[Tensor]):
    """A loader as litdata's: opened with its first batch. Passes go on from a state until one is read to its end."""

    __module__ = "litdata.stand_in"
    given = 0
    restore = False

    def __iter__(self) -> Any:
        if not self.restore:
            self.given = 0
        for batch in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch
        self.restore = False

    def __len__(self) -> int:
        return len(self.dataset.own()) // BATCH  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.restore = state["given"], True


class _Counted(Iterator[Any]):
    __module__ = "torchdata.stand_in"

    def __init__(self, batches: Iterator[Any], given: int) -> None:
        self._batches = batches
        self._num_yielded = given
        for _ in range(given):
            next(self)

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._num_yielded += 1
        return batch


class CountingTwice(DataLoader[Tensor]):
    """A loader as torchdata's of an iterable without a state: what a resumed pass reads again is counted twice."""

    _iterator: Any = None
    _loaded = 0

    def __iter__(self) -> Any:
        self._iterator = _Counted(super().__iter__(), self._loaded)
        self._loaded = 0
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        return {"_num_yielded": self._iterator._num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["_num_yielded"]


class Counting(Sampler[int]):
    """Seeds a generator with the number of its pass."""

    def __init__(self, count: int) -> None:
        self.count, self.passes = count, 0

    def __len__(self) -> int:
        return self.count

    def order(self) -> list[int]:
        self.passes += 1
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.passes)).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class CountingInSlots(Counting):
    """Keeps its count where the attributes of objects do not show it."""

    __slots__ = ("passes",)


class CountingLate(Counting):
    """Counts a pass, and draws its order, when the first number is read."""

    def __iter__(self) -> Iterator[int]:
        yield from self.order()


class Consuming(Counting):
    """Counts the numbers that were read, and goes on there."""

    consumed = 0

    def __iter__(self) -> Iterator[int]:
        epoch, begin = divmod(self.consumed, self.count)
        for number in random.Random(epoch).sample(range(self.count), self.count)[begin:]:
            self.consumed += 1
            yield number


class Named(Counting):
    """Asks for its own class."""

    def __iter__(self) -> Iterator[int]:
        return super(self.__class__, self).__iter__()  # noqa: UP008


class Drawing(Counting):
    """Draws from the random states of the process."""

    def order(self) -> list[int]:
        return torch.randperm(self.count).tolist()


class Shuffling(Counting):
    """Shuffles its order in place."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rows = list(range(count))

    def order(self) -> list[int]:
        random.shuffle(self.rows)
        return list(self.rows)


class Around(Sampler[int]):
    """Reverses the order of another sampler in every second pass."""

    def __init__(self, count: int) -> None:
        self.sampler, self.turn = Counting(count), False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.turn = not self.turn
        return iter(list(self.sampler)[:: -1 if self.turn else 1])


class InBatches(Counting):
    """Gives batches."""

    def __len__(self) -> int:
        return self.count // BATCH

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        for first in range(0, self.count, BATCH):
            yield order[first : first + BATCH]


class Repeated(Numbers):
    """Rows in an order that a count of the passes decides."""

    passes = 0

    def order(self) -> Sequence[int]:
        self.passes += 1
        return random.Random(self.passes).sample(range(self.count), self.count)


class StatefulStream(DataLoader[Tensor]):
    """A loader of a dataset with a state, which is the loader's: its next pass goes on there."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.dataset.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["batches"])  # type: ignore[attr-defined]


class Run(Model):
    """A model that also remembers its losses and learning rates."""

    def __init__(self, loaders: Callable[[], Any]) -> None:
        super().__init__(loaders)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(dict(enumerate(tree_leaves(batch))), batch_idx)
        self.losses.append(loss.item())
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByEpochRun(Run):
    """One whose data depends on the epoch in which it is asked for."""

    def train_dataloader(self) -> Any:
        draws = torch.randperm(10).tolist()  # also the random states of that moment matter
        return rows(10, first=10 * self.trainer.current_epoch + draws[0])


class SetEpoch(pl.Callback):
    """Tells datasets the epoch, as users do for those of Hugging Face."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        for loader in trainer.fit_loop._combined_loader.flattened:  # type: ignore[union-attr]
            for part in (getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(trainer.current_epoch)


class SaveAt(pl.Callback):
    """Saves at points. "start" is in ``on_train_start``, before anything is trained."""

    def __init__(self, folder: Path, points: Sequence[str]) -> None:
        self.folder, self.points = folder, points
        self.batches: dict[str, int] = {}  # trained on, at each point
        folder.mkdir(parents=True, exist_ok=True)

    def _save(self, trainer: pl.Trainer, point: str) -> None:
        if point in self.points:
            self.batches[point] = len(trainer.lightning_module.seen)  # type: ignore[arg-type]
            trainer.save_checkpoint(self.folder / f"{point}.ckpt", weights_only=False)

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "start")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, f"b{len(trainer.lightning_module.seen)}")  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, f"e{trainer.current_epoch}")


def rows(per_rank: int, first: int = 0, kind: Any = DataLoader, **options: Any) -> DataLoader[Tensor]:
    """A shuffled loader of ``per_rank`` batches."""
    data = Rows(per_rank * BATCH * _ranks(), first, noise=options.pop("noise", 0.05))
    return kind(data, **{"batch_size": BATCH, "shuffle": True, **options})  # type: ignore[no-any-return]


def stream(per_rank: int, dataset: Any = Numbers, kind: Any = DataLoader, **options: Any) -> DataLoader[Tensor]:
    """A loader of unknown length that has ``per_rank`` batches."""
    return kind(dataset(per_rank * BATCH * _ranks()), batch_size=BATCH, **options)  # type: ignore[no-any-return]


def weighted(per_rank: int, first: int = 0, **options: Any) -> DataLoader[Tensor]:
    """A loader of ``per_rank`` batches, with a sampler and samples that draw from generators of their own."""
    count = per_rank * BATCH * _ranks()
    sampler = WeightedRandomSampler(torch.arange(1.0, 1.0 + count), count, generator=seeded())
    kind = options.pop("kind", DataLoader)
    return kind(Noisy(count, first), batch_size=BATCH, sampler=sampler, **options)  # type: ignore[no-any-return]


def sampled(per_rank: int, sampler: Any, **options: Any) -> DataLoader[Tensor]:
    """A loader of ``per_rank`` batches, with a sampler of its own."""
    kind, noise = options.pop("kind", DataLoader), options.pop("noise", 0.05)
    count = per_rank * BATCH * _ranks()
    if sampler is InBatches:
        given = {"batch_sampler": sampler(per_rank * BATCH)}
    else:
        given = {"batch_size": BATCH, "sampler": sampler(count)}
    return kind(Rows(count, noise=noise), **given, **options)  # type: ignore[no-any-return]


def public(kind: Any, *args: Any, per_rank: int = 6, **options: Any) -> DataLoader[Tensor]:
    """A loader with a sampler of a public package, which knows ranks itself."""
    rows = Rows(per_rank * BATCH * _ranks(), noise=options.pop("noise", 0.05))
    sampler = kind(len(rows), *args, _rank(), _ranks())
    if args:
        return DataLoader(rows, batch_sampler=sampler, **options)
    return DataLoader(rows, batch_size=BATCH, sampler=sampler, **options)


def torchdata(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return make(*args, kind=StatefulDataLoader, **options)


def table(per_rank: int) -> Any:
    """One of Hugging Face's map-style datasets, of the samples of all ranks."""
    from datasets import Dataset

    return Dataset.from_dict({"x": [[number / 100] * WIDTH for number in range(per_rank * BATCH * _ranks())]})


def huggingface(per_rank: int, shuffled: bool = False, kind: Any = DataLoader, shards: int = 2, **options: Any) -> Any:
    """A loader of one of Hugging Face's iterable datasets, of ``shards`` for a rank, which are shared out."""
    from datasets.distributed import split_dataset_by_node

    data = table(per_rank).to_iterable_dataset(num_shards=shards * _ranks())
    data = data.shuffle(seed=7, buffer_size=5) if shuffled else data
    return kind(split_dataset_by_node(data, _rank(), _ranks()).with_format("torch"), batch_size=BATCH, **options)


def mapped(per_rank: int, kind: Any = DataLoader, **options: Any) -> Any:
    """A shuffled loader of one of Hugging Face's map-style datasets."""
    return kind(table(per_rank).with_format("torch"), batch_size=BATCH, shuffle=True, **options)


def write_litdata(folder: Path) -> None:
    """In a process of its own, as litdata's writer waits for the files of all ranks."""
    program = (
        "import sys, torch\n"
        "from litdata.streaming import Cache\n"
        "cache = Cache(sys.argv[1], chunk_size=3)\n"
        "for number in range(int(sys.argv[2])):\n"
        f"    cache[number] = torch.full(({WIDTH},), number / 100)\n"
        "cache.done()\n"
        "cache.merge()\n"
    )
    alone = {
        key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "LOCAL_", "GROUP_"))
    }
    subprocess.run([sys.executable, "-c", program, str(folder), str(12 * _ranks())], env=alone, check=True)


def litdata(folder: Path, shuffled: bool = False, kind: Any = None, **options: Any) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(folder), shuffle=shuffled, seed=7)
    return (kind or StreamingDataLoader)(data, batch_size=BATCH, **options)


def write_webdataset(folder: Path) -> None:
    folder.mkdir(parents=True)
    for shard in range(2 * _ranks()):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for number in range(6 * shard, 6 * shard + 6):
                text = str(number / 100).encode()
                entry = tarfile.TarInfo(f"{number:04d}.txt")
                entry.size = len(text)
                file.addfile(entry, io.BytesIO(text))


def combined_litdata(folder: Path, **options: Any) -> Any:
    """A loader that draws from two of litdata's datasets, as those of litgpt."""
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    parts = [StreamingDataset(str(folder), shuffle=True, drop_last=True, seed=seed) for seed in (7, 8)]
    data = CombinedStreamingDataset(parts, seed=42, weights=(0.7, 0.3), iterate_over_all=False)
    return StreamingDataLoader(data, batch_size=BATCH, drop_last=True, **options)


def webdataset(folder: Path, shuffled: str = "", **options: Any) -> Any:
    """A loader of webdataset. ``shuffled``: "", or "by seed" or "by pass": how shards are shuffled, beside samples."""
    import webdataset as wds

    chosen: dict[str, Any] = {"shardshuffle": 4, "detshuffle": shuffled == "by pass"}
    chosen = chosen if shuffled else {"shardshuffle": False}
    data = wds.WebDataset(_shards(folder), nodesplitter=wds.split_by_node, **chosen)
    if shuffled:
        data = data.shuffle(5, initial=3, seed=3)
    return DataLoader(data.map(_row), batch_size=BATCH, **options)


def resampled_webdataset(folder: Path, **options: Any) -> Any:
    """A loader of shards that are drawn, of samples that a generator shuffles, and of a length that is set."""
    import webdataset as wds

    shuffle = wds.shuffle(5, initial=3, rng=random.Random(5))
    shards = wds.ResampledShards(_shards(folder), deterministic=True, seed=3)
    data = wds.DataPipeline(shards, wds.tarfile_to_samples(), shuffle, wds.map(_row))
    return wds.WebLoader(data.with_epoch(6 * BATCH), batch_size=BATCH, **options)


def web_loader(folder: Path, **options: Any) -> Any:
    """A loader that shuffles samples once more, behind its workers."""
    import webdataset as wds

    data = wds.WebDataset(_shards(folder), shardshuffle=False, nodesplitter=wds.split_by_node)
    loader = wds.WebLoader(data.map(_row_in_tuple), batch_size=3, **options)
    shuffled = loader.unbatched().shuffle(5, initial=3, rng=random.Random(3)).batched(BATCH)
    return shuffled.map(operator.itemgetter(0)).with_epoch(6)


def _shards(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.iterdir())]


def _row(sample: Any) -> Tensor:
    return torch.full((WIDTH,), float(sample["txt"]))


def _row_in_tuple(sample: Any) -> tuple[Tensor]:
    return (_row(sample),)


@dataclass(frozen=True)
class Case:
    """A kind of loaders, with what the Trainer needs for it.

    Attributes:
        make: makes the loaders; from the folder where ``write`` has written their files, if it has.
    """

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    model: type[Run] = Run
    write: Callable[[Path], None] | None = None


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


UNSHARDED = {"use_distributed_sampler": False}  # each rank reads all samples, in an order of its own
CASES: dict[str, Case] = {
    "shuffled": Case(lambda: rows(6)),
    "shuffled by the process": Case(lambda: rows(6), UNSHARDED),
    "three lengths": Case(lambda: [rows(4), rows(8, 30), rows(2, 60)], {"max_epochs": 2}),
    "three lengths, windows": Case(lambda: [rows(4), rows(7, 30), rows(2, 60)], {"accumulate_grad_batches": 3}),
    "three lengths, streams": Case(
        lambda: [stream(4), stream(7), rows(2, 60, generator=seeded())], {**UNSHARDED, "accumulate_grad_batches": 3}
    ),
    "stateful": Case(lambda: rows(6, kind=Stateful)),
    "stateful, generator": Case(lambda: rows(6, kind=Stateful, generator=seeded()), UNSHARDED),
    "stateful, windows": Case(
        lambda: rows(6, kind=Stateful, generator=seeded()), {**UNSHARDED, "accumulate_grad_batches": 4}
    ),
    "stateful, workers": Case(lambda: rows(6, kind=Stateful, num_workers=2, noise=0.0)),
    "stateful, limited": Case(lambda: rows(9, kind=Stateful), {"limit_train_batches": 6}),
    "stateful stream": Case(lambda: stream(6, Placed, StatefulStream)),
    "stateful stream, windows": Case(lambda: stream(6, Placed, StatefulStream), {"accumulate_grad_batches": 4}),
    "stateful, combined": Case(
        lambda: CombinedLoader(
            {"a": rows(3, kind=Stateful, generator=seeded()), "b": rows(6, 30), "c": stream(5, Placed, StatefulStream)},
            "max_size_cycle",
        ),
        {**UNSHARDED, "accumulate_grad_batches": 2},
    ),
    "epoch of a callback": Case(lambda: stream(6, ByEpoch)),
    "epoch of a callback, workers": Case(lambda: stream(6, ByEpoch, num_workers=2)),
    "epoch of a callback, max_steps": Case(lambda: stream(6, ByEpoch), {"max_steps": 18, "max_epochs": -1}),
    "max_size": Case(lambda: CombinedLoader([stream(6), rows(4, 30)], "max_size")),
    "max_size, stream last": Case(lambda: CombinedLoader([rows(4, 30), stream(6)], "max_size")),
    "max_size_cycle": Case(lambda: CombinedLoader([stream(6), rows(4, 30)], "max_size_cycle")),
    "max_size_cycle, stream last": Case(lambda: CombinedLoader([rows(8, 30), stream(6)], "max_size_cycle")),
    "min_size": Case(lambda: CombinedLoader([rows(8, 30), stream(6)], "min_size")),
    "reloaded": Case(lambda: None, {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}, ByEpochRun),
    "not reloaded": Case(lambda: None, {}, ByEpochRun),
    "weighted": Case(lambda: weighted(6)),
    "weighted, windows": Case(lambda: weighted(6), {"accumulate_grad_batches": 4}),
    "weighted beside stateful": Case(
        lambda: {"a": rows(6, kind=Stateful), "b": weighted(6, 30)}, {"accumulate_grad_batches": 2}
    ),
    "weighted cycles beside stateful": Case(
        lambda: CombinedLoader([rows(6, kind=Stateful, generator=seeded()), weighted(4, 30)], "max_size_cycle"),
    ),
    "weighted ends beside a stream": Case(lambda: CombinedLoader([stream(6), weighted(4, 30)], "max_size")),
    "weighted, stateful": Case(lambda: weighted(6, kind=Stateful), {"accumulate_grad_batches": 2}),
    "weighted, stateful, own order": Case(
        lambda: weighted(6, kind=Stateful), {**UNSHARDED, "accumulate_grad_batches": 2}
    ),
    "counting": Case(lambda: sampled(6, Counting), UNSHARDED),
    "slots": Case(lambda: sampled(6, CountingInSlots)),
    "counting, reopened": Case(lambda: sampled(6, Counting, kind=Reopening)),
    "counting late, reopened": Case(lambda: sampled(6, CountingLate, kind=Reopening), {"accumulate_grad_batches": 4}),
    "drawing, reopened": Case(lambda: sampled(6, Drawing, kind=Reopening), {"accumulate_grad_batches": 2}),
    "shuffling, reopened": Case(lambda: sampled(6, Shuffling, kind=Reopening)),
    "named, reopened": Case(lambda: sampled(6, Named, kind=Reopening), UNSHARDED),
    "consuming, restored": Case(lambda: sampled(6, Consuming, kind=Restoring), UNSHARDED),
    "around, reopened": Case(lambda: sampled(6, Around, kind=Reopening)),
    "counting twice": Case(lambda: stream(6, ByEpoch, CountingTwice)),
    "opened late": Case(lambda: stream(6, ByEpoch, Late)),
    "opened late, windows": Case(lambda: stream(6, ByEpoch, Late), {"accumulate_grad_batches": 4}),
    "opened late, workers that stay": Case(lambda: stream(6, ByEpoch, Late, num_workers=2, persistent_workers=True)),
    "opened late, max_steps": Case(lambda: stream(6, ByEpoch, Late), {"max_steps": 15, "max_epochs": -1}),
    "batches, reopened": Case(lambda: sampled(6, InBatches, kind=Stateful), UNSHARDED),
    "endless": Case(lambda: public(Endless), {**UNSHARDED, "limit_train_batches": 6}),
    "repeat factor": Case(lambda: public(RepeatFactor), {**UNSHARDED, "limit_train_batches": 6}),
    "consumed": Case(lambda: public(Consumed, BATCH), UNSHARDED),
    "consumed, windows": Case(lambda: public(Consumed, BATCH), {**UNSHARDED, "accumulate_grad_batches": 4}),
    "consumed, limited": Case(lambda: public(Consumed, BATCH, per_rank=9), {**UNSHARDED, "limit_train_batches": 6}),
    "consumed, workers": Case(lambda: public(Consumed, BATCH, num_workers=2, noise=0.0), UNSHARDED),
    "buckets": Case(lambda: public(Buckets, BATCH, per_rank=8), {**UNSHARDED, "limit_train_batches": 6}),
    "buckets, windows": Case(
        lambda: public(Buckets, BATCH, per_rank=8),
        {**UNSHARDED, "limit_train_batches": 6, "accumulate_grad_batches": 4},
    ),
    "repeats": Case(lambda: public(Repeats), UNSHARDED),
    "balanced": Case(lambda: sampled(6, Balanced)),
    "balanced, own order": Case(lambda: sampled(6, Balanced), UNSHARDED),
    "epochs": Case(lambda: Epochs(Rows(6 * BATCH * _ranks()), BATCH, _rank(), _ranks())),
    "epochs, windows": Case(
        lambda: Epochs(Rows(6 * BATCH * _ranks()), BATCH, _rank(), _ranks()), {"accumulate_grad_batches": 4}
    ),
    "epochs with a state": Case(lambda: EpochsWithState(Rows(6 * BATCH * _ranks()), BATCH, _rank(), _ranks())),
    **{
        f"torchdata, {sampler.__name__}{', workers' if workers else ''}{', own order' if own else ''}": Case(
            partial(torchdata, sampled, 6, sampler, num_workers=workers, noise=0.0 if workers else 0.05),
            UNSHARDED if own else {},
        )
        for sampler in (Counting, CountingLate, Drawing, Shuffling, Around, InBatches)
        for workers in (0, 2)
        for own in ((True,) if sampler is InBatches else (False, True))
    },
    "torchdata, Repeated": Case(lambda: torchdata(stream, 6, Repeated)),
    "torchdata, Repeated, workers": Case(lambda: torchdata(stream, 6, Repeated, num_workers=2)),
    "torchdata": Case(lambda: torchdata(rows, 6)),
    "torchdata, own order": Case(lambda: torchdata(rows, 6), UNSHARDED),
    "torchdata, workers": Case(lambda: torchdata(rows, 6, num_workers=2, noise=0.0), UNSHARDED),
    "torchdata, workers, windows": Case(
        lambda: torchdata(rows, 6, num_workers=2, noise=0.0, snapshot_every_n_steps=4), {"accumulate_grad_batches": 4}
    ),
    "torchdata, workers that stay": Case(lambda: torchdata(rows, 6, num_workers=2, noise=0.0, persistent_workers=True)),
    "torchdata, windows": Case(lambda: torchdata(rows, 6), {**UNSHARDED, "accumulate_grad_batches": 4}),
    "torchdata, stream": Case(lambda: torchdata(stream, 6, Placed), {"accumulate_grad_batches": 4}),
    "torchdata, stream, workers": Case(lambda: torchdata(stream, 6, Placed, num_workers=2)),
    "torchdata, plain stream": Case(lambda: torchdata(stream, 6, ByEpoch)),
    "torchdata, plain stream, workers": Case(lambda: torchdata(stream, 6, ByEpoch, num_workers=2)),
    "torchdata, weighted": Case(lambda: torchdata(weighted, 6), {"accumulate_grad_batches": 2}),
    "torchdata, weighted, own order": Case(lambda: torchdata(weighted, 6), UNSHARDED),
    "torchdata, combined": Case(
        lambda: {"a": torchdata(rows, 3), "b": rows(6, 30)}, {**UNSHARDED, "accumulate_grad_batches": 2}
    ),
    "datasets": Case(lambda: huggingface(6)),
    "datasets, shuffled": Case(lambda: huggingface(6, shuffled=True), {"accumulate_grad_batches": 2}),
    "datasets, torchdata": Case(lambda: torchdata(huggingface, 6)),
    "datasets, workers": Case(lambda: huggingface(6, num_workers=2)),
    "datasets, shuffled, workers": Case(
        lambda: huggingface(6, shuffled=True, num_workers=2), {"accumulate_grad_batches": 4}
    ),
    "datasets, one shard, workers": Case(lambda: huggingface(6, shuffled=True, shards=1, num_workers=2)),
    "datasets, workers that stay": Case(lambda: huggingface(6, shuffled=True, num_workers=2, persistent_workers=True)),
    "datasets, torchdata, workers": Case(lambda: torchdata(huggingface, 6, num_workers=2)),
    "datasets, mapped": Case(lambda: mapped(6)),
    "datasets, mapped, workers": Case(lambda: mapped(6, num_workers=2), {"accumulate_grad_batches": 4}),
    "datasets, mapped, torchdata": Case(lambda: torchdata(mapped, 6)),
    "datasets, mapped, torchdata, workers": Case(lambda: torchdata(mapped, 6, num_workers=2)),
    "datasets, combined": Case(
        lambda: CombinedLoader([huggingface(6, shuffled=True), rows(4, 60)], "max_size_cycle"),
    ),
    "litdata": Case(litdata, write=write_litdata),
    "litdata, shuffled": Case(partial(litdata, shuffled=True), {"accumulate_grad_batches": 2}, write=write_litdata),
    "litdata, max_steps": Case(litdata, {"max_steps": 15, "max_epochs": -1}, write=write_litdata),
    "litdata, combined": Case(
        lambda folder: CombinedLoader([litdata(folder, shuffled=True), rows(4, 60)], "max_size_cycle"),
        write=write_litdata,
    ),
    "litdata, workers": Case(partial(litdata, num_workers=2, drop_last=True), write=write_litdata),
    "litdata, shuffled, workers": Case(
        partial(litdata, shuffled=True, num_workers=2), {"accumulate_grad_batches": 4}, write=write_litdata
    ),
    "litdata, max_steps, workers": Case(
        partial(litdata, num_workers=2), {"max_steps": 15, "max_epochs": -1}, write=write_litdata
    ),
    "litdata, workers that stay": Case(
        partial(litdata, shuffled=True, num_workers=2, persistent_workers=True), write=write_litdata
    ),
    "litdata, weights": Case(combined_litdata, {"limit_train_batches": 6}, write=write_litdata),
    "litdata, weights, workers": Case(
        partial(combined_litdata, num_workers=2), {"limit_train_batches": 6}, write=write_litdata
    ),
    "webdataset": Case(webdataset, {"accumulate_grad_batches": 2}, write=write_webdataset),
    "webdataset, workers": Case(
        partial(webdataset, num_workers=2), {"accumulate_grad_batches": 2}, write=write_webdataset
    ),
    **{
        f"webdataset, {name}{', workers' if workers else ''}": Case(
            partial(make, num_workers=workers), options, write=write_webdataset
        )
        for name, make, options in (
            ("by seed", partial(webdataset, shuffled="by seed"), {}),
            ("by pass", partial(webdataset, shuffled="by pass"), {"accumulate_grad_batches": 4}),
            ("resampled", resampled_webdataset, {}),
            ("WebLoader", web_loader, {"accumulate_grad_batches": 4}),
        )
        for workers in (0, 2)
    },
}


def case_of(name: str, folder: Path, **options: Any) -> Case:
    """A case with more options of ``new_trainer``, and with its files in ``folder``."""
    case = replace(CASES[name], options={**CASES[name].options, **options})
    if case.write is None:
        return case
    if _rank() == 0:
        case.write(folder / "data")
    dist.barrier()
    return replace(case, make=partial(case.make, folder / "data"), write=None)


def trained(
    case: Case, seed: int, ckpt: Path | None = None, *callbacks: pl.Callback, loaders: Any = None
) -> tuple[pl.Trainer, Run]:
    """A run that is over; ``seed`` differs between ranks, as for any program that does not care.

    Args:
        loaders: those of an earlier run; None: new ones.
    """
    model = case.model(case.make if loaders is None else lambda: loaders)
    for seeding in (torch.manual_seed, random.seed, np.random.seed):
        seeding(seed + 17 * _rank())
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "use_distributed_sampler": True, **case.options}
    trainer = new_trainer(callbacks=[SetEpoch(), *callbacks], **options)
    trainer.fit(model, ckpt_path=ckpt)
    return trainer, model


def fit(
    case: Case, seed: int, ckpt: Path | None = None, *callbacks: pl.Callback, loaders: Any = None
) -> dict[str, Any]:
    """What a run has seen and computed."""
    trainer, model = trained(case, seed, ckpt, *callbacks, loaders=loaders)
    return {
        "seen": model.seen,
        "losses": model.losses,
        "rates": model.rates,
        "weights": {name: value.tolist() for name, value in trainer.strategy.full_state_dict().items()},  # type: ignore[attr-defined]
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
    }


def differences(name: str, points: Sequence[str], folder: Path, **options: Any) -> list[str]:
    """What differs between the run that was not interrupted and its resumes; [] if nothing does.

    Args:
        options: of ``new_trainer``, beside those of the case.
    """
    case, saver = case_of(name, folder, **options), SaveAt(folder, points)
    want = fit(case, 1, None, saver)
    found = [f"{name}: {point} was not reached" for point in points if point not in saver.batches]
    for number, (point, batches) in enumerate(saver.batches.items()):
        got = fit(case, 2 + number, folder / f"{point}.ckpt")
        found += _different(case, want, got, batches, f"{name} at {point}")
    return found


def differences_after_a_run(folder: Path) -> list[str]:
    """What differs in a resume from a checkpoint that was saved after a run, of a loader that forgets its place."""
    case = Case(lambda: rows(6, kind=Forgetful))
    want, path = fit(case, 1), folder / "over.ckpt"
    trainer, _ = trained(replace(case, options={"max_steps": 8}), 1)
    trainer.save_checkpoint(path, weights_only=False)
    return _different(case, want, fit(case, 2, path), 8, "after a run")


class Sends(pl.Callback):
    """Sends a signal to the process of the last rank at the begin of a batch, and waits until all ranks know of it.

    Args:
        number: of the signal.
        batch: the number of batches that were trained on before.
    """

    def __init__(self, number: int, batch: int) -> None:
        self.number = number
        self.batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if len(trainer.lightning_module.seen) != self.batch:  # type: ignore[arg-type]
            return
        if _rank() == _ranks() - 1:
            os.kill(os.getpid(), self.number)
        agreement = trainer.strategy.world.agreement  # type: ignore[attr-defined]
        agreement.poll()  # as its thread does
        dist.barrier()
        agreement.poll()


class Kept(OnExceptionCheckpoint):
    def teardown(self, *args: Any) -> None:
        """Lightning's removes the file when the next run ends."""


def differences_after_a_stop(name: str, batches: Sequence[int], folder: Path) -> list[str]:
    """What differs in resumes of runs that SIGTERM has stopped after a batch, and that a callback has saved then."""
    case = case_of(name, folder)
    want = fit(case, 1)
    stopped = replace(case, options={**case.options, "enable_checkpointing": True})
    found = []
    for number, batch in enumerate(batches):
        path = folder / str(batch)
        with pytest.raises(SIGTERMException):
            fit(stopped, 1, None, Sends(signal.SIGTERM, batch - 1), Kept(path, "stopped"))
        got = fit(case, 2 + number, path / "stopped.ckpt")
        found += _different(case, want, got, batch, f"{name}, stopped after {batch}")
    return found


def differences_after_a_requeue(name: str, batches: Sequence[int], folder: Path) -> list[str]:
    """What differs in resumes from checkpoints of SLURM's requeue signal, which is saved at the begin of a batch."""
    job = {"NTASKS": _ranks(), "NTASKS_PER_NODE": _ranks(), "PROCID": _rank(), "LOCALID": _rank(), "NODEID": 0}
    job |= {"JOB_ID": 7, "JOB_NAME": "train"}
    environment = {f"SLURM_{key}": str(value) for key, value in job.items()}
    found = []
    plain = case_of(name, folder)
    for number, batch in enumerate(batches):
        more = {"default_root_dir": str(folder / str(batch)), "plugins": [SLURMEnvironment()]}
        case = replace(plain, options={**plain.options, **more})
        with mock.patch.dict(os.environ, environment), mock.patch.object(signal_connector, "call", return_value=0):
            want = fit(case, 1, None, Sends(signal.SIGUSR1, batch))
            got = fit(case, 2 + number)  # Lightning finds the checkpoint
        found += _different(case, want, got, batch, f"{name}, requeued after {batch}")
    return found


class Draws(pl.Callback):
    """Draws random numbers between the start of training and the first batch."""

    def on_train_epoch_start(self, *args: Any) -> None:
        torch.rand(3), random.random(), np.random.rand()


def differences_by_a_save_at_the_start(name: str, folder: Path) -> list[str]:
    """What a save before the first batch changes in a run, and what differs in a resume from there."""
    case, saver = CASES[name], SaveAt(folder, ["start"])
    want = fit(case, 1, None, Draws())
    found = _different(case, want, fit(case, 1, None, saver, Draws()), 0, f"{name} with a save at the start")
    got = fit(case, 2, folder / "start.ckpt", Draws())
    return found + _different(case, want, got, 0, f"{name} from the start")


def differences_of_a_second_fit(name: str, points: Sequence[str], folder: Path) -> list[str]:
    """What differs in resumes of a second fit, whose loaders an earlier fit has read to the middle of an epoch."""
    case, saver = CASES[name], SaveAt(folder, points)
    loaders = case.make()
    fit(replace(case, options={**case.options, "max_steps": 8}), 5, None, loaders=loaders)
    want = fit(case, 1, None, saver, loaders=loaders)
    found = [f"{name}: {point} was not reached" for point in points if point not in saver.batches]
    for number, (point, batches) in enumerate(saver.batches.items()):
        got = fit(case, 2 + number, folder / f"{point}.ckpt")
        found += _different(case, want, got, batches, f"the second fit of {name} at {point}")
    return found


def differences_of_a_second_resume(name: str, point: str, seconds: Sequence[str], folder: Path) -> list[str]:
    """What differs after a resume from ``seconds`` points of a run that was itself resumed from ``point``.

    There "b1" is the first batch after the first resume.
    """
    case = case_of(name, folder)
    saver = SaveAt(folder, [point])
    second = SaveAt(folder / "second", seconds)
    want = fit(case, 1, None, saver)
    begin = len(want["seen"]) - len(fit(case, 2, folder / f"{point}.ckpt", second)["seen"])
    found = [f"{name}: {point} was not reached again" for point in seconds if point not in second.batches]
    for number, (again, batches) in enumerate(second.batches.items()):
        got = fit(case, 3 + number, folder / "second" / f"{again}.ckpt")
        found += _different(case, want, got, begin + batches, f"{name} at {point} and {again}")
    return found


def _different(case: Case, want: dict[str, Any], got: dict[str, Any], batches: int, where: str) -> list[str]:
    """How a run that was resumed after ``batches`` differs from the one that was not interrupted."""
    window = case.options.get("accumulate_grad_batches", 1)
    begin = len(want["seen"]) - len(got["seen"])
    wrong = [] if batches - window < begin <= batches else [f"begins at {begin}"]
    wrong += [key for key in ("seen", "losses", "rates") if got[key] != want[key][begin:]]
    wrong += [key for key in ("weights", "global_step", "current_epoch") if got[key] != want[key]]
    return [f"{where}: {', '.join(wrong)}"] if wrong else []
