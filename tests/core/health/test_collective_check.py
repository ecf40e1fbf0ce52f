"""Debug mode: ranks agree on each collective before they launch it, reductions included."""

from __future__ import annotations

import os
from unittest import mock

import torch.distributed as dist

import lt_zero
from lt_zero.core.comm.ranks import LaunchOrder
from lt_zero.core.comm.work import CollectiveId
from tests.support.models import Net, next_token_loss
from tests.support.parity import Case, check, config_of
from tests.support.pool import Pool

DEBUG = {"LT_ZERO_DEBUG": "1"}
ZERO = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def _good() -> None:
    check(Case(Net, next_token_loss, 3, zero=ZERO))


def test_alike_ranks_pass(pool: Pool) -> None:
    pool.run(3, _good, env=DEBUG)


def _reductions() -> list[str]:
    """What is agreed upon in the last of four equal steps."""
    engine = lt_zero.shard(Net(), config_of(2, ZERO))
    agreed: list[str] = []

    def note(order: LaunchOrder, launch: CollectiveId) -> None:
        agreed.append(launch.channel)
        agree(order, launch)

    agree = LaunchOrder._compare
    with mock.patch.object(LaunchOrder, "_compare", note):
        for step in range(4):
            agreed.clear()
            next_token_loss(engine.root, step, 0, 0).backward()
    return agreed


def test_every_collective_is_agreed_upon(pool: Pool) -> None:
    for agreed in pool.run(2, _reductions, env=DEBUG):
        assert set(agreed) == {"collective", "reduction"}
    for agreed in pool.run(2, _reductions, env={"LT_ZERO_SHARED_MEMORY": "0"}):
        assert agreed == []


def _of_one_rank() -> list[str]:
    if dist.get_rank() == 1:
        os.environ.update(DEBUG)
    return _reductions()


def test_one_rank_that_asks_for_it_is_enough(pool: Pool) -> None:
    """Its comparisons are barriers, for which it would wait alone."""
    for agreed in pool.run(2, _of_one_rank):
        assert set(agreed) == {"collective", "reduction"}
