"""A run goes on with other ranks, another stage, other memory and another precision, exactly where it was.

Each walk resumes from the directory that its step before saved. Every axis follows a sequence in which each ordered
pair of its values occurs, so that together the walks, half of which are slow, make all transitions. Four ranks are two
replicas of two shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.common import accelerator
from tests.support.checkpoint_tools import everything, resume
from tests.support.features import needs
from tests.support.lightning_tools import GPT
from tests.support.matrix import only
from tests.support.pool import Pool

LENGTH = 16  # transitions


def cycle_of_pairs(values: Sequence[Any]) -> list[Any]:
    """A cycle in which each ordered pair of values occurs once, a value after itself included (de Bruijn)."""
    found: list[Any] = []
    for i, one in enumerate(values):
        found.append(one)
        for other in values[i + 1 :]:
            found += [one, other]
    return found


def along(values: Sequence[Any], start: int = 0) -> list[Any]:
    cycle = cycle_of_pairs(values)
    return [cycle[(start + i) % len(cycle)] for i in range(LENGTH + 1)]


class Setting(NamedTuple):
    ranks: int
    stage: int
    offload: str
    precision: str


# Different starts, so that the axes do not change in step.
WALK = [
    Setting(*values)
    for values in zip(
        along([2, 3, 1, 4], 5),
        along([3, 1, 0, 2]),
        along(["nvme", "none", "cpu"], 1),
        along(["32-true", "16-true", "bf16-mixed"], 4),
        strict=True,
    )
]
PARTS = 4


def test_the_walk_makes_all_transitions() -> None:
    for axis, count in zip(range(4), (4, 4, 3, 3), strict=True):
        pairs = {(one[axis], other[axis]) for one, other in itertools.pairwise(WALK)}
        assert len(pairs) == count**2


def _options(setting: Setting, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"mics_shard_size": 2} if setting.ranks == 4 and setting.stage else {}
    if setting.offload != "none":
        where = {"device": setting.offload, **({"nvme_path": folder} if setting.offload == "nvme" else {})}
        zero["offload_optimizer"] = where
        if setting.stage == 3:
            zero["offload_param"] = {**where, **({"max_in_cpu": 0} if setting.offload == "nvme" else {})}
    config = {"checkpoint": {"format": "sharded"}, "fp16": {"initial_scale_power": 4}}
    return {"zero": zero, "config": config, "precision": setting.precision, "max_epochs": 99}


def _visit(setting: Setting, folder: str, step: int, source: str | None, target: str) -> None:
    """Resume from ``source``, compare with what its run had, make one step, save."""
    accelerator._apart = setting.offload == "cpu"
    try:
        module = GPT(dist.get_world_size(), "adamw")
        restored, trainer = resume(source, setting.stage, module, steps=step, **_options(setting, folder))  # type: ignore[arg-type]
        assert trainer.global_step == step
        saved = everything(trainer)
        trainer.save_checkpoint(target)
        if dist.get_rank() == 0:
            if source is not None:
                want = torch.load(f"{source}.want", weights_only=True)
                keys = ["weights", "optimizers", "schedulers", "step"]
                for key in keys + (["precision"] if want["setting"] == setting.precision else []):
                    as_kept(restored[key], want[key], key)
                assert any(torch.any(state["exp_avg"] != 0) for state in restored["optimizers"][0]["state"].values())
            torch.save({**saved, "setting": setting.precision}, f"{target}.want")
    finally:
        accelerator._apart = False


def as_kept(got: Any, want: Any, where: str) -> None:
    """Equal, but for the dtype in which this run keeps it."""
    if isinstance(want, Tensor):
        assert torch.equal(got, want.to(got.dtype)), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), (where, got.keys(), want.keys())
        for key in want:
            as_kept(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            as_kept(one, other, f"{where}.{number}")
    else:
        assert got == want, (where, got, want)


@needs("offload")
@pytest.mark.parametrize("part", only([3], range(PARTS)))
def test_goes_on_elsewhere(pool: Pool, tmp_path: Path, part: int) -> None:
    source: str | None = None
    first = part * LENGTH // PARTS
    for number, setting in enumerate(WALK[first : first + LENGTH // PARTS + 1]):
        target = str(tmp_path / f"{number}.ckpt")
        pool.run(setting.ranks, _visit, setting, str(tmp_path), number + 1, source, target)
        archive = Archive(target)
        archive.verify()
        assert archive.manifest.run["ranks"] == setting.ranks
        assert archive.manifest.run["stage"] == setting.stage
        archive.close()
        source = target
