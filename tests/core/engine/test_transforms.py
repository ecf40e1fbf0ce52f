"""torch.func's transforms, forward mode, torch.jit: exact inside of ``gathered``, else an error that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.optim.swa_utils import AveragedModel

import lt_zero
from lt_zero.common.tensor_tree import iter_tensors
from tests.support.matrix import only
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
T = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x))) + x


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters())


def _loss(net: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = functional_call(net, weights, (x,)).square().sum()
    return out


def _grad(net: nn.Module) -> Any:
    return grad(lambda weights: _loss(net, weights, X))(_weights(net))


def _per_sample(net: nn.Module) -> Any:
    one = grad(lambda weights, x: _loss(net, weights, x[None]))
    return vmap(one, (None, 0))({name: p.detach() for name, p in _weights(net).items()}, X)


def _pulled_back(net: nn.Module) -> Any:
    out, pull = vjp(net, X)
    return pull(torch.ones_like(out))


def _ensemble(net: nn.Module) -> Any:
    weights = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in _weights(net).items()}
    return vmap(lambda w: functional_call(net, w, (X,)))(weights)


def _directional(net: nn.Module) -> Any:
    with forward_ad.dual_level():
        weights = {n: forward_ad.make_dual(p, torch.ones_like(p)) for n, p in _weights(net).items()}
        return tuple(forward_ad.unpack_dual(functional_call(net, weights, (X,))))


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": _grad,
    "per sample": _per_sample,
    "vmap": lambda net: vmap(net)(X),
    "jvp": lambda net: jvp(net, (X,), (T,)),
    "vjp": _pulled_back,
    "jacrev": lambda net: jacrev(net)(X),
    "jacfwd": lambda net: jacfwd(net)(X),
    "hessian": lambda net: hessian(lambda x: net(x).sum())(X[0]),
    "trace": lambda net: torch.jit.trace(net, X)(T),
    "ensemble": _ensemble,
    "forward mode": _directional,
}


def _transform(stage: int) -> None:
    torch.manual_seed(0)
    plain = Tower()
    net = copy.deepcopy(plain)
    lt_zero.shard(net, config_of(stage, RELEASE if stage == 3 else {}))
    for transform in TRANSFORMS.values() if stage == 3 else ():
        with pytest.raises(RuntimeError, match=r"lt_zero\.gathered"):
            transform(net)
    for name, transform in TRANSFORMS.items():
        with lt_zero.gathered(net):
            found = list(iter_tensors(transform(net)))
        wanted = list(iter_tensors(transform(plain)))
        assert len(found) == len(wanted) > 0, name
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=name)
    with lt_zero.gathered(net):
        torch.testing.assert_close(net(X), plain(X))


@pytest.mark.parametrize("stage", only([3], [0, 1, 2, 3]))
def test_transforms_are_exact_inside_of_gathered(pool: Pool, stage: int) -> None:
    pool.run(2, _transform, stage)


def _flow(net: nn.Module, rank: int, step: int) -> Tensor:
    """A loss whose target is a derivative along the input (mean flows); two vmaps add to it."""
    x = X * (1 + rank + step)
    out, along = jvp(net, (x,), (T,))
    loss: Tensor = (out - along.detach()).square().mean() + vmap(net)(x).square().mean() + net(x).mean()
    return loss


def _trains(stage: int, outside: bool) -> None:
    torch.manual_seed(0)
    plain = Tower()
    net = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine, *_ = lt_zero.initialize(
        model=net, optimizer=optimizer, config={"zero_optimization": zero, "gradient_accumulation_steps": 1}
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        with lt_zero.gathered(net):
            loss = _flow(net, rank, step)
            if not outside:
                engine.backward(loss)
        if outside:
            engine.backward(loss)
        engine.step()
        sum(_flow(plain, other, step) / world for other in range(world)).backward()  # type: ignore[union-attr]
        reference.step()
        reference.zero_grad()
    assert not any(bucket.resident for unit in engine.engine.units for bucket in unit.sharded)
    with lt_zero.gathered(net):
        for (name, one), other in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("outside", only([True], [False, True]), ids=["backward inside", "backward outside"])
def test_a_loss_is_trained_through_transforms(pool: Pool, outside: bool) -> None:
    pool.run(2, _trains, 3, outside)


@pytest.mark.parametrize("stage", only([], [0, 1, 2]))
def test_a_loss_is_trained_through_transforms_at_other_stages(pool: Pool, stage: int) -> None:
    pool.run(3, _trains, stage, True)


def _refused() -> None:
    net = Tower()
    lt_zero.shard(net, config_of(3, RELEASE))
    with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile a module that lt_zero has sharded"):
        torch.jit.script(net.blocks[0])

    def gathers(x: Tensor) -> Tensor:
        with lt_zero.gathered(net):
            out: Tensor = net(x).sum()
            return out

    def reads(x: Tensor) -> Tensor:
        return (x @ net.head.weight.T).sum()

    with pytest.raises(RuntimeError, match="gathered was entered inside of a transform"):
        grad(gathers)(X)
    with pytest.raises(RuntimeError, match=r"'head\.weight' are read inside of a transform"):
        grad(reads)(X)
    scripted = Tower()
    scripted.blocks[1] = torch.jit.script(scripted.blocks[1])  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"'blocks\.1' is compiled by torch\.jit\.script"):
        lt_zero.shard(scripted, config_of(3))


def test_what_cannot_be_transformed_is_named(pool: Pool) -> None:
    pool.run(2, _refused)


def _exported() -> None:
    net = Tower()
    engine = lt_zero.shard(net, config_of(3, RELEASE))
    averaged = AveragedModel(Tower())
    with pytest.raises(RuntimeError, match=r"lt_zero\.gathered"):
        torch.export.export(net, (X,))
    with lt_zero.gathered(net):
        averaged.update_parameters(net)
        program = torch.export.export(net, (X,))
        torch.testing.assert_close(program.module()(X), net(X))
    for name, value in full_values(engine).items():
        assert torch.equal(averaged.module.get_parameter(name), value)
    net(X).square().mean().backward()


@pytest.mark.slow
def test_a_gathered_model_is_exported_and_averaged(pool: Pool) -> None:
    pool.run(2, _exported)
