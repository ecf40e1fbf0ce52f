"""LAMB (arXiv:1904.00962), whose steps scale with the norm of each parameter, as DeepSpeed computes it.

Note [Norms of full parameters]
    The trust ratio of a parameter is the quotient of two norms over all of its elements. Under ZeRO a tensor in the
    optimizer's groups is only the fragment of a parameter that this rank owns. Code that puts fragments there gives
    ``combine`` what makes squared norms of full parameters of the parts that describe fragments. ``step`` calls it
    once on every rank, also on a rank without fragments, so it may be collective. Without it, the tensors are full
    parameters.

Note [DeepSpeed's LAMB]
    The arithmetic is that of DeepSpeed 0.19.8 (csrc/lamb/fused_lamb_cuda_kernel.cu), which differs from algorithm 2 of
    the paper: the trust ratio is that of the uncorrected moments, and the bias correction multiplies the learning
    rate, so it also scales the weight decay. The ratio is clamped, and 1 where a norm is 0. Only rounding differs from
    DeepSpeed's: norms are summed in fp64, and 1 - beta is not computed from fp32 betas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.core.engine.optimizer_spec import (
    Combine,
    CombinedNorms,
    Kernel,
    NormedOptimizer,
    Norms,
    Options,
    SecondPass,
    chosen,
)
from lt_zero.optim.adam import check_betas, run_closure
from lt_zero.optim.params import Signature, only
from lt_zero.optim.registry import OPTIMIZER_RULES, Factory, without


def _options(group: Options, step: float) -> Options:
    bounds = {"lower": group["min_coeff"], "upper": group["max_coeff"]}
    return {**chosen(group, "beta1", "beta2", "eps", "weight_decay"), "lr": corrected_rate(group, step), **bounds}


def _rates(squares: Tensor, options: Options) -> Tensor:
    """``trust_rates`` of fragments with the same options."""
    count = len(squares)
    return trust_rates(squares, [options["lr"]] * count, [(options["lower"], options["upper"])] * count)


class Lamb(NormedOptimizer):
    """LAMB with DeepSpeed's arithmetic and defaults. See Note [DeepSpeed's LAMB].

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        bias_correction: correct the bias of both moments, by a factor of the learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        eps_inside_sqrt: add ``eps`` before taking the square root.
        weight_decay: times the weights, added to the update before its norm is taken.
        max_coeff: upper bound of the trust ratio (norm of the weights / norm of the update).
        min_coeff: lower bound of the trust ratio.

    Attributes:
        full_norms: None, or what makes norms of the full parameters (of the weights, of the update) out of those of
            the tensors of the groups. See Note [Norms of full parameters].

    Raises:
        ValueError: a number is out of range.
    """

    full_norms: CombinedNorms | None = None
    takes_parts = True
    step_kernel = Kernel(
        "lamb_update",
        ("exp_avg", "exp_avg_sq"),
        options=_options,
        takes=lambda group: not group["eps_inside_sqrt"],
        second=SecondPass("lamb_apply", ("eps", "weight_decay"), own=("lr", "lower", "upper"), columns=2, rates=_rates),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("min_coeff", min_coeff)):
            if not value >= 0:
                raise ValueError(f"{name}={value}: write a number of at least 0.")
        check_betas(betas)
        if not max_coeff >= min_coeff:
            raise ValueError(f"max_coeff={max_coeff}: write a number of at least min_coeff={min_coeff}.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Groups from DeepSpeed's checkpoints do not have the key.
        for group in self.param_groups:
            group.setdefault("eps_inside_sqrt", self.defaults["eps_inside_sqrt"])

    @override
    def combine(self, norms: CombinedNorms, maxima: Combine) -> None:
        self.full_norms = norms

    @property
    def _norms(self) -> Norms:
        return self.full_norms if self.full_norms is not None else Norms()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns.

        The update is computed twice, before and after its norm is known, so it need not be stored.

        Raises:
            RuntimeError: a gradient is sparse or complex.
        """
        loss = run_closure(closure)
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        rows = [self._update_moments(p, p.grad, group) for p, group in stepped]
        squares = self._norms.of_parts([p for p, _ in stepped], rows, 2)
        rates = [corrected_rate(group, float(self.state[p]["step"])) for p, group in stepped]
        bounds = [(group["min_coeff"], group["max_coeff"]) for _, group in stepped]
        step_sizes = trust_rates(squares, rates, bounds)
        for (p, group), step_size in zip(stepped, step_sizes, strict=True):
            self._apply(p, group, step_size)
        return loss

    def _apply(self, parameter: Tensor, group: dict[str, Any], step_size: Tensor) -> None:
        """Subtract ``step_size`` (0D) times the update."""
        update, weights = self._update(parameter, group), wide(parameter)
        weights.addcmul_(update, step_size.to(parameter.device, update.dtype), value=-1)
        if weights is not parameter:
            parameter.copy_(weights)

    def _update_moments(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the moments; returns the parts (``Norms.part``) of the norms of the weights and of the update."""
        if grad.is_sparse or grad.is_complex():
            raise RuntimeError("Lamb has no update for sparse or complex gradients. Use sparse=False, or Adam.")
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        first = wide(state["exp_avg"])
        second = wide(state["exp_avg_sq"])
        g = wide(grad)
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        for moment, value in (("exp_avg", first), ("exp_avg_sq", second)):
            if value is not state[moment]:
                state[moment].copy_(value)
        return torch.cat([self._norms.part(parameter), self._norms.part(self._update(parameter, group))])

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's update without bias correction, plus the weight decay; a new tensor of at least 32 bits."""
        state, eps = self.state[parameter], group["eps"]
        first, second = wide(state["exp_avg"]), wide(state["exp_avg_sq"])
        root = second.add(eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = torch.div(first, root, out=root)
        return update.add_(wide(parameter), alpha=group["weight_decay"]) if group["weight_decay"] else update


def corrected_rate(group: dict[str, Any], step: float) -> float:
    """The learning rate of a group at step number ``step``, with the bias correction of both moments."""
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    return float(rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)) if group["bias_correction"] else rate


def trust_rates(squares: Tensor, rates: Sequence[float], bounds: Sequence[tuple[float, float]]) -> Tensor:
    """The factor of each update ([parameters], fp64): the learning rate times the trust ratio.

    Args:
        squares: [parameters, 2] fp64: squared norms of full weights and updates.
        rates: learning rates.
        bounds: of the trust ratio, from below and above.
    """
    table = [(rate, *pair) for rate, pair in zip(rates, bounds, strict=True)]
    rules = torch.tensor(table, dtype=torch.float64).view(-1, 3)
    rate, lower, upper = accelerator.send(rules, squares.device).unbind(1)
    weight, update = squares.sqrt().unbind(1)
    clamped = torch.maximum(torch.minimum(weight / update, upper), lower)
    return rate * torch.where((weight != 0) & (update != 0), clamped, 1.0)


def wide(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or its fp32 copy if it has 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---- in configurations -----------------------------------------------------------------------------------------------

_NO_AMSGRAD = only(False, "Lamb has no such variant; write false, or remove it")


def factory_of(name: str) -> Factory:
    """The factory of ``optimizer.type: Lamb``."""
    own = Signature.of(Lamb, OPTIMIZER_RULES).plus({"amsgrad": _NO_AMSGRAD})
    return Factory(own, partial(without, Lamb, ("amsgrad",)))
