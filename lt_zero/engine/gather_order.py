"""The order of gathers, recorded in the last pass, and the limits of prefetching.

All decisions depend only on the sequence of modules and on sizes, so they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """The sequence of a repeated pass (all gathers of a forward, or of a backward)."""

    def __init__(self) -> None:
        self._last: list[T] = []
        self._now: list[T] = []
        self._cursor = 0

    def start(self) -> None:
        """Begin a pass; the recorded one becomes the forecast."""
        if self._now:
            self._last = self._now
        self._now, self._cursor = [], 0

    def visit(self, item: T) -> None:
        """Record the use of ``item``."""
        self._now.append(item)
        if self._cursor < len(self._last) and self._last[self._cursor] == item:
            self._cursor += 1
            return
        try:  # the sequence has changed: continue after the next occurrence, if there is one
            self._cursor = self._last.index(item, self._cursor) + 1
        except ValueError:
            return

    def upcoming(self) -> Sequence[T]:
        """The items that followed in the last pass."""
        return self._last[self._cursor :]


@dataclass(frozen=True)
class Residency:
    """How many parameters may stay gathered, in elements (``stage3_*`` keys of the same names).

    Attributes:
        max_live: no prefetch, and no keeping after forward, beyond this many gathered elements.
        max_reuse_distance: a unit stays gathered after its forward if fewer elements are used before its next use.
        prefetch: how many elements to gather ahead of their use.
        ahead: the most units that these may belong to.
    """

    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch: int = 50_000_000
    ahead: float = float("inf")

    def without_training(self) -> Residency:
        """Limits for evaluation: no unit stays gathered, and one is prefetched."""
        return replace(self, max_reuse_distance=0, ahead=1)

    def keep_after_forward(self, numels: Sequence[int]) -> list[bool]:
        """Which units (sizes in forward order) stay gathered from their forward to their backward.

        Before the next use of a unit, the units after it run forward and backward.
        """
        keep, behind = [False] * len(numels), 0
        for index in reversed(range(len(numels))):
            distance = 2 * behind
            behind += numels[index]
            keep[index] = distance < self.max_reuse_distance and behind <= self.max_live
        return keep
