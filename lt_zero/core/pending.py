"""Work that was launched and is waited for later.

Note [Waits that can end]
    A collective that a peer never enters would block in C++ until its timeout, and no other thread can end it: gloo's
    ``abort`` does nothing. So on gloo, where waiting costs the host's time anyway, this file waits in slices and
    looks in between whether somebody has found out that the collective can never complete (rollcall.py). The
    operation itself stays behind in gloo's thread until its sockets close, which they do when a peer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

SLICE = timedelta(seconds=0.5)


class Pending(Protocol):
    """A launched collective or copy; ``wait`` returns once its result may be used on the current stream."""

    def wait(self) -> Any: ...


class Launch(NamedTuple):
    """A collective: which one of its channel it is (from 1), and what for."""

    channel: str
    number: int
    operation: str
    name: str


class Watch:
    """What the collectives of one group have come to on this rank; another thread may look.

    ``launched``: per channel, how many; equal numbers are the same collective on all ranks. ``waiting``: the one that
    is being waited for. ``verdict``: why no collective can complete any more.
    """

    def __init__(self) -> None:
        self.launched: dict[str, int] = {}
        self.waiting: Launch | None = None
        self.verdict: str | None = None

    def launch(self, channel: str, operation: str, name: str) -> Launch:
        """Number a collective that is about to be launched.

        Raises:
            RuntimeError: there is a verdict.
        """
        self.refuse()
        number = self.launched[channel] = self.launched.get(channel, 0) + 1
        return Launch(channel, number, operation, name)

    def wait(self, work: Any, launch: Launch | None) -> None:
        """Wait for a gloo work. See Note [Waits that can end].

        Raises:
            RuntimeError: there is a verdict, or the collective failed.
        """
        try:
            if launch is not None:
                self.waiting = launch
            while not work.is_completed():
                try:
                    work.wait(SLICE)
                except RuntimeError:
                    if not work.is_completed():  # nothing but a slice is over
                        self.refuse()
            work.wait()
        except RuntimeError as error:
            if self.verdict is not None and self.verdict not in str(error):
                raise RuntimeError(self.verdict) from error  # peers left because of it
            raise
        finally:
            if launch is not None:
                self.waiting = None

    def refuse(self) -> None:
        """Raise the verdict, if there is one."""
        if self.verdict is not None:
            raise RuntimeError(self.verdict)


class Done:
    """Nothing was to be done."""

    def wait(self) -> None:
        return None


class All:
    """Several launched works that are waited for together, in order, and what is done with their results afterwards.

    With ``watch`` the works are gloo's, of ``launch``.
    """

    def __init__(
        self,
        works: Sequence[Pending],
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
