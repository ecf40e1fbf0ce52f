"""What does not fit is found out before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.restore import Contents, Part, restore


def test_a_schedule_that_does_not_fit_leaves_weights_alone() -> None:
    module = nn.Linear(2, 1)
    before = module.weight.clone()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters(), lr=0.1), 1)
    part = Part(module, None, {name: torch.ones_like(value) for name, value in module.state_dict().items()})
    state = {**schedule.state_dict(), "_last_lr": [float("nan")]}
    contents = Contents((part,), schedules=[(schedule, state)], new_schedule="leave it out")
    with pytest.raises(CheckpointError, match="NaN.*: leave it out to begin a new schedule"):
        restore(contents, None, LossScaleController(DtypePolicy()))
    assert torch.equal(module.weight, before)
