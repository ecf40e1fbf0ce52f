"""One file with all weights in 16 bits beside each checkpoint, and exports of what is being trained."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import lt_zero
from lt_zero.checkpoint import export as export_module
from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.training.lightning.checkpoint_service import CheckpointService
from lt_zero.training.lightning.data_position.position import DataPosition
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only
from tests.support.pool import Pool

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def _half(trainer: Any, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) for name, value in trainer.strategy.full_state_dict().items()}


def _beside(folder: str, how: dict[str, Any]) -> None:
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    options: dict[str, Any] = {
        "enable_checkpointing": True,
        "callbacks": [keep],
        "max_steps": 3,
        "limit_val_batches": 0,
    }
    trainer = sharded_trainer(3, GATHER, {"checkpoint": how}, **options)
    trainer.fit(GPT(2, "adamw"))
    want = _half(trainer)
    dist.barrier()
    if dist.get_rank() == 0:
        names = sorted(path.name for path in Path(folder).iterdir())
        last = Path(keep.best_model_path)
        assert names == sorted([last.name, f"{last.stem}-fp16.pt"]), names
        found = torch.load(last.with_name(f"{last.stem}-fp16.pt"), weights_only=True)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("how", only([{"async": True}], [{}, {"async": True}, {"format": "full"}]), ids=str)
def test_a_file_beside_each_checkpoint(pool: Pool, tmp_path: Path, how: dict[str, Any]) -> None:
    pool.run(2, _beside, str(tmp_path), how)


def _precisions(folder: str) -> None:
    for mode, dtype, name in (("bf16-true", torch.bfloat16, "bf16"), ("16-true", torch.float16, "fp16")):
        trainer = sharded_trainer(2, GATHER, max_steps=1, limit_val_batches=0, precision=mode)
        trainer.fit(GPT(2))
        trainer.save_checkpoint(f"{folder}/{mode}.ckpt")
        found = torch.load(f"{folder}/{mode}-{name}.pt", weights_only=True)
        if dist.get_rank() == 0:
            assert all(torch.equal(found[key], value) for key, value in _half(trainer, dtype).items())
        else:
            trainer.strategy.full_state_dict()
    with pytest.raises(CheckpointError, match="is a URL"):
        trainer.save_checkpoint("memory://beside/x.ckpt")
    assert not fsspec.filesystem("memory").exists("/beside/x.ckpt"), "it is refused before anything is written"


def test_in_the_dtype_that_is_computed_in(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _precisions, str(tmp_path))


def _live(stage: int, folder: str) -> None:
    trainer = sharded_trainer(stage, max_steps=2, limit_val_batches=0)
    module = GPT(2)
    trainer.fit(module)
    want = trainer.strategy.full_state_dict()
    trainer.strategy.export(f"{folder}/{stage}.safetensors", "fp32")
    trainer.strategy.export(f"{folder}/{stage}.ckpt", "fp32")
    trainer.save_checkpoint(f"{folder}/{stage}")
    if dist.get_rank() == 0:
        lt_zero.export(f"{folder}/{stage}", f"{folder}/{stage}-again.safetensors", "fp32")
        pair = [Path(f"{folder}/{stage}{more}.safetensors").read_bytes() for more in ("", "-again")]
        assert len(pair[0]) == len(pair[1])
        again = torch.load(f"{folder}/{stage}.ckpt", weights_only=True)["state_dict"]
        assert again.keys() == want.keys()
        assert all(torch.equal(again[name], value) for name, value in want.items())
        loaded = lt_zero.load_from_checkpoint(GPT, f"{folder}/{stage}")
        assert all(torch.equal(value, want[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("stage", only([3], [0, 2, 3]))
def test_export_of_what_is_trained(pool: Pool, tmp_path: Path, stage: int) -> None:
    pool.run(2, _live, stage, str(tmp_path))


def _fails(folder: str) -> None:
    """Rank 0's trouble is everybody's, and nobody waits for it."""
    trainer = sharded_trainer(3, max_steps=1, limit_val_batches=0)
    trainer.fit(GPT(2))
    Path(folder, "taken").mkdir(exist_ok=True)
    dist.barrier()
    with pytest.raises((CheckpointError, ValueError), match="taken"):
        trainer.strategy.export(f"{folder}/taken", format="ckpt")
    patch = pytest.MonkeyPatch()

    def full(*args: Any) -> None:
        raise CheckpointError("the disk is full")

    patch.setitem(export_module._WRITERS, "pt", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.strategy.export(f"{folder}/x.pt")
    patch.undo()
    trainer.strategy.export(f"{folder}/x.pt")
    assert Path(folder, "x.pt").is_file()


def test_a_failing_export_fails_everywhere(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _fails, str(tmp_path))


def _large(folder: str) -> None:
    trainer = sharded_trainer(3, max_steps=1, limit_val_batches=0)
    module = GPT(2)
    trainer.fit(module)
    with torch.no_grad(), lt_zero.gathered(module.net.blocks[0].up.weight, write=True):
        module.net.blocks[0].up.weight.fill_(1e6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.strategy.export(f"{folder}/x.pt")
    texts = [str(warning.message) for warning in caught if "net.blocks.0.up.weight" in str(warning.message)]
    assert len(texts) == (1 if dist.get_rank() == 0 else 0)


def test_values_out_of_range_are_named(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _large, str(tmp_path))


def _removes(folder: str) -> None:
    """A file of the user with such a name stays, unless lt_zero was told to write it."""
    trainer = sharded_trainer(2, max_steps=1, limit_val_batches=0)
    trainer.fit(GPT(2))
    trainer.save_checkpoint(f"{folder}/x.ckpt")
    trainer.strategy.export(f"{folder}/x-fp16.pt")
    trainer.strategy.remove_checkpoint(f"{folder}/x.ckpt")
    trainer.strategy.barrier()
    assert [path.name for path in Path(folder).iterdir()] == ["x-fp16.pt"]


def test_an_export_of_the_user_stays(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _removes, str(tmp_path))


def test_the_key_is_refused_without_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run begins: not at its first save."""
    monkeypatch.setitem(sys.modules, "lt_zero.training.lightning.weights_beside", None)
    run: Any = SimpleNamespace(config=lt_zero.ZeroConfig.of({"zero_optimization": {"stage": 3, **GATHER}}))
    missing = r"on_model_save: the export of weights is not installed, there is no module .*weights_beside"
    with pytest.raises(ConfigError, match=missing):
        CheckpointService(DataPosition()).set_up(run)
