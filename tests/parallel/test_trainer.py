"""A Trainer with tensor-parallel ranks: against one process, saved and resumed on other meshes, exported."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from tests.support.lightning_tools import sharded_trainer, single_trainer, trust
from tests.support.parallel_module import BATCH, Module
from tests.support.pool import Pool


def trainer_of(stage: int, tensor: int, steps: int) -> pl.Trainer:
    config = {"tensor_parallel": {"autotp_size": tensor}, "train_batch_size": BATCH}
    if dist.get_world_size() == tensor == 1:
        return single_trainer(max_steps=steps, use_distributed_sampler=False)
    return sharded_trainer(stage, config=config, max_steps=steps)


def _fit(stage: int, tensor: int, steps: int, save: str, resume: str | None = None) -> tuple[list[float], float]:
    data = dist.get_world_size() // tensor
    trainer, module = trainer_of(stage, tensor, steps), Module(data=data)
    trainer.fit(module, ckpt_path=resume, **trust(False))
    trainer.save_checkpoint(save)
    assert float(trainer.callback_metrics["rows"]) == BATCH
    assert float(trainer.callback_metrics["count"]) == BATCH * (steps if resume is None else 2), "of the last epoch"
    return module.losses


def expected(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    module = Module()
    single_trainer(max_steps=steps).fit(module)
    return module.losses, module.state_dict()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in range(3)), 3])
def test_a_run_is_that_of_one_process_and_goes_on_without_tensor_ranks(pool: Pool, tmp_path: Path, stage: int) -> None:
    first, second = str(tmp_path / "tensor"), str(tmp_path / "data")
    losses = pool.run(4, _fit, stage, 2, 3, first)[0]
    assert losses == pytest.approx(expected(3)[0], rel=1e-5)
    losses = pool.run(3, _fit, stage, 1, 6, second, first)[0]
    want, weights = expected(6)
    assert losses == pytest.approx(want[3:], rel=1e-5)
    lt_zero.export(second, tmp_path / "weights.pt", dtype=torch.float32)
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), weights, rtol=1e-4, atol=1e-5)
