"""A thread that steps buckets while backward, or the next forward, goes on.

ZeRO-Offload, arXiv:2101.06840, section 4, lets the CPU step while the GPU computes; here the weights are those of the
plain order, because whoever needs a bucket waits for it.

Note [Who touches what]
    A bucket that was handed over belongs to the thread: its master weights, states, accumulator and what gathers read.
    Whoever wants one of them asks for it through the bucket, which waits first (``Job.wait``). Several buckets share
    nothing but files, buffers and the threads that read and write, which have locks.

Note [Order of jobs]
    Jobs run in the order in which they were handed over. While one is stepped, the next is read from its files and the
    last is written (tier.py, Note [Walking]). A job's ``publish`` is collective, in a process group of its own: jobs
    that have one are handed over in the same order on all ranks.

Note [Errors in the thread]
    An error must not keep a rank from the collectives that the others are in. It is given to ``report``, the job ends
    as all do, and the ranks agree on raising where they meet (tier.py, Note [A failing disk]).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lt_zero.clock import phase
from lt_zero.offload.home import FileHome
from lt_zero.offload.pool import SwapError

_in_thread = threading.local()
_EXIT_PATIENCE = 30.0  # seconds at exit for the job that is running


class Job:
    """One bucket's step.

    Args:
        step: computes.
        homes: what has to be here for it, and is put away afterwards.
        publish: lets other ranks and gathers see the result; None if somebody else does.
        report: is told what goes wrong. See Note [Errors in the thread].
    """

    def __init__(
        self,
        step: Callable[[], object],
        homes: Callable[[], list[FileHome]],
        publish: Callable[[], object] | None,
        report: Callable[[Exception], object],
    ) -> None:
        self._step: Callable[[], object] | None = step
        self._publish, self._report = publish, report
        self._homes = homes
        self._leaving: list[FileHome] = []
        self._ended = threading.Event()
        self._pid = os.getpid()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> bool:
        """Return when the job is done; at once, and False, in the thread that does jobs: it has this bucket now.

        Raises:
            SwapError: in a forked process, which has no such thread.
        """
        if getattr(_in_thread, "working", False):
            return False
        if not self.done and os.getpid() != self._pid:
            raise SwapError(
                f"Process {os.getpid()} was forked from process {self._pid} while weights were being stepped in the "
                "background, and has half of the step. Set zero_optimization.offload_optimizer.overlap_step=auto, or "
                "read weights before the fork."
            )
        with phase("offload", "step"):
            return self._ended.wait()

    def prefetch(self) -> None:
        """Start reading. In the thread, as all below."""
        self._try(self._read)

    def _read(self) -> None:
        for home in self._homes():
            home.prefetch()

    def run(self) -> None:
        """Compute, and start writing."""
        self._try(self._compute)

    def _compute(self) -> None:
        for home in self._homes():
            home.bring_for_step()
        assert self._step is not None
        try:
            self._step()
        finally:
            self._leaving = self._homes()  # a step may make some
            for home in self._leaving:
                home.put_away()

    def finish(self) -> None:
        """Wait until everything is written, and publish."""
        self._try(self._settle)
        if self._publish is not None:
            self._try(self._publish)
        self._step = self._publish = None  # who keeps the job must not keep the gradients
        self._ended.set()

    def _settle(self) -> None:
        for home in self._leaving:
            home.settle()

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._report(error)


@dataclass
class _Line:
    """What the thread sees: not the ``Background``, which ends the thread when nobody has it any more."""

    room: int
    behind: int
    ahead: bool
    walking: Callable[[], AbstractContextManager[object]]
    device: torch.device | None
    jobs: deque[Job]
    changed: threading.Condition
    pid: int
    closed: bool = False


class Background:
    """The thread; it starts with the first job.

    Args:
        room: buckets that may be in memory at a time, if their states rest in files.
        read_ahead: read the next bucket while one is stepped.
        write_behind: write the last bucket while one is stepped.
        walking: a context for as long as there are jobs; must not hold what holds this.
        device: to which results are copied.
    """

    def __init__(
        self,
        room: int = 3,
        read_ahead: bool = True,
        write_behind: bool = True,
        walking: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: torch.device | None = None,
    ) -> None:
        behind = max(0, min(1, room - 2)) if write_behind else 0
        self._line = _Line(room, behind, read_ahead, walking, device, deque(), threading.Condition(), os.getpid())
        self._stop: weakref.finalize | None = None  # type: ignore[type-arg]

    def hand_over(self, job: Job, limit: int | None = None) -> None:
        """Have a job done after those before it; wait while more than ``limit`` others stand in line."""
        if self._stop is None:
            thread = threading.Thread(target=_serve, args=(self._line,), name="lt_zero-step", daemon=True)
            thread.start()
            self._stop = weakref.finalize(self, _end, self._line, thread)
        with self._line.changed:
            if limit is not None:
                with phase("offload", "line"):
                    self._line.changed.wait_for(lambda: len(self._line.jobs) <= limit)
            self._line.jobs.append(job)
            self._line.changed.notify_all()

    def close(self) -> None:
        """Do what was handed over, and end the thread."""
        if self._stop is not None:
            self._stop()


def _serve(line: _Line) -> None:
    _in_thread.working = True
    if line.device is not None and line.device.type == "cuda":
        torch.cuda.set_device(line.device)
    while True:
        with line.changed:
            line.changed.wait_for(lambda: bool(line.jobs) or line.closed)
            if not line.jobs:
                return
        with line.walking(), torch.no_grad():
            _work(line)


def _work(line: _Line) -> None:
    """Do jobs until none is left. See Note [Order of jobs]."""
    leaving: deque[Job] = deque()
    while True:
        with line.changed:
            job = line.jobs.popleft() if line.jobs else None
            ahead = line.jobs[0] if line.jobs and line.ahead else None
            line.changed.notify_all()
        if job is None:
            break
        job.prefetch()
        if ahead is not None and 2 + len(leaving) <= line.room:
            ahead.prefetch()
        job.run()
        leaving.append(job)
        while len(leaving) > line.behind:
            leaving.popleft().finish()
    for job in leaving:
        job.finish()


def _end(line: _Line, thread: threading.Thread) -> None:
    if os.getpid() != line.pid:
        return  # a forked child, which has no such thread
    with line.changed:
        line.closed = True
        line.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(_EXIT_PATIENCE)
