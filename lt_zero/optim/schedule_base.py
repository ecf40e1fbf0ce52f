"""A scheduler of torch whose rates follow from the number of steps alone.

Note [Counting]
    ``last_epoch`` is torch's counter: how often the scheduler was stepped, that is how many optimizer steps are done.
    DeepSpeed's ``last_batch_iteration`` is one less. So the first optimizer step sees the rate for ``last_epoch`` 0,
    and DeepSpeed's warm-ups, which begin at iteration 0, begin with two steps at the same rate.

Note [Position]
    A state dict holds the position and no parameters, as DeepSpeed's does: after a resume the configuration says how
    the schedule goes on, for example for more steps. All rates are computed from the position alone, so they are
    bitwise those of a run that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Number = TypeVar("Number", int, float)
PerGroup = float | Sequence[float]  # one value for all parameter groups, or one for each


class Schedule(LRScheduler):
    """Rates that depend on the number of steps only; to be stepped once per optimizer step.

    Args:
        optimizer: its groups' rates are set at once.
        last_batch_iteration: with 0 or more the schedule goes on behind this iteration, and the optimizer keeps the
            rates it has (a checkpoint's) until the first ``step``. See Note [Counting].

    Raises:
        ValueError: ``last_batch_iteration`` is below -1.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration < -1:
            raise ValueError(
                f"last_batch_iteration={last_batch_iteration}: write -1 (a new run) or the last iteration."
            )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self._bases = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self._keeps = last_batch_iteration >= 0
        self._last = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_epoch=last_batch_iteration)
        self._keeps = False

    def rates(self, steps: int) -> list[float]:
        """The rate of each group after ``steps`` optimizer steps."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """What ``step`` sets."""
        if not self._keeps:
            self._last = self.rates(self.last_epoch)
        return list(self._last)

    def get_last_lr(self) -> list[Any]:
        """The rates that the last ``step`` has set."""
        return list(self._last)

    def state_dict(self) -> dict[str, Any]:
        """See Note [Position]."""
        return {"last_epoch": self.last_epoch, "last_lr": list(self._last)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of this class or of DeepSpeed's; the optimizer's own state has its current rates.

        Raises:
            ValueError: there is no position in it.
        """
        if "last_epoch" in state_dict:
            self.last_epoch = int(state_dict["last_epoch"])
        elif "last_batch_iteration" in state_dict:
            self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        else:
            raise ValueError(
                f"A state of {type(self).__name__} has last_epoch (or DeepSpeed's last_batch_iteration), this one has "
                f"{sorted(map(str, state_dict))}. Give it the state of a scheduler that is stepped once per step."
            )
        self._last = [float(rate) for rate in state_dict.get("last_lr", self.rates(self.last_epoch))]


def per_group(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    """One value for each parameter group.

    Raises:
        ValueError: a list has another length.
    """
    groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * groups
    if len(value) != groups:
        raise ValueError(
            f"{name}={list(value)} has {len(value)} values for {groups} parameter groups. Write one number, or one for "
            "each group."
        )
    return [float(item) for item in value]


def positive(name: str, value: Number) -> Number:
    """The value.

    Raises:
        ValueError: it is 0 or less, or no number.
    """
    if not value > 0:
        raise ValueError(f"{name}={value}: write a number of steps, 1 or more.")
    return value
