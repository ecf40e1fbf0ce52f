"""Measures the phases of an optimizer step, and opens the ranges that torch's profilers show.

Note [Stages and parts]
    A step consists of consecutive stages: ``forward``, ``backward``, ``step`` (the optimizer, with unscaling and
    clipping) and ``rest`` (data, callbacks, our own bookkeeping); ``pause`` (validation) is not counted. Each moment
    belongs to one stage, so the stages add up to the time of the step. Parts break a stage down: waits for weights
    (``gather``), for gradients (``reduce``), for copies, files and background steps (``offload``), and in a step
    ``clip`` and ``publish``. A part's time counts in its stage as well; of nested parts, the innermost gets it. With
    shared memory between ranks, and in a single process, nothing overlaps with compute, and the wait is the operation
    itself.

Note [Timestamps]
    On a CPU a timestamp is the host's. On a GPU it is an event on the compute stream, read after the device has passed
    it: the host never waits. Only waits of the GPU count as waits, not work of the host while the GPU is busy.

Note [One clock per process]
    Waits happen in NVMe stores and copy streams, which do not know the engine, so the running clock is global. It
    times the training thread and autograd's threads; work of other threads is not counted. Without a clock or
    profiler, ``phase`` costs two look-ups.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.profiler import record_function
from typing_extensions import ParamSpec

from lt_zero.common import accelerator
from lt_zero.common.compat import in_running_backward, profiling

P = ParamSpec("P")
T = TypeVar("T")
STAGES = ("forward", "backward", "step", "rest")
PARTS = ("gather", "reduce", "offload", "clip", "publish")
_PAUSE = "pause"

_running: Clock | None = None  # see Note [One clock per process]


def phase(kind: str, name: str | None = None) -> TimedSpan:
    """A context whose time counts as ``kind``, a stage or a part, and which a running profiler shows.

    ``name``: of the unit; '' is the root.
    """
    clock = _running
    if clock is None and not profiling():
        return NOTHING
    return _Running(clock, kind, name)


def unit_range(kind: str, name: str) -> TimedSpan:
    """A range in a running profiler, which the clock does not count. It is open; ``close`` may be called twice."""
    return _Running(None, kind, name).open() if profiling() else NOTHING


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


class _Running(TimedSpan):
    __slots__ = ("_clock", "_depth", "_kind", "_name", "_range")

    def __init__(self, clock: Clock | None, kind: str, name: str | None) -> None:
        self._clock, self._kind, self._name = clock, kind, name
        self._depth = -1
        self._range: Any = None

    def __enter__(self) -> None:
        if self._kind != _PAUSE and profiling():
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
            ended, self._range = self._range, None
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
            self._name, self._open = name, unit_range("backward", name)

    def leave(self, name: str | None = None) -> None:
        """Close the range of ``name``, or with ``None`` any open range."""
        if self._name is not None and name in (None, self._name):
            self._open.close()
            self._name, self._open = None, NOTHING


# ---- the clock -----------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    stage: str
    part: str | None


class Times(NamedTuple):
    """Seconds by stage and part over several optimizer steps."""

    steps: int
    seconds: dict[str, float]


class Clock:
    """Measures the phases from ``start`` to ``stop``. See the notes above.

    A step begins with the first stage, or where the last step ended, and ends with ``end_step``.

    Args:
        device: the compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = accelerator.current_stream(device) if accelerator.has_streams(device) else None
        self._device, self._thread = device, threading.get_ident()
        self._lock = threading.Lock()  # autograd may run hooks of several devices at once
        self._stack: list[_State] = []  # innermost last; [] before the first step
        self._marks: list[tuple[_State, Any]] = []  # of the running step: states and when they began
        self._unread: deque[tuple[list[tuple[_State, Any]], Any]] = deque()  # steps that a GPU may not have completed
        self._free_events: list[Any] = []
        self._outer: Clock | None = None
        self._steps, self._seconds = 0, Counter[str]()

    def start(self) -> None:
        global _running
        self._outer, _running = _running, self

    def stop(self) -> None:
        global _running
        if _running is self:
            _running = self._outer
        self._outer = None

    def enter(self, kind: str) -> int:
        """Begin ``kind``; returns the argument for ``leave``."""
        if threading.get_ident() != self._thread and not in_running_backward():
            return -1
        with self._lock:
            staged = kind in STAGES
            if not self._stack:
                if not staged:
                    return -1
                self._stack.append(_State("rest", None))
            state = _State(kind, None) if staged or kind == _PAUSE else _State(self._stack[-1].stage, kind)
            self._stack.append(state)
            self._marks.append((state, self._now()))
            return len(self._stack) - 1

    def leave(self, depth: int) -> None:
        """End a span and all spans inside it."""
        with self._lock:
            if 0 < depth < len(self._stack):
                del self._stack[depth:]
                self._marks.append((self._stack[-1], self._now()))

    def paused(self) -> TimedSpan:
        """A context whose time is not counted."""
        return _Running(self, _PAUSE, None)

    def end_step(self) -> None:
        """End the optimizer step; the next one begins."""
        with self._lock:
            if not self._stack:
                return
            now = self._now()
            self._unread.append((self._marks, now))
            self._marks = [(self._stack[-1], now)]
            while self._unread and (self._stream is None or self._unread[0][1].query()):
                self._read(*self._unread.popleft())

    @property
    def times(self) -> Times:
        """The times since ``reset``; on a GPU only of steps that the device has completed."""
        return Times(self._steps, dict(self._seconds))

    def reset(self) -> None:
        self._steps, self._seconds = 0, Counter()

    def _read(self, marks: list[tuple[_State, Any]], end: Any) -> None:
        ends = [begin for _, begin in marks[1:]] + [end]
        for ((stage, part), begin), until in zip(marks, ends, strict=True):
            if stage == _PAUSE:
                continue
            seconds = until - begin if self._stream is None else begin.elapsed_time(until) / 1e3
            self._seconds[stage] += seconds
            if part is not None:
                self._seconds[part] += seconds
        if self._stream is not None:
            self._free_events += [event for _, event in marks]  # ``end`` is still used: the next step begins there
        self._steps += 1

    def _now(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = self._free_events.pop() if self._free_events else accelerator.event(self._device, timing=True)
        event.record(self._stream)
        return event
