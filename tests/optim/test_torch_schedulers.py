"""Torch's schedulers by name: each moves what it moves in plain torch, or is refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as torchs

from lt_zero.common.errors import ConfigError
from lt_zero.optim import build_scheduler, check_scheduler
from tests.support.plain_module import Own, run

WORKS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 5]},
    "ConstantLR": {"factor": 0.5, "total_iters": 4},
    "LinearLR": {"total_iters": 7},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 7, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 6, "eta_min": 1e-4},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": [0.1], "step_size_up": 3, "mode": "exp_range", "gamma": 0.9},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 12, "three_phase": True},
    "ReduceLROnPlateau": {"patience": 1, "factor": 0.5},
}
REFUSED = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}


def test_every_public_class_is_here() -> None:
    assert set(torchs.__all__) == {*WORKS, *REFUSED, "LRScheduler"}
    for name in REFUSED:
        (problem,) = check_scheduler(name, {})
        assert f"scheduler.type='{name}' cannot be used." in problem.message
        assert "Return it from configure_optimizers" in problem.message


def make(cls: Any) -> Optimizer:
    return cls([torch.nn.Parameter(torch.ones(2))], lr=0.1, **({"momentum": 0.9} if cls is SGD else {}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [SGD, AdamW])
@pytest.mark.parametrize("name", WORKS)
def test_ten_steps_as_in_torch(name: str, cls: Any) -> None:
    plateau = name == "ReduceLROnPlateau"
    params = {**WORKS[name], **({"monitor": "val"} if plateau else {})}
    assert check_scheduler(name, params) == []
    ours, theirs = make(cls), make(cls)
    pairs = ((ours, build_scheduler(name, params, ours)), (theirs, getattr(torchs, name)(theirs, **WORKS[name])))
    seen = set()
    for step in range(10):
        for optimizer, schedule in pairs:
            optimizer.step()
            schedule.step(float(step)) if plateau else schedule.step()
        first, second = ({k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (ours, theirs))
        assert first == second
        seen.add(first["lr"])
    assert len(seen) > 1


class Watched(Own):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("growing", float(self.current_epoch))
        return super().training_step(batch, batch_idx)


def test_on_plateau_after_each_epoch() -> None:
    params = {"factor": 0.5, "patience": 0, "monitor": "growing"}
    module = Watched(batch=16)  # 4 steps an epoch
    trainer = run(module, {"scheduler": {"type": "ReduceLROnPlateau", "params": params}}, max_steps=-1, max_epochs=4)
    assert module.rates == [0.5] * 8 + [0.25] * 4 + [0.125] * 4
    assert trainer.lr_scheduler_configs[0].monitor == "growing"
    with pytest.raises(ConfigError, match=r"scheduler.params.monitor is missing: ReduceLROnPlateau requires it"):
        run(Watched(), {"scheduler": {"type": "ReduceLROnPlateau", "params": {"factor": 0.5}}})
