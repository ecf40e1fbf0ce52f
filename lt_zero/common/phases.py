"""The phases of an optimizer step, as a running clock counts them, and the ranges that torch's profilers show.

Note [Stages and parts]
    A step consists of consecutive stages: ``forward``, ``backward``, ``step`` (the optimizer, with unscaling and
    clipping) and ``rest`` (data, callbacks, our own bookkeeping); ``pause`` (validation) is not counted. Each moment
    belongs to one stage, so the stages add up to the time of the step. Parts break a stage down: waits for weights
    (``gather``), for gradients (``reduce``), for copies, files and background steps (``offload``), and in a step
    ``clip`` and ``publish``. A part's time counts in its stage as well; of nested parts, the innermost gets it. With
    shared memory between ranks, and in a single process, nothing overlaps with compute, and the wait is the operation
    itself.

Note [One clock per process]
    Waits happen in NVMe stores and copy streams, which do not know the engine, so the running clock is global. Without
    a clock or profiler, ``phase`` costs two look-ups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.autograd.profiler import record_function
from typing_extensions import ParamSpec

from lt_zero.common.compat import profiling

P = ParamSpec("P")
T = TypeVar("T")
STAGES = ("forward", "backward", "step", "rest")
PARTS = ("gather", "reduce", "offload", "clip", "publish")
PAUSE = "pause"


class PhaseClock(Protocol):
    """Measures phases."""

    def enter(self, kind: str) -> int:
        """Begin ``kind``; returns the argument for ``leave``."""

    def leave(self, depth: int) -> None:
        """End a span and all spans inside it."""


_clock: PhaseClock | None = None  # see Note [One clock per process]


def run_clock(clock: PhaseClock | None) -> PhaseClock | None:
    """Let ``clock`` count the phases from now on; returns the one that did."""
    global _clock
    before = _clock
    _clock = clock
    return before


def running_clock() -> PhaseClock | None:
    """The clock that counts the phases, if there is one."""
    return _clock


def phase(kind: str, name: str | None = None) -> TimedSpan:
    """A context whose time counts as ``kind``, a stage or a part, and which a running profiler shows.

    ``name``: of the unit; '' is the root.
    """
    clock = _clock
    if clock is None and not profiling():
        return NOTHING
    return RunningSpan(clock, kind, name)


def unit_range(kind: str, name: str) -> TimedSpan:
    """A range in a running profiler, which the clock does not count. It is open; ``close`` may be called twice."""
    return RunningSpan(None, kind, name).open() if profiling() else NOTHING


def phased(kind: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator that makes each call of a function a ``phase``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            with phase(kind):
                return function(*args, **kwargs)

        return timed

    return decorate


class TimedSpan:
    """A no-op span, used without clock and profiler."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def open(self) -> TimedSpan:
        """Enter the span, where it cannot be a ``with`` statement."""
        self.__enter__()
        return self

    def close(self) -> None:
        self.__exit__()


NOTHING = TimedSpan()


class RunningSpan(TimedSpan):
    """A span that a clock counts as ``kind``, and that a running profiler shows, unless it is a pause."""

    __slots__ = ("_clock", "_depth", "_kind", "_name", "_range")

    def __init__(self, clock: PhaseClock | None, kind: str, name: str | None) -> None:
        self._clock = clock
        self._kind = kind
        self._name = name
        self._depth = -1
        self._range: Any = None

    def __enter__(self) -> None:
        if self._kind != PAUSE and profiling():
            text = "" if self._name is None else f": {self._name or '(root)'}"
            self._range = record_function(f"lt_zero.{self._kind}{text}")
            self._range.__enter__()
        if self._clock is not None:
            self._depth = self._clock.enter(self._kind)

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.leave(self._depth)
            self._clock = None
        if self._range is not None:
            ended = self._range
            self._range = None
            ended.__exit__(None, None, None)


class UnitRanges:
    """Profiler ranges of the units in a backward: from entering a unit until leaving it or entering the next.

    Ranges of nested units do not overlap: the outer one ends where the inner one begins.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._open: TimedSpan = NOTHING

    def enter(self, name: str) -> None:
        if name != self._name:
            self._open.close()
            self._name = name
            self._open = unit_range("backward", name)

    def leave(self, name: str | None = None) -> None:
        """Close the range of ``name``, or with ``None`` any open range."""
        if self._name is not None and name in (None, self._name):
            self._open.close()
            self._name = None
            self._open = NOTHING
