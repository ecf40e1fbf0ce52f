"""The commands on checkpoints of a Trainer with tensor and data ranks: whole tensors, with the values of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.open import open_source
from lt_zero.cli import app
from lt_zero.training.lightning.precision import sharded_of
from tests.support.lightning_tools import FULL, sharded_trainer
from tests.support.matrix import only
from tests.support.parallel_module import BATCH, Module
from tests.support.pool import Pool

Values = dict[str, Tensor]


def _save(stage: int, folder: str) -> tuple[Values, dict[str, Values], Values]:
    """The weights and states of a run that is saved, and those of its export in 16 bits (rank 0)."""
    config = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": BATCH, **(FULL if stage == 0 else {})}
    trainer, module = sharded_trainer(stage, config=config, max_steps=2), Module("adamw", data=2)
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    trainer.strategy.export(f"{folder}/live.pt")  # type: ignore[attr-defined]
    sharded = sharded_of(trainer.optimizers[0])
    assert sharded is not None
    names, states = [name for name, _ in module.named_parameters()], full_optimizer_state(sharded)
    named = {names[number]: state for number, state in states.get("state", {}).items()}
    return trainer.strategy.full_state_dict(), named, torch.load(f"{folder}/live.pt")  # type: ignore[attr-defined]


def run(*command: Any) -> str:
    done = CliRunner().invoke(app, [str(word) for word in command])
    assert done.exit_code == 0, done.output
    return done.output


def same(found: Values, wanted: Values, dtype: torch.dtype = torch.float32) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.to(dtype) if value.is_floating_point() else value), name


@pytest.mark.parametrize("stage", only([3], range(4)))
def test_commands(pool: Pool, tmp_path: Path, stage: int) -> None:
    weights, states, live = pool.run(4, _save, stage, str(tmp_path))[0]
    last = tmp_path / "last.ckpt"
    assert len(states) == len(weights) == 20
    same(live, weights, torch.float16)

    run("export", last, tmp_path / "a.safetensors", "--dtype", "fp32")
    same(load_file(tmp_path / "a.safetensors"), weights)
    run("export", last, tmp_path / "hf", "--shard-size", "1KB", "--strip-prefix", "")
    source = open_source(tmp_path / "hf")
    same({name: source.read(name) for name in source.weights}, weights, torch.float16)

    same(lt_zero.load_from_checkpoint(Module, last).state_dict(), weights)
    run("import", last, tmp_path / "imported")
    archive = Archive(str(tmp_path / "imported"))
    same({name: archive.read(name) for name in archive.weights}, weights)
    assert f"weights: {len(weights)} tensors" in run("verify", tmp_path / "imported")
    if stage == 0:
        assert last.is_file()
        return  # names of states are not in it
    assert "all checksums match" in run("verify", last)
    run("export", last, tmp_path / "full.ckpt", "--dtype", "fp32", "--training-state")
    full = torch.load(tmp_path / "full.ckpt")["optimizer_states"][0]["state"]
    for number, (name, state) in enumerate(states.items()):
        for key, value in state.items():
            found = archive.optimizers[0].state[name][key] if key == "step" else archive.read_state(0, name, key)
            assert torch.equal(torch.as_tensor(found), value), (name, key)
            assert torch.equal(torch.as_tensor(full[number][key]), value), (name, key)
