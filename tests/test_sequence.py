"""Debug mode: a branch taken on one rank only becomes an error that names both ranks' next operation."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import lt_zero
from lt_zero.core import sequence
from tests.models import Net, next_token_loss, tokens
from tests.parity import Case, check, config_of
from tests.pool import Pool

DEBUG = {"LT_ZERO_DEBUG": "1"}
ZERO = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def _good() -> None:
    check(Case(Net, next_token_loss, 3, zero=ZERO))


def test_alike_ranks_pass(pool: Pool) -> None:
    pool.run(3, _good, env=DEBUG)


def _branch() -> None:
    engine = lt_zero.shard(Net(), config_of(3, ZERO))
    if dist.get_rank() == 1:
        del engine.root.blocks[1]  # rank 1 does not run this block
    with pytest.raises(RuntimeError, match=r"blocks\.1.*blocks\.2|blocks\.2.*blocks\.1"):
        engine.root(tokens(0, 0, 0))


def test_another_module_on_one_rank(pool: Pool) -> None:
    pool.run(2, _branch, env=DEBUG)


def _fewer(timeout: float) -> None:
    sequence.TIMEOUT_S = timeout
    engine = lt_zero.shard(Net(), config_of(3, ZERO))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 is about to launch the all-gather.*rank 1 launched nothing"):
            engine.root(tokens(0, 0, 0))


def test_fewer_steps_on_one_rank(pool: Pool) -> None:
    pool.run(2, _fewer, 2.0, env=DEBUG)
