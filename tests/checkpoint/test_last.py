"""The checkpoint that a restarted run goes on from: the last complete one, wherever its save was ended."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

import lt_zero
from lt_zero.checkpoint.last import tell_of_newer
from lt_zero.checkpoint.native import directory
from lt_zero.checkpoint.native.directory import PendingDirectory, whole_file
from lt_zero.checkpoint.open import open_source
from lt_zero.common.errors import CheckpointError
from tests.support.checkpoint_tools import SHARDED
from tests.support.lightning_tools import FULL, GPT, QUIET


def _trained(config: dict[str, Any]) -> pl.Trainer:
    """A trainer of one process after a step."""
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    trainer = pl.Trainer(
        **{**QUIET, "strategy": lt_zero.ZeroStrategy(config={**zero, **config}), "devices": 1, "max_steps": 1}
    )
    trainer.fit(GPT())
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one trainer: a directory, then a file, then weights only."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = _trained(SHARDED)
    trainer.save_checkpoint(folder / "a/version_0/checkpoints/last.ckpt")
    trainer.save_checkpoint(folder / "a/weights.ckpt", weights_only=True)
    other = _trained(FULL)
    other.save_checkpoint(folder / "b/last.ckpt")
    other.save_checkpoint(folder / "b/weights.ckpt", weights_only=True)
    return folder


def test_the_newest_with_a_training_state_is_taken(folder: Path) -> None:
    nested, file = str(folder / "a/version_0/checkpoints/last.ckpt"), str(folder / "b/last.ckpt")
    assert Path(nested).is_dir()
    assert Path(file).is_file()
    assert lt_zero.last_checkpoint(folder) == lt_zero.last_checkpoint(folder / "a", folder / "b") == file
    assert lt_zero.last_checkpoint(folder / "a") == nested
    os.utime(f"{nested}/manifest.json")
    assert lt_zero.last_checkpoint(folder) == nested
    assert lt_zero.last_checkpoint(folder / "missing") is None


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_last_that_is_older_than_another_is_told(folder: Path, tmp_path: Path, kind: str) -> None:
    """A run that was ended between two saves leaves one; what is loaded stays as it is."""
    saved = folder / ("a/version_0/checkpoints/last.ckpt" if kind == "directory" else "b/last.ckpt")
    if kind == "link":
        shutil.copy(saved, tmp_path / "epoch=0-step=1.ckpt")
        os.symlink("epoch=0-step=1.ckpt", tmp_path / "last.ckpt")
    else:
        (shutil.copytree if kind == "directory" else shutil.copy)(saved, tmp_path / "last.ckpt")
    newer = torch.load(folder / "b/last.ckpt", weights_only=True)
    newer["global_step"] = 2
    torch.save(newer, tmp_path / "epoch=0-step=2.ckpt")
    torch.save({**newer, "global_step": 0}, tmp_path / "first.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"PK")
    callback = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True, "callbacks": [callback], "devices": 1, "max_steps": 1},
        strategy=lt_zero.ZeroStrategy(stage=3),
    )
    os.utime(tmp_path / "broken.ckpt", (1 << 32, 1 << 32))
    with pytest.warns(UserWarning, match=r"last\.ckpt \(step 1\) is older than .*step=2\.ckpt \(step 2\)"):
        trainer.fit(GPT(), ckpt_path="last")
    assert trainer.global_step == 1
    os.remove(tmp_path / "epoch=0-step=2.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_newer(tmp_path / "last.ckpt", 1)
        os.symlink("loop.ckpt", tmp_path / "loop.ckpt")  # a neighbour that cannot be looked at ends no run
        tell_of_newer(tmp_path / "last.ckpt", 1)


def test_incomplete_ones_are_passed_over(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "b/last.ckpt").read_bytes()
    (tmp_path / "old.ckpt").write_bytes(whole)
    os.utime(tmp_path / "old.ckpt", (0, 0))
    (tmp_path / "last.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="Passed over an incomplete checkpoint: .*last.ckpt"):
        assert lt_zero.last_checkpoint(tmp_path) == str(tmp_path / "old.ckpt")


@pytest.mark.parametrize("sealed", [False, True])
def test_a_kill_in_a_requeues_save_leaves_the_one_before(folder: Path, tmp_path: Path, sealed: bool) -> None:
    """Lightning takes all digits in names with ``hpc_ckpt_`` for the number of a checkpoint."""
    saved = folder / "a/version_0/checkpoints/last.ckpt"
    os.symlink(saved, tmp_path / "hpc_ckpt_1.ckpt")
    place = PendingDirectory.make(str(tmp_path / "hpc_ckpt_2.ckpt"))
    for path in saved.iterdir() if sealed else []:
        os.link(path, Path(place.folder, path.name))
    os.utime(saved / "manifest.json")
    version: Any = _CheckpointConnector._CheckpointConnector__max_ckpt_version_in_folder  # type: ignore[attr-defined]
    assert version(str(tmp_path), "hpc_ckpt_") == 1
    place.unlock()
    os.utime(place.folder, (0, 0))
    number = 2 if sealed else 1  # in the first case its rename was all that was missing
    if sealed:
        (tmp_path / "hpc_ckpt_1.ckpt").unlink()
        assert lt_zero.last_checkpoint(tmp_path) == str(tmp_path / "hpc_ckpt_2.ckpt")
        assert open_source(str(tmp_path / "hpc_ckpt_2.ckpt")).meta["global_step"] == 1
        directory.remove_leftovers(tmp_path)
    assert lt_zero.last_checkpoint(tmp_path) == str(tmp_path / f"hpc_ckpt_{number}.ckpt")
    assert (tmp_path / f"hpc_ckpt_{number}.ckpt").is_dir()


def _half(path: Path) -> None:
    with whole_file(str(path)) as temporary:
        Path(temporary).write_text("half")
        raise OSError("disk is full")


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hpc_ckpt_3.ckpt"
    path.write_text("old")
    with whole_file(str(path)) as temporary:
        Path(temporary).write_text("new")
        assert path.read_text() == "old"
        assert "ckpt_" not in temporary.removeprefix(str(tmp_path))
    assert path.read_text() == "new"
    with pytest.raises(CheckpointError, match=r"hpc_ckpt_3.*disk is full"):
        _half(path)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == [path.name]


def test_nothing_lies_beside_a_requeues_checkpoint(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    trainer = _trained({**SHARDED, "zero_optimization": zero})
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["hpc_ckpt_1.ckpt", "last-fp16.pt", "last.ckpt"]
    assert torch.load(tmp_path / "last-fp16.pt", weights_only=True)
