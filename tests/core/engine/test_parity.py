"""Stages 0-3 train to the weights of one process, on 2 and 3 ranks, with odd sizes."""

from __future__ import annotations

import pytest

from tests.support.matrix import cover
from tests.support.models import Net, next_token_loss
from tests.support.parity import Case, check
from tests.support.pool import Pool


def _train(stage: int, optimizer: str, zero: dict[str, int], micro: int, sync_every: bool) -> None:
    check(Case(Net, next_token_loss, stage, optimizer, steps=4, micro=micro, zero=zero, sync_every=sync_every))


@pytest.mark.parametrize(("stage", "optimizer", "world"), cover([0, 1, 2, 3], ["sgd", "adamw"], [2, 3]))
def test_equals_single_process(pool: Pool, world: int, stage: int, optimizer: str) -> None:
    pool.run(world, _train, stage, optimizer, {}, 1, False)
