"""The keys of ``gradient_compression``, and the plans that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lt_zero import ZeroConfig
from lt_zero.common.codec import Codec
from lt_zero.common.errors import ConfigError
from lt_zero.config.options import engine_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core import ask
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import plan_engine
from lt_zero.features import features_of
from lt_zero.features.compression.feature import SIGNS
from lt_zero.features.compression.gradient_compression import CompressedGradients
from lt_zero.kernels.codecs import TWO_BITS, TopK
from lt_zero.planning.setup import PlannedGroup


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3)


def _options(**block: Any) -> EngineOptions:
    config = ZeroConfig.of({"gradient_compression": block})
    return ask.adapted(engine_options(config, dtype_policy(config, "32-true")), features_of(config))


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ({}, None),
        ({"algorithm": "topk"}, set()),
        ({"algorithm": "1bit"}, {"table.weight", "head.bias"}),
        ({"algorithm": "topk", "exclude": ["head"]}, {"head.weight", "head.bias"}),
    ],
)
def test_parameters_that_are_sent_as_they_are(block: dict[str, Any], names: set[str] | None) -> None:
    net = Net()
    found = _options(**block).sent_dense
    mine = None if found is None else {name for name, p in net.named_parameters() if p in found(net)}
    assert mine == names


def test_a_pattern_that_matches_nothing() -> None:
    found = _options(algorithm="topk", exclude=["haed"]).sent_dense
    assert found is not None
    with pytest.raises(ConfigError, match="'haed': no class, module or parameter matches it"):
        found(Net())


def _plan(world: int, neighbours: int, **block: Any) -> ExchangePlan:
    config = ZeroConfig.of({"gradient_compression": block})
    zero = config.zero_optimization
    group = PlannedGroup.assumed(world, world, zero, "cpu", in_node=world == neighbours, neighbours=neighbours)
    return ask.plan_exchange(features_of(config), plan_engine(Net(), _options(**block), world), True, group)


@pytest.mark.parametrize(
    ("block", "codec", "hierarchical", "warmup"),
    [
        ({"algorithm": "1bit", "hierarchical_compress": True}, SIGNS, True, 0),
        ({"algorithm": "2bit"}, TWO_BITS, False, 0),
        (
            {"algorithm": "topk", "topk_ratio": 0.1, "huffman_coding": True, "warmup_steps": 3},
            *(TopK(0.1, torch.bfloat16, True), False, 3),
        ),
    ],
)
def test_the_exchange_that_is_asked_for(block: dict[str, Any], codec: Codec, hierarchical: bool, warmup: int) -> None:
    found = _plan(4, 2, **block)
    assert found == CompressedGradients(codec, hierarchical, True, warmup)


def test_gradients_are_sent_in_full_where_there_is_nothing_to_compress() -> None:
    assert type(_plan(1, 1, algorithm="2bit")) is ExchangePlan, "one rank"
    assert type(_plan(2, 2, algorithm="2bit", hierarchical_compress=True)) is ExchangePlan, "one node"
    assert type(_plan(2, 2, algorithm="2bit", exclude=["Net"])) is ExchangePlan, "all are excluded"
