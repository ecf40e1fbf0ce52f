"""Saves in the background: values of the moment, one at a time, errors on all ranks, nothing lost or leaked."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.io import sequential_writer
from tests.support.checkpoint_tools import copied, error_of, everything, resume, same, train
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.pool import Pool

ASYNC: dict[str, Any] = {"checkpoint": {"async": True, "format": "sharded"}}


class Gate:
    """Holds writers back until it is opened; fails them when it is told to."""

    def __init__(self) -> None:
        self.open, self.writing, self.most = threading.Event(), 0, 0
        self.fail = 0
        self._write = sequential_writer.write_some

    def __call__(self, fd: int, view: memoryview, offset: int) -> int:
        assert self.open.wait(30)
        if self.fail:
            self.fail -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, view, offset)


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
            self.pending.append(trainer.strategy.checkpoints._pending is not None)
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
    patch.setattr(sequential_writer, "write_some", gate)
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


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {}), (2, {"precision": "16-true"}), (3, {}), (3, {"precision": "bf16-mixed"})],
    ids=str,
)
def test_values_of_the_moment(pool: Pool, tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    pool.run(2, _moment, stage, str(tmp_path), options)


def _fails(folder: str) -> list[Any]:
    """A background write fails on rank 1; the checkpoint before it stays, and so does what it would have replaced."""
    patch = pytest.MonkeyPatch()
    gate = Gate()
    gate.open.set()
    patch.setattr(sequential_writer, "write_some", gate)
    rank = dist.get_rank()

    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.checkpoints.wait(trainer.strategy.run)
                gate.fail = rank  # once
            if trainer.global_step == 3:
                while not trainer.strategy.checkpoints._pending.done():
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
    assert trainer.strategy.checkpoints._thread is None  # type: ignore[attr-defined]


def test_many_saves(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _many, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step=12.ckpt"]


def _one_at_a_time(folder: str) -> None:
    """The next save waits for the one that is under way, and takes its buffer."""
    gate = Gate()
    patch = pytest.MonkeyPatch()
    patch.setattr(sequential_writer, "write_some", gate)

    class Twice(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{folder}/one")
                first = trainer.strategy.checkpoints._pending
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
    patch.setattr(sequential_writer, "write_some", gate)

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
    patch.setattr(sequential_writer, "write_some", gate)

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
