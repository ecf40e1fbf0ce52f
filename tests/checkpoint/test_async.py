"""Saves in the background: values of the moment, one at a time, errors on all ranks, nothing lost or leaked."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.core.division import Division
from lt_zero.core.stores import direct_file
from lt_zero.training import checkpoints
from tests.support.checkpoint_tools import Gate, copied, error_of, everything, resume, same, train
from tests.support.lightning_tools import GPT, sharded_trainer, weights
from tests.support.matrix import only
from tests.support.pool import Pool

ASYNC: dict[str, Any] = {"checkpoint": {"async": True, "format": "sharded"}}


class SavesAt(pl.Callback):
    """Saves after the first step, in the middle of training, and lets the writers go after ``late`` steps."""

    def __init__(self, path: str, gate: Gate, late: int) -> None:
        self.path, self.gate, self.late = path, gate, late
        self.want: dict[str, Any] = {}
        self.pending: list[bool] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["moving"] = [pl_module.moving]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.moving += 1  # in place
        if trainer.global_step == 1:
            self.want = everything(trainer)
            trainer.save_checkpoint(self.path)
        if trainer.global_step >= 1:
            self.pending.append(trainer.strategy.session.saver.pending is not None)
        if trainer.global_step == 1:
            assert not Path(self.path).exists(), "no name before all is written"
        if trainer.global_step == self.late:
            self.gate.open.set()


def _module() -> GPT:
    module = GPT(dist.get_world_size(), "adamw")
    module.moving = torch.zeros(2)  # type: ignore[assignment]
    return module


def _moment(stage: int, folder: str, options: dict[str, Any]) -> None:
    patch = pytest.MonkeyPatch()
    gate = Gate()
    patch.setattr(direct_file, "write_some", gate)
    saves = SavesAt(f"{folder}/one", gate, 4)
    try:
        train(stage, _module(), config=ASYNC, callbacks=[saves], max_steps=5, max_epochs=9, **options)
    finally:
        gate.open.set()
        patch.undo()
    assert saves.pending[:3] == [True] * 3, "training went on"
    assert Path(folder, "one").is_dir(), "fit waits for it"
    module = _module()
    seen: list[Any] = []
    module.on_load_checkpoint = lambda checkpoint: seen.append(checkpoint["moving"])  # type: ignore[assignment, method-assign]
    got, _ = resume(f"{folder}/one", stage, module, **options)
    same(got, saves.want)
    assert torch.equal(seen[0][0], torch.ones(2)), "the user's tensors are those of the moment, too"
    archive = Archive(f"{folder}/one")
    archive.verify()
    archive.close()


MOMENTS = [(0, "32-true"), (1, "32-true"), (2, "16-true"), (3, "32-true"), (3, "bf16-mixed")]


@pytest.mark.slow  # in the fast suite: tests/conformance/test_async.py
@pytest.mark.parametrize("how", MOMENTS, ids=str)
def test_values_of_the_moment(pool: Pool, tmp_path: Path, how: tuple[int, str]) -> None:
    stage, precision = how
    pool.run(2, _moment, stage, str(tmp_path), {"precision": precision})


def _fails(folder: str) -> list[Any]:
    """A background write fails on rank 1; the checkpoint before it stays, and so does what it would have replaced."""
    patch = pytest.MonkeyPatch()
    gate = Gate()
    gate.open.set()
    patch.setattr(direct_file, "write_some", gate)
    rank = dist.get_rank()

    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.checkpoints.wait(trainer.strategy.run)
                gate.fail = rank  # once
            if trainer.global_step == 3:
                while not trainer.strategy.session.saver.pending.done():
                    time.sleep(0.001)

    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=False)
    trainer = sharded_trainer(
        2,
        config=ASYNC,
        max_steps=8,
        max_epochs=9,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[keeps, Fails()],
    )
    try:
        text = error_of(trainer.fit, _module())
    finally:
        patch.undo()
    return [text, trainer.global_step]


def test_an_error_in_the_background(pool: Pool, tmp_path: Path) -> None:
    for text, step in pool.run(2, _fails, str(tmp_path)):
        assert "rank 1" in text
        assert "ENOSPC" in text
        assert "-00001.pt" in text
        assert "Free space" in text
        assert step < 8
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step=1.ckpt"], "what waited for the failed save is still there, and nothing else"
    archive = Archive(str(tmp_path / names[0]))
    archive.verify()
    assert archive.meta["global_step"] == 1
    archive.close()


def _has_no_memory(path: str) -> list[Any]:
    """The second save finds no memory for its copy."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            effect = checkpoints.stage if trainer.global_step == 1 else MemoryError
            with mock.patch.object(checkpoints, "stage", side_effect=effect):
                trainer.save_checkpoint(path)

    with pytest.raises(MemoryError):
        train(2, _module(), config=ASYNC, callbacks=[Saves()], max_steps=3)
    archive = Archive(path)
    archive.verify()
    archive.close()
    folder = os.path.dirname(path)
    left = [] if "://" in path else [name for name in os.listdir(folder) if name != "one"]
    return [archive.meta["global_step"], *left]


@pytest.mark.parametrize("remote", [False, True])
def test_no_memory_for_the_copy(pool: Pool, tmp_path: Path, remote: bool) -> None:
    path = "memory:///copy/one" if remote else str(tmp_path / "one")
    (steps,) = pool.run(1, _has_no_memory, path)
    assert steps == [1], "the checkpoint before is there, and nothing of the failed one"


def _many(folder: str) -> None:
    """Deferred removal; memory that stays; the save at the very end."""
    process = psutil.Process()
    sizes: list[int] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            sizes.append(process.memory_info().rss)
            assert len(list(Path(folder).glob("step*"))) >= (trainer.global_step > 2), "one is always there"

    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    trainer = sharded_trainer(
        3,
        config=ASYNC,
        max_steps=12,
        max_epochs=99,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[Watch(), keeps],
    )
    module = GPT(dist.get_world_size(), "adamw")
    module.ballast = torch.nn.Parameter(torch.zeros(1 << 19))  # 2 MB and 4 MB of moments over two ranks
    trainer.fit(module)
    # Minima: malloc's noise is a few MB; a copy of 3 MB that each save kept would show.
    assert min(sizes[8:]) - min(sizes[2:6]) < 6 << 20, [size >> 20 for size in sizes]
    assert threading.active_count() < 40
    end = copied(trainer.strategy.full_state_dict())  # type: ignore[attr-defined]
    archive = Archive(f"{folder}/last.ckpt")
    for name, value in end.items():
        assert torch.equal(archive.read(name), value), name
    archive.verify()
    archive.close()
    assert trainer.strategy.session.saver._thread is None  # type: ignore[attr-defined]


@pytest.mark.slow
def test_many_saves(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _many, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step=12.ckpt"]


def _one_at_a_time(folder: str) -> None:
    """The next save waits for the one that is under way, and takes its buffer."""
    gate = Gate()
    patch = pytest.MonkeyPatch()
    patch.setattr(direct_file, "write_some", gate)

    class Twice(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{folder}/one")
                first = trainer.strategy.session.saver.pending
                trainer.strategy.remove_checkpoint(f"{folder}/old")
                assert Path(folder, "old").is_dir(), "removed when the save under way has succeeded"
                threading.Timer(0.05, gate.open.set).start()
                trainer.save_checkpoint(f"{folder}/two")
                assert first.done()
                assert Path(folder, "one").is_dir()
                assert not Path(folder, "old").exists()

    if dist.get_rank() == 0:
        Path(folder, "old").mkdir()
    dist.barrier()
    try:
        train(1, config=ASYNC, callbacks=[Twice()])
    finally:
        gate.open.set()
        patch.undo()
    for name in ("one", "two"):
        archive = Archive(f"{folder}/{name}")
        archive.verify()
        assert archive.meta["global_step"] == 1
        archive.close()


def test_one_at_a_time(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _one_at_a_time, str(tmp_path))


def _fails_last(folder: str) -> str:
    """The last save of a fit fails: fit does, too."""
    gate = Gate()
    gate.open.set()
    patch = pytest.MonkeyPatch()
    patch.setattr(direct_file, "write_some", gate)

    class Last(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                gate.fail = dist.get_rank()
                trainer.save_checkpoint(f"{folder}/one")

    try:
        return error_of(train, 1, config=ASYNC, callbacks=[Last()])
    finally:
        patch.undo()


def test_the_last_save_fails(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, _fails_last, str(tmp_path)):
        assert "rank 1" in text
        assert "ENOSPC" in text
    assert not list(tmp_path.iterdir())


class Stops(GPT):
    """The user's code fails while a save is under way; then its writers may go on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            self.gate.open.set()  # type: ignore[operator, union-attr]
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)


def _interrupted(folder: str) -> None:
    gate = Gate()
    patch = pytest.MonkeyPatch()
    patch.setattr(direct_file, "write_some", gate)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(f"{folder}/one")

    module = Stops(dist.get_world_size(), "adamw")
    module.gate = gate  # type: ignore[assignment]
    try:
        text = error_of(train, 2, module, config=ASYNC, callbacks=[Saves()], max_steps=4)
    finally:
        gate.open.set()
    assert text == "the user's own"
    deadline = time.monotonic() + 30
    while not Path(folder, "one").is_dir() and time.monotonic() < deadline:
        time.sleep(0.005)  # what was under way is finished by its threads
    patch.undo()
    archive = Archive(f"{folder}/one")
    archive.verify()
    assert archive.meta["global_step"] == 2
    archive.close()
    dist.barrier()
    got, _ = resume(f"{folder}/one", 2)
    assert got["step"] == 2


def test_an_error_while_a_save_is_under_way(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _interrupted, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


class Moving(GPT):
    """Hooks hand over tensors that training changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.average = torch.zeros(3)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = {"now": [self.average]}

    def get_extra_state(self) -> Any:
        return {"average": self.average}

    def set_extra_state(self, state: Any) -> None:
        self.average = state["average"]


class SavesAt2(Callback):
    def __init__(self, path: str, release: threading.Event, fail: bool = False) -> None:
        self.path, self.release, self.fail = path, release, fail

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 3 and self.fail:
            raise ZeroDivisionError
        if trainer.global_step == 4:
            self.release.set()


def _overtaken(path: str, fused: bool) -> None:
    release, write = threading.Event(), checkpoints.write

    def held(*args: Any) -> None:
        assert release.wait(30)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "write", held)
        config = {**ASYNC, "fused_step": fused}
        saves = SavesAt2(path, release)
        trainer = sharded_trainer(2, config=config, max_steps=5, max_epochs=9, limit_val_batches=0, callbacks=[saves])
        trainer.fit(Moving(dist.get_world_size(), "adamw"))


@pytest.mark.parametrize("fused", only([False], [True, False]))
def test_counters_and_tensors_of_hooks_are_those_of_the_moment(pool: Pool, tmp_path: Path, fused: bool) -> None:
    path = str(tmp_path / "one.ckpt")
    pool.run(2, _overtaken, path, fused)
    archive = Archive(path)
    own = archive.meta["lt_zero"]
    assert {float(state["step"]) for state in own["optimizers"][0]["state"].values()} == {2.0}
    (now,) = archive.meta["average"]["now"]
    (extra,) = own["extra_state"].values()
    assert now.tolist() == extra["average"].tolist() == [1.0] * 3


def _abandons(folder: str) -> Any:
    """An error in training while a save is held back; a fit of the same strategy saves before that one has ended."""
    release, write, count = threading.Event(), checkpoints.write, [0]

    def held(*args: Any) -> None:
        count[0] += 1
        assert count[0] > 1 or release.wait(30)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "write", held)
        patch.setattr(checkpoints, "GRACE", 0.1)
        options: dict[str, Any] = {"config": ASYNC, "max_steps": 5, "max_epochs": 9, "limit_val_batches": 0}
        trainer = sharded_trainer(2, **options, callbacks=[SavesAt2(f"{folder}/first", release, fail=True)])
        with pytest.raises(ZeroDivisionError):
            trainer.fit(GPT(dist.get_world_size(), "adamw"))
        group = trainer.strategy.session.group  # type: ignore[attr-defined]
        again = sharded_trainer(2, **options, callbacks=[SavesAt2(f"{folder}/second", release)])
        again.strategy.session.division = Division(group)
        again.fit(GPT(dist.get_world_size(), "adamw"))
        for thread in [t for t in threading.enumerate() if t.name.startswith("lt_zero-async-save")]:
            thread.join(30)
    dist.barrier()
    return [Archive(f"{folder}/{name}").verify() > 0 for name in ("first", "second")]


def test_a_save_that_was_left_behind_disturbs_no_later_one(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _abandons, str(tmp_path)) == [[True, True]] * 2


class _Tuned(GPT):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def _finds(folder: str) -> Any:
    os.chdir(folder)
    trainer = sharded_trainer(3, config=ASYNC, max_epochs=1, limit_val_batches=0, default_root_dir=folder)
    module = _Tuned(dist.get_world_size())
    want = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    Tuner(trainer).lr_find(module, num_training=6)
    got = weights(trainer)
    return all(np.array_equal(got[name], want[name]) for name in got), os.listdir(folder)


def test_lr_find_restores_what_is_still_being_saved(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _finds, str(tmp_path)) == [(True, [])] * 2


def test_counters_are_saved_without_their_neighbours(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _overtaken, str(tmp_path / "one"), True)
    extras = torch.load(tmp_path / "one" / "extras.pt", weights_only=True)
    steps = [value for name, value in extras.items() if name.endswith(".step")]
    assert len(steps) == 1, "equal counters are one entry"
    assert torch.load(io.BytesIO(steps[0].numpy().tobytes())).untyped_storage().nbytes() == 4
