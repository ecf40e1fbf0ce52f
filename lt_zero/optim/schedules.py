"""DeepSpeed's learning-rate schedules as torch schedulers, with the rates of DeepSpeed 0.19.8.

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

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lt_zero.common.users_code import warn

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

    @property
    def last_batch_iteration(self) -> int:
        """The position as DeepSpeed counts it."""
        return self.last_epoch - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates for the next optimizer step.

        ``last_batch_iteration``: as if the steps 0 to this one had been taken (DeepSpeed's counter, see Note
        [Counting]); default: one more than before.
        """
        if last_batch_iteration is None:
            super().step()
            return
        self.last_epoch = last_batch_iteration
        super().step()

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
        ValueError: it is 0 or less, NaN, or no number.
    """
    if not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name}={value}: write a number of steps, 1 or more.")
    return value


class LRRangeTest(Schedule):
    """A rate that grows without bound, to find the largest one that trains (arXiv:1803.09820).

    Args:
        optimizer: the optimizer to schedule.
        lr_range_test_min_lr: the first rate.
        lr_range_test_step_size: optimizer steps per interval.
        lr_range_test_step_rate: growth per interval, in multiples of the first rate.
        lr_range_test_staircase: grow at the ends of intervals only.
        last_batch_iteration: see ``Schedule``.

    Raises:
        ValueError: a value is out of range, or a list does not have one value per group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, steps: int) -> list[float]:
        intervals = steps / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [low * (1 + self.step_rate * intervals) for low in self.min_lrs]


class OneCycle(Schedule):
    """The rate rises and falls once while the momentum does the reverse, then both decay (arXiv:1803.09820).

    Momentum is the first of ``betas``; the second becomes 0.99, as in DeepSpeed. An optimizer without betas keeps its
    momentum, with a warning.

    Args:
        optimizer: the optimizer to schedule.
        cycle_min_lr, cycle_max_lr: the rates at the ends and in the middle of the cycle.
        decay_lr_rate: after the cycle the rate is divided by 1 + this per interval.
        cycle_first_step_size, cycle_second_step_size: optimizer steps up, and down (default: as many).
        cycle_first_stair_count, cycle_second_stair_count: stairs up, and down (default: as many); 0: none.
        decay_step_size: optimizer steps per interval of decay; 0: no decay.
        cycle_momentum: whether momentum cycles, too.
        cycle_min_mom, cycle_max_mom: momentum in the middle and at the ends of the cycle.
        decay_mom_rate: after the cycle momentum is multiplied by 1 + this per interval, as in DeepSpeed. A positive
            value lets momentum exceed 1, and Adam diverge.
        last_batch_iteration: see ``Schedule``.

    Raises:
        ValueError: a value is out of range, or a list does not have one value per group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.up = positive("cycle_first_step_size", cycle_first_step_size)
        self.down = self.up if cycle_second_step_size is None else cycle_second_step_size
        if self.down < 0:
            raise ValueError(f"cycle_second_step_size={self.down}: write a number of steps, 0 or more.")
        self.stairs_up = cycle_first_stair_count
        self.stairs_down = self.stairs_up if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_every = decay_step_size
        self.lr_decay, self.momentum_decay = decay_lr_rate, decay_mom_rate
        self.min_lrs = per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            warn(
                f"cycle_momentum=True, but {type(optimizer).__name__} has no betas: it keeps its momentum. Set it to "
                "False, or use an optimizer such as AdamW.",
            )
        super().__init__(optimizer, last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates, and the momentum where it cycles."""
        super().step(last_batch_iteration)
        if self.cycle_momentum and not self._keeps:
            for group, momentum in zip(self.optimizer.param_groups, self.momenta(self.last_epoch), strict=True):
                group["betas"] = (momentum, 0.99)

    def rates(self, steps: int) -> list[float]:
        if self._in_cycle(steps):
            height = self._height(steps)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.lr_decay * self._intervals(steps)) for low in self.min_lrs]

    def momenta(self, steps: int) -> list[float]:
        """The momentum of each group after ``steps`` optimizer steps; the first one is low, as in DeepSpeed."""
        return list(self.min_moms) if steps == 0 else self._momenta(steps)

    def _momenta(self, steps: int) -> list[float]:
        if self._in_cycle(steps):
            height = self._height(steps)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        return [high * (1 + self.momentum_decay * self._intervals(steps)) for high in self.max_moms]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas that each group should have now; None if momentum does not cycle.

        Before the first step the optimizer has the lowest momentum, though the cycle begins with the highest: both are
        as in DeepSpeed.
        """
        return [(momentum, 0.99) for momentum in self._momenta(self.last_epoch)] if self.cycle_momentum else None

    def _in_cycle(self, steps: int) -> bool:
        return steps - 1 < self.up + self.down

    def _intervals(self, steps: int) -> float:
        """Intervals of decay since the end of the cycle."""
        return (steps - (self.up + self.down)) / self.decay_every if self.decay_every else 0.0

    def _height(self, steps: int) -> float:
        """0 at the ends of the cycle, 1 in the middle. Multiplying first keeps rounding from moving stairs."""
        position = steps % (self.up + self.down)
        distance, length, stairs = position, self.up, self.stairs_up
        if position > self.up:
            distance, length, stairs = self.up + self.down - position, self.down, self.stairs_down
        return math.floor(distance * stairs / length) / stairs if stairs > 0 else distance / length


class _Warmup(Schedule):
    """Base of the warm-ups: a progress that grows from 0 to 1, logarithmically or linearly."""

    def __init__(
        self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise ValueError(f"warmup_type={warmup_type!r}: write log or linear.")
        self.warmup_num_steps = max(2, positive("warmup_num_steps", warmup_num_steps))  # as DeepSpeed; log(1) is 0
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def warmed(self, iteration: int) -> float | None:
        """The progress at DeepSpeed's ``iteration``; None after the warm-up."""
        if iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return iteration / self.warmup_num_steps
        return 1.0 / math.log(self.warmup_num_steps) * math.log(iteration + 1)


class WarmupLR(_Warmup):
    """Warm-up from a low rate to a high one, which then stays.

    Args:
        optimizer: the optimizer to schedule.
        warmup_min_lr: the first rate.
        warmup_max_lr: the rate after the warm-up; None: the optimizer's.
        warmup_num_steps: optimizer steps; 1 counts as 2, as in DeepSpeed.
        warmup_type: ``log`` (most of the growth in the first steps) or ``linear``.
        last_batch_iteration: see ``Schedule``.

    Raises:
        ValueError: a value is out of range, or a list does not have one value per group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = None if warmup_max_lr is None else per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self, steps: int) -> list[float]:
        if steps == 0:
            return list(self.min_lrs)
        fraction = self._fraction(steps - 1)
        highs = self._bases if self.max_lrs is None else self.max_lrs
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, highs, strict=True)]

    def _fraction(self, iteration: int) -> float:
        warmed = self.warmed(iteration)
        return 1.0 if warmed is None else warmed


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a linear decay to ``warmup_min_lr``, which is reached after ``total_num_steps``.

    Args:
        optimizer: the optimizer to schedule.
        total_num_steps: optimizer steps of the training.
        warmup_max_lr: the rate after the warm-up; None: the optimizer's.
        warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration: as for ``WarmupLR``.

    Raises:
        ValueError: a value is out of range, or a list does not have one value per group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = positive("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _compare(self.total_num_steps, self.warmup_num_steps)

    def _fraction(self, iteration: int) -> float:
        warmed = self.warmed(iteration)
        if warmed is not None:
            return warmed
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - iteration) / length)


class WarmupCosineLR(_Warmup):
    """Warm-up to the optimizer's rate, then a cosine decay. All rates are ratios of the optimizer's.

    The first step has the rate 0, whatever ``warmup_min_ratio`` is, as in DeepSpeed.

    Args:
        optimizer: the optimizer to schedule.
        total_num_steps: optimizer steps of the training.
        warmup_min_ratio: ratio at the start of the warm-up.
        warmup_num_steps: optimizer steps; 1 counts as 2, as in DeepSpeed.
        cos_min_ratio: ratio at the end of the decay.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: see ``Schedule``.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = positive("total_num_steps", total_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        _compare(self.total_num_steps, self.warmup_num_steps)

    def rates(self, steps: int) -> list[float]:
        ratio = self._ratio(steps - 1)
        return [base * ratio for base in self._bases]

    def get_lr_ratio(self) -> float:
        """The ratio for the next optimizer step."""
        return self._ratio(self.last_epoch - 1)

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        warmed = self.warmed(iteration)
        if warmed is not None:
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(1.0, (iteration - self.warmup_num_steps + 1) / length)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


SCHEDULES: Mapping[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def _compare(total: int, warmup: int) -> None:
    if total < warmup:
        warn(
            f"total_num_steps={total} is less than warmup_num_steps={warmup}: training ends within the warm-up. "
            "Raise total_num_steps or lower warmup_num_steps.",
        )
