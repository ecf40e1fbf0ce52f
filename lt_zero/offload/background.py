"""A thread that steps buckets while backward, or the next forward, goes on.

ZeRO-Offload, arXiv:2101.06840, section 4, lets the CPU step while the GPU computes; here the weights are those of the
plain order, because whoever needs a bucket waits for it.

Note [Who touches what]
    A bucket that was handed over belongs to the thread: its master weights, states, accumulator and what gathers read.
    Whoever wants one of them asks for it through the bucket, which waits first (``Job.wait``). Several buckets share
    nothing but files, buffers and the threads that read and write, which have locks.

Note [Order of jobs]
    Jobs run in the order in which they were handed over. While one is stepped, the next is read from its files and the
    last is written (nvme_files.py, Note [Walking]). A job's ``publish`` is collective, in a process group of its own:
    jobs that have one are handed over in the same order on all ranks.

Note [Errors in the thread]
    An error must not keep a rank from the collectives that the others are in. It is given to ``report``, the job ends
    as all do, and the ranks agree on raising where they meet (nvme_files.py, Note [A failing disk]). That holds for an
    error between jobs, too: all that stand in line end with it, because somebody waits for each of them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from lt_zero.common.timing import phase
from lt_zero.io.thread_pool import LOOK, SwapError, check_alive
from lt_zero.offload.nvme_store import StoredTensor

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
        homes: Callable[[], list[StoredTensor]],
        publish: Callable[[], object] | None,
        report: Callable[[Exception], object],
    ) -> None:
        self._step: Callable[[], object] | None = step
        self._publish, self._report = publish, report
        self._homes = homes
        self._leaving: list[StoredTensor] = []
        self._ended = threading.Event()
        self._pid = os.getpid()
        self.thread: threading.Thread | None = None  # that it was handed to

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> bool:
        """Return when the job is done; at once, and False, in the thread that does jobs: it has this bucket now.

        Raises:
            SwapError: in a forked process, which has no such thread; or the thread is gone.
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
            while not self._ended.wait(LOOK):
                check_alive(self.thread)
        return True

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

    def fail(self, error: BaseException) -> None:
        """End without a step, for want of what all jobs need; other ranks are in ``publish``."""
        try:
            self._report(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            self.finish()
        finally:
            self._ended.set()

    def _settle(self) -> None:
        for home in self._leaving:
            home.wait_written()

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
    pid: int
    jobs: deque[Job] = field(default_factory=deque)  # in line
    begun: deque[Job] = field(default_factory=deque)  # taken out of it, and not ended
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False


class Background:
    """The thread; it starts with the first job, and after ``close`` with the next.

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
        self._line = _Line(room, behind, read_ahead, walking, device, os.getpid())
        self._thread: threading.Thread | None = None
        self._stop: weakref.finalize | None = None  # type: ignore[type-arg]

    def hand_over(self, job: Job, limit: int | None = None) -> None:
        """Have a job done after those before it; wait while more than ``limit`` others stand in line."""
        line = self._line
        if self._stop is None:
            self._thread = threading.Thread(target=_serve, args=(line,), name="lt_zero-step", daemon=True)
            self._thread.start()
            self._stop = weakref.finalize(self, _end, line, self._thread)
        with line.changed:
            with phase("offload", "line") if limit is not None else nullcontext():
                while limit is not None and len(line.jobs) > limit:
                    if not line.changed.wait(LOOK):
                        check_alive(self._thread)
            job.thread = self._thread
            line.jobs.append(job)
            line.changed.notify_all()

    def close(self) -> None:
        """Do what was handed over, and end the thread."""
        if self._stop is not None:
            self._stop()
            # A thread that is stuck keeps the old line.
            self._line = replace(self._line, jobs=deque(), begun=deque(), changed=threading.Condition(), closed=False)
            self._stop = self._thread = None


def _serve(line: _Line) -> None:
    _in_thread.working = True
    while True:
        with line.changed:
            line.changed.wait_for(lambda: bool(line.jobs) or line.closed)
            if not line.jobs:
                return
        try:
            if line.device is not None and line.device.type == "cuda":
                torch.cuda.set_device(line.device)
            with line.walking(), torch.no_grad():
                _work(line)
        except BaseException as error:
            _give_up(line, error)


def _work(line: _Line) -> None:
    """Do jobs until none is left. See Note [Order of jobs]."""
    begun = line.begun
    while True:
        with line.changed:
            job = line.jobs.popleft() if line.jobs else None
            ahead = line.jobs[0] if line.jobs and line.ahead else None
            begun.extend([job] if job is not None else [])
            line.changed.notify_all()
        if job is None:
            break
        job.prefetch()
        if ahead is not None and 1 + len(begun) <= line.room:
            ahead.prefetch()
        job.run()
        while len(begun) > line.behind:
            begun[0].finish()
            begun.popleft()
    while begun:
        begun[0].finish()
        begun.popleft()


def _give_up(line: _Line, error: BaseException) -> None:
    """End all jobs that somebody may wait for. See Note [Errors in the thread]."""
    with line.changed:
        jobs = [*line.begun, *line.jobs]
        line.begun.clear()
        line.jobs.clear()
        line.changed.notify_all()
    for job in jobs:
        job.fail(error)


def _end(line: _Line, thread: threading.Thread) -> None:
    if os.getpid() != line.pid:
        return  # a forked child, which has no such thread
    with line.changed:
        line.closed = True
        line.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(_EXIT_PATIENCE)
