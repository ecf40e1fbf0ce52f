"""Lightning's Tuner: the learning rate finder does what it does under DDP; batch-size finding is refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner

from lt_zero import ZeroStrategy
from tests.support.lightning_tools import (
    GPT,
    QUIET,
    assert_same,
    sharded_trainer,
    single_trainer,
    torchrun_env,
    weights,
)
from tests.support.matrix import only
from tests.support.pool import Pool


class Tuned(GPT):
    """A learning rate and a batch size to be found."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(world, "adamw")
        self.lr, self.batch_size = 0.1, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def _found(stage: int | None, folder: str) -> tuple[list[float], float | None, float, dict[str, Any]]:
    """The losses on the way, the suggestion, the rate that the module got, and weights of a fit with it."""
    options: dict[str, Any] = {"default_root_dir": folder, "max_steps": 3, "limit_val_batches": 0}
    if stage is None:
        warnings.filterwarnings("ignore")
        os.environ.update(torchrun_env())
        ddp = {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": dist.get_world_size()}
        trainer = pl.Trainer(**{**QUIET, **options, **ddp})
    else:
        trainer = sharded_trainer(stage, **options)
    module = Tuned(dist.get_world_size())
    finder = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=1e-1, num_training=15, early_stop_threshold=None)
    assert finder is not None
    assert not list(Path(folder).glob(".lr_find*")), "what it saved to go back to is gone"
    losses, suggestion, rate = list(finder.results["loss"]), finder.suggestion(), module.lr
    trainer.fit(module)
    return losses, suggestion, rate, weights(trainer)


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_the_learning_rate_finder_is_ddps(pool: Pool, tmp_path: Path, stage: int) -> None:
    losses, suggestion, rate, trained = pool.run(2, _found, None, str(tmp_path))[0]
    assert suggestion == rate != 0.1
    got = pool.run(2, _found, stage, str(tmp_path))[0]
    assert got[0] == pytest.approx(losses, rel=1e-4)
    assert got[1:3] == (pytest.approx(suggestion), pytest.approx(rate))
    assert_same(got[3], trained, rtol=1e-4, atol=1e-5)


def test_batch_size_finding_is_refused_by_name() -> None:
    # By Lightning, for every subclass of DDPStrategy, at one rank too: docs/limits.md says what to do in its place.
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(single_trainer(strategy=ZeroStrategy(stage=3))).scale_batch_size(Tuned())
