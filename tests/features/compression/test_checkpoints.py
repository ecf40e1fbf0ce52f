"""Residuals of ``gradient_compression`` in checkpoints: the same ranks go on exactly, others get the same sum."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lt_zero.checkpoint.native.residuals import residual_state
from tests.support.checkpoint_tools import resume, train
from tests.support.lightning_tools import GPT
from tests.support.matrix import only_rows
from tests.support.pool import Pool

BITS = {"gradient_compression": {"algorithm": "1bit", "exclude": []}}


def _owed(trainer: pl.Trainer) -> tuple[int, dict[str, Any]]:
    """Steps so far, and what residuals owe to the mean gradient, by parameter; {} on other ranks. Collective."""
    strategy: Any = trainer.strategy
    state = residual_state(strategy.run.engine, sharded=False)
    assert state is not None
    owed = {name: rows.double().sum(0) for name, rows in state["worker"].items()}
    for name, sums in state["server"].items():
        owed[name] = owed[name] + sums
    return state["steps"], {name: (value * state["units"][name]).numpy() for name, value in owed.items()}


class Owed(pl.Callback):
    """What was owed before the first step and after the last."""

    before: Any = None
    after: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = _owed(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after = _owed(trainer)


def _options(format: str, precision: str = "32-true", **block: Any) -> dict[str, Any]:
    compression = {"gradient_compression": {**BITS["gradient_compression"], **block}}
    config = {**compression, "checkpoint": {"format": format}, "fp16": {"initial_scale_power": 4}}
    return {"config": config, "precision": precision}


def _save(stage: int, folder: str, options: dict[str, Any], steps: int = 4) -> Any:
    owed = Owed()
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = train(stage, callbacks=[owed, saves], max_steps=steps, enable_checkpointing=True, **options)
    strategy: Any = trainer.strategy
    return owed.after, {k: v.float().numpy() for k, v in strategy.full_state_dict().items()}


def _resume(stage: int, path: str, options: dict[str, Any], steps: int = 4) -> Any:
    owed = Owed()
    _, trainer = resume(path, stage, steps=steps, callbacks=[owed], **options)
    strategy: Any = trainer.strategy
    weights = {k: v.float().numpy() for k, v in strategy.full_state_dict().items()}
    return owed.before, owed.after, weights


def _equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("stage", "format", "precision"),
    only_rows(
        [(2, "full", "16-true")],
        itertools.product([0, 2, 3], ["sharded", "full"], ["32-true", "16-true"]),
    ),
)
def test_the_same_ranks_go_on_exactly(pool: Pool, tmp_path: Path, stage: int, format: str, precision: str) -> None:
    options = _options(format, precision)
    (steps, owed), weights = pool.run(2, _save, stage, str(tmp_path), options)[0]
    assert any(value.any() for value in owed.values())
    found = pool.run(2, _resume, stage, str(tmp_path / "step=2.ckpt"), options)[0]
    assert (found[0][0], found[1][0], steps) == (2, 4, 4)
    _equal(found[1][1], owed)
    _equal(found[2], weights)


@pytest.mark.parametrize(
    ("ranks", "stages", "format"),
    only_rows(
        [(3, (2, 0), "sharded")],
        itertools.product([1, 3, 4], [(0, 0), (0, 2), (2, 0), (3, 1)], ["sharded", "full"]),
    ),
)
def test_other_ranks_and_stages_owe_the_same(
    pool: Pool, tmp_path: Path, ranks: int, stages: tuple[int, int], format: str
) -> None:
    options = _options(format)
    (_, owed), _ = pool.run(2, _save, stages[0], str(tmp_path), options)[0]
    if ranks == 1:  # where nothing is sent, residuals are dropped
        pool.run(1, _dropped, stages[1], str(tmp_path / "step=4.ckpt"), options)
        return
    before, after, _ = pool.run(ranks, _resume, stages[1], str(tmp_path / "step=4.ckpt"), options, 6)[0]
    assert (before[0], after[0]) == (4, 6)
    for name, value in owed.items():
        np.testing.assert_allclose(before[1][name], value, rtol=1e-5, atol=1e-8, err_msg=name)


def _dropped(stage: int, path: str, options: dict[str, Any]) -> None:
    assert dist.get_world_size() == 1
    _, trainer = resume(path, stage, steps=5, module=GPT(2, "adamw"), **options)
    assert trainer.global_step == 5


def test_a_warm_up_goes_on(pool: Pool, tmp_path: Path) -> None:
    options = _options("sharded", warmup_steps=3)
    (_, owed), weights = pool.run(2, _save, 2, str(tmp_path), options)[0]
    assert owed
    found = pool.run(2, _resume, 2, str(tmp_path / "step=2.ckpt"), options)[0]
    assert found[0] == (2, {})
    _equal(found[2], weights)
