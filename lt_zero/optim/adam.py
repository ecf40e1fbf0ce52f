"""Adam without bias correction, for DeepSpeed's ``bias_correction: false``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam


class UncorrectedAdam(Adam):
    """Adam without bias correction, so its first steps are larger; the state is that of ``torch.optim.Adam``.

    As a subclass of Adam it is not stepped by lt_zero's kernel, which corrects the bias.

    Args:
        params: parameters, or dicts of parameter groups.
        lr, betas, eps, weight_decay, maximize, decoupled_weight_decay: as for ``torch.optim.Adam``.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=False,
            fused=False,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise RuntimeError("Adam has no update for sparse gradients. Use sparse=False, or SparseAdam.")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        grad = -grad if group["maximize"] else grad
        if decay and group["decoupled_weight_decay"]:
            parameter.mul_(1 - lr * decay)
        elif decay:
            grad = grad.add(parameter, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        parameter.sub_(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]) * lr)
