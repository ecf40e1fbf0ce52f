"""Edits of gradients between backward and step, where ranks have parts of them: as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.config.precision import dtype_policy
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool


def _mask(shape: torch.Size, every: int) -> Tensor:
    return (torch.arange(shape.numel()) % every == 0).view(shape)


def _assign(p: nn.Parameter, of: Callable[[Any], Any]) -> None:
    p.grad = of(p.grad)


def _augment(p: nn.Parameter) -> None:
    p.grad *= 0.5
    p.grad += 1e-3
    p.grad /= 2


def _fill(p: Any) -> None:
    p.grad[p.grad.abs() < 1e-2] = 0
    p.grad[...] = p.grad**3 + p.grad
    p.grad[_mask(p.shape, 3)] = 0.25


def _repair(p: Any) -> None:
    for number, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        p.grad.masked_fill_(_mask(p.shape, number + 2), bad)
    assert p.grad.norm().isnan()
    if p.dim() == 1:
        p.grad.masked_fill_(~torch.isfinite(p.grad), 0.5)
    else:
        torch.nan_to_num_(p.grad, posinf=3.0, neginf=-2.0)


# Each changes ``p.grad``, in place or by assignment.
EDITS: dict[str, Callable[[Any], object]] = {
    "clamp": lambda p: p.grad.clamp_(-0.02, 0.03),
    "augmented": _augment,
    "fill": _fill,
    "repair": _repair,
    "where": lambda p: _assign(p, lambda g: torch.where(g > 0.01, g, -0.1 * g)),
    "mask": lambda p: p.grad.mul_(_mask(p.shape, 4)),
    "rows": lambda p: p.grad.add_(torch.linspace(0, 1, p.shape[-1], dtype=p.dtype), alpha=0.1),
    "decay": lambda p: p.grad.add_(p, alpha=0.01),
    "sign": lambda p: _assign(p, lambda g: g.sign() * 0.1),
    "copy": lambda p: p.grad.copy_((p.grad * 3).tanh()),
    "lists": lambda p: torch._foreach_addcmul_([p.grad], [p.grad], [p.grad], value=0.1),
    "centred": lambda p: p.grad.addcdiv_(p.grad, p.grad.abs() + 1, value=-0.5),
    "normalized": lambda p: _assign(p, lambda g: 0.1 * g / (g.clamp(min=0).norm(1) + g.norm(-1))),
    "offset": lambda p: torch.clamp_(p.grad, max=torch.tensor(0.01)),
}


def _edited(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net(depth=1).double()
    reference = copy.deepcopy(model)
    config = config_of(stage, RELEASE if stage == 3 else {})
    engine = lt_zero.shard(model, config, policy=dtype_policy(config, "64-true"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, reference)]
    lt_zero.ShardedOptimizer(engine, optimizers[0])
    for step, (name, edit) in enumerate(EDITS.items()):
        for micro in range(2):  # an edit between two micro-batches, too
            next_token_loss(model, step, micro, rank).backward()
            for other in range(world):
                (next_token_loss(reference, step, micro, other) / world).backward()
            if micro == 0:
                for p in [*model.parameters(), *reference.parameters()]:
                    p.grad = None if p.grad is None else p.grad * 0.5
        engine.finish_reductions()
        with torch.no_grad(), lt_zero.gathered(model):
            for p in [*model.parameters(), *reference.parameters()]:
                edit(p)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wanted = dict(reference.named_parameters())
        for key, value in full_values(engine).items():
            _compare(f"{name}, {key}", value, wanted[key].detach())


def _compare(what: str, got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(3, 2), (2, 3)], [(3, 2), (2, 3), (2, 1), (2, 0)]))
def test_edits_are_those_of_one_process(pool: Pool, ranks: int, stage: int) -> None:
    pool.run(ranks, _edited, stage)


# Functions of a gradient whose pieces lie on several ranks that need all of it.
REFUSED: list[Callable[[Any, Any], object]] = [
    *(
        lambda g, p, name=name: getattr(g, name)()
        for name in (
            *("sum", "mean", "std", "var", "min", "max", "amin", "amax", "median", "count_nonzero", "any", "all"),
            *("prod", "argmax", "argmin", "histc", "sort", "argsort", "nonzero", "unique", "t", "tolist"),
            *("normal_", "item", "numpy", "nanmean", "contiguous", "aminmax", "logdet", "nansum"),
        )
    ),
    lambda g, p: g.abs().max(),
    lambda g, p: (g > 0).sum(),
    lambda g, p: bool((g > 0).any()),
    lambda g, p: g.isnan().any().item(),
    lambda g, p: g.quantile(0.5),
    lambda g, p: g.topk(2),
    lambda g, p: g.logsumexp(0),
    lambda g, p: g.cumsum(0),
    lambda g, p: g.cumsum_(0),
    lambda g, p: g.norm(2, dim=0),
    lambda g, p: g.norm("nuc"),
    lambda g, p: g.norm(0, -1, True),
    lambda g, p: torch.linalg.vector_norm(g, 2, keepdim=True),
    lambda g, p: torch.linalg.vector_norm(g, dim=(0, 1)),
    lambda g, p: torch.linalg.norm(g, 1),
    lambda g, p: torch.norm(g, out=torch.empty(())),
    lambda g, p: torch.mul(g, 2, out=torch.empty(p.shape)),
    lambda g, p: g[0],
    lambda g, p: g.__setitem__(0, 1.0),
    lambda g, p: g.__setitem__((slice(None), 0), 1.0),
    lambda g, p: g.copy_(torch.ones(p.shape)),
    lambda g, p: setattr(g, "data", torch.ones(p.shape)),
    lambda g, p: g @ torch.ones(p.shape).t(),
    lambda g, p: torch.stack([g, g]),
    lambda g, p: torch.equal(g, g),
    lambda g, p: torch.allclose(g, g),
    lambda g, p: torch.dot(g, g),
    lambda g, p: g + torch.ones(2, *p.shape),
    lambda g, p: torch.cdist(g, g),
    lambda g, p: torch.softmax(g, 0),
    lambda g, p: torch.nn.functional.dropout(g),
    lambda g, p: g.renorm(2, 0, 1.0),
    lambda g, p: torch.einsum("ij,ij->", g, g),
    lambda g, p: torch._foreach_max([g]),
    lambda g, p: torch.zeros(p.shape).copy_(g),
    lambda g, p: torch.zeros(p.shape).add_(g),
    lambda g, p: copy.deepcopy(g),
]


def _refused() -> None:
    model = Net(depth=1)
    engine = lt_zero.shard(model, config_of(2))
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    engine.finish_reductions()
    p, norm = model.blocks[0].up.weight, model.blocks[0].norm
    before = p.grad.norm()  # type: ignore[union-attr]
    for function in REFUSED:
        with pytest.raises(
            (RuntimeError, TypeError), match="needs all of a gradient|unsupported operand|must be tensors"
        ):
            function(p.grad, p)
    with pytest.raises(RuntimeError, match="'blocks.0.norm.weight' and 'blocks.0.norm.bias', whose pieces lie on"):
        norm.weight.grad.add_(norm.bias.grad)
    torch.testing.assert_close(p.grad.norm(), before, rtol=0, atol=0)  # type: ignore[union-attr]
    p.grad = torch.ones(p.shape)
    with pytest.raises(RuntimeError, match="sharded over the ranks"):
        engine.finish_reductions()


def test_what_needs_all_of_a_gradient_is_refused(pool: Pool) -> None:
    pool.run(2, _refused)


def _read_on_one_rank() -> list[dict[str, Tensor]]:
    """The weights of stage 0 with gradients that lack a factor, which nobody reads, or rank 0 alone."""
    readers: list[Callable[[Any], object]] = [
        lambda g: None,
        lambda g: (g.norm(), (g > 0).sum(), g.data.abs(), g.view(-1)[0].item(), g.flatten().max()),
    ]
    found = []
    for read in readers:
        torch.manual_seed(0)
        model = Net(depth=1)
        engine = lt_zero.shard(model, config_of(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        grads = lt_zero.ShardedOptimizer(engine, optimizer).grads
        grads.carry(3.0)  # as a loop does with three micro-batches
        next_token_loss(model, 0, 0, dist.get_rank()).backward()
        grads.carry(1.0)
        for p in model.parameters() if dist.get_rank() == 0 else ():
            read(p.grad)
        grads.clip_norm(0.05)
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def test_reading_on_one_rank_rounds_nothing(pool: Pool) -> None:
    (alone, first), (_, second) = pool.run(2, _read_on_one_rank)
    for name, value in alone.items():
        assert torch.equal(value, first[name]), name
        assert torch.equal(value, second[name]), name


def _norm_of_assigned() -> None:
    torch.manual_seed(0)
    model = Net(depth=1)
    engine = lt_zero.shard(model, config_of(1))
    lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.5))
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    with engine.unused_parameters.user_access():
        weight: Any = model.blocks[0].up.weight
        before = weight.grad.norm()
        weight.grad = weight.grad * 3
        engine.finish_reductions()
        torch.testing.assert_close(weight.grad.norm(), 3 * before)


def test_norms_follow_what_is_assigned(pool: Pool) -> None:
    pool.run(2, _norm_of_assigned)
