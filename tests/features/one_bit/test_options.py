"""The keys of 1-bit optimizers, and the plans that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lt_zero import ConfigError, ZeroConfig
from lt_zero.config.options import engine_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core import ask
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.partition import plan_engine
from lt_zero.features import features_of
from lt_zero.features.one_bit.compressed_momentum import AveragedMomenta
from lt_zero.features.one_bit.feature import MOMENTA
from lt_zero.features.one_bit.local_steps import AveragedSteps
from lt_zero.optim import build_optimizer, check_optimizer
from lt_zero.planning.setup import PlannedGroup


def _plan(world: int, **optimizer: Any) -> ExchangePlan:
    config = ZeroConfig.of({"optimizer": optimizer, "zero_optimization": {"stage": 0}})
    features = features_of(config)
    options = ask.adapted(engine_options(config, dtype_policy(config, "32-true")), features)
    plan = plan_engine(nn.Linear(3, 2), options, world)
    assert all(bucket.compresses for bucket in plan.buckets)
    zero = config.zero_optimization
    group = PlannedGroup.assumed(world, world, zero, "cpu", in_node=True, neighbours=world)
    return ask.plan_exchange(features, plan, False, group)


@pytest.mark.parametrize(
    ("optimizer", "planned", "interval"),
    [
        ({"type": "OneBitAdam", "params": {"lr": 0.1}}, AveragedMomenta(MOMENTA, False, False), 1),
        ({"type": "lt_zero.optim.OneBitLamb"}, AveragedMomenta(MOMENTA, False, False), 1),
        ({"type": "ZeroOneAdam"}, AveragedSteps(MOMENTA, False, False, 16), 16),
        ({"type": "ZeroOneAdam", "params": {"local_step_clipper": 8}}, AveragedSteps(MOMENTA, False, False, 8), 8),
    ],
)
def test_the_exchange_that_is_asked_for(optimizer: dict[str, Any], planned: ExchangePlan, interval: int) -> None:
    found = _plan(2, **optimizer)
    assert found == planned
    assert found.interval == interval


def test_one_rank_exchanges_nothing() -> None:
    assert type(_plan(1, type="OneBitAdam")) is ExchangePlan


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("OneBitAdam", {"coeff_beta": 0.9}, "optimizer.params.coeff_beta=0.9: it belongs to the 1-bit"),
        ("OneBitLamb", {"freeze_step": 0}, "optimizer.params.freeze_step=0: write a whole number of at least 1"),
        ("OneBitLamb", {"coeff_beta": 1}, "optimizer.params.coeff_beta=1: write a number of at least 0 and below 1"),
        ("ZeroOneAdam", {"local_step_clipper": 0}, "optimizer.params.local_step_clipper=0: write a whole number of at"),
        ("ZeroOneAdam", {"freeze_step": 9}, "optimizer.params.freeze_step=9: it belongs to the 1-bit optimizers"),
        ("OneBitLamb", {"factor_max": 0.4}, "optimizer.params.factor_max=0.4: write a number of at least factor_min"),
        ("OneBitLamb", {"comm_backend_name": "smoke"}, "optimizer.params.comm_backend_name='smoke': write nccl or mpi"),
        ("OneBitLamb", {"amsgrad": True}, "optimizer.params.amsgrad=True: 1-bit optimizers have no such variant"),
    ],
)
def test_wrong_values(kind: str, params: Any, expected: str) -> None:
    (problem,) = check_optimizer(kind, params)
    assert expected in problem.message
    assert problem.key.startswith("optimizer.params")
    with pytest.raises(ConfigError):
        build_optimizer(kind, params, [nn.Parameter(torch.zeros(1))])
