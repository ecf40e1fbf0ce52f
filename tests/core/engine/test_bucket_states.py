"""The states of a bucket follow each other as their tables say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import lt_zero
from lt_zero.core.comm.work import Done, WorkList
from lt_zero.core.engine.bucket import Bucket, GatherStrategy
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


class _Fails(GatherStrategy):
    """What was gathered cannot be used."""

    def finish(self, bucket: Bucket) -> None:
        raise ValueError("codes of no codec")


def test_a_gather_that_cannot_be_finished_raises_its_cause_each_time() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    bucket = engine.owner[id(model.blocks[0].up.weight)][0]
    before, bucket.gathers = bucket.gathers, _Fails()
    uses: list[Callable[[], object]] = [bucket.gather, bucket.gather, bucket.release]
    uses.append(lambda: next_token_loss(model, 0, 0, 0))
    for use in uses:
        with pytest.raises(ValueError, match="codes of no codec"):
            use()
    bucket.gathers = before
    bucket.gather()
    assert bucket.state is State.READABLE


def test_a_result_that_could_not_be_made_is_none_for_a_second_wait() -> None:
    calls = list[int]()

    def finish() -> None:
        calls.append(1)
        raise ValueError("codes of no codec")

    work = WorkList([Done()], finish)
    for _ in range(3):
        with pytest.raises(ValueError, match="codes of no codec"):
            work.wait()
    assert len(calls) == 1, "half of the result may be there"
    made = WorkList([Done()], partial(calls.append, 2))
    made.wait()
    made.wait()
    assert calls == [1, 2]
