"""Optimizers on fragments: groups, schedulers, unfreezing, several optimizers, what is refused."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import lt_zero
from tests.support.matrix import only, only_rows
from tests.support.models import VOCAB, WIDTH, Block, Net, next_token_loss, tokens
from tests.support.parity import STAGES, Case, check, config_of, full_values
from tests.support.pool import Pool

ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"]


def _by_name(name: str, stage: int) -> None:
    def make(model: nn.Module) -> Optimizer:
        cls: Any = getattr(torch.optim, name)
        return cls(model.parameters(), lr=1e-2)

    # Rprop compares signs of consecutive gradients and Adam-likes divide by tiny numbers: last bits are magnified.
    check(Case(Net, next_token_loss, stage, make, rtol=1e-4, atol=1e-5))


# test_optimizer_matrix.py has the others, by name in a configuration.
@pytest.mark.parametrize(("name", "stage"), only_rows([("Rprop", 3), ("ASGD", 1)], product(ELEMENTWISE, [1, 3])))
def test_elementwise_optimizers(pool: Pool, name: str, stage: int) -> None:
    pool.run(3, _by_name, name, stage)


def _fused(stage: int) -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    check(Case(Net, next_token_loss, stage, make, rtol=1e-4, atol=1e-5))


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_fused_adamw(pool: Pool, stage: int) -> None:
    pool.run(2, _fused, stage)


def _groups(model: nn.Module) -> Optimizer:
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.3},
            {"params": []},
            {"params": plain, "lr": 3e-2, "weight_decay": 0.0},
            {"params": frozen, "lr": 1.0},
        ],
        lr=1e-2,
    )


def _half_frozen() -> nn.Module:
    net = Net()
    net.blocks[0].requires_grad_(False)
    return net


def _unfreezing(stage: int) -> None:
    """Three kinds of groups, a schedule per group, and a block that is unfrozen in the middle."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = _half_frozen()
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, {"stage3_max_reuse_distance": 0}))
    mine, theirs = _groups(model), _groups(reference)
    lt_zero.ShardedOptimizer(engine, mine)
    rates = [lambda step, k=k: 1.0 / (1 + k * step) for k in range(4)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, rates) for o in (mine, theirs)]
    for step in range(6):
        if step == 3:
            for net, optimizer in ((model, mine), (reference, theirs)):
                net.blocks[0].down.requires_grad_(True)
                new = list(net.blocks[0].norm.parameters())
                for p in new:
                    p.requires_grad_(True)
                known = {p for g in optimizer.param_groups for p in g["params"]}
                optimizer.add_param_group({"params": [p for p in new if p not in known], "lr": 0.02})
        mine.zero_grad()
        theirs.zero_grad()
        next_token_loss(model, step, 0, rank).backward()
        for r in range(world):
            (next_token_loss(reference, step, 0, r) / world).backward()
        mine.step()
        theirs.step()
        for schedule in schedules if step < 3 else []:
            schedule.step()
        got = full_values(engine)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(got[name], p.detach(), rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}\n{t}")
        assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_groups_schedules_and_unfreezing(pool: Pool, stage: int) -> None:
    pool.run(3 if stage == 3 else 2, _unfreezing, stage)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleList(Block() for _ in range(2))
        self.critic = nn.ModuleList(Block() for _ in range(2))
        self.score = nn.Linear(WIDTH, 1)

    def make(self, batch: Tensor) -> Tensor:
        x = F.one_hot(batch, VOCAB).float()[..., :WIDTH]
        for block in self.generator:
            x = block(x)
        return x

    def judge(self, x: Tensor) -> Tensor:
        for block in self.critic:
            x = block(x)
        return self.score(x).mean()


def _gan_step(
    net: Gan, optimizers: tuple[Optimizer, Optimizer], batches: list[Tensor], contexts: tuple[Any, Any], toggle: bool
) -> None:
    """Critic and generator in turn, as in manual optimization; several ``batches`` stand for several ranks."""
    for which, optimizer in enumerate(optimizers):
        if toggle:
            net.generator.requires_grad_(which == 1)
            net.critic.requires_grad_(which == 0)
            net.score.requires_grad_(which == 0)
        optimizer.zero_grad()
        for batch in batches:
            with contexts[0]():
                fake = net.make(batch)
                if which == 0:
                    loss = net.judge(fake.detach()) - net.judge(F.one_hot(batch, VOCAB).float()[..., 1:])
                else:
                    loss = -net.judge(fake)
            with contexts[1]():  # as manual_backward does
                (loss / len(batches)).backward()
        optimizer.step()
    net.requires_grad_(True)


def _gan(stage: int, toggle: bool, threshold: int) -> None:
    from contextlib import nullcontext

    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    net = Gan()
    reference = copy.deepcopy(net)
    zero = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": threshold}
    engine = lt_zero.shard(net, config_of(stage, zero))

    def optimizers(g: Gan) -> tuple[Optimizer, Optimizer]:
        critic = [*g.critic.parameters(), *g.score.parameters()]
        return torch.optim.AdamW(critic, lr=1e-2), torch.optim.SGD(g.generator.parameters(), lr=1e-2, momentum=0.9)

    mine, theirs = optimizers(net), optimizers(reference)
    for optimizer in mine:
        lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(4):
        _gan_step(net, mine, [tokens(step, 0, rank)], (engine.forward_scope, engine.backward_pass), toggle)
        _gan_step(reference, theirs, [tokens(step, 0, r) for r in range(world)], (nullcontext, nullcontext), toggle)
        got = full_values(engine)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(got[name], p.detach(), rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}\n{t}")


@pytest.mark.parametrize(
    ("stage", "toggle", "threshold"),
    only_rows([(1, True, 0), (3, False, 50)], product(STAGES, [True, False], [0, 50])),
)
def test_two_optimizers(pool: Pool, stage: int, toggle: bool, threshold: int) -> None:
    pool.run(2, _gan, stage, toggle, threshold)


def _refusals(stage: int) -> None:
    engine = lt_zero.shard(Net(), config_of(stage))
    parameters = list(engine.root.parameters())
    with pytest.raises(TypeError, match="LBFGS"):
        lt_zero.ShardedOptimizer(engine, torch.optim.LBFGS(parameters))
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer .* over the ranks by itself.* Pass SGD instead"):
        lt_zero.ShardedOptimizer(engine, ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1))
    if stage:
        with pytest.raises(TypeError, match="Adafactor.*whole matrices"):
            lt_zero.ShardedOptimizer(engine, torch.optim.Adafactor(parameters))
    else:
        lt_zero.ShardedOptimizer(engine, torch.optim.Adafactor(parameters))

    class Mine(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

    if stage:
        with pytest.raises(TypeError, match=r"Mine cannot be tried out .*optimizer_is_elementwise"):
            lt_zero.ShardedOptimizer(engine, Mine(parameters))
    else:
        lt_zero.ShardedOptimizer(engine, Mine(parameters))


@pytest.mark.parametrize("stage", only([0, 2], [0, 2, 3]))
def test_optimizers_that_need_whole_matrices_are_refused(pool: Pool, stage: int) -> None:
    pool.run(2, _refusals, stage)


def _at_rest(stage: int) -> None:
    engine = lt_zero.shard(Net(), config_of(stage))
    optimizer = torch.optim.AdamW(engine.root.parameters())
    name, parameters = type(optimizer).__name__, list(engine.root.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    assert type(optimizer).__name__ == name
    assert isinstance(optimizer, torch.optim.AdamW)
    next_token_loss(engine.root, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert all(any(k is p for p in parameters) for k in optimizer.state), "state is shown under parameters"
    held = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    total = sum(p.numel() for p in parameters)
    assert held == total if stage == 0 else held <= total / 2 + 8 * len(parameters)


@pytest.mark.parametrize("stage", only([0, 3], STAGES))
def test_groups_and_state_at_rest(pool: Pool, stage: int) -> None:
    pool.run(2, _at_rest, stage)
