"""Pipelines, against the same model in one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.matrix import cover
from tests.support.parity import OPTIMIZERS
from tests.support.pipelines import Model, Ranks, all_weights, reference_step, specs, start
from tests.support.pool import Pool

STEPS = 4


def _train(ranks: Ranks, stage: int, optimizer: str, tied: bool, schedule: str, limit: float | None) -> None:
    layers = lambda: specs(tied)  # noqa: E731
    run, reference = start(ranks, stage, optimizer, layers, {"schedule": schedule}), Model(layers)
    expected = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(STEPS):
        rows = 8 if step < STEPS - 1 else 6
        loss, norm = run.step(step, rows, limit)
        want, its_norm = reference_step(reference, expected, step, ranks.data, rows, limit)
        if ranks.data == 1:
            torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
        if norm is not None:
            torch.testing.assert_close(norm, its_norm, rtol=1e-5, atol=1e-6)
    weights = all_weights(run.engine)
    assert weights.keys() == dict(reference.named_parameters()).keys()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("stage", "optimizer", "tied", "schedule"),
    cover([0, 1, 2, 3], ["sgd", "adamw"], [True, False], ["1F1B", "GPipe"], strength=2),
)
def test_equals_one_process(pool: Pool, stage: int, optimizer: str, tied: bool, schedule: str) -> None:
    pool.run(2, _train, Ranks(), stage, optimizer, tied, schedule, 0.5)
