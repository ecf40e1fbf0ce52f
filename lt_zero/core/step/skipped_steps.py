"""Counts of optimizer steps skipped because of an overflow, and learning rate schedules that are held meanwhile.

A schedule counts optimizer steps. Stepped after a skipped one it would run ahead of training, and torch would warn that
``lr_scheduler.step()`` came before ``optimizer.step()``.

With a device skip flag (loss_scale.py, Note [Device skip flag]) the counter first assumes that the step was
taken, and schedules move. Each keeps a snapshot, which is restored if the step turns out to be skipped.
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
    """Skipped and taken steps of one optimizer."""

    def __init__(self) -> None:
        self.skipped = 0  # in total
        self.consecutive = 0  # skipped since the last step that was taken
        self.succeeded = 0  # taken since the last one that was skipped
        self.attempts = 0  # in this process, taken or skipped
        self._last_success = 0  # number of the attempt
        self._before: tuple[int, int, int, int] | None = None  # counters before an assumed success
        self._find_out: Callable[[], object] = lambda: None
        self._undo: list[Callable[[], None]] = []  # callbacks for a skipped step

    @property
    def assumed(self) -> bool:
        """True if the last success is only assumed."""
        return self._before is not None

    def assume_success(self, find_out: Callable[[], object]) -> None:
        """Count a launched step as taken; ``find_out`` waits for its outcome and calls ``decide``."""
        self._before = (self.attempts, self._last_success, self.succeeded, self.consecutive)
        self._find_out = find_out
        self.succeed()

    def find_out(self) -> None:
        """Wait for the outcome of an assumed success."""
        if self.assumed:
            self._find_out()

    def if_skipped(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` if the assumed success turns out to be a skipped step."""
        self._undo.append(undo)

    def decide(self, skipped: bool) -> None:
        """Replace an assumed success by its outcome."""
        before, self._before, undo, self._undo = self._before, None, self._undo, []
        if before is None or not skipped:
            return
        self.attempts, self._last_success, self.succeeded, self.consecutive = before
        self.skip()
        for call in reversed(undo):
            call()

    def skip(self) -> None:
        """Count a skipped step."""
        self.attempts += 1
        self.skipped += 1
        self.consecutive += 1
        self.succeeded = 0

    def succeed(self) -> None:
        """Count a step that was taken."""
        self.attempts += 1
        self._last_success = self.attempts
        self.succeeded += 1
        self.consecutive = 0

    def only_skips_after(self, attempt: int) -> bool:
        """True if there were attempts after number ``attempt`` and all were skipped."""
        return self._last_success <= attempt < self.attempts

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "consecutive": self.consecutive, "succeeded": self.succeeded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore ``state_dict``."""
        self.skipped, self.consecutive = int(state["skipped"]), int(state["consecutive"])
        self.succeeded = int(state["succeeded"])


@dataclass
class _Hold:
    counter: SkipCounter
    mark: int  # the counter's attempts at the scheduler's last call

    def waits(self, scheduler: Any) -> bool:
        """True if this call of the scheduler does nothing: all steps since its last call were skipped."""
        if not all(hasattr(scheduler, name) for name in ("optimizer", "state_dict", "load_state_dict")):
            # Find out now: a scheduler without these cannot be restored if the assumed success turns out wrong.
            self.counter.find_out()
        mark, self.mark = self.mark, self.counter.attempts
        if self.counter.assumed and mark < self.mark:
            restore = _snapshot(scheduler)
            self.counter.if_skipped(lambda: restore() if self.counter.only_skips_after(mark) else None)
        return self.counter.only_skips_after(mark)


def _snapshot(scheduler: Any) -> Callable[[], None]:
    """A callable that restores the current state of a scheduler and of the hyper-parameters that it sets."""
    state = copy.deepcopy(scheduler.state_dict())
    groups = scheduler.optimizer.param_groups
    numbers = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]

    def restore() -> None:
        scheduler.load_state_dict(state)
        for group, before in zip(groups, numbers, strict=False):
            for key, value in before.items():
                # A tensor learning rate stays the same object.
                group[key].copy_(value) if isinstance(group[key], Tensor) else group.update({key: value})

    return restore


_holds: WeakIdKeyDictionary = WeakIdKeyDictionary()  # scheduler -> _Hold


def hold_schedule(scheduler: Any, counter: SkipCounter) -> None:
    """Make ``scheduler.step`` do nothing if all optimizer steps since its last call were skipped.

    A call without any optimizer step in between passes. ``ReduceLROnPlateau`` is not held, as it counts metrics.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    hold = _holds.get(scheduler)
    if hold is None:
        scheduler.__class__ = _held_class(type(scheduler))
    if hold is None or hold.counter is not counter:
        _holds[scheduler] = _Hold(counter, counter.attempts)


def _held_class(cls: type) -> type:
    # By class, not by attribute: the scheduler saves its ``__dict__`` in checkpoints.
    original: Any = cls

    @functools.wraps(original.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        hold = _holds.get(self)
        return None if hold is not None and hold.waits(self) else original.step(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Reduce to the original class: copies and pickles are not held."""
        parts = original.__reduce_ex__(self, protocol)
        if isinstance(parts, str):
            return parts
        make, args, *rest = (original if part is held else part for part in parts)
        args = tuple(original if arg is held else arg for arg in args)
        # Pickle requires the ``__new__`` of the object's own class.
        if getattr(make, "__name__", "") == "__newobj__":
            make = original.__new__
        return (make, args, *rest)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    held = type(cls.__name__, (cls,), {**names, "step": step, "__reduce_ex__": reduce})
    return held
