"""What does not fit is found out before anything is loaded."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lt_zero.common.errors import CheckpointError
from lt_zero.core.comm.world import World
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.restore import Contents, ModuleContents, restore
from tests.support.pool import Pool


def _error_of(rate: float, world: World | None = None) -> str:
    """The error of a restore whose schedule has this rate."""
    module = nn.Linear(2, 1)
    before = module.weight.clone()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters(), lr=0.1), 1)
    part = ModuleContents(module, None, {name: torch.ones_like(value) for name, value in module.state_dict().items()})
    state = {**schedule.state_dict(), "_last_lr": [rate]}
    contents = Contents((part,), schedules=[(schedule, state)], new_schedule="leave it out")
    with pytest.raises(CheckpointError) as caught:
        restore(contents, world, LossScaleController(DtypePolicy()))
    assert torch.equal(module.weight, before)
    return str(caught.value)


def test_a_schedule_that_does_not_fit_leaves_weights_alone() -> None:
    assert re.search("NaN.*: leave it out to begin a new schedule", _error_of(float("nan")))


def _error_of_one() -> str:
    return _error_of(float("nan") if dist.get_rank() == 1 else 0.1, World.join(torch.device("cpu")))


def test_a_schedule_of_one_rank_that_does_not_fit_is_an_error_of_all(pool: Pool) -> None:
    for told in pool.run(2, _error_of_one):
        assert "with which weights would become NaN: leave it out" in told
