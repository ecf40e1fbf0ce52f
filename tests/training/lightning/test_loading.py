"""Lightning's own loading takes checkpoint directories: other strategies, ``Model.load_from_checkpoint``, Fabric."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import cloud_io

import lt_zero
from lt_zero.checkpoint.native.directory import README
from lt_zero.checkpoint.open import of_source, open_source, verify
from lt_zero.common.compat import open_first
from lt_zero.common.errors import CheckpointError
from lt_zero.training.lightning.load import open_directory
from tests.support.lightning_tools import FULL, GPT, assert_same, sharded_trainer, single_trainer, weights
from tests.support.pool import Pool


class Grouped(GPT):
    """Its optimizer has the parameters in another order than the module, and two parameters share their weight."""

    def __init__(self, world: int = 1, rate: float = 0.01) -> None:
        super().__init__(world, "adamw")
        self.save_hyperparameters()
        self.again = self.temperature

    def configure_optimizers(self) -> Any:
        own = [{"params": [self.temperature], "lr": self.hparams["rate"]}]
        return torch.optim.AdamW([*own, {"params": list(self.net.parameters())[::-1]}], lr=0.02)


def _save(folder: str) -> dict[str, Any]:
    for name, config in (("directory", None), ("file", FULL)):
        trainer = sharded_trainer(3, config=config, max_epochs=1)
        trainer.fit(Grouped(dist.get_world_size(), rate=0.03))
        trainer.save_checkpoint(f"{folder}/{name}")
    return weights(trainer)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory and a file of the same run of two ranks, and its weights."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, pool.run(2, _save, str(folder))[0]


def _arrays(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def test_a_module_is_made_from_a_directory(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, want = saved
    loaded = Grouped.load_from_checkpoint(folder / "directory", world=1)
    assert_same(_arrays(loaded), want, 0, 0)
    assert (loaded.hparams["rate"], loaded.hparams["world"]) == (0.03, 1)
    assert loaded.again is loaded.temperature
    assert_same(_arrays(Grouped.load_from_checkpoint(f"file://{folder}/directory", world=1)), want, 0, 0)
    strict = Grouped.load_from_checkpoint(str(folder / "directory"), map_location="cpu", strict=True, weights_only=True)
    assert_same(_arrays(strict), want, 0, 0)


def test_other_strategies_go_on_from_a_directory_as_from_a_file(saved: tuple[Path, dict[str, Any]]) -> None:
    results = []
    for path in (saved[0] / "directory", saved[0] / "file"):
        module, trainer = Grouped(), single_trainer(max_epochs=2)
        validated = trainer.validate(module, ckpt_path=path, verbose=False)
        assert_same(_arrays(module), saved[1], 0, 0)
        trainer.fit(module, ckpt_path=path)
        results.append((trainer.global_step, validated, _arrays(module)))
    (steps, validated, got), (steps_of_file, validated_of_file, want) = results
    assert steps == steps_of_file > 0
    assert validated == validated_of_file
    assert_same(got, want, 0, 0)
    assert any((got[name] != saved[1][name]).any() for name in got), "it has trained"


def test_fabric_opens_a_directory(saved: tuple[Path, dict[str, Any]]) -> None:
    found = L.Fabric(accelerator="cpu", devices=1).load(saved[0] / "directory")
    assert_same({name: value.numpy() for name, value in found["state_dict"].items()}, saved[1], 0, 0)
    assert found["optimizer_states"][0]["param_groups"][1]["params"][0] == 1
    assert all(type(value) is torch.Tensor for value in found["optimizer_states"][0]["state"][0].values())


def test_the_device_is_that_of_torch_load(saved: tuple[Path, dict[str, Any]]) -> None:
    path = saved[0] / "directory"
    places: list[tuple[Any, str]] = [(None, "cpu"), ("meta", "meta"), ({"cpu": "meta"}, "meta"), ({"cuda": "x"}, "cpu")]
    places += [(lambda storage, place: None, "cpu"), (lambda storage, place: storage, "cpu")]
    for map_location, want in places:
        found = open_directory(path, map_location, None, True)
        assert found is not None
        assert {value.device.type for value in found["state_dict"].values()} == {want}


def test_all_else_stays_lightnings(saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: Any) -> None:
    """Also a directory that is not a checkpoint of ours, or not a complete one."""
    assert cloud_io._load.asks_first  # type: ignore[attr-defined]
    before = cloud_io._load
    open_first(lambda *_: pytest.fail("a second one was asked"))
    assert cloud_io._load is before
    shutil.copytree(saved[0] / "directory", tmp_path / "cut")
    (tmp_path / "cut" / "manifest.json").unlink()
    for path in (tmp_path, tmp_path / "cut"):
        with pytest.raises(IsADirectoryError):
            Grouped.load_from_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        Grouped.load_from_checkpoint(tmp_path / "none")
    monkeypatch.setattr(
        "lt_zero.training.lightning.load.open_directory", lambda *_: pytest.fail("a file is Lightning's")
    )
    assert_same(_arrays(Grouped.load_from_checkpoint(saved[0] / "file", world=1)), saved[1], 0, 0)


def test_damage_is_seen(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "directory", tmp_path / "bad")
    os.truncate(tmp_path / "bad" / "weights-00001.pt", 100)
    with pytest.raises(CheckpointError, match=r"weights-00001\.pt has 100 bytes"):
        Grouped.load_from_checkpoint(tmp_path / "bad")


def test_the_text_for_readers_is_no_part_of_the_checkpoint(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """It says how to load the directory, with and without lt_zero; it may be edited and removed."""
    path = shutil.copytree(saved[0] / "directory", tmp_path / "copy")
    text = (path / README).read_text()
    assert len(text.splitlines()) <= 15
    assert all(way in text for way in ("ckpt_path=", "load_from_checkpoint(", "torch.load(", "lt-zero export"))
    want, facts = of_source(open_source(path)), verify(path)  # type: ignore[arg-type]
    (path / README).write_text("edited")
    assert (of_source(open_source(path)), verify(path)) == (want, facts)  # type: ignore[arg-type]
    (path / README).unlink()
    assert (of_source(open_source(path)), verify(path)) == (want, facts)  # type: ignore[arg-type]
    assert_same(_arrays(lt_zero.load_from_checkpoint(Grouped, path)), saved[1], 0, 0)
