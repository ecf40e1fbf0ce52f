"""A Trainer with pipelines: against one process."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from tests.support.features import needs
from tests.support.lightning_tools import quick, sharded_trainer, single_trainer
from tests.support.matrix import only, only_rows
from tests.support.pipeline_module import Module
from tests.support.pool import Pool


def trainer_of(stage: int, pipeline: int, config: dict[str, Any] | None = None, **how: Any) -> pl.Trainer:
    block = {"pipeline": {"stages": pipeline, "num_microbatches": 2}, **(config or {})}
    return sharded_trainer(stage, config=block, use_distributed_sampler=False, **how)


def _fit(stage: int, pipeline: int, how: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    trainer, module = trainer_of(stage, pipeline, **how), Module(data=dist.get_world_size() // pipeline)
    trainer.fit(module)
    logits = trainer.predict(module)
    return module.losses, module.validated, logits


def expected(how: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    module, trainer = Module(), single_trainer(use_distributed_sampler=False, **how)
    trainer.fit(module)
    return module.losses, module.validated, trainer.predict(module)


@pytest.mark.parametrize(("stage", "accumulates"), only_rows([(0, 1), (3, 2)], itertools.product([0, 1, 2, 3], [1, 2])))
def test_a_run_is_that_of_one_process(pool: Pool, stage: int, accumulates: int) -> None:
    how = {"max_epochs": 2, "accumulate_grad_batches": accumulates, "gradient_clip_val": 0.5, "num_sanity_val_steps": 1}
    found, want = pool.run(2, _fit, stage, 2, how), expected(how)
    for losses, validated, logits in found:
        assert losses == pytest.approx(want[0], rel=1e-5)
        assert validated == pytest.approx(want[1], rel=1e-5)
        torch.testing.assert_close(logits, want[2], rtol=1e-4, atol=1e-5)


def _fit_averaged(stage: int, pipeline: int) -> tuple[list[float], list[float], Any]:
    return _fit(stage, pipeline, {"max_epochs": 2, "callbacks": [lt_zero.EMA(decay=0.7)]})


@needs("ema")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_averages_are_those_of_one_process(pool: Pool, stage: int) -> None:
    """Validation and prediction see them."""
    want = pool.run(1, _fit_averaged, 0, 1)[0]
    for losses, validated, logits in pool.run(2, _fit_averaged, stage, 2):
        assert losses == pytest.approx(want[0], rel=1e-5)
        assert validated == pytest.approx(want[1], rel=1e-5)
        torch.testing.assert_close(logits, want[2], rtol=1e-4, atol=1e-5)


def _run_several(trainer: pl.Trainer, module: Module) -> Module:
    """Validation, an epoch, and another epoch with new optimizers."""
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return module


def _several(stage: int) -> tuple[list[float], list[float]]:
    module = _run_several(trainer_of(stage, 2, max_epochs=1), Module("adamw"))
    return module.losses, module.validated


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_trainer_runs_several_times(pool: Pool, stage: int) -> None:
    want = _run_several(single_trainer(use_distributed_sampler=False, max_epochs=1), Module("adamw"))
    assert len(want.losses) == 8
    for losses, validated in pool.run(2, _several, stage):
        assert losses == pytest.approx(want.losses, rel=1e-5)
        assert validated == pytest.approx(want.validated, rel=1e-5)


class TwoOptimizers(Module):
    """One of them has parameters on the first stage only."""

    def __init__(self, data: int = 1) -> None:
        super().__init__(data=data)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.pipe(batch[:, :-1], batch[:, 1:])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        first = [{"params": [p for name, p in named if ".layers.1." in name]}]
        others = [p for name, p in named if ".layers.1." not in name]
        return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for parameters in (first, others)]


def _fit_two(stage: int) -> list[float]:
    module = TwoOptimizers()
    with quick():
        trainer_of(stage, 2, max_epochs=1).fit(module)
    return module.losses


@pytest.mark.parametrize("stage", only([1], [0, 1, 2, 3]))
def test_an_optimizer_may_have_parameters_on_one_stage_only(pool: Pool, stage: int) -> None:
    module = TwoOptimizers()
    single_trainer(use_distributed_sampler=False, max_epochs=1).fit(module)
    for losses in pool.run(2, _fit_two, stage):
        assert losses == pytest.approx(module.losses, rel=1e-5)
