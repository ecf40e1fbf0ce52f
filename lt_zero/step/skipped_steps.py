"""Optimizer steps that were skipped because of an overflow, and learning rate schedules that wait for them.

A schedule counts optimizer steps. Stepped after a skipped one it would run ahead of the training, and torch would warn
that the scheduler came before the optimizer.

Note [Held schedulers]
    As with optimizers (sharded_optimizer.py) ``step`` is overridden by class: the scheduler's ``__dict__`` is what it
    saves in checkpoints, and stays as it is. Copies and pickles have the original class and are not held.

Note [Assumed steps]
    Where only the device knows whether a step was skipped, the counter assumes that it was not, and schedules move
    (loss_scale_controller.py, Note [Verdict on the device]). Each remembers where it was, and is put back if it should
    have waited.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary


class SkipCounter:
    """Skipped and done steps of one optimizer."""

    def __init__(self) -> None:
        self.skipped = 0  # in all
        self.consecutive = 0  # skipped since the last step that was done
        self.succeeded = 0  # done since the last one that was skipped
        self.attempts = 0  # in this process, of either kind
        self._last_success = 0  # the attempt's number
        self._before: tuple[int, int, int, int] | None = None  # an assumed success
        self._find_out: Callable[[], object] = lambda: None
        self._undo: list[Callable[[], None]] = []  # what moved since

    @property
    def assumed(self) -> bool:
        """Whether the last success is only assumed. See Note [Assumed steps]."""
        return self._before is not None

    def assume_success(self, find_out: Callable[[], object]) -> None:
        """A step was launched; ``find_out`` waits for its outcome and calls ``decide``."""
        self._before = (self.attempts, self._last_success, self.succeeded, self.consecutive)
        self._find_out = find_out
        self.succeed()

    def find_out(self) -> None:
        """Wait for the outcome of an assumed step."""
        if self.assumed:
            self._find_out()

    def if_skipped(self, undo: Callable[[], None]) -> None:
        """Have ``undo`` called if the assumed step turns out to be skipped."""
        self._undo.append(undo)

    def decide(self, skipped: bool) -> None:
        """The outcome of the assumed step."""
        before, self._before, undo, self._undo = self._before, None, self._undo, []
        if before is None or not skipped:
            return
        self.attempts, self._last_success, self.succeeded, self.consecutive = before
        self.skip()
        for call in reversed(undo):
            call()

    def skip(self) -> None:
        """A step was skipped."""
        self.attempts += 1
        self.skipped += 1
        self.consecutive += 1
        self.succeeded = 0

    def succeed(self) -> None:
        """A step was done."""
        self.attempts += 1
        self._last_success = self.attempts
        self.succeeded += 1
        self.consecutive = 0

    def only_skips_after(self, attempt: int) -> bool:
        """Whether there were attempts after number ``attempt`` and all were skipped."""
        return self._last_success <= attempt < self.attempts

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "consecutive": self.consecutive, "succeeded": self.succeeded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken."""
        self.skipped, self.consecutive = int(state["skipped"]), int(state["consecutive"])
        self.succeeded = int(state["succeeded"])


@dataclass
class _Hold:
    counter: SkipCounter
    mark: int  # the counter's attempts at the scheduler's last call

    def waits(self, scheduler: Any) -> bool:
        """Whether this call of the scheduler is to do nothing; the next call is judged by what comes after this."""
        if self.counter.assumed and not _restorable(scheduler):
            self.counter.find_out()
        mark, self.mark = self.mark, self.counter.attempts
        if self.counter.assumed and mark < self.mark:
            put_back = _snapshot(scheduler)
            self.counter.if_skipped(lambda: put_back() if self.counter.only_skips_after(mark) else None)
        return self.counter.only_skips_after(mark)


def _restorable(scheduler: Any) -> bool:
    return all(hasattr(scheduler, name) for name in ("optimizer", "state_dict", "load_state_dict"))


def _snapshot(scheduler: Any) -> Callable[[], None]:
    """What puts a scheduler, and the hyperparameters that it sets, back to where they are now."""
    state = copy.deepcopy(scheduler.state_dict())
    groups = scheduler.optimizer.param_groups
    numbers = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]

    def put_back() -> None:
        scheduler.load_state_dict(state)
        for group, before in zip(groups, numbers, strict=False):
            for key, value in before.items():
                # A learning rate that is a tensor stays the same object.
                group[key].copy_(value) if isinstance(group[key], Tensor) else group.update({key: value})

    return put_back


_holds: WeakIdKeyDictionary = WeakIdKeyDictionary()  # scheduler -> _Hold


def hold_schedule(scheduler: Any, counter: SkipCounter) -> None:
    """From now on ``scheduler.step`` does nothing if all optimizer steps since its last call were skipped.

    A call without any optimizer step in between passes. ``ReduceLROnPlateau`` is left alone, as it counts metrics.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    hold = _holds.get(scheduler)
    if hold is None:
        scheduler.__class__ = _held_class(type(scheduler))
    if hold is None or hold.counter is not counter:
        _holds[scheduler] = _Hold(counter, counter.attempts)


def _held_class(cls: type) -> type:
    original: Any = cls

    @functools.wraps(original.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        hold = _holds.get(self)
        return None if hold is not None and hold.waits(self) else original.step(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """See Note [Held schedulers]."""
        parts = original.__reduce_ex__(self, protocol)
        if isinstance(parts, str):
            return parts
        make, args, *rest = (original if part is held else part for part in parts)
        args = tuple(original if arg is held else arg for arg in args)
        if getattr(make, "__name__", "") == "__newobj__":  # pickle insists on the object's own class there
            make = original.__new__
        return (make, args, *rest)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    held = type(cls.__name__, (cls,), {**names, "step": step, "__reduce_ex__": reduce})
    return held
