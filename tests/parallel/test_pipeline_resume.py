"""Trainers with pipelines: saved and resumed, in the middle of an epoch, on other meshes, as one file, exported."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import FabricZeroStrategy, ZeroStrategy
from lt_zero.checkpoint.open import verify
from tests.support.features import there
from tests.support.lightning_tools import FULL, sharded_trainer, single_trainer, torchrun_env, trust
from tests.support.matrix import only, only_rows
from tests.support.pipeline_module import Module
from tests.support.pipelines import Model, batch
from tests.support.pool import Pool

EPOCHS, ALL, MIDDLE = 2, 8, 5  # steps of the epochs, and those before the checkpoint: it is in the second epoch


def trainer_of(stage: int, pipeline: int, config: dict[str, Any] | None = None, **how: Any) -> Any:
    """A trainer of lt_zero, or of one process without it, which reads and writes single files."""
    how = {"max_steps": ALL, "use_distributed_sampler": False, "num_sanity_val_steps": 0, **how}
    if dist.get_world_size() == 1 and config == FULL:
        return single_trainer(**how)
    block = {"pipeline": {"stages": pipeline, "num_microbatches": 2}, **(config or {})}
    return sharded_trainer(stage, config=block, **how)


def _fit(
    stage: int,
    pipeline: int,
    steps: int,
    save: str = "",
    resume: str | None = None,
    dropout: float = 0.0,
    averages: bool = False,
    config: dict[str, Any] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and on rank 0 the weights, which are the averages if there are some."""
    data = dist.get_world_size() // pipeline
    callbacks = [lt_zero.EMA(decay=0.7)] if averages else []
    trainer, module = trainer_of(stage, pipeline, config, max_steps=steps, callbacks=callbacks), Module("adamw", data)
    module.dropout = dropout
    trainer.fit(module, ckpt_path=resume, **trust(False))
    if save:
        trainer.save_checkpoint(save)
    if not isinstance(trainer.strategy, ZeroStrategy):
        return module.losses, dict(module.state_dict())
    return module.losses, {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}


ASYNC: dict[str, Any] = {"checkpoint": {"async": True}}


@pytest.mark.parametrize(
    ("stage", "ranks", "form"),
    only_rows(
        [(3, (2, 2), {})],
        itertools.product([0, 1, 2, 3], [(2, 2), (3, 3), (4, 2)], [{}, FULL, ASYNC]),
    ),
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    pool: Pool, tmp_path: Path, stage: int, ranks: tuple[int, int], form: dict[str, Any]
) -> None:
    """In the middle of an epoch, with dropout, whose masks repeat, and with averages of the weights.

    ``ranks``: all, and stages of the pipeline.
    """
    how: dict[str, Any] = {"dropout": 0.3, "averages": there("ema"), "config": form}
    path = str(tmp_path / "0.ckpt")
    losses, weights = pool.run(ranks[0], _both, stage, ranks[1], path, how)[0]
    assert losses[0] == losses[1]
    assert len(losses[0]) == ALL
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def _both(stage: int, pipeline: int, path: str, how: dict[str, Any]) -> Any:
    whole, first = _fit(stage, pipeline, ALL, **how), _fit(stage, pipeline, MIDDLE, path, **how)
    rest = _fit(stage, pipeline, ALL, resume=path, **how)
    return (whole[0], first[0] + rest[0]), (whole[1], rest[1])


def expected() -> tuple[list[float], dict[str, Tensor]]:
    module = Module("adamw")
    single_trainer(max_steps=ALL, use_distributed_sampler=False, num_sanity_val_steps=0).fit(module)
    return module.losses, module.state_dict()


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        ((2, 2, 1, {}), (1, 1, 0, {})),
        pytest.param((4, 2, 3, {}), (2, 1, 2, {}), marks=pytest.mark.slow),
        ((1, 1, 0, FULL), (2, 2, 3, {})),
        pytest.param((3, 3, 1, FULL), (1, 1, 0, FULL), marks=pytest.mark.slow),
        pytest.param((2, 1, 1, {}), (3, 3, 1, {}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_with_other_stages(pool: Pool, tmp_path: Path, saves: Any, loads: Any) -> None:
    """``saves`` and ``loads``: ranks, stages of the pipeline, ZeRO stage, configuration.

    One rank with single files runs without us, and begins an epoch when it is resumed.
    """
    path, (ranks, pipeline, stage, form) = str(tmp_path / "0.ckpt"), saves
    steps = ALL // EPOCHS if FULL in (form, loads[3]) else MIDDLE
    losses = pool.run(ranks, _fit, stage, pipeline, steps, path, None, 0.0, False, form)[0][0]
    ranks, pipeline, stage, form = loads
    more, weights = pool.run(ranks, _fit, stage, pipeline, ALL, "", path, 0.0, False, form)[0]
    want = expected()
    assert losses + more == pytest.approx(want[0], rel=1e-5)
    assert list(weights) == list(want[1])
    torch.testing.assert_close(weights, want[1], rtol=1e-4, atol=1e-5)


def _last(folder: str) -> list[float]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []
    for steps, resume in ((MIDDLE, None), (ALL, "last")):
        saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=1)
        trainer, module = trainer_of(1, 2, max_steps=steps, callbacks=[saver], enable_checkpointing=True), Module()
        trainer.fit(module, ckpt_path=resume, **trust(False))
        found += module.losses
    return found


@pytest.mark.slow
def test_the_last_checkpoint_is_found(pool: Pool, tmp_path: Path) -> None:
    module = Module()
    single_trainer(max_steps=ALL, use_distributed_sampler=False).fit(module)
    assert pool.run(2, _last, str(tmp_path))[0] == pytest.approx(module.losses, rel=1e-5)


def _weights(folder: str) -> dict[str, Any]:
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    trainer, module = trainer_of(3, 2, zero=zero, max_steps=2), Module("adamw")
    trainer.fit(module)
    want = {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}
    trainer.strategy.export(Path(folder, "live.pt"), dtype=torch.float32)
    trainer.save_checkpoint(Path(folder, "whole"))
    trainer.save_checkpoint(Path(folder, "weights"), weights_only=True)
    return want


def test_whole_weights_leave_a_run(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(2, _weights, str(tmp_path))[0]
    found = {"live": torch.load(tmp_path / "live.pt")}
    for name in ("whole", "weights"):
        lt_zero.export(tmp_path / name, tmp_path / f"{name}.pt", dtype=torch.float32)
        found[name] = torch.load(tmp_path / f"{name}.pt")
        verify(tmp_path / name)
    for name, state in found.items():
        assert list(state) == list(want), name
        assert all(torch.equal(state[key], value) for key, value in want.items())
    beside = torch.load(tmp_path / "whole-fp16.pt")
    assert list(beside) == list(want)
    assert all(torch.equal(beside[key], value.half()) for key, value in want.items())
    module = Module()
    module.configure_model()
    assert module.load_state_dict(found["whole"]) == ([], [])


def _fabric(path: str, form: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that goes on from its checkpoint after two steps."""
    os.environ.update(torchrun_env())
    found = list[list[float]]()
    for resumes in (False, True):
        block = {"zero_optimization": {"stage": 3}, "pipeline": {"num_microbatches": 2}, **form}
        strategy = FabricZeroStrategy(config=block, pipeline_parallel_size=2)
        fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        model = Model()
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        module.mark_forward_method("loss")
        state = {"model": module, "optimizer": optimizer}
        if resumes:
            assert fabric.load(path, state) == {}
        found.append([])
        for step in range(2 if resumes else 0, 4):
            loss = module.loss(*batch(step, strategy.session.division.data_rank))
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            found[-1].append(float(loss))
            if step == 1:
                fabric.save(path, state)
    return found[0], found[1]


@pytest.mark.parametrize("form", only([{}], [{}, FULL]), ids=["sharded", "full"])
def test_fabric_goes_on(pool: Pool, tmp_path: Path, form: dict[str, Any]) -> None:
    for whole, rest in pool.run(2, _fabric, str(tmp_path / "0.ckpt"), form):
        assert rest == whole[2:]
