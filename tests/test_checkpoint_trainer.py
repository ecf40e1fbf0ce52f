"""Directories under ModelCheckpoint, other readers, other file systems, and disks that fail."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader

import lt_zero.strategy as strategy_module
from lt_zero.checkpoint import place, sink
from lt_zero.checkpoint.archive import Archive
from lt_zero.checkpoint.errors import CheckpointError
from tests.checkpoint_tools import SHARDED, copied, error_of, everything, raised, resume, same, train
from tests.lightning_tools import GPT, sharded_trainer
from tests.pool import Pool


def _names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _keeping(folder: str, stage: int, keeps: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    callback = ModelCheckpoint(folder, **{"filename": "{step}", "every_n_train_steps": 1, **keeps})
    options = {"max_steps": 10, "max_epochs": 99, "limit_val_batches": 0, "enable_checkpointing": True, **options}
    trainer = sharded_trainer(stage, callbacks=[callback], config=options.pop("config", SHARDED), **options)
    trainer.fit(GPT(dist.get_world_size(), "adamw"), ckpt_path=options.pop("ckpt_path", None))
    return trainer, callback


def _top(folder: str, stage: int) -> None:
    trainer, callback = _keeping(f"{folder}/a", stage, {"save_top_k": 1, "save_last": True})
    dist.barrier()
    assert _names(f"{folder}/a") == ["last.ckpt", "step=10.ckpt"]
    want = everything(trainer)
    for path in ("last", callback.best_model_path, Path(callback.last_model_path), f"{callback.best_model_path}/"):
        again, _ = resume(path, stage, steps=11, callbacks=[ModelCheckpoint(f"{folder}/a")], enable_checkpointing=True)
        same(again, want)
    inside, _ = resume(f"{callback.best_model_path}/meta.pt", stage, steps=11)
    same(inside, want)
    seen = copied(trainer.strategy.full_state_dict())  # type: ignore[attr-defined]
    trainer.validate(ckpt_path="best")
    trainer.test(ckpt_path="last")
    same(copied(trainer.strategy.full_state_dict()), seen)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [1, 3])
def test_best_and_last(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _top, str(tmp_path), stage)


def _linked(folder: str) -> None:
    _keeping(folder, 2, {"save_top_k": 1, "save_last": "link"}, max_steps=4)
    dist.barrier()
    assert _names(folder) == ["last.ckpt", "step=4.ckpt"]
    assert Path(folder, "last.ckpt").is_symlink()
    assert Path(folder, "last.ckpt").resolve() == Path(folder, "step=4.ckpt").resolve()
    got, _ = resume(f"{folder}/last.ckpt", 1, steps=5)
    assert got["step"] == 4
    # Saving to the link's own name replaces the link, not what it leads to.
    trainer = train(2, config=SHARDED)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    dist.barrier()
    assert not Path(folder, "last.ckpt").is_symlink()
    for name, step in (("last.ckpt", 2), ("step=4.ckpt", 4)):
        archive = Archive(f"{folder}/{name}")
        archive.verify()
        assert archive.meta["global_step"] == step
        archive.close()
    assert _names(folder) == ["last.ckpt", "step=4.ckpt"]


def test_last_as_a_link(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _linked, str(tmp_path))


def _versions(folder: str) -> None:
    keeps = {"filename": "same", "save_top_k": 2, "monitor": "loss"}
    _keeping(folder, 3, keeps, max_steps=3)
    dist.barrier()
    assert _names(folder) == ["same-v1.ckpt", "same.ckpt"]
    _keeping(folder, 3, {"filename": "same", "save_top_k": -1}, max_steps=2)
    dist.barrier()
    assert _names(folder) == ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"], _names(folder)
    for name in _names(folder):
        Archive(f"{folder}/{name}").verify()


def test_version_suffixes(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _versions, str(tmp_path))


def _replaces(folder: str) -> None:
    """A new checkpoint takes the place of an old one, of a file, of an empty directory, and of a torn one."""
    trainer = train(2, config=SHARDED)
    want = everything(trainer)
    for name in ("old", "file", "empty", "torn"):
        if dist.get_rank() == 0:
            if name in ("empty", "torn"):
                Path(folder, name).mkdir()
            if name == "torn":
                Path(folder, name, "weights-00007.pt").write_text("x")
            elif name == "file":
                Path(folder, name).write_text("x")
        dist.barrier()
        for _ in range(2):
            trainer.save_checkpoint(f"{folder}/{name}")
        dist.barrier()
        same(resume(f"{folder}/{name}", 2)[0], want)
    patch = pytest.MonkeyPatch()
    patch.setattr(place, "_exchange", lambda one, other: False)  # a file system without renameat2
    trainer.save_checkpoint(f"{folder}/old")
    patch.undo()
    dist.barrier()
    same(resume(f"{folder}/old", 2)[0], want)
    assert _names(folder) == ["empty", "file", "old", "torn"]


def test_what_had_the_name_goes_away(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _replaces, str(tmp_path))


def _released(folder: str) -> None:
    """Nothing keeps a checkpoint's files open: they may be removed, and their space is wanted."""
    train(3, config=SHARDED).save_checkpoint(f"{folder}/one")
    got, trainer = resume(f"{folder}/one", 2)
    del got
    gc.collect()
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in held if folder in path], held


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_files_are_closed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _released, str(tmp_path))


def _stale(folder: str) -> None:
    """Weights of a run that failed before they were loaded are not those of the next."""
    train(3, config=SHARDED).save_checkpoint(f"{folder}/one")
    patch = pytest.MonkeyPatch()
    patch.setattr(strategy_module.attach, "check_callbacks", _full)
    trainer = sharded_trainer(3, max_steps=1, limit_val_batches=0)
    error_of(trainer.fit, GPT(2, "adamw"), ckpt_path=f"{folder}/one")
    patch.undo()
    trainer._checkpoint_connector.resume_end()  # Lightning's own part of it stays otherwise
    trainer.fit(GPT(2, "adamw"))
    same(everything(trainer)["weights"], everything(train(3, max_steps=1))["weights"])


def test_a_failed_restore_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _stale, str(tmp_path))


# ---- other readers ---------------------------------------------------------------------------------------------------


def _save(stage: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = train(stage, config=SHARDED)
    trainer.save_checkpoint(f"{folder}/one")
    found = everything(trainer)
    return found["weights"], found["optimizers"][0]


@pytest.mark.parametrize("stage", [0, 3])
def test_torch_and_lightning_read_directories(pool: Pool, tmp_path: Path, stage: int) -> None:
    weights, optimizer = pool.run(3, _save, stage, str(tmp_path))[0]
    module = {name: torch.zeros_like(value) for name, value in weights.items()}
    names = [name for name, _ in GPT().named_parameters()]
    moments = {f"optimizer_0.state.{n}.exp_avg_sq": torch.zeros_like(weights[n]) for n in names}
    state: dict[str, Any] = {f"model.{n}": value for n, value in module.items()} | moments
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "one"), no_dist=True)
    for name, value in weights.items():
        assert torch.equal(state[f"model.{name}"], value), name
    for number, name in enumerate(names):
        assert torch.equal(state[f"optimizer_0.state.{name}.exp_avg_sq"], optimizer["state"][number]["exp_avg_sq"])
    target = tmp_path / "consolidated.ckpt"
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", str(tmp_path / "one")]
    done = subprocess.run([*command, "--output_file", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = torch.load(target, weights_only=True)
    assert whole["global_step"] == 2
    assert whole["state_dict"].keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(whole["state_dict"][name], value), name
    GPT().load_state_dict(whole["state_dict"])


def _elsewhere(stage: int) -> None:
    memory = fsspec.filesystem("memory")
    if memory.exists("/checkpoints"):  # of an earlier test in this process
        memory.rm("/checkpoints", recursive=True)
    trainer = train(stage, config=SHARDED)
    want = everything(trainer)
    for name in ("one", "one", "two.ckpt"):
        trainer.save_checkpoint(f"memory://checkpoints/{name}")
    for path in ("memory://checkpoints/one", "memory://checkpoints/one/"):
        got, _ = resume(path, stage)
        same(got, want)
    Archive("memory://checkpoints/one").verify()
    trainer.strategy.remove_checkpoint("memory://checkpoints/one")
    assert not memory.exists("memory://checkpoints/one")
    assert "nowhere" in error_of(resume, "memory://checkpoints/nowhere", stage)
    data = bytearray(memory.cat_file("/checkpoints/two.ckpt/weights-00000.pt"))
    data[len(data) // 2] ^= 1
    memory.pipe_file("/checkpoints/two.ckpt/weights-00000.pt", bytes(data))
    assert "weights-00000.pt" in error_of(resume, "memory://checkpoints/two.ckpt", stage)
    _keeping("memory://checkpoints/kept", stage, {"save_top_k": 1, "save_last": True}, max_steps=3)
    assert sorted(Path(p).name for p in memory.ls("/checkpoints/kept", detail=False)) == ["last.ckpt", "step=3.ckpt"]


@pytest.mark.parametrize("stage", [0, 2])
def test_another_file_system(pool: Pool, stage: int) -> None:
    pool.run(1, _elsewhere, stage)


# ---- disks that fail -------------------------------------------------------------------------------------------------


def _broken(folder: str, how: str) -> str:
    rank = dist.get_rank()
    trainer = train(3, config=SHARDED, max_steps=1)
    trainer.save_checkpoint(f"{folder}/one")
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(trainer.lightning_module)
    patch = pytest.MonkeyPatch()
    target = f"{folder}/one"
    if how == "space":
        patch.setattr(place.Place, "free_bytes", lambda self: 1000)
    elif how == "unseen" and rank == 1:
        patch.setattr(place.Path, "read_text", _missing)
    elif how == "other" and rank == 1:
        patch.setattr(place.Path, "read_text", lambda *args, **kwargs: "another")
    elif how == "write" and rank == 1:
        patch.setattr(sink, "write_some", _full)
    elif how == "manifest" and rank == 0:
        patch.setattr(place.Place, "seal", _full)
    elif how == "rename" and rank == 0:
        patch.setattr(place, "_replace", _full)
    elif how == "folder":
        target = f"{folder}/one/meta.pt/inner"
    elif how == "project":
        target = folder
    elif how == "nul":
        target = f"{folder}/a\0b"
    elif how == "protocol":
        target = "nonsense://x/y"
    elif how == "long":
        target = f"{folder}/{'x' * 300}"
    try:
        text = error_of(trainer.save_checkpoint, target)
    finally:
        patch.undo()
    dist.barrier()
    assert _names(folder) == ["one"], how
    archive = Archive(f"{folder}/one")
    archive.verify()
    assert archive.meta["global_step"] == 1
    archive.close()
    trainer.save_checkpoint(f"{folder}/one")  # the trainer is still usable
    assert Archive(f"{folder}/one").meta["global_step"] == 2
    return text


def _missing(*args: Any, **kwargs: Any) -> str:
    raise FileNotFoundError(errno.ENOENT, "No such file")


def _full(*args: Any, **kwargs: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("space", ["one", "free", "save_top_k"]),
        ("unseen", ["rank 1", "one", "disk of one node", 'format="full"']),
        ("other", ["rank 1", "not the directory that rank 0 made"]),
        ("write", ["rank 1", "-00001.pt", "ENOSPC", "Free space"]),
        ("manifest", ["rank 0", "No space left"]),
        ("rename", ["Cannot name", "one", "ENOSPC"]),
        ("folder", ["meta.pt"]),
        ("project", ["is a directory with one", "<name>"]),
        ("nul", ["null"]),
        ("protocol", ["nonsense"]),
        ("long", ["xxx"]),
    ],
)
def test_saves_that_fail(pool: Pool, tmp_path: Path, how: str, words: list[str]) -> None:
    raised(pool.run(2, _broken, str(tmp_path), how), *words)


@pytest.mark.parametrize("name", ["complete", "x[1]*.ckpt", "a-b-c.tmp-d", "ä b"])
def test_a_kill_between_two_renames(tmp_path: Path, name: str) -> None:
    made = place.Place.make(str(tmp_path / name))
    Path(made.folder, "manifest.json").write_text("{}")
    assert place.find(tmp_path / name) == made.folder
    os.close(made._lock)
    place.remove_leftovers(tmp_path)
    assert _names(tmp_path) == [name]
    assert place.find(tmp_path / name / "meta.pt") == str(tmp_path / name)


def test_leftovers_of_processes_that_are_gone(tmp_path: Path) -> None:
    mine = place.Place.make(str(tmp_path / "running"))
    gone = place.Place.make(str(tmp_path / "gone"))
    os.close(gone._lock)  # as the kernel does when a process ends
    foreign = tmp_path / ".x.tmp-another-host-77-0123abcd"
    young = tmp_path / ".y.tmp-another-host-77-0123abcd"
    for path in (foreign, young, tmp_path / ".x.tmp-note", tmp_path / ".hidden-a-b"):
        path.mkdir()
    os.utime(foreign, (0, 0))
    os.utime(tmp_path / ".hidden-a-b", (0, 0))
    complete = place.Place.make(str(tmp_path / "complete"))
    Path(complete.folder, "manifest.json").write_text("{}")
    assert place.find(tmp_path / "complete") == complete.folder, "a kill between two renames"
    os.close(complete._lock)
    place.remove_leftovers(tmp_path)
    names = _names(tmp_path)
    assert names == sorted([Path(mine.folder).name, young.name, ".x.tmp-note", ".hidden-a-b", "complete"])
    mine.discard()


def test_what_a_save_replaced_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while the old checkpoint is being removed leaves a part of it, which must not get a name again."""
    old, path = tmp_path / "last", tmp_path / "new"
    for folder in (old, path):
        folder.mkdir()
        (folder / "manifest.json").write_text(folder.name)
    made = place.Place(str(old), str(place._temporary(old)))
    os.rename(path, made.folder)
    monkeypatch.setattr(place.shutil, "rmtree", lambda *args, **kwargs: None)  # killed here
    made.commit()
    monkeypatch.undo()
    assert (old / "manifest.json").read_text() == "new"
    place.remove(old)
    place.remove_leftovers(tmp_path)
    assert _names(tmp_path) == []
