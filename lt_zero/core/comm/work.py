"""Launched collectives and copies, and interruptible waits for them.

A collective that a peer never enters would block in C++ until its timeout, and no other thread can end it: gloo's
``abort`` does nothing. So on gloo, where waiting costs the host's time anyway, ``CollectiveMonitor.wait`` waits in
slices, and in between hang detection finds out whether the collective can complete (hang_detection.py). The operation
stays in gloo's thread until its sockets close, when a peer ends or closes its connections.

Note [Unforeseen collectives]
    Backends match collectives only by order. If one rank runs a module that another does not, two different gathers
    meet: of equal size they swap data, of other sizes they abort a process; and with shared memory nothing meets.
    Comparing each collective before its launch would cost a round trip. But training repeats itself: a rank predicts
    the collective that followed the same two the last time. All ranks have the same history, so they predict the same,
    and at the first difference at least one of them launches a collective that it did not predict. Such a collective is
    compared before its launch (``LaunchOrder``): the ranks exchange a checksum of their histories. They agree, or the
    checksums differ, or a rank waits until hang detection ends that (hang_detection.py). A repeated step costs nothing.
    A long sequence that all ranks know beforehand is compared at once (``Ranks.expect_broadcasts``).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lt_zero.common.worker import Worker
from lt_zero.core.comm.shared_memory import Barrier
from lt_zero.core.health.awaited_works import work_awaited

if TYPE_CHECKING:
    from lt_zero.core.comm.costs import Costs

CALL = "roll call"  # the operation of a launch that is a call of the user
MEETING = "meeting"  # of a launch that is a point of the run
START = "start"  # of a launch that is the start of a further run
FENCE = "fence"
_SLICE = 0.5  # seconds
_ASK = 5.0  # seconds at most between two questions, each a message that stays in the peer's queue
_REMEMBERED = 4096  # launches that are kept per channel, for messages
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}  # do not need this rank
# Bound once: two threads that ask torch for an operator at the same time may each make one.
_WAITS_OF_LAYERS = (torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional.wait_tensor.default)
_FACTOR = 0x01000193  # of the checksum; odd, so that multiplication loses no bits


Label = tuple[str, str, int]  # operation, name, elements


class Work(Protocol):
    """A launched collective or copy; ``wait`` returns once its result may be used on the current stream."""

    def wait(self) -> Any: ...


class CollectiveId(NamedTuple):
    """A collective: its number in its channel (from 1), operation, purpose and elements."""

    channel: str
    number: int
    operation: str
    name: str
    numel: int = 0

    def __str__(self) -> str:
        if self.operation in (CALL, MEETING, START):
            return f"`{self.name}`" if self.operation == CALL else self.name
        return f"the {self.operation} of {self.name!r}"

    def like(self, other: CollectiveId | None) -> bool:
        """True if both are the same operation of the same name and size."""
        return other is not None and self[2:] == other[2:]


class Channel:
    """The collectives of one order on this rank; equal numbers are the same collective on all of ``ranks``.

    ``launched``: the number of the last one. Other threads may read it, and call ``find``.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.launched, self.ranks = 0, ranks
        self._name = name
        self._recent: dict[int, CollectiveId] = {}
        # The last two collectives -> the one that followed, and its checksum. See Note [Unforeseen collectives].
        self._followed: dict[tuple[Label | None, Label | None], tuple[Label, int]] = {}
        self._last: tuple[Label | None, Label | None] = (None, None)
        self._hash = 0

    def launch(self, operation: str, name: str, numel: int) -> tuple[CollectiveId, bool]:
        """Number the collective that is launched next; returns it, and whether it was predicted."""
        number = self.launched + 1
        launch = self._recent[number % _REMEMBERED] = CollectiveId(self._name, number, operation, name, numel)
        # Set after ``_recent``: other threads read ``launched`` first, and then look that number up.
        self.launched = number
        label = (operation, name, numel)
        before, checksum = self._followed.get(self._last, (None, 0))
        if before != label:
            checksum = checksum_of(label)
            self._followed[self._last] = label, checksum
        self._last = (self._last[1], label)
        self._hash = (self._hash * _FACTOR + checksum) % 2**32
        return launch, before == label

    def expect(self, labels: Iterable[Label]) -> None:
        """Predict that these are launched next, in this order."""
        last = self._last
        for label in labels:
            self._followed[last] = label, checksum_of(label)
            last = (last[1], label)

    @property
    def checksum(self) -> int:
        """63 bits, of the collectives and their number."""
        return (self.launched % 2**31) << 32 | self._hash

    def find(self, number: int) -> CollectiveId | None:
        """The launch of that number; None if there was none, or it is forgotten."""
        found = self._recent.get(number % _REMEMBERED)
        return found if found is not None and found.number == number else None

    def history(self) -> list[CollectiveId]:
        """The recent launches in order."""
        return sorted(self._recent.values())


def checksum_of(label: Label) -> int:
    """32 bits."""
    return zlib.crc32("{} {} {}".format(*label).encode())


class CollectiveMonitor:
    """The state of this rank's collectives; other threads may read it.

    ``channels``: by name; those that this rank takes part in. ``verdict``: why no collective can complete any more.
    ``raised``: whether an error has told this rank's code the verdict.
    ``detector``: weak reference to the ``HangDetector``, which examines a wait after every ``slice`` and explains its
    error.
    """

    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self._wait: tuple[int, CollectiveId] | None = None  # the thread that waits, and for which launch
        self.verdict: str | None = None
        self.raised = False
        self.slice = timedelta(seconds=_SLICE)
        self.detector: Callable[[], Any] = lambda: None

    def open(self, name: str, ranks: Sequence[int]) -> Channel:
        """The channel of that name, of these ranks of the run."""
        # The dict is replaced, not extended: other threads iterate over it.
        if name not in self.channels:
            self.channels = {**self.channels, name: Channel(name, ranks)}
        return self.channels[name]

    def wait(self, work: Any, launch: CollectiveId | None) -> None:
        """Wait for a gloo work, or a ``Barrier``, in slices.

        Raises:
            RuntimeError: there is a verdict, or the collective failed.
        """
        if isinstance(work, Barrier) and work.is_completed():
            return
        started = time.monotonic()
        # Not by the contexts below: each takes five calls, and a small step has several waits.
        if launch is not None:
            self._wait = threading.get_ident(), launch
        try:
            while not work.is_completed():
                # An error is the end of a slice, or the work has failed: then the last ``wait`` below raises it.
                with suppress(RuntimeError):
                    work.wait(self.slice)
                if not work.is_completed():
                    self.raise_verdict()
                    waited = time.monotonic() - started
                    if launch is not None and (detector := self.detector()) is not None:
                        detector.examine(launch, waited)
                    if isinstance(work, Barrier):
                        self._examine_barrier(work, waited)
            work.wait()
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            if launch is not None:
                self._wait = None

    @contextmanager
    def waiting_for(self, launch: CollectiveId | None) -> Iterator[None]:
        """Context in which this thread waits for ``launch``; None: for something that has no number."""
        if launch is None:
            yield
            return
        self._wait = threading.get_ident(), launch
        try:
            yield
        finally:
            self._wait = None

    @property
    def waiting(self) -> CollectiveId | None:
        """The launch that is waited for."""
        found = self._wait
        return found[1] if found is not None else None

    def waiting_of(self, thread: int) -> CollectiveId | None:
        """The launch that ``thread`` waits for."""
        found = self._wait
        return found[1] if found is not None and found[0] == thread else None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context in which an error of gloo becomes its cause, if that is known: peers close their connections."""
        try:
            yield
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise the cause of an error of gloo, if it is known and the error does not name it."""
        cause = self.verdict
        if (detector := self.detector()) is not None:
            cause = detector.cause()
        self.raised |= self.verdict is not None
        if cause is not None and cause not in str(error):
            raise RuntimeError(cause) from error

    def _examine_barrier(self, barrier: Barrier, waited: float) -> None:
        """Raise if a rank that has not entered has ended, or after the timeout."""
        if waited > barrier.ask_after:
            barrier.ask_after = waited + min(waited / 10, _ASK)
            detector = self.detector()
            ended = [rank for rank in barrier.absent() if detector is not None and detector.ends.has_ended(rank)]
            # Look again: a rank may have entered after the first look and then ended, and nothing is wrong with that.
            if missing := set(ended) & set(barrier.absent()):
                raise RuntimeError(f"Connection closed by rank {min(missing)}.")
        if waited > barrier.timeout.total_seconds() and (absent := barrier.absent()):
            raise RuntimeError(f"Timed out after {waited:.0f} s of waiting for rank {', '.join(map(str, absent))}.")

    def raise_verdict(self) -> None:
        """Raise the verdict, if there is one."""
        if self.verdict is not None:
            self.raised = True
            raise RuntimeError(self.verdict)


class Done:
    """A work that is complete."""

    def wait(self) -> None:
        return None


class WorkList:
    """Several works that are waited for in order, and ``finish``, which is called afterwards.

    With ``watch`` they are gloo works of ``launch``. ``costs``: of codes, complete after the wait; None: none are sent.
    """

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[], object] | None = None,
        watch: CollectiveMonitor | None = None,
        launch: CollectiveId | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.works: Sequence[Work] = works
        self.watch = watch
        self.costs = costs
        self._finish = finish
        self._failed: BaseException | None = None
        self._launch = launch

    def wait(self) -> None:
        for work in self.works:
            if self.watch is not None:
                self.watch.wait(work, self._launch)
            else:
                work.wait()
        self.works = []
        if self._failed is not None:
            raise self._failed  # half of the result may have been made
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                finish()
            except BaseException as error:
                self._failed = error
                raise


# ---- waits of this and other packages, by their frames --------------------------------------------------------------


def collective_of(frame: FrameType) -> list[int] | None:
    """The global ranks of the collective in which this frame waits; None if it waits in none."""
    code = frame.f_code
    if code.co_filename != distributed_c10d.__file__ or code.co_name in POINT_TO_POINT:
        return None
    if code.co_name.startswith("_"):
        return None  # a step of a collective that waits for no rank: objects are pickled, or read
    group = frame.f_locals.get("group")
    return dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)


def in_layer(frame: FrameType) -> bool:
    """True if a frame waits for a functional collective, as layers launch them. Such a collective has no group."""
    if frame.f_code.co_filename != torch._ops.__file__:
        return False
    # The frame may be of another thread, which is about to make this operator: it is compared, and not read.
    called = frame.f_locals.get("self")
    return any(called is wait for wait in _WAITS_OF_LAYERS)


def in_collective(error: BaseException) -> bool:
    """True if an error came out of torch.distributed, or of a wait for it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    frame = trace.tb_frame
    if frame.f_code.co_filename in (distributed_c10d.__file__, __file__) or in_layer(frame):
        return True
    return work_awaited(frame, trace.tb_lasti) is not None


# ---- collectives of several steps ----------------------------------------------------------------------------------


class Procedure:
    """A launched procedure, with the interface of torch's works."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn: Callable[[], object] | None = fn
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run it, in the thread."""
        try:
            assert self._fn is not None
            with torch.no_grad():
                self._fn()
        except BaseException as error:
            self._error = error
        finally:
            # The function holds buffers, which must not live as long as this object.
            self._fn = None
            self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: it has not ended in time.
            Exception: what it raised.
        """
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a collective is not complete")
        if self._error is not None:
            raise self._error


class CollectiveWorker:
    """A thread that runs collectives of several steps one after the other while the model computes.

    gloo has no streams: what follows the first exchange of such a collective (a sum, an encoding, another exchange)
    needs a thread. It uses process groups of its own, in the order of the launches, which is the same on all ranks. The
    thread starts with the first procedure and ends with this object.
    """

    def __init__(self, name: str) -> None:
        self._worker: Worker[Procedure] = Worker(name, Procedure.run)

    def submit(self, fn: Callable[[], object]) -> Procedure:
        """Run ``fn`` after all procedures that were submitted before."""
        procedure = Procedure(fn)
        self._worker.put(procedure)
        return procedure

    def stop(self) -> None:
        """End the thread after what was submitted; the next procedure starts it again."""
        self._worker.stop()
