"""1-bit optimizers in checkpoints: the same ranks go on exactly, others with the same momentum and what was owed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lt_zero.checkpoint.native.residuals import residual_state
from lt_zero.optim import ZeroOneAdam
from tests.support.checkpoint_tools import resume, train
from tests.support.lightning_tools import GPT
from tests.support.matrix import only_rows
from tests.support.pool import Pool

FREEZE = {
    "OneBitAdam": {"freeze_step": 2},
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 1},  # step 5 is within an interval
}


class Configured(GPT):
    """Its optimizer is that of the configuration."""

    configure_optimizers = pl.LightningModule.configure_optimizers


def _options(type_: str, format: str, precision: str = "32-true") -> dict[str, Any]:
    optimizer = {"type": type_, "params": {"lr": 1e-3, "comm_backend_name": "nccl", **FREEZE[type_]}}
    config = {
        "gradient_clipping": 0.1,
        "optimizer": optimizer,
        "checkpoint": {"format": format},
        "fp16": {"initial_scale_power": 4},
    }
    return {"config": config, "precision": precision, "module": Configured(2)}


def _weights(trainer: pl.Trainer) -> dict[str, Any]:
    strategy: Any = trainer.strategy
    (optimizer,) = strategy.optimizers
    assert optimizer.local if isinstance(optimizer, ZeroOneAdam) else optimizer.frozen
    own = {f"own {name}": p.detach().float().numpy() for name, p in trainer.lightning_module.named_parameters()}
    return own | {name: value.float().numpy() for name, value in strategy.full_state_dict().items()}


def _owed(trainer: pl.Trainer) -> dict[str, Any]:
    """What residuals owe to the averaged momentum, by parameter; {} on other ranks. Collective."""
    strategy: Any = trainer.strategy
    state = residual_state(strategy.run.engine, sharded=False)
    assert state is not None
    owed = {name: rows.double().sum(0) for name, rows in state["worker"].items()}
    for name, sums in state["server"].items():
        owed[name] = owed[name] + sums
    return {name: (value * state["units"][name]).numpy() for name, value in owed.items()}


class Owed(pl.Callback):
    """What was owed before the first step."""

    found: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = _owed(trainer)


def _save(type_: str, stage: int, folder: str, format: str, precision: str, steps: int) -> Any:
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    options = _options(type_, format, precision)
    trainer = train(stage, callbacks=[saves], max_steps=steps, enable_checkpointing=True, **options)
    return _owed(trainer), _weights(trainer)


def _resume(type_: str, stage: int, path: str, format: str, precision: str = "32-true") -> Any:
    owed = Owed()
    _, trainer = resume(path, stage, steps=7, callbacks=[owed], **_options(type_, format, precision))
    return owed.found, _weights(trainer)


TYPES, FORMATS, PRECISIONS = ["OneBitAdam", "OneBitLamb"], ["sharded", "full"], ["32-true", "16-true"]


@pytest.mark.parametrize(
    ("type_", "stage", "format", "precision"),
    only_rows(
        [
            ("OneBitAdam", 1, "sharded", "32-true"),
            ("ZeroOneAdam", 0, "full", "16-true"),
        ],
        [
            *itertools.product(TYPES, [0, 1], FORMATS, PRECISIONS),
            *itertools.product(["ZeroOneAdam"], [0], FORMATS, PRECISIONS),
        ],
    ),
)
def test_the_same_ranks_go_on_exactly(
    pool: Pool, tmp_path: Path, type_: str, stage: int, format: str, precision: str
) -> None:
    saved = pool.run(2, _save, type_, stage, str(tmp_path), format, precision, 7)
    resumed = pool.run(2, _resume, type_, stage, str(tmp_path / "step=5.ckpt"), format, precision)
    for (_, weights), (_, found) in zip(saved, resumed, strict=True):
        assert list(found) == list(weights)
        for name, value in weights.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


ELSEWHERE = [(3, (0, 1), "sharded"), (4, (1, 0), "full")]  # ranks, stages, format
LOCAL = [("ZeroOneAdam", 3, (0, 0), "sharded"), ("ZeroOneAdam", 4, (0, 0), "full")]


@pytest.mark.parametrize(
    ("type_", "ranks", "stages", "format"),
    only_rows(
        [("OneBitLamb", *ELSEWHERE[0])],
        [*((name, *where) for name in TYPES for where in ELSEWHERE), *LOCAL],
    ),
)
def test_other_ranks_and_stages_owe_the_same(
    pool: Pool, tmp_path: Path, type_: str, ranks: int, stages: tuple[int, int], format: str
) -> None:
    owed, _ = pool.run(2, _save, type_, stages[0], str(tmp_path), format, "32-true", 5)[0]
    assert any(value.any() for value in owed.values())
    found, _ = pool.run(ranks, _resume, type_, stages[1], str(tmp_path / "step=5.ckpt"), format)[0]
    for name, value in owed.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-8, err_msg=name)


class Together(pl.Callback):
    """Whether ranks validate the same weights."""

    found: Any = None

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.found = trainer.global_step, optimizer.pending  # type: ignore[attr-defined]


def _validate() -> Any:
    together = Together()
    options: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 5}
    options["check_val_every_n_epoch"] = None  # counts steps over epochs
    train(0, callbacks=[together], max_steps=5, **_options("ZeroOneAdam", "full"), **options)
    return together.found


def test_ranks_validate_the_same_weights(pool: Pool) -> None:
    assert pool.run(2, _validate) == [(5, False)] * 2
