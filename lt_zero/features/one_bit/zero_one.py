"""0/1 Adam (arXiv:2202.06009): rare updates of the variance, then steps on local gradients between exchanges in 1 bit.

Note [Variance steps and local steps]
    The policy and the update are those of DeepSpeed 0.18 (runtime/fp16/onebit/zoadam.py): no bias correction, and
    weight decay is part of the update. For ``var_freeze_step`` steps all ranks take the same step. In some of them the
    variance is updated, with gradients that are averaged as ever; the distance between these doubles every
    ``var_update_scaler`` updates. In the others gradients are averaged in 1 bit, and change the momentum only.
    From then on each rank steps with its own gradients. What its weights have changed by since the last exchange, times
    the denominator (``momentum_accumulator``, u in the paper before that factor), is averaged in 1 bit at the end of an
    interval, and all ranks continue from the weights of the last exchange plus that mean. The momentum becomes the
    mean divided by the sum of the learning rates. Intervals double every ``local_step_scaler`` steps up to
    ``local_step_clipper``. Weights of the last exchange are kept (``exchanged``), so that ranks stay equal to the bit.
    As in onebit.py, Note [Frozen variances], elements whose second moment is zero are not updated after the freeze.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lt_zero.core.engine.optimizer_spec import ExchangingOptimizer
from lt_zero.optim.adam import check_betas, check_least, run_closure

_CHANGE, _EXCHANGED = "momentum_accumulator", "exchanged"
# (tensors of the groups, value (fp32) to average of such a tensor, what takes the average of one)
Average = Callable[[list[Tensor], Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], None]], None]


class ZeroOneAdam(ExchangingOptimizer):
    """0/1 Adam. See Note [Variance steps and local steps].

    Several ranks need ``optimizer.type: ZeroOneAdam`` in the configuration, which prepares their exchange.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        bias_correction: accepted and without effect, as in DeepSpeed.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: times the weights, added to the update.
        var_freeze_step: optimizer steps until the variance is frozen and local steps begin.
        var_update_scaler: updates of the variance after which the distance between them doubles.
        local_step_scaler: steps after which the interval between exchanges doubles.
        local_step_clipper: the longest interval, in steps.
        cuda_aware, comm_backend_name: accepted; the exchange is that of the process group.

    Raises:
        ValueError: a number is out of range.
    """

    prepared_at = "at stage 0"
    most_states = 4
    _average: Average | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        check_least(0, lr=lr, eps=eps, weight_decay=weight_decay)
        rules = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        rules |= {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        check_least(1, **rules)
        check_betas(betas)
        counters = {"steps": 0, "var_interval": 1, "var_counter": 0, "local_step_interval": 1, "local_step_counter": 0}
        since = {"pending": 0, "lrs": 0.0}  # the last exchange: steps, and the sum of their rates
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, **rules, **counters, **since})

    # ---- what the next step is: the same in all groups -----------------------------------------------------------

    @property
    def local(self) -> bool:
        """True if each rank steps with its own gradients."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["var_freeze_step"])

    @property
    def begins_local(self) -> bool:
        """True if the next step is the first local one."""
        group = self.param_groups[0]
        return bool(group["steps"] == group["var_freeze_step"] and not group["pending"])

    @property
    def compresses(self) -> bool:
        """True if gradients are averaged in 1 bit."""
        group = self.param_groups[0]
        return not self.local and (group["steps"] + 1) % group["var_interval"] != 0

    @property
    def pending(self) -> bool:
        """True if the ranks have stepped apart since the last exchange."""
        return bool(self.param_groups[0]["pending"])

    def exchange_by(self, average: Average) -> None:
        """Set the collective function that averages the changes of the ranks; without one, this is a single rank."""
        self._average = average

    # ---- steps ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` (run first, with gradients) returns. Collective at the end of an interval.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = run_closure(closure)
        local, compressed = self.local, self.compresses
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    first, second = self._moments(parameter, group, compressed or local)
                    update = first / second.sqrt().add_(group["eps"])
                    if group["weight_decay"]:
                        update.add_(parameter, alpha=group["weight_decay"])
                    if local:
                        self._move(parameter, update.mul_(second > 0), group)
                    else:
                        parameter.add_(update, alpha=-float(group["lr"]))
            group["steps"] += 1
            if local:
                group["pending"] += 1
                group["lrs"] += float(group["lr"])
        if local and self.param_groups[0]["steps"] % self.param_groups[0]["local_step_interval"] == 0:
            self._exchange()
        for group in self.param_groups:
            _lengthen(group, local)
        return loss

    def _moments(self, parameter: Tensor, group: dict[str, Any], keeps_second: bool) -> tuple[Tensor, Tensor]:
        grad = parameter.grad
        state = self.state[parameter]
        (beta1, beta2) = group["betas"]
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("ZeroOneAdam has no update for sparse gradients. Use sparse=False.")
        if not state:
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        if keeps_second:
            first.mul_(second > 0)
        else:
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return first, second

    def _move(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """Take a local step: the weights are those of the last exchange plus the change since then."""
        state = self.state[parameter]
        if _CHANGE not in state:
            state[_CHANGE], state[_EXCHANGED] = torch.zeros_like(parameter), parameter.detach().clone()
        # Weights may have been edited since the last exchange, so the first local step after it starts from them anew.
        elif not group["pending"]:
            state[_EXCHANGED].copy_(parameter)
        change = state[_CHANGE].add_(update, alpha=-float(group["lr"]))
        torch.add(state[_EXCHANGED], change, out=parameter)

    def _exchange(self) -> None:
        """Average the changes of the ranks since the last exchange."""
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}

        def root(parameter: Tensor) -> Tensor:
            denominator: Tensor = self.state[parameter]["exp_avg_sq"].sqrt().add_(group_of[id(parameter)]["eps"])
            return denominator

        def value(parameter: Tensor) -> Tensor:
            change: Tensor = self.state[parameter][_CHANGE] * root(parameter)
            return change.float()

        def take(parameter: Tensor, mean: Tensor) -> None:
            state, rates = self.state[parameter], group_of[id(parameter)]["lrs"]
            change = mean * (state["exp_avg_sq"] > 0)
            if rates > 0:
                state["exp_avg"].copy_(change / -rates)
            torch.add(state[_EXCHANGED], change.div_(root(parameter)), out=parameter)
            state[_CHANGE].zero_()

        moved = [p for group in self.param_groups for p in group["params"] if _CHANGE in self.state.get(p, {})]
        if self._average is not None:
            self._average(moved, value, take)
        else:
            for parameter in moved:
                take(parameter, value(parameter))
        for group in self.param_groups:
            group["pending"], group["lrs"] = 0, 0.0

    @torch.no_grad()
    def end_interval(self) -> None:
        """Exchange now if the ranks have stepped apart, and drop the states for exchanges. Collective."""
        if self.pending:
            self._exchange()
        for group in self.param_groups:
            for parameter in group["params"]:
                for key in (_CHANGE, _EXCHANGED) if parameter in self.state else ():
                    self.state[parameter].pop(key, None)


def _lengthen(group: dict[str, Any], local: bool) -> None:
    """Double the distance between updates of the variance, or between exchanges, if it is time. Called after a step."""
    if local:
        group["local_step_counter"] += 1
        if group["local_step_counter"] == group["local_step_scaler"]:
            group["local_step_counter"] = 0
            group["local_step_interval"] = min(group["local_step_clipper"], 2 * group["local_step_interval"])
    elif group["steps"] % group["var_interval"] == 0:
        group["var_counter"] += 1
        if group["var_counter"] == group["var_update_scaler"]:
            group["var_counter"] = 0
            group["var_interval"] *= 2
