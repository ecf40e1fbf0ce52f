"""LAMB, whose steps have for each parameter the size of its weights (arXiv:1904.00962), as DeepSpeed computes it.

Note [Norms of whole parameters]
    The trust ratio of a parameter is a quotient of two norms over all of its elements, and under ZeRO a tensor in the
    optimizer's groups is the piece of a parameter that this rank holds. Whoever put pieces there sets ``whole_norms``,
    a function that turns the squared norms of pieces into those of the whole parameters. ``step`` calls it once, on
    every rank alike, also on one that holds no piece of anything: it may be collective. Without it the tensors are
    whole parameters.

Note [DeepSpeed's LAMB]
    This is what DeepSpeed 0.19.8 computes (csrc/lamb/fused_lamb_cuda_kernel.cu), which is not algorithm 2 of the paper
    to the letter: the trust ratio is that of the moments as they are, and the correction of their bias multiplies the
    learning rate, so that it scales the weight decay, too. The ratio is kept between two bounds, and is 1 where a norm
    is 0. It differs in rounding only: norms are added up in fp64, and 1 - beta is not computed from betas in fp32.
    ``lt_zero.ops.lamb_update`` has the paper's correction, inside the update; without its correction, and with the
    learning rate that is corrected here, it is the same (with ``eps_inside_sqrt=False``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WholeNorms = Callable[[list[Tensor], Tensor], Tensor]


class Lamb(Optimizer):
    """LAMB with DeepSpeed's arithmetic and defaults. See Note [DeepSpeed's LAMB].

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        bias_correction: correct the bias of both moments, by a factor of the learning rate.
        betas: how much of the first and of the second moment is kept.
        eps: added to the root of the second moment.
        eps_inside_sqrt: add ``eps`` before the root is taken.
        weight_decay: times the weights, added to the update before its norm is taken.
        max_coeff: upper bound of the trust ratio (norm of the weights / norm of the update).
        min_coeff: lower bound of the trust ratio.

    Attributes:
        whole_norms: None, or a function of tensors of the groups and their squared norms ([tensors, 2] in fp64: of the
            weights, of the update) that returns those of the whole parameters, in the same shape. See Note [Norms of
            whole parameters].

    Raises:
        ValueError: a number is out of range.
    """

    whole_norms: WholeNorms | None = None

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
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: write two numbers of at least 0 and below 1.")
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
        for group in self.param_groups:  # DeepSpeed keeps it elsewhere
            group.setdefault("eps_inside_sqrt", self.defaults["eps_inside_sqrt"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns.

        The update is computed twice, before and after its norm is known, which takes no memory of its size.

        Raises:
            RuntimeError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        rows = [self._advance(p, p.grad, group) for p, group in moved]
        device = rows[0].device if rows else torch.device("cpu")
        squares = torch.stack([row.to(device) for row in rows]) if rows else torch.zeros(0, 2, dtype=torch.float64)
        if self.whole_norms is not None:
            squares = self.whole_norms([p for p, _ in moved], squares)
        sizes = self._sizes(squares.sqrt(), moved)
        for (p, group), size in zip(moved, sizes, strict=True):
            update, wide = self._update(p, group), _wide(p)
            wide.addcmul_(update, size.to(p.device, update.dtype), value=-1)
            if wide is not p:
                p.copy_(wide)
        return loss

    def _advance(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the moments; returns the squared norms of the weights and of the update (fp64)."""
        if grad.is_sparse or grad.is_complex():
            raise RuntimeError("Lamb has no update for sparse or complex gradients. Use sparse=False, or Adam.")
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        first, second, g = _wide(state["exp_avg"]), _wide(state["exp_avg_sq"]), _wide(grad)
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        for moment, value in (("exp_avg", first), ("exp_avg_sq", second)):
            if value is not state[moment]:
                state[moment].copy_(value)
        return torch.stack([_square(parameter), _square(self._update(parameter, group))])

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's update without the correction, plus the weight decay; a new tensor of at least 32 bits."""
        state, eps = self.state[parameter], group["eps"]
        first, second = _wide(state["exp_avg"]), _wide(state["exp_avg_sq"])
        root = second.add(eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = torch.div(first, root, out=root)
        return update.add_(_wide(parameter), alpha=group["weight_decay"]) if group["weight_decay"] else update

    def _sizes(self, norms: Tensor, moved: list[tuple[Tensor, dict[str, Any]]]) -> Tensor:
        """What multiplies each update (fp64): the learning rate times the trust ratio."""
        rules = [(self._rate(p, group), group["max_coeff"], group["min_coeff"]) for p, group in moved]
        rates, most, least = torch.tensor(rules, dtype=torch.float64).view(-1, 3).to(norms.device).unbind(1)
        weight, update = norms.unbind(1)
        bounded = torch.maximum(torch.minimum(weight / update, most), least)
        return rates * torch.where((weight != 0) & (update != 0), bounded, 1.0)

    def _rate(self, parameter: Tensor, group: dict[str, Any]) -> float:
        """The learning rate of the step at hand, with the correction of the moments' bias."""
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        if not group["bias_correction"]:
            return rate
        number = float(self.state[parameter]["step"])
        return float(rate * math.sqrt(1 - beta2**number) / (1 - beta1**number))


def _wide(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or in fp32 if it has 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _square(tensor: Tensor) -> Tensor:
    """The sum of the squares (0D), in fp64."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
