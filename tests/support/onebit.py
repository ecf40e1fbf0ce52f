"""The algorithms of 1-bit optimizers in plain torch: all ranks of a run in one process, no collective, no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def clipped(grads: Sequence[Tensor], limit: float) -> list[Tensor]:
    """``grads`` times the factor that limits the root mean square of their norms; 0: no limit."""
    norm = torch.stack([grad.double().square().sum() for grad in grads]).mean().sqrt()
    return [grad * float((limit / (norm + 1e-6)).clamp(max=1.0)) for grad in grads] if limit else list(grads)


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
        return got / self._world * self._real


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
        clip: float = 0.0,
    ) -> None:
        self.weights, self._world, self._clip = weights, world, clip
        self._lr, self._freeze, (self._beta1, self._beta2) = lr, freeze_step, betas
        self._eps, self._decay, self.steps = eps, weight_decay, 0
        self.momentum, self.variance = torch.zeros_like(weights), torch.zeros_like(weights)
        self.average = Averager(world, real)

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step with each rank's gradients (1D)."""
        if self.steps < self._freeze:
            (mean,) = clipped([torch.stack(list(grads)).sum(0) / self._world], self._clip)
            self.momentum.mul_(self._beta1).add_(mean, alpha=1 - self._beta1)
            self.variance.mul_(self._beta2).addcmul_(mean, mean, value=1 - self._beta2)
        else:
            self.momentum = self.average(
                [(g * (1 - self._beta1)).add_(self.momentum, alpha=self._beta1) for g in clipped(grads, self._clip)]
            )
            self.momentum[self.variance == 0] = 0
        update = self.momentum / (self.variance.sqrt() + self._eps) + self._decay * self.weights
        self.weights -= self._lr * update
        self.steps += 1


class OneBitLambOracle:
    """Algorithm 1 of arXiv:2104.06069, with the arithmetic of DeepSpeed, on one flat tensor of parameters.

    Args:
        weights: 1D fp32; stepped in place.
        world: ranks.
        real: 1D bool; the elements that belong to parameters.
        spans: elements [lo, hi) of each parameter.
    """

    def __init__(
        self,
        weights: Tensor,
        world: int,
        real: Tensor,
        spans: Sequence[tuple[int, int]],
        lr: float,
        freeze_step: int,
        weight_decay: float = 0.0,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        clip: float = 0.0,
    ) -> None:
        self.weights, self._world, self._spans, self._clip = weights, world, spans, clip
        self._lr, self._freeze, self._decay, self.steps = lr, freeze_step, weight_decay, 0
        self._coeff_beta, self._bounds = coeff_beta, (min_coeff, max_coeff)
        self._factors, self._threshold = (factor_min, factor_max), factor_threshold
        self._beta1, self._beta2, self._eps = 0.9, 0.999, 1e-8
        self.momentum, self.variance = torch.zeros_like(weights), torch.zeros_like(weights)
        self.ratios, self.factors = [0.0] * len(spans), [1.0] * len(spans)
        self.fresh, self.scales = Tensor(), torch.ones_like(weights)
        self.average = Averager(world, real)

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step with each rank's gradients (1D)."""
        if self.steps == self._freeze:
            self._freeze_now()
        if self.steps < self._freeze:
            (mean,) = clipped([torch.stack(list(grads)).sum(0) / self._world], self._clip)
            self.momentum.mul_(self._beta1).add_(mean, alpha=1 - self._beta1)
            self.variance.mul_(self._beta2).addcmul_(mean, mean, value=1 - self._beta2)
            root = self.variance.sqrt() + self._eps
        else:
            last = self.momentum
            grads = clipped(grads, self._clip)
            mine = [(grad * (1 - self._beta1)).add_(last, alpha=self._beta1) * self.scales for grad in grads]
            self.momentum = self.average(mine) / self.scales
            self.momentum[self.variance == 0] = 0
            implied = (self.momentum - self._beta1 * last) / (1 - self._beta1)
            self.fresh.mul_(self._beta2).addcmul_(implied, implied, value=1 - self._beta2)
            root = self.variance.sqrt() + self._eps
        for index, (lo, hi) in enumerate(self._spans):
            part = self.momentum[lo:hi] / root[lo:hi]
            update = part + self._decay * self.weights[lo:hi]
            rate = self._frozen_rate(index, part, update) if self.steps >= self._freeze else self._rate(index, update)
            self.weights[lo:hi] -= self._lr * rate * update
        self.steps += 1

    def _freeze_now(self) -> None:
        self.fresh = self.variance.clone()
        magnitudes = [float(self.momentum[lo:hi].double().square().mean().sqrt()) for lo, hi in self._spans]
        for (lo, hi), magnitude in zip(self._spans, magnitudes, strict=True):
            self.scales[lo:hi] = sum(magnitudes) / len(magnitudes) / magnitude if magnitude else 1.0

    def _rate(self, index: int, update: Tensor) -> float:
        weight = float(self.weights[slice(*self._spans[index])].double().norm())
        norm = float(update.double().norm())
        ratio = min(max(weight / norm, self._bounds[0]), self._bounds[1]) if weight and norm else 1.0
        if ratio != 1.0:
            self.ratios[index] = self._coeff_beta * self.ratios[index] + (1 - self._coeff_beta) * ratio
        return ratio

    def _frozen_rate(self, index: int, part: Tensor, update: Tensor) -> float:
        lo, hi = self._spans[index]
        frozen, fresh = (value[lo:hi].sqrt() + self._eps for value in (self.variance, self.fresh))
        factor = float((frozen / fresh).max())
        if self._decay:
            share = min(1.0, float(part.double().norm() / update.double().norm()))
            factor = factor * share + 1.0 - share
        factor = min(max(factor, self._factors[0]), self._factors[1])
        last = self.factors[index]
        factor = min(max(factor, last * (1 - self._threshold)), last * (1 + self._threshold))
        self.factors[index] = factor
        return self.ratios[index] * factor


class ZeroOneAdamOracle:
    """Algorithm 1 of arXiv:2202.06009, with the policies and the update of DeepSpeed, on one flat tensor.

    ``each`` are the weights (1D fp32) of each rank; the other arguments are as for ``OneBitAdamOracle``.
    """

    def __init__(
        self,
        weights: Tensor,
        world: int,
        real: Tensor,
        lr: float,
        var_freeze_step: int,
        var_update_scaler: int,
        local_step_scaler: int,
        local_step_clipper: int,
        weight_decay: float = 0.0,
        clip: float = 0.0,
    ) -> None:
        self._clip = clip
        self.each = [weights.clone() for _ in range(world)]
        self.exchanged, self._world, self._real = weights.clone(), world, real
        self._lr, self._decay, self._freeze = lr, weight_decay, var_freeze_step
        self._var_scaler, self._local_scaler, self._longest = var_update_scaler, local_step_scaler, local_step_clipper
        self._beta1, self._beta2, self._eps, self.steps = 0.9, 0.999, 1e-8, 0
        self.momenta = [torch.zeros_like(weights) for _ in range(world)]
        self.changes = [torch.zeros_like(weights) for _ in range(world)]
        self.variance = torch.zeros_like(weights)
        self._var_interval = self._local_interval = 1
        self._var_updates = self._local_steps = 0
        self._rates = 0.0
        self.average = Averager(world, real)

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step with each rank's gradients (1D)."""
        self.steps += 1
        if self.steps <= self._freeze:
            self._step_together(grads)
            if self.steps == self._freeze:
                self.average = Averager(self._world, self._real)
                self.exchanged = self.each[0].clone()
            return
        moves, root = self.variance > 0, self.variance.sqrt() + self._eps
        for rank, grad in enumerate(clipped(grads, self._clip)):
            self.momenta[rank] = (self._beta1 * self.momenta[rank]).add_(grad, alpha=1 - self._beta1) * moves
            update = (self.momenta[rank] / root + self._decay * self.each[rank]) * moves
            self.changes[rank] -= self._lr * update
            self.each[rank] = self.exchanged + self.changes[rank]
        self._rates += self._lr
        if self.steps % self._local_interval == 0:
            self.exchange()
        self._local_steps += 1
        if self._local_steps % self._local_scaler == 0:
            self._local_interval = min(self._longest, 2 * self._local_interval)

    def exchange(self) -> None:
        """The end of an interval."""
        root = self.variance.sqrt() + self._eps
        change = self.average([mine * root for mine in self.changes]) * (self.variance > 0)
        self.momenta = [change / -self._rates for _ in range(self._world)]
        self.exchanged = self.exchanged + change / root
        self.each = [self.exchanged.clone() for _ in range(self._world)]
        self.changes = [torch.zeros_like(change) for _ in range(self._world)]
        self._rates = 0.0

    def _step_together(self, grads: Sequence[Tensor]) -> None:
        updates = self.steps % self._var_interval == 0
        mean = torch.stack(list(grads)).sum(0) / self._world if updates else self.average(grads)
        (mean,) = clipped([mean], self._clip)
        momentum = (self._beta1 * self.momenta[0]).add_(mean, alpha=1 - self._beta1)
        if updates:
            self.variance.mul_(self._beta2).addcmul_(mean, mean, value=1 - self._beta2)
            self._var_updates += 1
            if self._var_updates % self._var_scaler == 0:
                self._var_interval *= 2
        else:
            momentum[self.variance == 0] = 0
        self.momenta = [momentum.clone() for _ in range(self._world)]
        update = momentum / (self.variance.sqrt() + self._eps) + self._decay * self.each[0]
        self.each = [self.each[0] - self._lr * update for _ in range(self._world)]


def oracle(type_: str, weights: Tensor, world: int, spans: Sequence[tuple[int, int]], **params: Any) -> Any:
    """The algorithm of an ``optimizer.type`` for parameters that are elements [lo, hi) of ``weights`` (1D fp32)."""
    real = torch.zeros_like(weights, dtype=torch.bool)
    for lo, hi in spans:
        real[lo:hi] = True
    if type_ == "ZeroOneAdam":
        return ZeroOneAdamOracle(weights, world, real, **params)
    if type_ == "OneBitLamb":
        return OneBitLambOracle(weights, world, real, spans, **params)
    return OneBitAdamOracle(weights, world, real, **params)
