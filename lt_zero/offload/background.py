"""The background step: a thread that steps buckets while backward or the next forward runs.

ZeRO-Offload, arXiv:2101.06840, section 4, overlaps the CPU step with GPU compute. Here the results equal those of the
synchronous step, because every use of a bucket waits for its job.

Note [Who touches what]
    A bucket that was handed over belongs to the thread: master weights, optimizer states, accumulator and gather
    source. All access goes through the bucket, which waits first (``Job.wait``). Buckets share only files, buffers and
    I/O threads, which have locks.

Note [Order of jobs]
    Jobs run in the order in which they were handed over. While one bucket is stepped, the next is read from its files
    and the previous one is written (store.py, ``stream``). ``publish`` runs a collective in a
    process group of its own: all ranks hand over jobs that have one in the same order.

Note [Errors in the thread]
    After an error, a rank must still join the collectives that the others are in. The error goes to ``report``, the
    job completes as usual, and the ranks agree on raising at the next check (nvme_store.py, Note [A failing disk]). An
    error between jobs fails all queued jobs, because each of them is waited for.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from lt_zero.common import accelerator
from lt_zero.common.phases import phase
from lt_zero.common.worker import Worker
from lt_zero.core.stores.io_options import SwapError
from lt_zero.core.stores.store import Store
from lt_zero.core.stores.thread_pool import LOOK, check_alive

_in_thread = threading.local()
_EXIT_PATIENCE = 30.0  # seconds to wait at exit for the running job


class Job:
    """The step of one bucket.

    Args:
        step: updates the bucket.
        stores: returns the streamed stores that the step needs in memory; they are written back afterwards.
        publish: makes the result visible to gathers and other ranks; None if the caller does that.
        report: receives errors. See Note [Errors in the thread].
    """

    def __init__(
        self,
        step: Callable[[], object],
        stores: Callable[[], list[Store]],
        publish: Callable[[], object] | None,
        report: Callable[[Exception], object],
    ) -> None:
        self._step: Callable[[], object] | None = step
        self._publish = publish
        self._report = report
        self._stores = stores
        self._leaving: list[Store] = []
        self._ended = threading.Event()
        self._pid = os.getpid()
        self.thread: threading.Thread | None = None  # the thread that runs this job

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> bool:
        """Wait until the job is done. In the background thread itself, return False at once: it owns the bucket.

        Raises:
            SwapError: this is a forked process, which has no background thread, or the thread has died.
        """
        if getattr(_in_thread, "working", False):
            return False
        if not self.done and os.getpid() != self._pid:
            raise SwapError(
                f"Process {os.getpid()} was forked from process {self._pid} while weights were being stepped in the "
                "background, so its copy of the weights is half stepped. Set "
                "zero_optimization.offload_optimizer.overlap_step=auto, or read the weights before forking."
            )
        with phase("offload", "step"):
            while not self._ended.wait(LOOK):
                check_alive(self.thread)
        return True

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._report(error)

    def prefetch(self) -> None:
        """Start reading the stores. This and all methods below run in the background thread."""
        with self._reporting():
            for store in self._stores():
                store.prefetch()

    def run(self) -> None:
        """Step the bucket and start writing its stores."""
        with self._reporting():
            for store in self._stores():
                store.begin_step()
            assert self._step is not None
            try:
                self._step()
            finally:
                # Ask again: the first step creates states, and they have to be written, too.
                self._leaving = self._stores()
                for store in self._leaving:
                    store.end_use()

    def finish(self) -> None:
        """Wait until everything is written, then publish."""
        with self._reporting():
            for store in self._leaving:
                store.wait_written()
        with self._reporting():
            if self._publish is not None:
                self._publish()
        # A bucket may refer to the finished job for long: it must not keep the gradients alive.
        self._step = self._publish = None
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End without stepping; ``publish`` still runs, because other ranks wait in it."""
        try:
            self._report(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            self.finish()
        finally:
            self._ended.set()


@dataclass
class _Queue:
    """State of the thread. Holds no ``Background``, with which the thread ends."""

    room: int
    behind: int
    ahead: bool
    streaming: Callable[[], AbstractContextManager[object]]
    device: torch.device | None
    jobs: deque[Job] = field(default_factory=deque)  # not started
    begun: deque[Job] = field(default_factory=deque)  # started, not finished
    changed: threading.Condition = field(default_factory=threading.Condition)


class Background:
    """The background thread. It starts with the first job, also after ``close``.

    Args:
        room: buckets that may be in memory at a time, if their states are stored in files.
        read_ahead: read the next bucket while one is stepped.
        write_behind: write the previous bucket while one is stepped.
        streaming: a context that is entered while there are jobs; it must not reference this object's owner.
        device: to which results are copied.
    """

    def __init__(
        self,
        room: int = 3,
        read_ahead: bool = True,
        write_behind: bool = True,
        streaming: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: torch.device | None = None,
    ) -> None:
        behind = max(0, min(1, room - 2)) if write_behind else 0
        self._queue = _Queue(room, behind, read_ahead, streaming, device)
        self._worker = self._new_worker()

    def _new_worker(self) -> Worker[None]:
        return Worker("step", partial(_serve, self._queue), patience=_EXIT_PATIENCE)

    def hand_over(self, job: Job, limit: int | None = None) -> None:
        """Queue a job; first wait while more than ``limit`` jobs are queued."""
        queue = self._queue
        self._worker.start()
        thread = self._worker.threads[0]
        with queue.changed:
            with phase("offload", "line") if limit is not None else nullcontext():
                while limit is not None and len(queue.jobs) > limit:
                    if not queue.changed.wait(LOOK):
                        check_alive(thread)
            job.thread = thread
            queue.jobs.append(job)
        self._worker.put(None)

    def close(self) -> None:
        """Finish all queued jobs and end the thread."""
        self._worker.stop()
        # A thread that is stuck keeps the old queue.
        self._queue = replace(self._queue, jobs=deque(), begun=deque(), changed=threading.Condition())
        self._worker = self._new_worker()


def _serve(queue: _Queue, _: None) -> None:
    """Run the jobs that there are; an earlier call may have run those of this one."""
    _in_thread.working = True
    if not queue.jobs:
        return
    try:
        accelerator.make_current(queue.device)
        with queue.streaming(), torch.no_grad():
            _work(queue)
    except BaseException as error:  # fail all jobs: see Note [Errors in the thread]
        with queue.changed:
            jobs = deque([*queue.begun, *queue.jobs])
            queue.begun.clear()
            queue.jobs.clear()
            queue.changed.notify_all()
        while jobs:
            # Give the job no name here: this frame stays, and would keep the job's bucket alive.
            jobs.popleft().fail(error)


def _work(queue: _Queue) -> None:
    """Run jobs until the queue is empty. See Note [Order of jobs]."""
    begun = queue.begun
    while True:
        with queue.changed:
            job = queue.jobs.popleft() if queue.jobs else None
            ahead = queue.jobs[0] if queue.jobs and queue.ahead else None
            begun.extend([job] if job is not None else [])
            queue.changed.notify_all()
        if job is None:
            break
        job.prefetch()
        if ahead is not None and 1 + len(begun) <= queue.room:
            ahead.prefetch()
        job.run()
        while len(begun) > queue.behind:
            # Remove the job only after it is finished: if ``finish`` raises, ``_serve`` fails all jobs in ``begun``.
            begun[0].finish()
            begun.popleft()
    while begun:
        begun[0].finish()
        begun.popleft()
