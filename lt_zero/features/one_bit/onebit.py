"""1-bit Adam (arXiv:2102.02888) and 1-bit LAMB (arXiv:2104.06069): momenta averaged in 1 bit, variances frozen.

Note [Frozen variances]
    The updates are those of DeepSpeed 0.18 (runtime/fp16/onebit): no bias correction, and weight decay is added to the
    update. After ``freeze_step`` steps the second moment stays as it is. One bit cannot represent zero, so an
    element that has had no gradient would get a momentum, and its update would be divided by ``eps``: elements whose
    second moment is zero are not updated. (DeepSpeed has the user pass a mask of them.)

Note [Frozen trust ratios]
    LAMB's trust ratio depends on a second moment that follows the gradients. 1-bit LAMB freezes a running mean of the
    ratio, ``lamb_coeff_freeze``, and multiplies it by a factor: the largest quotient of the frozen and of a fresh
    denominator, which follows the gradients that the averaged momenta imply. Where weights decay, the part of the
    update that is not decay is what the factor applies to. It is clamped, and changes by a bounded share per step.
    Momenta of all parameters share blocks in the exchange, so each is scaled to the mean magnitude of all before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.core.engine.optimizer_spec import Combine, CombinedNorms, ExchangingOptimizer
from lt_zero.optim.adam import check_betas, check_least, run_closure
from lt_zero.optim.lamb import Lamb, trust_rates, wide

BACKENDS = ("nccl", "mpi", "hccl", "compressed", "gloo", "ccl")  # DeepSpeed's, and those of its accelerators


class OneBitOptimizer(ExchangingOptimizer):
    """Base of 1-bit optimizers. Their groups have ``freeze_step``, and count ``steps``.

    Attributes:
        scales_momenta: the exchange scales momenta to one magnitude, by ``scaling_coeff`` of each parameter's state.
    """

    prepared_at = "at stage 0 or 1"
    most_states = 2
    scales_momenta = False
    _averaged = False  # gradients after the freeze are averaged momenta

    @property
    def frozen(self) -> bool:
        """True if the next step averages momenta."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["freeze_step"])

    def expect_averages(self) -> None:
        """Take the gradients of each step after the freeze for averaged momenta."""
        self._averaged = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = run_closure(closure)
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.grad is not None and p.grad.is_sparse for p, _ in stepped):
            raise RuntimeError(f"{type(self).__name__} has no update for sparse gradients. Use sparse=False.")
        self._step(stepped, self.frozen and self._averaged)
        for group in self.param_groups:
            group["steps"] += 1
        return loss

    def _step(self, stepped: Sequence[tuple[Tensor, dict[str, Any]]], averaged: bool) -> None:
        """Step parameters that have gradients, or, if ``averaged``, averaged momenta in their place."""
        raise NotImplementedError


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam. See Note [Frozen variances].

    Several ranks need ``optimizer.type: OneBitAdam`` in the configuration, which prepares their exchange.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        freeze_step: optimizer steps with averaged gradients; from then on, momenta are averaged in 1 bit.
        bias_correction: accepted and without effect, as in DeepSpeed.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: times the weights, added to the update.
        cuda_aware, comm_backend_name: accepted; the exchange is that of the process group.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        check_least(0, lr=lr, eps=eps, weight_decay=weight_decay)
        check_least(1, freeze_step=freeze_step)
        check_betas(betas)
        defaults = {"lr": lr, "freeze_step": freeze_step, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "steps": 0})

    def _step(self, stepped: Sequence[tuple[Tensor, dict[str, Any]]], averaged: bool) -> None:
        frozen = self.frozen
        for parameter, group in stepped:
            state = self.state[parameter]
            grad = parameter.grad
            (beta1, beta2) = group["betas"]
            assert grad is not None
            if not state:
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            first, second = state["exp_avg"], state["exp_avg_sq"]
            if averaged:
                first.copy_(grad)
            else:
                first.mul_(beta1).add_(grad, alpha=1 - beta1)
            if frozen:
                first.mul_(second > 0)
            else:
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            update = first / second.sqrt().add_(group["eps"])
            if group["weight_decay"]:
                update.add_(parameter, alpha=group["weight_decay"])
            parameter.add_(update, alpha=-float(group["lr"]))


class OneBitLamb(OneBitOptimizer, Lamb):
    """1-bit LAMB. See Notes [Frozen variances] and [Frozen trust ratios].

    Several ranks need ``optimizer.type: OneBitLamb`` in the configuration, which prepares their exchange.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        freeze_step: optimizer steps with averaged gradients; from then on, momenta are averaged in 1 bit.
        bias_correction: accepted and without effect, as in DeepSpeed.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: times the weights, added to the update before its norm is taken.
        max_coeff, min_coeff: bounds of the trust ratio before the freeze.
        cuda_aware, comm_backend_name: accepted; the exchange is that of the process group.
        coeff_beta: decay rate of the running mean of trust ratios that is frozen.
        factor_max, factor_min: bounds of the factor of the frozen ratio.
        factor_threshold: the share by which that factor may change in a step.

    Attributes:
        full_maxima: None, or a function of tensors of the groups and their maxima ([tensors, 1], fp64) that returns
            those of the full parameters, as ``full_norms`` does for norms.

    Raises:
        ValueError: a number is out of range.
    """

    full_maxima: Combine | None = None
    takes_parts = False
    most_states = 3
    scales_momenta = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        check_least(1, freeze_step=freeze_step)
        check_least(0, factor_min=factor_min, factor_threshold=factor_threshold)
        if not 0 <= coeff_beta < 1:
            raise ValueError(f"coeff_beta={coeff_beta}: write a number of at least 0 and below 1.")
        if not factor_max >= factor_min:
            raise ValueError(f"factor_max={factor_max}: write a number of at least factor_min={factor_min}.")
        own = {"freeze_step": freeze_step, "coeff_beta": coeff_beta, "factor_max": factor_max, "steps": 0}
        own |= {"factor_min": factor_min, "factor_threshold": factor_threshold}
        Lamb.__init__(self, params, lr, False, betas, eps, False, weight_decay, max_coeff, min_coeff)
        self.defaults.update(own)
        for group in self.param_groups:
            group.update({**own, **group})

    def combine(self, norms: CombinedNorms, maxima: Combine) -> None:
        super().combine(norms, maxima)
        self.full_maxima = maxima

    def _step(self, stepped: Sequence[tuple[Tensor, dict[str, Any]]], averaged: bool) -> None:
        stepped = [(p, group) for p, group in stepped if p.numel() > 0]
        rates = self._frozen_rates(stepped, averaged) if self.frozen else self._rates(stepped)
        for (parameter, group), rate in zip(stepped, rates, strict=True):
            self._apply(parameter, group, rate * float(group["lr"]))

    def _rates(self, stepped: Sequence[tuple[Tensor, dict[str, Any]]]) -> Sequence[Tensor]:
        """Update the moments and the running mean of trust ratios; returns the ratios (0D each)."""
        rows = [self._update_moments(p, p.grad, group) for p, group in stepped if p.grad is not None]
        squares = self._full(self.full_norms, stepped, rows, 2)
        bounds = [(group["min_coeff"], group["max_coeff"]) for _, group in stepped]
        ratios = trust_rates(squares, [1.0] * len(stepped), bounds).unbind()
        for (parameter, group), ratio in zip(stepped, ratios, strict=True):
            state, beta = self.state[parameter], group["coeff_beta"]
            mean = state.setdefault("lamb_coeff_freeze", torch.zeros((), device=parameter.device))
            mean.copy_(torch.where(ratio != 1, beta * mean + (1 - beta) * ratio.to(mean), mean))
        return ratios

    def _frozen_rates(self, stepped: Sequence[tuple[Tensor, dict[str, Any]]], averaged: bool) -> Sequence[Tensor]:
        """Update the momenta and the fresh second moments; returns the frozen ratios times their factors (0D each)."""
        rows = [self._update_momentum(p, group, averaged) for p, group in stepped]
        squares = self._full(self.full_norms, stepped, [row[:2] for row in rows], 2)
        maxima = self._full(self.full_maxima, stepped, [row[2:] for row in rows], 1)
        rates = []
        for (parameter, group), (part, update), largest in zip(stepped, squares.sqrt(), maxima[:, 0], strict=True):
            state, threshold = self.state[parameter], group["factor_threshold"]
            share = torch.where(update > 0, part / update, 1.0).clamp(max=1.0) if group["weight_decay"] else 1.0
            factor = (largest * share + (1.0 - share)).clamp(group["factor_min"], group["factor_max"])
            last = state["last_factor"]
            factor = factor.to(last).clamp(last * (1 - threshold), last * (1 + threshold))
            last.copy_(factor)
            rates.append(state["lamb_coeff_freeze"] * factor)
        return rates

    def _update_momentum(self, parameter: Tensor, group: dict[str, Any], averaged: bool) -> Tensor:
        """Update moments; returns squared norms of the update without and with decay, and the largest ratio (fp64)."""
        state = self.state[parameter]
        (beta1, beta2) = group["betas"]
        eps = group["eps"]
        # A parameter whose first gradient comes after the freeze: its second moment stays zero.
        if not state:
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["lamb_coeff_freeze"] = torch.zeros((), device=parameter.device)
        if "last_factor" not in state:
            state["last_factor"] = torch.ones((), device=parameter.device)
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        first, second, fresh = (wide(state[key]) for key in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"))
        assert parameter.grad is not None
        grad = wide(parameter.grad)
        momentum = grad.clone() if averaged else torch.lerp(first, grad, 1 - beta1)
        momentum.mul_(second > 0)
        implied = momentum.sub(first, alpha=beta1).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        state["exp_avg"].copy_(momentum)
        state["exp_avg_sq_fresh"].copy_(fresh)
        root = second.sqrt().add_(eps)
        largest = (root / fresh.sqrt().add_(eps)).max().double()
        part = torch.linalg.vector_norm(momentum.div_(root), dtype=torch.float64).square()
        update = torch.linalg.vector_norm(self._update(parameter, group), dtype=torch.float64).square()
        return torch.stack([part, update, largest])

    def _full(
        self,
        combine: Combine | None,
        stepped: Sequence[tuple[Tensor, dict[str, Any]]],
        rows: Sequence[Tensor],
        columns: int,
    ) -> Tensor:
        """``rows`` (fp64) of fragments as [parameters, columns] of full parameters. Collective with ``combine``."""
        table = torch.stack([row.to(rows[0].device) for row in rows]) if rows else torch.zeros(0, columns).double()
        return combine([p for p, _ in stepped], table) if combine is not None else table
