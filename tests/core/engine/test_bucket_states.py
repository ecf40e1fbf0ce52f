"""The states of a bucket follow each other as their tables say."""

from __future__ import annotations

import pytest
import torch

import lt_zero
from lt_zero.core.engine.compute_copy import State
from lt_zero.core.engine.grad_accumulator import GradState
from tests.support.models import Net, next_token_loss
from tests.support.parity import RELEASE, config_of


def test_states_of_a_bucket() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    bucket = engine.owner[id(model.blocks[0].up.weight)][0]
    assert (bucket.state, bucket.grads.sums) == (State.RELEASED, GradState.NONE)
    with pytest.raises(AssertionError):
        bucket.compute.end_update()
    with pytest.raises(AssertionError):
        bucket.grads.begin_early_step()
    bucket.launch_gather()
    assert bucket.state is State.GATHERING
    with pytest.raises(AssertionError):
        bucket.launch_gather()
    bucket.gather()
    assert bucket.state is State.READABLE
    bucket.guard()
    assert bucket.state is State.GUARDED
    bucket.release()
    next_token_loss(model, 0, 0, 0).backward()
    assert (bucket.state, bucket.grads.sums) == (State.RELEASED, GradState.COMPLETE)
    bucket.grads.begin_early_step()
    with pytest.raises(RuntimeError, match="needed again"):
        bucket.launch_gather()
    bucket.grads.end_early_step()
    bucket.gather()
    bucket.grads.clear(bucket.grads.held)
    assert (bucket.state, bucket.grads.sums) == (State.READABLE, GradState.NONE)
