"""Adam for Muon's other half, and without bias correction for DeepSpeed's ``bias_correction: false``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam


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
        loss = run_closure(closure)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("Adam has no update for sparse gradients. Use sparse=False, or SparseAdam.")
            if parameters:
                step_adam(self, parameters, group, group["decoupled_weight_decay"], corrected=False)
        return loss


def step_adam(
    optimizer: Optimizer, parameters: list[Any], group: dict[str, Any], decoupled: bool, corrected: bool = True
) -> None:
    """One step of these parameters of a group, which have gradients, by torch's functional Adam.

    Args:
        optimizer: whose state is that of ``torch.optim.Adam``.
        parameters, group: what to step, and the hyper-parameters.
        decoupled: the weight decay of AdamW.
        corrected: correct the bias of the moments.
    """
    for parameter in parameters:
        if not (state := optimizer.state[parameter]):
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    states = [optimizer.state[p] for p in parameters]
    steps = [state["step"] for state in states]
    # The bias correction of an infinite step number is one, so it leaves nothing to correct.
    if not corrected:
        for step in steps:
            step += 1
        steps = [torch.full_like(step, torch.inf) for step in steps]
    adam(
        parameters,
        [p.grad for p in parameters],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group.get("maximize", False),
        decoupled_weight_decay=decoupled,
    )


# ---- what optimizers have in common ----------------------------------------------------------------------------------


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Call the ``closure`` of a step, which computes gradients, and return its result."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError if ``betas`` are no decay rates."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}: write two numbers of at least 0 and below 1.")


def check_least(least: float, **numbers: float) -> None:
    """Raise ValueError if one of ``numbers`` is below ``least``, or NaN."""
    for name, value in numbers.items():
        if not value >= least:
            raise ValueError(f"{name}={value}: write a number of at least {least}.")
