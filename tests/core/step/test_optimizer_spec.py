"""Optimizers of other packages that bring what the core asks: norms of full parameters, and a kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

import lt_zero
from lt_zero import kernels as ops
from lt_zero.core.engine.optimizer_spec import Combine, Kernel, NormedOptimizer, chosen
from lt_zero.core.step.fused_step import FusedStep
from lt_zero.optim import Lamb, Lion
from tests.support.lamb_tools import Odd, loss
from tests.support.matrix import only
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool


class NormalizedMomentum(NormedOptimizer):
    """SGD with momentum, each update of which is divided by the norm of all of its parameter's momentum."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._norms: Combine | None = None

    @override
    def combine(self, norms: Combine, maxima: Combine) -> None:
        self._norms = norms

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        rows = []
        for p, group in stepped:
            moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            moment.mul_(group["momentum"]).add_(p.grad)
            rows.append(torch.linalg.vector_norm(moment, dtype=torch.float64).square().view(1))
        squares = torch.stack(rows) if rows else torch.zeros(0, 1, dtype=torch.float64)
        if self._norms is not None:
            squares = self._norms([p for p, _ in stepped], squares)
        for (p, group), norm in zip(stepped, squares.sqrt(), strict=True):
            p.sub_(self.state[p]["momentum_buffer"] / (norm + 1e-8), alpha=group["lr"])


def _as_one_process() -> None:
    world = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    start = Odd().double()
    whole = copy.deepcopy(start)
    reference = NormalizedMomentum(whole.parameters())
    wanted: list[dict[str, Tensor]] = []
    for step in range(4):
        reference.zero_grad()
        for r in range(world):
            (loss(whole, step, 0, r) / world).backward()
        reference.step()
        wanted.append({name: p.detach().clone() for name, p in whole.named_parameters()})
    for stage in STAGES:
        model = copy.deepcopy(start)
        engine = lt_zero.shard(model, config_of(stage))
        optimizer = NormalizedMomentum(model.parameters())
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step, 0, rank).backward()
            optimizer.step()
            torch.testing.assert_close(full_values(engine), wanted[step], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_norms_are_those_of_full_parameters(pool: Pool, world: int) -> None:
    pool.run(world, _as_one_process)


class Bringing(torch.optim.SGD):
    """Momentum that brings the kernel of torch's class."""

    step_kernel = Kernel(
        "sgd_step",
        ("momentum_buffer",),
        options=lambda group, step: {
            **chosen(group, "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
            "first": step == 1,
        },
        counts=False,
    )


@pytest.mark.parametrize(("cls", "operation"), [(Lion, "lion_step"), (Lamb, "lamb_update"), (Bringing, "sgd_step")])
def test_a_kernel_is_that_of_exactly_its_class(cls: type[Any], operation: str) -> None:
    """A subclass may compute something else."""
    below: type[Any] = type("Below", (cls,), {})
    other: type[Any] = type("Other", (cls,), {"step_kernel": "an attribute of this name"})
    parameters = [Parameter(torch.zeros(3))]
    found = [FusedStep.operation_of(made(parameters, lr=0.1)) for made in (cls, below, other)]
    assert found == [operation, "", ""]


def test_a_kernel_that_is_brought_steps(pool: Pool) -> None:
    pool.run(2, _brought)


def _brought() -> None:
    rank = dist.get_rank()
    values: list[dict[str, Tensor]] = []
    makers: list[Callable[[Iterable[Any]], Optimizer]] = [
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda params: Bringing(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    ]
    for make in makers:
        torch.manual_seed(0)
        model = Odd()
        engine = lt_zero.shard(model, config_of(2))
        sharded = lt_zero.ShardedOptimizer(engine, make(model.parameters()))
        taken = set(engine.buckets) if ops.available(torch.device("cpu")) else set()
        assert sharded.kernel_buckets(engine.buckets) == taken
        for step in range(3):
            sharded.zero_grad()
            loss(model, step, 0, rank).backward()
            sharded.step()
        values.append(full_values(engine))
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)
