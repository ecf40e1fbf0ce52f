"""Lion, an optimizer with one moment that updates by its sign (arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.core.engine.optimizer_spec import Kernel, chosen
from lt_zero.optim.adam import check_betas, run_closure
from lt_zero.optim.params import Flag, Signature
from lt_zero.optim.registry import ADAM_RULES, FP32_STATES, OPTIMIZER_RULES, Factory


class Lion(Optimizer):
    """Algorithm 2 of the paper, with decoupled weight decay. It is element-wise, so shards step as full tensors do.

    Compared with AdamW, the paper recommends a learning rate three to ten times smaller and a weight decay larger by
    the same factor.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        betas: weight of the moment in the update, and its decay rate.
        weight_decay: per unit of learning rate.
        maximize: ascend the gradient.

    Raises:
        ValueError: a number is out of range.
    """

    step_kernel = Kernel(
        "lion_step",
        ("exp_avg",),
        options=lambda group, step: chosen(group, "lr", "beta1", "beta2", "weight_decay", "maximize"),
        counts=False,
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr={lr}: write a number of at least 0.")
        check_betas(betas)
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay}: write a number of at least 0.")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = run_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise RuntimeError("Lion has no update for sparse gradients. Use sparse=False, or SparseAdam.")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        moment, (beta1, beta2) = state["exp_avg"], group["betas"]
        grad = -grad if group["maximize"] else grad
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(moment.lerp(grad, 1 - beta1).sign_() * group["lr"])
        moment.lerp_(grad, 1 - beta2)


# ---- in configurations -----------------------------------------------------------------------------------------------


def factory_of(name: str) -> Factory:
    """The factory of ``optimizer.type: Lion``."""
    extra = {"set_grad_none": Flag, "fp32_optimizer_states": FP32_STATES}
    return Factory(Signature.of(Lion, OPTIMIZER_RULES).plus(extra), _make)


def _make(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    """Lion with DeepSpeed's defaults, which differ from the paper's."""
    options = {"lr": 1e-3, "betas": (0.9, 0.999), **values}
    return Lion(parameters, **{k: v for k, v in options.items() if k not in ADAM_RULES})
