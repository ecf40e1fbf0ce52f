"""A torch scheduler whose rates depend on the number of steps only.

Note [Counting]
    ``last_epoch`` is torch's counter: the number of scheduler steps, which is the number of completed optimizer steps.
    DeepSpeed's ``last_batch_iteration`` is one less. So the first optimizer step uses the rate for ``last_epoch`` 0,
    and DeepSpeed's warm-ups, which begin at iteration 0, begin with two steps at the same rate.

Note [Position]
    A state dict holds the position but no hyperparameters, as DeepSpeed's does: after a resume the configuration
    decides how the schedule continues, for example over more steps. All rates are computed from the position alone, so
    they are bitwise equal to those of an uninterrupted run.
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
        optimizer: its groups get the first rates.
        last_batch_iteration: 0 or more continues the schedule after this iteration; the optimizer keeps its rates (a
            checkpoint's) until the first ``step``. See Note [Counting].

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
        """The rates that ``step`` sets."""
        if not self._keeps:
            self._last = self.rates(self.last_epoch)
        return list(self._last)

    def get_last_lr(self) -> list[Any]:
        """The rates that the last ``step`` set."""
        return list(self._last)

    def state_dict(self) -> dict[str, Any]:
        """See Note [Position]."""
        return {"last_epoch": self.last_epoch, "last_lr": list(self._last)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of this class or of DeepSpeed's; the current rates are in the optimizer's state.

        Raises:
            ValueError: the state has no position.
        """
        if "last_epoch" in state_dict:
            self.last_epoch = int(state_dict["last_epoch"])
        elif "last_batch_iteration" in state_dict:
            self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        else:
            raise ValueError(
                f"A state of {type(self).__name__} has last_epoch (or DeepSpeed's last_batch_iteration), this one has "
                f"{sorted(map(str, state_dict))}. Load the state of a scheduler that is stepped in every step."
            )
        self._last = [float(rate) for rate in state_dict.get("last_lr", self.rates(self.last_epoch))]


def per_group(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    """One value for each parameter group.

    Raises:
        ValueError: a list does not have one value per group.
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
    """``value`` if it is positive.

    Raises:
        ValueError: it is 0 or less, or NaN.
    """
    if not value > 0:
        raise ValueError(f"{name}={value}: write a number of steps, 1 or more.")
    return value
