"""Forecasts of what a step sends between nodes, beside what simulated nodes send."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import lt_zero
from lt_zero.config import ZeroConfig
from lt_zero.optim import build_optimizer
from lt_zero.planning.comm_options import comm_options_table, fitting, recommended, valid
from lt_zero.planning.estimate import Machine, estimate_traffic
from tests.support.features import needs, skip_without
from tests.support.matrix import only_rows
from tests.support.nodes import NodePool, Traffic
from tests.support.parity import RELEASE, config_of

MB = 10**6
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ring": {"communication": {"topology": 1}},
    "torus": {"communication": {"topology": 3}},
    "groups": {"mics_shard_size": 2},
    "ZeRO++": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True},
    "virtual ranks": {"reproducible": {"virtual_ranks": 8}},
    "1bit": {"gradient_compression": {"algorithm": "1bit", "exclude": []}},
    "OneBitAdam": {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1}}},
    "topk between nodes": {
        "gradient_compression": {"algorithm": "topk", "topk_ratio": 0.1, "hierarchical_compress": True}
    },
}


IMPOSSIBLE = [(0, "groups"), (2, "OneBitAdam"), (3, "OneBitAdam")]


def net(way: str) -> nn.Module:
    """Large enough for headers of packets and flags not to count: some 30 KB in each step."""
    torch.manual_seed(0)
    width = 768 if way in ("ZeRO++", "1bit", "OneBitAdam", "topk between nodes") else 256
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def config(stage: int, way: str, low: bool) -> ZeroConfig:
    keys = dict(WAYS[way])
    zero = {
        key: keys.pop(key)
        for key in WAYS[way]
        if key not in ("communication", "gradient_compression", "optimizer", "reproducible")
    }
    return config_of(stage, zero | (RELEASE if stage == 3 else {}), torch.bfloat16 if low else None, **keys)


def _sent(stage: int, way: str, low: bool) -> float:
    """Bytes from this rank's node in a step of two micro-batches."""
    model = net(way)
    engine = lt_zero.shard(model, config(stage, way, low))
    own = WAYS[way].get("optimizer", {"type": "AdamW", "params": {}})
    optimizer = build_optimizer(own["type"], own["params"], model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    for _ in range(3 if own["type"].startswith("OneBit") else 2):  # the first after the freeze gathers momenta
        with Traffic() as traffic:
            optimizer.zero_grad()
            for micro in range(2):
                engine.reducer.sync = micro == 1
                model(torch.ones(2, width, dtype=torch.bfloat16 if low else torch.float32)).sum().backward()
            optimizer.step()
            engine.finish_steps()
    return traffic.sent


@pytest.mark.nodes
@pytest.mark.parametrize(
    ("stage", "way", "low"),
    only_rows(
        [(3, "auto", True), (0, "1bit", False), (2, "ring", True), (3, "groups", False)],
        [row for row in itertools.product([0, 1, 2, 3], WAYS, [False, True]) if row[:2] not in IMPOSSIBLE],
    ),
)
def test_as_many_bytes_as_forecast(node_pool: NodePool, stage: int, way: str, low: bool) -> None:
    skip_without(WAYS[way])
    sent = node_pool.run(_sent, stage, way, low)
    forecast = estimate_traffic(
        net(way), config(stage, way, low), 4, ranks_per_node=2, device="cpu", accumulate_grad_batches=2
    )
    assert forecast.total == pytest.approx((sent[0] + sent[2]) / 2, rel=0.05)


def test_nothing_is_sent_by_one_node() -> None:
    assert estimate_traffic(1e6, {"zero_optimization": {"stage": 3}}, 8).total == 0


def test_a_ring_of_gpus() -> None:
    """15 of 16 parts of 1e9 bf16 weights leave each node for each gather, as fp32 gradients for the reduction."""
    found = estimate_traffic(1e9, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, 16, ranks_per_node=8)
    assert found.weights == pytest.approx(2e9 * 15 / 16, rel=1e-3)
    assert found.gradients == pytest.approx(4e9 * 15 / 16, rel=1e-3)
    assert found.seconds(10_000) == pytest.approx(6e9 * 15 / 16 * 8 / 1e10, rel=1e-3)


@needs("zero_plus_plus")
def test_the_way_that_sends_least_is_recommended() -> None:
    console = Console(record=True, width=120)
    options: dict[str, Any] = {"ranks_per_node": 2, "device": "cpu"}
    found = comm_options_table(29.5e6, ZeroConfig.of(None), 4, 200, 3, console, step_seconds=3.0, **options)
    assert recommended(found, 200)[0].startswith("least traffic: stage 3 (2 ranks of a node, then 2 nodes")
    assert recommended(found, 200)[1].startswith("~ less, with other results: stage 3, ZeRO++ (")
    text = console.export_text()
    for way, traffic in found.items():
        line = next(line for line in text.splitlines() if f"{way.name}  " in line and ("~" in line) != way.exact)
        for cell in (f"{traffic.seconds(200):.2f}", f"{3 + traffic.seconds(200):.2f}"):
            assert cell in line
    names = [way.name for way in found]
    assert names[:3] == ["stage 3", "stage 3, topology 1", "stage 3, mics_shard_size 2"]


def test_ways_do_not_contradict_the_configuration() -> None:
    config = ZeroConfig.of({"zero_optimization": {"stage": 2, "mics_shard_size": 2}, "optimizer": {"type": "SGD"}})
    assert not [way.name for way in valid(config, 8, 4, "cuda") if "1bit" in way.name and way.stage > 0]


def test_what_fits_is_recommended_by_its_traffic() -> None:
    """Full copies in each node need more memory than shards over all of them."""
    config = ZeroConfig.of({"bf16": {"enabled": True}})
    options: dict[str, Any] = {"optimizer": "adam", "saves": False}
    large = fitting(1e9, Machine(10**12, 80 * 10**9, 0, 8), config, 64, ("-", "-"), **options)
    small = fitting(1e9, Machine(10**12, 4 * 10**9, 0, 8), config, 64, ("-", "-"), **options)
    assert {"stage 2, mics_shard_size 8", "stage 3", "stage 0"} <= {way.name for way in large}
    names = {way.name for way in small}
    assert "stage 3" in names
    assert "stage 0" not in names
