"""The clock that measures the phases of an optimizer step.

Note [Timestamps]
    On a CPU a timestamp is the host's. On a GPU it is an event on the compute stream, read after the device has passed
    it: the host never waits. Only waits of the GPU count as waits, not work of the host while the GPU is busy.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.compat import in_running_backward
from lt_zero.common.phases import PAUSE, STAGES, PhaseClock, RunningSpan, TimedSpan, run_clock, running_clock


class _State(NamedTuple):
    stage: str
    part: str | None


class Times(NamedTuple):
    """Seconds by stage and part over several optimizer steps."""

    steps: int
    seconds: dict[str, float]


class Clock(PhaseClock):
    """Measures the phases (phases.py) of the training thread and autograd's threads, from ``start`` to ``stop``.

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
        self._outer: PhaseClock | None = None
        self._steps, self._seconds = 0, Counter[str]()

    def start(self) -> None:
        self._outer = run_clock(self)

    def stop(self) -> None:
        if running_clock() is self:
            run_clock(self._outer)
        self._outer = None

    @override
    def enter(self, kind: str) -> int:
        if threading.get_ident() != self._thread and not in_running_backward():
            return -1
        with self._lock:
            staged = kind in STAGES
            if not self._stack:
                if not staged:
                    return -1
                self._stack.append(_State("rest", None))
            state = _State(kind, None) if staged or kind == PAUSE else _State(self._stack[-1].stage, kind)
            self._stack.append(state)
            self._marks.append((state, self._now()))
            return len(self._stack) - 1

    @override
    def leave(self, depth: int) -> None:
        with self._lock:
            if 0 < depth < len(self._stack):
                del self._stack[depth:]
                self._marks.append((self._stack[-1], self._now()))

    def paused(self) -> TimedSpan:
        """A context whose time is not counted."""
        return RunningSpan(self, PAUSE, None)

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
            if stage == PAUSE:
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
