"""What a step needs to know of groups is kept until they, the used parameters or training change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lt_zero
from lt_zero.core.step.param_groups import StepPlan
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of


def test_a_plan_is_kept_until_something_changes() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    engine = lt_zero.shard(model, config_of(1))
    optimizer = torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[1].weight]}], lr=0.1)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)

    def step(*layers: int) -> StepPlan:
        """A step in which these layers are used; returns its plan."""
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        sum(model[layer](x).sum() for layer in layers).backward()  # type: ignore[union-attr]
        plan = sharded.grads.plan()
        before = [model[layer].weight.detach().clone() for layer in range(3)]
        optimizer.step()
        moved = {layer for layer in range(3) if not torch.equal(model[layer].weight, before[layer])}
        owned = {id(parameter) for parameter in sharded.parameters()}
        assert moved == {layer for layer in layers if id(model[layer].weight) in owned}
        return plan

    first = step(0, 1)
    optimizer.param_groups[0]["lr"] = 0.01
    assert step(0, 1, 2) is first, "another learning rate, and parameters of others"
    assert [used for used in step(0).used.values()] == [[0]]
    again = step(0, 1)
    assert again is not first
    model[1].weight.requires_grad_(False)
    assert step(0) is not again
    model[1].weight.requires_grad_(True)
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    assert [len(some) for some in step(0, 1).fragments] == [0, 2], "the same parameters in the same order"
    optimizer.add_param_group({"params": [model[2].weight]})
    assert sum(map(len, step(0, 1, 2).fragments)) == 3
    del groups[1]
    assert sum(map(len, step(0, 1, 2).fragments)) == 1


def test_fragments_go_back_by_the_plan_of_the_step_that_lent_them() -> None:
    """Code that runs in the step may change a group: then the last plan is not that of the step any more."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    engine = lt_zero.shard(model, config_of(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    sum(layer(torch.ones(2, 4)).sum() for layer in model).backward()  # type: ignore[union-attr]
    optimizer.step()
    parameters = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in optimizer.state} == parameters
    groups = sharded.fragments
    plan = groups.plan(frozenset())
    listed = optimizer.param_groups[0]["params"]
    buckets = set(groups.buckets())

    groups.narrow(plan)
    listed.pop()
    assert groups.plan(frozenset()) is not plan
    assert parameters.isdisjoint(id(fragment) for fragment in optimizer.state)
    groups.drop(buckets)
    assert optimizer.param_groups[0]["params"] == []
    groups.widen()
    assert optimizer.param_groups[0]["params"] is listed
    assert {id(parameter) for parameter in optimizer.state} == parameters


class Group(dict[str, Any]):
    def clear(self) -> None:
        raise AssertionError("a user's group was emptied")


class Noting(torch.optim.SGD):
    """Writes to its groups in a step."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_a_users_group_stays_what_it_is_in_a_staged_step() -> None:
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # torch now calls hooks for the parent's step too
    model = Net()
    engine = lt_zero.shard(model, config_of(1, {}, torch.bfloat16, data_types={"grad_accum_dtype": "bf16"}))
    optimizer = Noting(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0] = Group(optimizer.param_groups[0])
    keys = [*group, "steps"]
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, 0).backward()
        optimizer.step()
    assert optimizer.param_groups[0] is group
    assert list(group) == keys
    assert group["steps"] == 2
