"""The algorithms of 1-bit optimizers in plain torch: all ranks of a run in one process, no collective, no kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1024  # elements that share a scale


def one_bit(values: Tensor, error: Tensor) -> Tensor:
    """What ``values + error`` (1D) becomes in one bit an element; ``error`` becomes what was lost."""
    wanted = values + error
    blocks = [
        block.sign().where(block != 0, 1.0) * block.double().abs().mean().float() for block in wanted.split(BLOCK)
    ]
    got = torch.cat(blocks)
    error.copy_(wanted - got)
    return got


class Averager:
    """The compressed all-reduce of arXiv:2102.02888, figure 3: worker errors, a server per rank, server errors.

    Elements that are not ``real`` (1D bool) are padding: they stay zero, and count in the scales.
    """

    def __init__(self, world: int, real: Tensor) -> None:
        self._world, self._real = world, real
        self.worker = [torch.zeros(real.numel()) for _ in range(world)]
        self.server = [torch.zeros(real.numel() // world) for _ in range(world)]

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """The average of each rank's ``values`` (1D), as all ranks receive it."""
        sent = [
            [one_bit(part, rest) for part, rest in zip(v.chunk(self._world), e.chunk(self._world), strict=True)]
            for v, e in zip(values, self.worker, strict=True)
        ]
        chunks = self._real.chunk(self._world)
        sums = [torch.stack(parts).sum(0) * real for *parts, real in zip(*sent, chunks, strict=True)]
        got = torch.cat([one_bit(total, rest) for total, rest in zip(sums, self.server, strict=True)])
        for error in self.worker:
            error[~self._real] = 0
        for error, real in zip(self.server, chunks, strict=True):
            error[~real] = 0
        return got / self._world


class OneBitAdamOracle:
    """Algorithm 1 of arXiv:2102.02888, with the update of DeepSpeed, on one flat tensor of parameters.

    Args:
        weights: 1D fp32; stepped in place.
        world: ranks.
        real: 1D bool; the elements that belong to parameters.
    """

    def __init__(
        self,
        weights: Tensor,
        world: int,
        real: Tensor,
        lr: float,
        freeze_step: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.weights, self._world = weights, world
        self._lr, self._freeze, (self._beta1, self._beta2) = lr, freeze_step, betas
        self._eps, self._decay, self.steps = eps, weight_decay, 0
        self.momentum, self.variance = torch.zeros_like(weights), torch.zeros_like(weights)
        self.average = Averager(world, real)

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step with each rank's gradients (1D)."""
        if self.steps < self._freeze:
            mean = torch.stack(list(grads)).sum(0) / self._world
            self.momentum.mul_(self._beta1).add_(mean, alpha=1 - self._beta1)
            self.variance.mul_(self._beta2).addcmul_(mean, mean, value=1 - self._beta2)
        else:
            self.momentum = self.average(
                [(grad * (1 - self._beta1)).add_(self.momentum, alpha=self._beta1) for grad in grads]
            )
            self.momentum[self.variance == 0] = 0
        update = self.momentum / (self.variance.sqrt() + self._eps) + self._decay * self.weights
        self.weights -= self._lr * update
        self.steps += 1
