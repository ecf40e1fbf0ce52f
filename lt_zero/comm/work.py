"""Launched collectives and copies, and interruptible waits for them.

A collective that a peer never enters would block in C++ until its timeout, and no other thread can end it: gloo's
``abort`` does nothing. So on gloo, where waiting costs the host's time anyway, ``Watch.wait`` waits in slices, and in
between hang detection finds out whether the collective can complete (hang_detection.py). The operation stays in gloo's
thread until its sockets close, when a peer ends or closes its connections.

Note [Unforeseen collectives]
    Backends match collectives only by order. If one rank runs a module that another does not, two different gathers
    meet: of equal size they swap data, of other sizes they abort a process; and with shared memory nothing meets.
    Comparing each collective before its launch would cost a round trip. But training repeats itself: a rank predicts
    the collective that followed the same two the last time. All ranks have the same history, so they predict the same,
    and at the first difference at least one of them launches a collective that it did not predict. Such a collective is
    compared before its launch (``Comm._compare``): the ranks exchange a checksum of their histories. They agree, or the
    checksums differ, or a rank waits until hang detection ends that (hang_detection.py). A repeated step costs nothing.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

CALL = "roll call"  # the operation of a launch that is a call of the user
FENCE = "fence"
_SLICE = 0.5  # seconds
_REMEMBERED = 4096  # launches that are kept per channel, for messages
_FACTOR = 0x01000193  # of the checksum; odd, so that multiplication loses no bits


Label = tuple[str, str, int]  # operation, name, elements


class Work(Protocol):
    """A launched collective or copy; ``wait`` returns once its result may be used on the current stream."""

    def wait(self) -> Any: ...


class Launch(NamedTuple):
    """A collective: its number in its channel (from 1), operation, purpose and elements."""

    channel: str
    number: int
    operation: str
    name: str
    numel: int = 0

    def __str__(self) -> str:
        return f"`{self.name}`" if self.operation == CALL else f"the {self.operation} of {self.name!r}"

    def like(self, other: Launch | None) -> bool:
        """Whether both are the same operation of the same name and size."""
        return other is not None and self[2:] == other[2:]


class CollectiveSequence:
    """The collectives of one channel on this rank. See Note [Unforeseen collectives]."""

    def __init__(self) -> None:
        # The last two collectives -> the one that followed, and its checksum.
        self._followed: dict[tuple[Label | None, Label | None], tuple[Label, int]] = {}
        self._last: tuple[Label | None, Label | None] = (None, None)
        self._count = self._hash = 0

    def add(self, operation: str, name: str, numel: int) -> bool:
        """Add the next collective; returns whether it was predicted."""
        label = (operation, name, numel)
        before, checksum = self._followed.get(self._last, (None, 0))
        predicted = before == label
        if not predicted:
            checksum = zlib.crc32(f"{operation} {name} {numel}".encode())
            self._followed[self._last] = label, checksum
        self._last = (self._last[1], label)
        self._count += 1
        self._hash = (self._hash * _FACTOR + checksum) % 2**32
        return predicted

    @property
    def checksum(self) -> int:
        """63 bits, of the collectives and their number."""
        return (self._count % 2**31) << 32 | self._hash


class Examiner(Protocol):
    """Finds out whether a wait can end (hang_detection.py)."""

    def examine(self, launch: Launch, waited: float) -> None:
        """Raise if ``launch``, which this rank has waited for ``waited`` seconds, can never complete."""

    def update_verdict(self) -> None:
        """Update the verdict."""


class Watch:
    """The state of one group's collectives on this rank; other threads may read it.

    ``launched``: number of launches per channel; equal numbers are the same collective on all ranks. ``waiting``: the
    launch that is waited for. ``verdict``: why no collective can complete any more. ``cause``: explains a failed one.
    ``examiner``: weak reference to the hang detection, called after every ``slice`` of a wait.
    """

    def __init__(self) -> None:
        self.launched: dict[str, int] = {}
        self.waiting: Launch | None = None
        self.verdict: str | None = None
        self.cause: Callable[[], str | None] = lambda: None
        self.slice = timedelta(seconds=_SLICE)
        self.examiner: Callable[[], Examiner | None] = lambda: None
        self._recent: dict[tuple[str, int], Launch] = {}

    def launch(self, channel: str, operation: str, name: str, numel: int = 0) -> Launch:
        """Number a collective that is about to be launched.

        Raises:
            RuntimeError: with the verdict, if there is one.
        """
        self.raise_verdict()
        number = self.launched.get(channel, 0) + 1
        launch = self._recent[channel, number % _REMEMBERED] = Launch(channel, number, operation, name, numel)
        self.launched[channel] = number  # after ``_recent``, as other threads read both
        return launch

    def find(self, channel: str, number: int) -> Launch | None:
        """The launch of that number; None if there was none, or it is forgotten."""
        found = self._recent.get((channel, number % _REMEMBERED))
        return found if found is not None and found.number == number else None

    def history(self, channel: str) -> list[Launch]:
        """The recent launches of a channel."""
        return sorted(launch for launch in self._recent.values() if launch.channel == channel)

    def wait(self, work: Any, launch: Launch | None) -> None:
        """Wait for a gloo work in slices.

        Raises:
            RuntimeError: there is a verdict, or the collective failed.
        """
        started = time.monotonic()
        try:
            if launch is not None:
                self.waiting = launch
            while not work.is_completed():
                with suppress(RuntimeError):  # end of a slice, or the work has failed
                    work.wait(self.slice)
                if not work.is_completed():
                    self.raise_verdict()
                    if launch is not None and (examiner := self.examiner()) is not None:
                        examiner.examine(launch, time.monotonic() - started)
            work.wait()
        except RuntimeError as error:
            if (examiner := self.examiner()) is not None:
                examiner.update_verdict()
            if self.verdict is not None and self.verdict not in str(error):
                raise RuntimeError(self.verdict) from error  # peers closed their connections because of it
            if self.verdict is None and (cause := self.cause()) is not None:
                raise RuntimeError(cause) from error
            raise
        finally:
            if launch is not None:
                self.waiting = None

    def raise_verdict(self) -> None:
        """Raise the verdict, if there is one."""
        if self.verdict is not None:
            raise RuntimeError(self.verdict)


class Done:
    """A work that is complete."""

    def wait(self) -> None:
        return None


class All:
    """Several works that are waited for in order, and ``finish``, which is called afterwards.

    With ``watch`` they are gloo works of ``launch``.
    """

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[], object] | None = None,
        watch: Watch | None = None,
        launch: Launch | None = None,
    ) -> None:
        self._works, self._finish, self._watch, self._launch = works, finish, watch, launch

    def wait(self) -> None:
        for work in self._works:
            if self._watch is not None:
                self._watch.wait(work, self._launch)
            else:
                work.wait()
        self._works = []
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
