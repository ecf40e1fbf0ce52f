"""Checkpoints of runs with whole parameters on their ranks go on with others, and with shards that cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lt_zero.checkpoint.native.archive import Archive
from tests.support.checkpoint_tools import SHARDED, everything, resume, same
from tests.support.lightning_tools import GPT
from tests.support.matrix import only
from tests.support.pool import Pool

MUON = {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 0.002, "ns_method": "standard"}}


class Configured(GPT):
    """Its optimizer is the configuration's."""

    configure_optimizers = pl.LightningModule.configure_optimizers


class Factored(GPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


MODULES = {"adamw": GPT, "muon": Configured, "adafactor": Factored}


def _visit(kind: str, stage: int, zero: dict[str, Any], step: int, source: str | None, target: str) -> None:
    """Resume from ``source``, compare with what its run had, make a step, save."""
    world = dist.get_world_size()
    module = GPT(world, "adamw") if kind == "adamw" else MODULES[kind](world)
    config = {**SHARDED, **({"optimizer": MUON} if kind == "muon" else {})}
    precision = "bf16-mixed" if kind == "muon" else "32-true"
    options: dict[str, Any] = {"zero": zero, "config": config, "precision": precision, "max_epochs": 99}
    restored, trainer = resume(source, stage, module, steps=step, **options)  # type: ignore[arg-type]
    assert trainer.global_step == step
    saved = everything(trainer)
    trainer.save_checkpoint(target)
    if dist.get_rank() == 0:
        if source is not None:
            want = torch.load(f"{source}.want", weights_only=True)
            for key in ("weights", "optimizers", "step"):
                same(restored[key], want[key], key)
            assert want["optimizers"][0]["state"]
        torch.save(saved, f"{target}.want")


PARAMETER, ELEMENT = {"shard_along": "parameter"}, {"shard_along": "element"}
WALKS: dict[str, list[tuple[int, int, dict[str, Any]]]] = {  # ranks, stage, keys
    "adamw": [(3, 3, ELEMENT), (2, 2, PARAMETER), (3, 1, ELEMENT)],
    "adafactor": [(2, 3, PARAMETER), (3, 2, PARAMETER), (1, 0, ELEMENT)],
    "muon": [(3, 2, PARAMETER), (2, 3, PARAMETER), (1, 0, ELEMENT)],
}


@pytest.mark.parametrize("kind", only(["adamw"], WALKS))
def test_goes_on_with_other_shards(pool: Pool, tmp_path: Path, kind: str) -> None:
    source: str | None = None
    for number, (ranks, stage, zero) in enumerate(WALKS[kind]):
        target = str(tmp_path / f"{number}.ckpt")
        pool.run(ranks, _visit, kind, stage, zero, number + 1, source, target)
        if kind == "adafactor" and stage:
            names = Archive(target).manifest.tensors
            factors = {
                name.rpartition(".")[2]: tuple(names[name].shape) for name in names if "blocks.0.up.weight" in name
            }
            assert factors["row_var"] == (31, 1), "written by the rank that has it"
            assert factors["col_var"] == (1, 10)
        source = target
