"""Code that edits weights inside of ``gathered(write=True)`` in the ways of public packages: as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from tests.support.matrix import only
from tests.support.parity import OPTIMIZERS, RELEASE, config_of, full_values
from tests.support.pool import Pool


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that can be merged into it, in peft's two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 5).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 7)), nn.Parameter(torch.randn(5, 2))
        self.merged = False

    def merge(self, safe: bool) -> None:
        if safe:  # tried on a copy, which becomes the weight
            merged = self.base.weight.data.clone()
            merged += self.up @ self.down
            assert torch.isfinite(merged).all()
            self.base.weight.data = merged
        else:
            self.base.weight.data += self.up @ self.down
        self.merged = True

    def unmerge(self) -> None:
        self.base.weight.data -= self.up @ self.down
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else self.base(x) + x @ self.down.t() @ self.up.t()


class Averaged(nn.Module):
    """A model that keeps an average of its weights, which belongs to it as in many scripts of diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Adapted(), nn.GELU(), nn.Linear(5, 3))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def update(self) -> None:
        for p, e in zip(self.net.parameters(), self.average.parameters(), strict=True):
            with torch.no_grad():
                e.mul_(0.75).add_(p, alpha=1 - 0.75)

    def swap(self) -> None:
        """Exchange weights and averages by assignment."""
        for p, e in zip(self.net.parameters(), self.average.parameters(), strict=True):
            p.data, e.data = e.data.clone(), p.data.clone()


def _edits(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Averaged()
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, RELEASE if stage == 3 else {}))
    optimizers = [OPTIMIZERS["sgd"]([p for p in m.net.parameters() if p.requires_grad]) for m in (model, reference)]
    lt_zero.ShardedOptimizer(engine, optimizers[0])
    data = torch.randn(world, 4, 7)

    def both(edit: Any) -> None:
        with lt_zero.gathered(model, write=True):
            edit(model)
        edit(reference)
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)

    for safe in (False, True):
        model(data[rank]).square().mean().backward()
        for part in data:
            (reference(part).square().mean() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        both(Averaged.update)
        both(Averaged.swap)
        both(Averaged.swap)
        both(lambda m, safe=safe: m.net[0].merge(safe))
        torch.testing.assert_close(model(data[0]), reference(data[0]), rtol=1e-5, atol=1e-6)
        both(lambda m: m.net[0].unmerge())
    before = full_values(engine)
    weight = model.net[2].weight
    with pytest.raises(RuntimeError, match=r"'net.2.weight' was assigned a tensor of \(3, 5\), torch.float64"):
        _assign_double(weight)
    after = full_values(engine)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model(data[rank]).square().mean().backward()
    optimizers[0].step()


def _assign_double(weight: nn.Parameter) -> None:
    with lt_zero.gathered(weight, write=True):
        weight.data = weight.data.double()


@pytest.mark.parametrize("stage", only([3], [0, 1, 2, 3]))
def test_edits_inside_gathered(pool: Pool, stage: int) -> None:
    pool.run(2, _edits, stage)
