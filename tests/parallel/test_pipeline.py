"""Pipelines, against the same model in one process."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.matrix import only_rows
from tests.support.parity import OPTIMIZERS
from tests.support.pipelines import Model, Ranks, all_weights, reference_step, specs, start
from tests.support.pool import Pool

SCHEDULES = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]


def _train(
    ranks: Ranks,
    stage: int,
    optimizer: str,
    tied: bool,
    schedule: str,
    steps: int = 3,
    zero: dict[str, Any] | None = None,
) -> None:
    """The last batch is short; gradients are clipped."""
    layers = partial(specs, tied)
    run = start(ranks, stage, optimizer, layers, {"schedule": schedule}, zero=zero)
    reference = Model(layers)
    expected = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(steps):
        rows = 8 if step < steps - 1 else 6
        loss, norm = run.step(step, rows, 0.5)
        want, its_norm = reference_step(reference, expected, step, ranks.data, rows, 0.5)
        if ranks.data == 1:
            torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(norm, its_norm, rtol=1e-6, atol=1e-6)
    weights = all_weights(run.engine)
    assert weights.keys() == dict(reference.named_parameters()).keys()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(
            weights[name], value.detach(), rtol=1e-6, atol=1e-6, msg=partial("{}: {}".format, name)
        )


@pytest.mark.parametrize(
    ("stage", "optimizer", "tied", "schedule"),
    only_rows(
        [(1, "sgd", False, "1F1B"), (3, "adamw", True, "Interleaved1F1B")],
        itertools.product([0, 1, 2, 3], ["sgd", "adamw"], [True, False], SCHEDULES),
    ),
)
def test_two_stages(pool: Pool, stage: int, optimizer: str, tied: bool, schedule: str) -> None:
    pool.run(2, _train, Ranks(), stage, optimizer, tied, schedule)


MESHES = [Ranks(1, 1, 3), Ranks(1, 1, 4), Ranks(2, 1, 2), Ranks(1, 2, 2)]


@pytest.mark.parametrize(
    ("ranks", "stage", "schedule"),
    only_rows(
        [(MESHES[0], 0, "GPipe"), (MESHES[2], 2, "1F1B"), (MESHES[3], 3, "LoopedBFS")],
        itertools.product(MESHES, [0, 1, 2, 3], SCHEDULES),
    ),
)
def test_meshes(pool: Pool, ranks: Ranks, stage: int, schedule: str) -> None:
    pool.run(ranks.all, _train, ranks, stage, "adamw" if stage % 2 else "sgd", True, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard_groups(pool: Pool, stage: int, schedule: str) -> None:
    """Micro-batches are summed over replicas once; those of another stage of a rank have ended before the last one."""
    env = {"LT_ZERO_SHARED_MEMORY": "0"}
    pool.run(4, _train, MESHES[2], stage, "sgd", True, schedule, 3, {"mics_shard_size": 1}, env=env)


def _reductions(stage: int, schedule: str) -> tuple[int, int]:
    """Reductions of a step, and as many as there have to be: sharded gradients in each backward of their stage."""
    run = start(Ranks(2, 1, 2), stage, pipeline={"schedule": schedule})
    channels = [c for name, c in run.engine.world.watch.channels.items() if name.startswith("reduction")]
    before = sum(channel.launched for channel in channels)
    run.step(0)
    pipe, owner = run.model.pipe, run.engine.owner
    expected = sum(not bucket.sharding.grads for bucket in run.engine.buckets)
    for number in pipe.position.own:
        found = {owner[id(p)][0] for p in pipe.parameters_of(number)}
        expected += 4 * sum(bucket.sharding.grads for bucket in found)
    return sum(channel.launched for channel in channels) - before, expected


@pytest.mark.parametrize(
    ("stage", "schedule"),
    only_rows([(3, "LoopedBFS")], [(1, "1F1B"), (2, "Interleaved1F1B"), (3, "LoopedBFS")]),
)
def test_gradients_are_reduced_as_often_as_they_have_to_be(pool: Pool, stage: int, schedule: str) -> None:
    for counted, expected in pool.run(4, _reductions, stage, schedule):
        assert counted == expected


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_dimensions(pool: Pool, stage: int, optimizer: str) -> None:
    """The norm and every weight are within 1e-6 of one process after six steps."""
    pool.run(8, _train, Ranks(2, 2, 2), stage, optimizer, True, "1F1B", 6)
