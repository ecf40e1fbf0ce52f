"""An optimizer that needs norms of full parameters, of which a rank may have fragments (LARS, arXiv:1708.03888)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.core.engine.optimizer_spec import Combine, NormedOptimizer


class Scaled(NormedOptimizer):
    """SGD with momentum whose step has the length ``lr`` times the norm of each parameter.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: of the norm of a parameter.
        momentum: decay rate of the mean gradient.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._full_norms: Combine | None = None

    @override
    def combine(self, norms: Combine, maxima: Combine) -> None:
        self._full_norms = norms

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure``, which runs first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = [self._averaged(p, p.grad, group["momentum"]) for p, group in stepped]
        rows = [
            [p.double().square().sum(), u.double().square().sum()] for (p, _), u in zip(stepped, updates, strict=True)
        ]
        squares = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        if self._full_norms is not None:  # on a rank without fragments, too: it is collective
            squares = self._full_norms([p for p, _ in stepped], squares)
        for (p, group), update, (weights, length) in zip(stepped, updates, squares.sqrt(), strict=True):
            if weights > 0 and length > 0:
                p.sub_(update * (group["lr"] * weights / length).to(p.dtype))
        return loss

    def _averaged(self, parameter: Tensor, grad: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        mean: Tensor = state["mean"]
        return mean.lerp_(grad, 1 - momentum)
