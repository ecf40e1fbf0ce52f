"""Work that was launched and is waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Pending(Protocol):
    """A launched collective or copy; ``wait`` returns once its result may be used on the current stream."""

    def wait(self) -> Any: ...


class Done:
    """Nothing was to be done."""

    def wait(self) -> None:
        return None


class All:
    """Several launched works that are waited for together, in order, and what is done with their results afterwards."""

    def __init__(self, works: Sequence[Pending], finish: Callable[[], object] | None = None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
