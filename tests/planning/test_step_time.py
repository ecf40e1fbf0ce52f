"""The model of waits for the network against numbers that are computed by hand, and what it proposes."""

from __future__ import annotations

import logging
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lt_zero
from lt_zero import Sizes
from lt_zero.config import ZeroConfig
from lt_zero.planning.comm_options import many_shards
from lt_zero.planning.estimate import Machine, estimate_step
from lt_zero.planning.step_time import Cluster, choices, ring
from tests.support.features import skip_without
from tests.support.parity import config_of
from tests.support.simulated import one_of

US = 1e-6
E = 1_600_000  # elements of a unit
# Of 2 nodes of 8: LL128, 14 + 14 * 1.9 + 4 us and 15 of 16 parts at 0.92 * 320 GB/s (8 * 46 are more).
GATHER = (44.6 + E * 2 * 15 / 16 / (0.92 * 320e9) / US) * US  # bf16
REDUCE = (44.6 + E * 4 * 15 / 16 / (0.92 * 320e9) / US) * US  # fp32


@pytest.mark.parametrize(
    ("nbytes", "ranks", "on_node", "us"),
    [
        (1e9, 1, 1, 0.0),
        (1e9, 8, 8, 8.4 + 7 * 3.4 + 1e9 * 7 / 8 / 320e9 / US),  # Simple, inside a node
        (1e9, 16, 8, 8.4 + 14 * 3.4 + 14.0 + 1e9 * 15 / 16 / 320e9 / US),
        (0.0, 1024, 8, 6.6 + (1023 - 127) * 0.6 + 127 * 2.7),  # LL: latency alone
        (1e6, 2, 1, 14.0 + 4.0 + 0.5e6 / (0.92 * 46e9) / US),  # LL128, over one card of each node
    ],
)
def test_rings(nbytes: float, ranks: int, on_node: int, us: float) -> None:
    assert ring(nbytes, ranks, on_node, Cluster()) == pytest.approx(us * US, rel=1e-9)


def waits(stage: int, tokens: int, accumulate: int = 1, **zero: Any) -> tuple[float, float]:
    """Seconds of waits and of computing of three units on two nodes of 8 ranks."""
    block = {"stage": stage, **({"stage3_max_reuse_distance": 0} if stage == 3 else {}), **zero}
    config = {"zero_optimization": {"reduce_bucket_size": E, **block}}
    sizes = Sizes(3 * E, layers=(E,) * 3)
    how: dict[str, Any] = {"ranks_per_node": 8, "precision": "bf16-mixed", "accumulate_grad_batches": accumulate}
    found = estimate_step(sizes, config, 16, tokens=tokens, **how)
    return found.waits, found.computes


def forward(tokens: int) -> float:
    return 2 * tokens * (E + tokens * math.sqrt(E / 12)) / (0.55 * 989e12)


def test_what_takes_longer_than_the_computing_beside_it_waits() -> None:
    few, many = forward(128), forward(32768)
    beyond = 3 * (GATHER - few) + 3 * (GATHER + REDUCE - 2 * few)
    assert waits(3, 128) == pytest.approx((GATHER + beyond + REDUCE, 9 * few))
    stays = waits(3, 128, stage3_max_reuse_distance=10**9)[0]  # weights stay from forward to backward
    assert stays == pytest.approx(GATHER + 3 * (GATHER - few) + REDUCE + 3 * (REDUCE - 2 * few))
    assert waits(3, 32768) == pytest.approx((GATHER + REDUCE, 9 * many))
    assert waits(1, 32768) == pytest.approx((GATHER + REDUCE, 9 * many))
    assert waits(1, 128) == pytest.approx((GATHER + 3 * (GATHER - few) + REDUCE + 3 * (REDUCE - 2 * few), 9 * few))


def test_micro_batches_repeat_what_their_stage_sends_in_each() -> None:
    many = forward(32768)
    assert waits(1, 32768, accumulate=4) == pytest.approx((GATHER + REDUCE, 36 * many))
    assert waits(2, 32768, accumulate=4) == pytest.approx((GATHER + 4 * REDUCE, 36 * many))
    assert waits(3, 32768, accumulate=4) == pytest.approx((4 * GATHER + 4 * REDUCE, 36 * many))


def test_replicas_and_second_copies_have_shorter_rings() -> None:
    many = forward(32768)
    inside = ring(2 * E, 8, 8, Cluster()), ring(4 * E, 8, 8, Cluster())
    across = 2 * ring(4 * E / 8, 2, 1, Cluster())
    assert waits(3, 32768, mics_shard_size=8) == pytest.approx((inside[0] + inside[1] + across, 9 * many))
    skip_without("zero_plus_plus")
    few = forward(128)
    beyond = 3 * (GATHER - few) + 3 * (inside[0] + REDUCE - 2 * few)
    assert waits(3, 128, zero_hpz_partition_size=8) == pytest.approx((GATHER + beyond + REDUCE, 9 * few))


@pytest.mark.parametrize(
    ("shards", "more", "keys"),
    [
        (1024, {}, ["mics_shard_size=64", "zero_hpz_partition_size=8", "communication_data_type=bf16"]),
        (64, {}, ["zero_hpz_partition_size=8", "communication_data_type=bf16"]),
        (56, {}, []),
        (1024, {"zero_optimization": {"stage": 1}}, ["mics_shard_size=64", "communication_data_type=bf16"]),
        (1024, {"zero_optimization": {"stage": 3, "mics_shard_size": 64}}, []),
        (1024, {"communication_data_type": "fp32"}, ["mics_shard_size=64", "zero_hpz_partition_size=8"]),
    ],
)
def test_choices_from_many_shards_on(shards: int, more: dict[str, Any], keys: list[str]) -> None:
    skip_without(*("zero_plus_plus" for key in keys if "hpz" in key))
    config = ZeroConfig.of({"zero_optimization": {"stage": 3}, **more})
    found = choices(config, shards, 8)
    assert [str(choice).removeprefix("zero_optimization.") for choice in found[1:]] == keys
    for choice in found:
        choice.of(config)


def lines(gpu_gb: float, world: int) -> list[str]:
    config = ZeroConfig.of({"zero_optimization": {"stage": 3}})
    machine = Machine(10**13, int(gpu_gb * 1e9), 0, 8)
    options: dict[str, Any] = {"precision": "bf16-mixed", "optimizer": "adam", "saves": False}
    return many_shards(7e9, machine, config, world, tokens=4096, **options)


def test_what_fits_and_waits_less_is_proposed() -> None:
    first, *others = lines(80, 1024)
    assert first.startswith("over 1,024 shards a step with micro-batches of 4,096 tokens waits ")
    assert "mics_shard_size=64" in others[0], "the least"
    assert [line.strip()[0] for line in others if "bf16" in line] == ["~"], "not exact"
    times = [float(line.rpartition("waits ")[2].removesuffix(" ms")) for line in others]
    assert times == sorted(times)
    assert not any("mics_shard_size" in line for line in lines(2, 1024)), "it does not fit"
    assert lines(80, 32) == []


@pytest.mark.parametrize(("ranks", "told"), [(64, 1), (8, 0)])
def test_set_up_says_what_many_shards_cost(ranks: int, told: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lt_zero"), one_of(ranks, torch.device("cpu")) as group:
        lt_zero.shard(nn.Linear(64, 64), config_of(3), torch.device("cpu"), group=group)
    found = [text for text in caplog.messages if f"{ranks} shards: a micro-batch of 4,096 tokens waits " in text]
    assert len(found) == told


def test_an_estimate_that_fails_ends_no_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.planning.step_time.step_time", mock.Mock(side_effect=IndexError))
    with one_of(64, torch.device("cpu")) as group:
        lt_zero.shard(nn.Linear(64, 64), config_of(3), torch.device("cpu"), group=group)
