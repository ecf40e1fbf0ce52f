"""1-bit Adam (arXiv:2102.02888): Adam until its variance is frozen, then momenta that are averaged in 1 bit.

Note [Frozen variances]
    The update is that of DeepSpeed 0.18 (runtime/fp16/onebit/adam.py): no bias correction, and weight decay is added to
    the update. After ``freeze_step`` steps the second moment stays as it is. One bit cannot represent zero, so an
    element that has had no gradient would get a momentum, and its update would be divided by ``eps``: elements whose
    second moment is zero are not updated. (DeepSpeed has the user pass a mask of them.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BACKENDS = ("nccl", "mpi", "hccl", "compressed")


class OneBitAdam(Optimizer):
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

    Attributes:
        averages: None, or whether the gradients of the running step are averaged momenta.

    Raises:
        ValueError: a number is out of range.
    """

    averages: Callable[[], bool] | None = None

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
        for name, value, low in (("lr", lr, 0), ("eps", eps, 0), ("weight_decay", weight_decay, 0)):
            if not value >= low:
                raise ValueError(f"{name}={value}: write a number of at least {low}.")
        if not freeze_step >= 1:
            raise ValueError(f"freeze_step={freeze_step}: write a number of at least 1.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: write two numbers of at least 0 and below 1.")
        defaults = {"lr": lr, "freeze_step": freeze_step, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "steps": 0})

    @property
    def frozen(self) -> bool:
        """Whether the next step averages momenta."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["freeze_step"])

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
        frozen = self.frozen
        averaged = frozen and self.averages is not None and self.averages()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group, frozen, averaged)
            group["steps"] += 1
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], frozen: bool, averaged: bool) -> None:
        if grad.is_sparse:
            raise RuntimeError("OneBitAdam has no update for sparse gradients. Use sparse=False.")
        state, (beta1, beta2) = self.state[parameter], group["betas"]
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
