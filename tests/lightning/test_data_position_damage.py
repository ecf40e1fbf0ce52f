"""Progress that cannot be repeated is told; states of it that are damaged are named."""

from __future__ import annotations

import functools
import io
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from lt_zero.common.errors import CheckpointError
from tests.support.progress_tools import CASES, WIDTH, Model, Noisy, Saver, Stream, fit, new_loader, new_trainer


class Shuffling(Stream):
    """Decides its order by the generator that dropout draws from."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.rand(WIDTH)


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
        (lambda: new_loader(Shuffling()), r"DataLoader\(Shuffling\) draws random numbers of this process \(torch\)"),
        (lambda: range(8), "range cannot be tracked"),
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
        trainer.fit(Any_(loader), ckpt_path=tmp_path / "2.ckpt")


def test_nothing_is_told_of_what_is_repeated(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        for case in ("shuffled", "iterable", "dict"):
            _resumed_from(lambda states: states, tmp_path, CASES[case])
    assert not [str(warning.message) for warning in told if "training loader" in str(warning.message)]


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


def test_checkpoints_of_the_first_versions_are_read(tmp_path: Path) -> None:
    def older(states: Any) -> Any:
        for state in states:
            state["full"] = False
            for name in ("rest", "window", "logged"):
                del state[name]
            for loader in state["loaders"]:
                loader["generators"] = [saved["state"] for saved in loader.pop("own").values()]
                loader["generators_now"] = [saved["state"] for saved in loader.pop("own_now").values()]
        return states

    _resumed_from(older, tmp_path, CASES["own generator"])


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
        _spoil(0, "loaders", 0, "own", value=[1]),
        _spoil(0, "loaders", 0, "own_now", value={"sampler.generator": {"kind": "torch", "state": torch.zeros(3)}}),
        _spoil(0, "loaders", 0, "own_now", value={"sampler.generator": {"kind": "numpy", "state": {}}}),
        _spoil(0, "rest", value="x"),
        _spoil(0, "window", value=None),
        _spoil(0, "logged", value={}),
    ],
)
def test_damaged_states_are_named(change: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lt_zero_progress"):
        _resumed_from(change, tmp_path)
