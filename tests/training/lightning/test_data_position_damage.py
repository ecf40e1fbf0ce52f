"""Progress that cannot be repeated is told; states of it that are damaged are named."""

from __future__ import annotations

import functools
import io
import itertools
import re
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lt_zero.common.errors import CheckpointError
from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import differing
from lt_zero.training.lightning.data_position.inexact import inexact
from lt_zero.training.lightning.data_position.own_state import OwnState
from lt_zero.training.lightning.data_position.position import Feed, LoaderPosition
from tests.support.progress_tools import (
    CASES,
    WIDTH,
    Model,
    Noisy,
    Remembering,
    Saver,
    Stream,
    fit,
    new_loader,
    new_trainer,
)
from tests.support.resumes import Stateful


class Shuffling(Stream):
    """Decides its order by the generator that dropout draws from."""

    def __iter__(self) -> Iterator[Tensor]:
        left = list(range(self.count))
        while left:
            yield torch.full((WIDTH,), left.pop(int(torch.randint(len(left), ()))) / self.count)


class Augmenting(Stream):
    """Draws random numbers with every sample, which do not decide the order."""

    def __iter__(self) -> Iterator[Tensor]:
        for row in super().__iter__():
            yield row + torch.rand(())


class Once:
    """A loader that can be read once."""

    def __init__(self) -> None:
        self.left = 8

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Tensor:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return torch.ones(2, WIDTH)


@functools.cache
def _saved(loader: Callable[[], Any]) -> bytes:
    """A checkpoint inside of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        fit(Model(loader), 1, callbacks=[Saver(Path(folder), "batch")], max_epochs=1, format="full")
        return Path(folder, "2.ckpt").read_bytes()


def _resumed_from(states: Any, tmp_path: Path, loader: Callable[[], Any] = new_loader) -> None:
    checkpoint = torch.load(io.BytesIO(_saved(loader)), weights_only=False)
    checkpoint["lt_zero_progress"] = states(checkpoint["lt_zero_progress"])
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    trainer = new_trainer(max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        trainer.fit(Model(loader), ckpt_path=tmp_path / "changed.ckpt")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: new_loader(Shuffling()), r"DataLoader\(Shuffling\) was read again .* the order of its samples is not"),
        (lambda: range(8), "The position in the training loaders cannot be restored: range cannot be tracked"),
    ],
    ids=["shuffles", "no object"],
)
def test_what_cannot_be_repeated_is_told(loader: Callable[[], Any], message: str, tmp_path: Path) -> None:
    class Any_(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(
                torch.full((2, WIDTH), float(batch)) if isinstance(batch, int) else batch, batch_idx
            )

    fit(Any_(loader), 1, callbacks=[Saver(tmp_path, "batch")], max_epochs=1)
    trainer = new_trainer(max_epochs=1)
    with pytest.warns(UserWarning, match=message):
        trainer.fit(Any_(loader), ckpt_path=tmp_path / "4.ckpt")


def test_nothing_is_told_of_what_is_repeated(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        for loader in (CASES["shuffled"], CASES["iterable"], CASES["dict"], _augmenting):
            _resumed_from(lambda states: states, tmp_path, loader)
    wrong = ("training loader", "not resumable", "seed_everything")
    assert not [str(warning.message) for warning in told if any(text in str(warning.message) for text in wrong)]


def _augmenting() -> Any:
    return new_loader(Augmenting())


def test_another_seed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    _saved.cache_clear()
    _saved(new_loader)
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    with pytest.warns(UserWarning, match="without seed_everything, and this run is one with seed 5"):
        _resumed_from(lambda states: states, tmp_path)


class _Registered(type):
    """A class of classes, each of which has a name of its own."""

    names: ClassVar[set[str]] = set()

    def __new__(cls, name: str, *args: Any) -> Any:
        if name in cls.names:
            raise ValueError(f"{name} is registered twice")
        cls.names.add(name)
        return super().__new__(cls, name, *args)


class _InOrder(SequentialSampler, metaclass=_Registered):
    pass


def _registered() -> Any:
    data = Noisy()
    return Stateful(data, batch_size=2, sampler=_InOrder(data))


def _persistent() -> Any:
    return new_loader(num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Once, "The training loader Once can be read once only"),
        (lambda: range(8), "The training loader range cannot be tracked"),
        (_registered, r"opens a sampler of a class that allows no subclass"),
        (_persistent, r"DataLoader\(Noisy\) keeps its workers"),
    ],
    ids=["once", "no object", "registered", "persistent workers"],
)
def test_what_a_resume_will_not_repeat_is_told_when_a_run_begins(loader: Callable[[], Any], message: str) -> None:
    class Any_(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch if isinstance(batch, Tensor) else torch.ones(2, WIDTH), batch_idx)

    trainer = new_trainer(max_epochs=1, limit_train_batches=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Any_(loader))
    assert len([True for warning in told if re.search(message, str(warning.message))]) == 1


def test_a_place_that_cannot_be_saved_is_told_at_the_start() -> None:
    class Sampler(RandomSampler):
        def __init__(self) -> None:
            super().__init__(Noisy())
            self.stream = itertools.cycle(range(24))

        def __iter__(self) -> Iterator[int]:
            return itertools.islice(self.stream, 20)

    trainer = new_trainer(max_steps=1)
    with pytest.warns(UserWarning, match=r"DataLoader\(Noisy\) keeps its place in sampler.stream"):
        trainer.fit(Model(lambda: new_loader(shuffle=None, sampler=Sampler())))


def test_a_shuffle_buffer_of_hugging_face_is_told() -> None:
    loader = Remembering(Stream(), batch_size=4)
    buffer = SimpleNamespace(ex_iterable=SimpleNamespace(), buffer_size=3)
    loader.dataset._ex_iterable = SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=buffer)])  # type: ignore[attr-defined]
    assert any("shuffle buffer" in reason for reason in inexact(loader, OwnState(loader, True), stateful=True))
    assert not any("shuffle buffer" in reason for reason in inexact(loader, OwnState(loader, False), stateful=False))


def test_a_data_set_that_only_the_loader_of_litdata_can_ask_is_told() -> None:
    def state_dict(self: Any, num_samples_yielded: int, num_workers: int) -> dict[str, Any]:
        return {}

    members = {"__module__": "litdata.streaming.dataset", "state_dict": state_dict}
    dataset: Any = type("StreamingDataset", (Stream,), members)()
    loader = Remembering(dataset, batch_size=4)
    (reason,) = inexact(loader, OwnState(loader, True), stateful=True)
    assert reason.startswith("cannot tell its state")
    plain = DataLoader(dataset)
    assert not list(inexact(plain, OwnState(plain, False), stateful=False))


def _webdataset(*stages: Any) -> DataLoader[Any]:
    """A loader of a data set as webdataset has it: a pipeline of stages, some of which are functions with arguments."""
    dataset: Any = type("WebDataset", (Stream,), {"__module__": "webdataset.compat"})()
    dataset.pipeline = [lambda shards: shards, *stages]
    return DataLoader(dataset)


def _stage(kind: str, **attributes: Any) -> Any:
    made = type(kind, (), {"__module__": "webdataset.stages"})()
    vars(made).update(attributes)
    return made


def _function(name: str) -> Any:
    """Stands for one of webdataset's functions."""

    def function(*args: Any) -> None: ...

    function.__name__ = name
    function.__module__ = "webdataset.filters"
    return function


def _shuffle(*args: Any, **kw: Any) -> Any:
    return _stage("FilterFunction", f=_function("_shuffle"), args=args, kw=kw)


def test_shuffles_of_webdataset_without_a_seed_are_told_and_other_pipelines_are_not() -> None:
    shards = _stage("SimpleShardList", seed=None)
    in_order = [shards, _shuffle(False), _stage("StreamingOpen")]
    repeated = [
        _stage("SimpleShardList", seed=3.0),
        _shuffle(9, seed=1),
        _shuffle(9, 5, object()),
        _stage("FilterFunction", f=len, args=(9,), kw={}),
        _stage("ResampledShards", deterministic=True),
        _stage("detshuffle", seed=0, epoch=-1),
    ]
    for stage in repeated:
        loader = _webdataset(*in_order, stage)
        assert not list(inexact(loader, OwnState(loader, False), stateful=False))
    drawn = _stage("FilterFunction", f=_function("resampled_"), args=(), kw={})
    shuffles = [_shuffle(9), _shuffle(bufsize=9), _shuffle(), _shuffle(9, seed=None)]
    for stage in (*shuffles, drawn, _stage("ResampledShards"), _stage("DirectoryShardList")):
        loader = _webdataset(*in_order, stage)
        (reason,) = inexact(loader, OwnState(loader, False), stateful=False)
        assert reason.startswith("is of webdataset, and shuffles")


def test_workers_of_a_web_loader_are_found() -> None:
    """It is no DataLoader, and reads one."""
    reader = DataLoader(Stream(), num_workers=2, persistent_workers=True)
    loader = SimpleNamespace(pipeline=[reader, _shuffle(9, seed=1)])
    (reason,) = inexact(loader, OwnState(loader, False), stateful=False)
    assert reason.startswith("keeps its workers (persistent_workers=True), and its data set has no `state_dict`")


def test_a_mixture_of_litdata_that_is_read_to_its_end_is_told() -> None:
    loader = Remembering(Stream(), batch_size=4)
    for whole in (True, False):
        loader.dataset._iterate_over_all = whole  # type: ignore[attr-defined]
        reasons = list(inexact(loader, OwnState(loader, True), stateful=True))
        assert ["CombinedStreamingDataset" in reason for reason in reasons] == ([True] if whole else [])


@pytest.mark.parametrize(("before", "told"), [(3, True), (1, False)])
def test_another_number_of_workers_is_told(before: int, told: bool, tmp_path: Path) -> None:
    """One worker reads the samples of a stream as none does, and three share them out."""
    with warnings.catch_warnings(record=True) as found:
        _resumed_from(_spoil(0, "loaders", 0, "workers", value=before), tmp_path, CASES["iterable"])
    text = f"goes on with num_workers=0 in an epoch that num_workers={before} began"
    assert any(text in str(warning.message) for warning in found) == told


class WithoutWorkers(Stateful):
    """Cannot read its state with another number of workers, as torchdata's."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_the_state_of_a_loader_with_other_workers_is_not_loaded(tmp_path: Path) -> None:
    """The order of a map-style data set is repeated without it."""
    loader = functools.partial(WithoutWorkers, Noisy(), batch_size=4, shuffle=True)
    whole = Model(loader)
    fit(whole, 1, max_epochs=1)
    checkpoint = _other_workers(tmp_path, loader)
    model = Model(loader)
    fit(model, 2, checkpoint, max_epochs=1)
    assert model.seen == whole.seen[2:]


def _other_workers(folder: Path, loader: Callable[[], Any]) -> Path:
    checkpoint = torch.load(io.BytesIO(_saved(loader)), weights_only=False)
    checkpoint["lt_zero_progress"][0]["loaders"][0]["workers"] = 2
    torch.save(checkpoint, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_a_stream_of_hugging_face_begins_new_passes_at_its_begin() -> None:
    """It keeps the state that it was given, and each pass would begin there."""
    members = {"__module__": "datasets.iterable_dataset", "_starting_state_dict": None, "set_epoch": lambda epoch: None}
    dataset: Any = type("IterableDataset", (Stream,), members)()
    loader = Remembering(dataset, batch_size=4)
    position = LoaderPosition(Feed(lambda: None, lambda: None), loader, 1)
    dataset._starting_state_dict = {"place": 3}
    position.open(lambda: iter(()))
    position._new_pass()
    assert dataset._starting_state_dict is None


class Ends(Stream):
    """Has samples in its first pass only, as a loader that goes on at its end."""

    passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        return super().__iter__() if self.passes == 1 else iter(())


def test_a_run_without_batches_ends() -> None:
    trainer = new_trainer(max_steps=99)
    with pytest.raises(RuntimeError, match=r"The training loader DataLoader\(Ends\) gave no batch in 10 epochs on end"):
        trainer.fit(Model(lambda: new_loader(Ends())))
    assert trainer.global_step == 6


def test_a_normal_number_that_waits_in_numpy_is_part_of_its_state() -> None:
    """The words of the generator do not change when it is drawn."""
    np.random.seed(1)
    np.random.standard_normal()
    waiting = RandomStates.now()
    want = np.random.standard_normal()
    drawn = RandomStates.now()
    assert differing(waiting, drawn) == {"numpy"}
    waiting.apply()
    assert not differing(waiting, RandomStates.now())
    assert np.random.standard_normal() == want
    assert not differing(drawn, RandomStates.now())


def test_values_of_an_epoch_that_is_cut_are_told(tmp_path: Path) -> None:
    """Lightning resets what was logged where ``max_steps`` ends an epoch; a resumed run goes on in it."""

    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            return loss

    trainer = new_trainer(max_steps=4)
    trainer.fit(Logs(new_loader))
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    trainer = new_trainer(max_epochs=1)
    with pytest.warns(UserWarning, match="Values of the epoch for 'loss' will cover"):
        trainer.fit(Logs(new_loader), ckpt_path=tmp_path / "x.ckpt")
    assert trainer.global_step == 6  # all batches of the epoch


def _spoil(*path: Any, value: Any = None) -> Callable[[Any], Any]:
    def change(states: Any) -> Any:
        place = states
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return states

    return change


def test_a_checkpoint_from_before_numbers_of_samples_were_saved(tmp_path: Path) -> None:
    """Its checksum is of the number and the indices, as it is now."""

    def without_number(states: Any) -> Any:
        witness = states[0]["loaders"][0]["witness"]
        del witness["size"]
        witness["digest"] = zlib.crc32(b"2" + b"24" + b"4" + b"4567")
        return states

    with warnings.catch_warnings(record=True) as told:
        _resumed_from(without_number, tmp_path, functools.partial(new_loader, shuffle=False))
    assert not [warning for warning in told if "another one now" in str(warning.message)]


@pytest.mark.parametrize(
    "change",
    [
        lambda states: [],
        lambda states: 3,
        _spoil(0, value="x"),
        _spoil(0, "version", value=7),
        _spoil(0, "consumed", value=-1),
        _spoil(0, "request", value={}),
        _spoil(0, "ended", value=None),
        _spoil(0, "states", value=[]),
        _spoil(0, "states", 0, value={}),
        _spoil(0, "states", 0, "torch", value=torch.zeros(3)),
        _spoil(0, "states", 0, "python", "words", value=torch.zeros(5, dtype=torch.int64)),
        _spoil(0, "states", 0, "python", "words", value=torch.full((625,), -1)),
        _spoil(0, "states", 0, "numpy", "words", value=torch.full((624,), 2**40)),
        _spoil(0, "states", 0, "numpy", "position", value="x"),
        _spoil(0, "loaders", 0, "fetched", value=-3),
        _spoil(0, "loaders", 0, "unit", value=0),
        _spoil(0, "loaders", 0, value=None),
        _spoil(0, "loaders", 0, "start", value=5),
        _spoil(0, "loaders", 0, "own", value=[1]),
        _spoil(0, "loaders", 0, "own_now", value={"sampler.generator": {"kind": "torch", "state": torch.zeros(3)}}),
        _spoil(0, "loaders", 0, "own_now", value={"sampler.generator": {"kind": "numpy", "state": {}}}),
        _spoil(0, "rest", value="x"),
        _spoil(0, "window", value=None),
        _spoil(0, "logged", value={}),
        _spoil(0, "loaders", 0, "epochs", value={"sampler": "x"}),
        _spoil(0, "loaders", 0, "witness", value=3),
        _spoil(0, "loaders", 0, "workers", value="x"),
    ],
)
def test_damaged_states_are_named(change: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lt_zero_progress"):
        _resumed_from(change, tmp_path)
