"""The keys of ZeRO++, and the plans that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lt_zero import ZeroConfig
from lt_zero.config.options import engine_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.partition import plan_engine
from lt_zero.core.feature import Feature
from lt_zero.features import features_of
from lt_zero.features.zero_plus_plus.zero_plus_plus import WEIGHTS, QuantizedSums
from lt_zero.planning.setup import PlannedGroup


def _feature(**zero: Any) -> Feature | None:
    return next(iter(features_of(ZeroConfig.of({"zero_optimization": zero}))), None)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("key", "gathers", "frozen", "updates"),
    [
        ("zero_quantized_weights", True, True, True),
        ("zero_quantized_nontrainable_weights", False, True, False),
        ("zero_quantized_gradients", False, False, False),
    ],
)
@pytest.mark.filterwarnings("ignore::lt_zero.config.load.ConfigWarning")
def test_weights_that_are_gathered_in_fewer_bits(
    stage: int, key: str, gathers: bool, frozen: bool, updates: bool
) -> None:
    config = ZeroConfig.of({"zero_optimization": {"stage": stage, key: True, "stage3_param_persistence_threshold": 0}})
    group = PlannedGroup.assumed(2, 2, config.zero_optimization, "cpu", in_node=True, neighbours=2)
    plan = plan_engine(nn.Linear(40, 40), engine_options(config, dtype_policy(config, "32-true")), 2)
    features = features_of(config)
    assert bool(features) is (stage == 3 or key != "zero_quantized_nontrainable_weights")
    for feature in features:
        codecs = feature.codecs(plan.buckets[0], group, training=True)
        assert codecs is not None
        assert codecs.gathers is (WEIGHTS if gathers and stage == 3 else None)
        assert codecs.gathers_frozen is (WEIGHTS if frozen and stage == 3 else None)
        assert codecs.updates is (WEIGHTS if updates and stage < 3 else None)
        alone = PlannedGroup.assumed(1, 1, config.zero_optimization, "cpu", in_node=True, neighbours=1)
        assert not any(feature.codecs(plan.buckets[0], alone, training=True) or ()), "there is nobody to send to"


@pytest.mark.filterwarnings("ignore::lt_zero.config.load.ConfigWarning")
def test_sums_in_few_bits_need_sharded_states() -> None:
    config = ZeroConfig.of({"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}})
    group = PlannedGroup.assumed(2, 2, config.zero_optimization, "cpu", in_node=True, neighbours=2)
    plan = plan_engine(nn.Linear(3, 2), engine_options(config, dtype_policy(config, "32-true")), 2)
    (feature,) = features_of(config)
    assert isinstance(feature.exchange(plan, False, group), QuantizedSums)
    assert _feature(stage=0, zero_quantized_gradients=True) is None


@pytest.mark.filterwarnings("ignore::lt_zero.config.load.ConfigWarning")
def test_second_copies_are_of_sharded_parameters() -> None:
    assert _feature(stage=2, zero_hpz_partition_size=2) is None
    assert _feature(stage=3, zero_hpz_partition_size=1) is None
    assert _feature(stage=3, zero_hpz_partition_size=2) is not None
