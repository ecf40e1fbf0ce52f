"""LAMB as DeepSpeed computes it, written from its source, and a model with the sizes that break sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.optim import Lamb

RULE: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.8, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}


class Transcript:
    """DeepSpeed 0.19.8 in torch, for whole parameters: deepspeed/ops/lamb/fused_lamb.py and csrc/lamb's kernels.

    Kernel 1 makes m, v and the squares of weights and update; 2 adds them up; 3 takes the coefficient and the step. The
    host's ``step_size`` has the correction of the bias.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.groups = [{**RULE, **group} for group in groups]
        self.state: dict[Parameter, list[Any]] = {}
        self.coefficients: list[float] = []  # of the last step

    @torch.no_grad()
    def step(self) -> None:
        self.coefficients = []
        for o in self.groups:
            for p in o["params"]:
                if p.grad is not None:
                    self._one(p, p.grad, o)

    def _one(self, p: Tensor, g: Tensor, o: dict[str, Any]) -> None:
        step, m, v = self.state.get(p, (0, torch.zeros_like(p), torch.zeros_like(p)))
        step, (b1, b2) = step + 1, o["betas"]
        step_size = o["lr"]
        if o["bias_correction"]:
            step_size = o["lr"] * math.sqrt(1 - b2**step) / (1 - b1**step)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        denom = torch.sqrt(v + o["eps"]) if o["eps_inside_sqrt"] else torch.sqrt(v) + o["eps"]
        update = m / denom + o["weight_decay"] * p
        weights, size = math.sqrt(float((p * p).sum())), math.sqrt(float((update * update).sum()))
        coefficient = 1.0
        if weights != 0 and size != 0:
            coefficient = weights / size
            if coefficient > o["max_coeff"]:
                coefficient = o["max_coeff"]
            if coefficient < o["min_coeff"]:
                coefficient = o["min_coeff"]
        p -= step_size * coefficient * update
        self.state[p] = [step, m, v]
        self.coefficients.append(coefficient)

    def zero_grad(self) -> None:
        for o in self.groups:
            for p in o["params"]:
                p.grad = None


class Odd(nn.Module):
    """Odd sizes, a bucket with fewer elements than ranks, zeros, a part that ranks use at times, one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 13)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(1))
        self.zero = nn.Linear(13, 3)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)
        self.rare, self.never = nn.Linear(13, 3), nn.Linear(3, 7)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = torch.tanh(self.first(x) * self.scale)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        extra = self.rare(x)  # under stage 3 every rank runs it
        return self.zero(x) + (extra if rare else 0)


def loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    """The last part is used by the first rank alone, in every third step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 5, generator=generator, dtype=torch.float32).to(dtype)
    result: Tensor = (model(x, rank == 0 and step % 3 == 1).double() - 1).square().mean()
    return result


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """No decay for vectors, a group that is empty, one with other bounds."""
    named = dict(model.named_parameters())
    bounded = [p for n, p in named.items() if n.startswith("blocks")]
    others = [p for n, p in named.items() if not n.startswith("blocks")]
    return [
        {"params": [p for p in others if p.dim() >= 2]},
        {"params": []},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
        {"params": bounded, "max_coeff": 0.5, "min_coeff": 0.4, "eps_inside_sqrt": True, "bias_correction": False},
    ]


def lamb(model: nn.Module) -> Optimizer:
    return Lamb(groups_of(model), **RULE)
