"""Directories under ModelCheckpoint, other readers, and other file systems."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader

import lt_zero.training.lightning.strategy as strategy_module
from lt_zero.checkpoint.native import directory
from lt_zero.checkpoint.native.archive import Archive
from tests.support.checkpoint_tools import SHARDED, copied, error_of, everything, resume, same, train
from tests.support.lightning_tools import FULL, GPT, sharded_trainer
from tests.support.matrix import only
from tests.support.pool import Pool


def _names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _keeping(folder: str, stage: int, keeps: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    callback = ModelCheckpoint(folder, **{"filename": "{step}", "every_n_train_steps": 1, **keeps})
    options = {"max_steps": 4, "max_epochs": 99, "limit_val_batches": 0, "enable_checkpointing": True, **options}
    trainer = sharded_trainer(stage, callbacks=[callback], config=options.pop("config", SHARDED), **options)
    trainer.fit(GPT(dist.get_world_size(), "adamw"), ckpt_path=options.pop("ckpt_path", None))
    return trainer, callback


def _top(folder: str, stage: int) -> None:
    trainer, callback = _keeping(f"{folder}/a", stage, {"save_top_k": 1, "save_last": True})
    dist.barrier()
    assert _names(f"{folder}/a") == ["last.ckpt", "step=4.ckpt"]
    want = everything(trainer)
    for path in ("last", f"{callback.best_model_path}/"):
        again, _ = resume(path, stage, steps=5, callbacks=[ModelCheckpoint(f"{folder}/a")], enable_checkpointing=True)
        same(again, want)
    inside, _ = resume(f"{callback.best_model_path}/meta.pt", stage, steps=5)
    same(inside, want)
    seen = copied(trainer.strategy.full_state_dict())  # type: ignore[attr-defined]
    trainer.validate(ckpt_path="best")
    trainer.test(ckpt_path="last")
    same(copied(trainer.strategy.full_state_dict()), seen)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
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
        Archive(f"{folder}/{name}").verify()
    same(resume(f"{folder}/torn", 2)[0], want)
    patch = pytest.MonkeyPatch()
    patch.setattr(directory, "_exchange", lambda one, other: False)  # a file system without renameat2
    trainer.save_checkpoint(f"{folder}/old")
    patch.undo()
    dist.barrier()
    same(resume(f"{folder}/old", 2)[0], want)
    assert _names(folder) == ["empty", "file", "old", "torn"]


def test_what_had_the_name_goes_away(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _replaces, str(tmp_path))


def _counted(folder: str) -> tuple[int, dict[str, Any]]:
    trainer = sharded_trainer(2, config=FULL, max_steps=2, limit_val_batches=0)
    trainer.fit(GPT(dist.get_world_size(), "adamw"))
    # Lightning's own suite counts like this, and puts a mock in the place of torch.save.
    with mock.patch("torch.save", wraps=torch.save) as save:
        trainer.save_checkpoint(f"{folder}/full.ckpt")
    return save.call_count, torch.load(f"{folder}/full.ckpt")["lt_zero_progress"][1]["states"][0]


def test_rank_0_alone_calls_torch_save_for_a_full_checkpoint(pool: Pool, tmp_path: Path) -> None:
    (zero, seen), (one, _) = pool.run(2, _counted, str(tmp_path))
    assert (zero, one) == (1, 0)
    assert isinstance(seen["torch"], torch.Tensor), "rank 1's random state came over all the same"


class Observed(GPT):
    """Trains nothing."""

    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


def _unoptimized(folder: str, layout: str) -> None:
    path = f"{folder}/last.ckpt"
    for epochs in (1, 2):
        trainer = sharded_trainer(2, config={"checkpoint": {"format": layout}}, max_epochs=epochs)
        trainer.fit(Observed(2), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
    assert trainer.current_epoch == 2


@pytest.mark.parametrize("layout", only(["sharded"], ["sharded", "full"]))
def test_no_optimizer(pool: Pool, tmp_path: Path, layout: str) -> None:
    pool.run(2, _unoptimized, str(tmp_path), layout)


def _released(folder: str) -> None:
    """Nothing keeps a checkpoint's files open: they may be removed, and their space is wanted."""
    train(3, config=SHARDED).save_checkpoint(f"{folder}/one")
    got, trainer = resume(f"{folder}/one", 2)
    del got
    gc.collect()
    held = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in held if folder in path], held


def test_files_are_closed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _released, str(tmp_path))


def _refuses(*args: Any) -> None:
    raise RuntimeError("refused")


def _stale(folder: str) -> None:
    """Weights of a run that failed before they were loaded are not those of the next."""
    train(3, config=SHARDED).save_checkpoint(f"{folder}/one")
    patch = pytest.MonkeyPatch()
    patch.setattr(strategy_module.set_up, "check_callbacks", _refuses)
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


@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_torch_and_lightning_read_directories(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
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
    monkeypatch.setattr(sys, "argv", ["consolidate", str(tmp_path / "one"), "--output_file", str(target)])
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
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


@pytest.mark.parametrize("stage", only([2], [0, 2]))
def test_another_file_system(pool: Pool, stage: int) -> None:
    pool.run(1, _elsewhere, stage)
