"""Functions of weights of two models at stage 3, each with an engine of its own, as of a teacher or an average."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine.guard import is_guarded
from tests.support.models import Net, next_token_loss
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

NAME = "blocks.0.up.weight"
# What code does with weights of two models; all of it needs values.
USES: list[Callable[[Any, Any], Any]] = [
    lambda p, q: p - q,
    lambda p, q: torch.lerp(p, q, 0.5),
    lambda p, q: torch.cat([p, q]),
    lambda p, q: torch.stack([q, p]),
    lambda p, q: torch.dist(p, q),
    lambda p, q: nn.functional.mse_loss(p, q),
    lambda p, q: nn.utils.parameters_to_vector([p, q]),
    lambda p, q: torch._foreach_sub([p], [q])[0],
]
# What changes the first one.
WRITES: list[Callable[[Any, Any], Any]] = [
    lambda p, q: p.lerp_(q, 0.25),
    lambda p, q: torch._foreach_lerp_([p], [q], 0.25),
    lambda p, q: p.copy_(q),
    lambda p, q: p.data.lerp_(q, 0.25),
    lambda p, q: p.data.mul_(0.5).add_(q.data, alpha=0.5),
]


def _models() -> tuple[Net, Net]:
    torch.manual_seed(0)
    return Net(), Net()


def _two(stages: tuple[int, int], zero: dict[str, Any]) -> tuple[list[Net], list[Any]]:
    """Two models, and their engines."""
    models = list(_models())
    return models, [lt_zero.shard(m, config_of(stage, zero)) for m, stage in zip(models, stages, strict=True)]


def _absent() -> None:
    """Nothing is gathered: each use is an error that names both parameters, and what gathers them."""
    models, _ = _two((3, 3), RELEASE)
    p, q = (model.get_parameter(NAME) for model in models)
    told = (
        rf"parameters '{NAME}' of Net and '{NAME}' of another Net are sharded over 2 ranks and not in memory here"
        r".*lt_zero\.gathered\(\[parameter, \.\.\.\]\)"
    )
    one = rf"parameter '{NAME}' are sharded .*lt_zero\.gathered\(parameter\)"
    for use in (*USES, *WRITES):
        with torch.no_grad(), pytest.raises(RuntimeError, match=rf"{told}|{one}"):
            use(p, q)
    with pytest.raises(RuntimeError, match=told):
        p - q
    with lt_zero.gathered(p), pytest.raises(RuntimeError, match=one):
        p - q
    with pytest.raises(RuntimeError, match=r"inside of a transform of torch\.func"):
        torch.func.grad(lambda x: (x * (p - q).sum()).sum())(torch.ones(2))
    assert not torch.equal(p, q)
    del models[1]


def _gathered() -> None:
    """Inside of ``gathered`` of both, values are those of one process, and writes are kept."""
    models, engines = _two((3, 3), RELEASE)
    plain = _models()
    p, q = (model.get_parameter(NAME) for model in models)
    wanted = [model.get_parameter(NAME) for model in plain]
    with lt_zero.gathered([p, q]):
        for use in USES:
            torch.testing.assert_close(use(p, q), use(*wanted), rtol=0, atol=0)
        assert torch.equal(p, wanted[0])
    for write in WRITES:
        with torch.no_grad():
            with lt_zero.gathered(q), lt_zero.gathered(p, write=True):
                write(p, q)
            write(*wanted)
        for engine, model in zip(engines, plain, strict=True):
            for name, value in full_values(engine).items():
                torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=0, atol=0, msg=name)


class Reads(nn.Module):
    """Compares a weight with that of another model, whose forward is running, when units of both are released."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.outer: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.net(tokens)
        mine = self.net.get_parameter(NAME)
        for weight in self.outer:
            assert is_guarded(mine) == is_guarded(weight)
            found = found + (mine - weight).square().sum()
        return found


class Outer(nn.Module):
    """Calls another model, which has an engine of its own, in its forward."""

    def __init__(self, net: Net, inner: Any) -> None:
        super().__init__()
        self.net, self.inner = net, [inner]

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.net(tokens) + self.inner[0](tokens)
        return made


def _running() -> None:
    """In forwards of both, the weights of both are there, and both get gradients of what is made of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    one, other = _models()
    inner = Reads(one)
    outer = Outer(other, inner)
    inner.outer.append(other.get_parameter(NAME))
    reference: Any = copy.deepcopy([inner, outer])
    engines = [lt_zero.shard(model, config_of(3, RELEASE)) for model in (inner, outer)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (inner, outer)]
    for engine, optimizer in zip(engines, optimizers, strict=True):
        lt_zero.ShardedOptimizer(engine, optimizer)
    optimizers += [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in reference]
    for step in range(3):
        next_token_loss(outer, step, 0, rank).backward()
        for every in range(world):
            (next_token_loss(reference[1], step, 0, every) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for engine, model in zip(engines, reference, strict=True):
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, model.get_parameter(name).detach(), msg=name)


def _beside_steps() -> None:
    """One model is whole on every rank and waits for its step, the other one is sharded; a third one is being built."""
    models, engines = _two((1, 3), {"overlap_comm": True})
    plain, _ = _models()
    optimizer, wanted = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (models[0], plain))
    lt_zero.ShardedOptimizer(engines[0], optimizer)
    next_token_loss(models[0], 0, 0, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (next_token_loss(plain, 0, 0, rank) / dist.get_world_size()).backward()
    optimizer.step()
    wanted.step()
    p, q = (model.get_parameter(NAME) for model in models)
    assert is_guarded(p)
    with torch.no_grad():
        q.copy_(p)  # a whole tensor is scattered
    torch.testing.assert_close(full_values(engines[1])[NAME], plain.get_parameter(NAME).detach())
    with torch.no_grad(), lt_zero.Init(config=config_of(3)):
        built = nn.Linear(*reversed(q.shape), bias=False)
        with lt_zero.gathered(q):
            built.weight.copy_(q)
    assert is_guarded(built.weight)
    with pytest.raises(RuntimeError, match=rf"parameter '{NAME}' are sharded"):
        q - built.weight
    with lt_zero.gathered([q, built.weight]):
        assert torch.equal(q, built.weight)


def _all() -> None:
    _absent()
    _gathered()
    _running()
    _beside_steps()


def test_weights_of_two_models(pool: Pool) -> None:
    pool.run(2, _all, env={"LT_ZERO_SHARED_MEMORY": "0"})  # a step that goes on beside other code needs messages
