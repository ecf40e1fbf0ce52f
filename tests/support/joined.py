"""A run that this process has joined, of which only the sequence ranks are known."""

from __future__ import annotations

import weakref

from lt_zero.core.division import Division
from lt_zero.parallel.sequence.ranks import SequenceRanks, in_use


class _Joined(Division):
    def __init__(self, ranks: SequenceRanks | None) -> None:
        super().__init__()
        self._ranks = weakref.ref(ranks) if ranks is not None else None

    @property
    def row_ranks(self) -> SequenceRanks | None:
        return in_use(self._ranks() if self._ranks is not None else None)


_last: list[_Joined] = []  # a run belongs to whoever has joined it


def use(ranks: SequenceRanks | None) -> None:
    """Begin a run in which sequences are cut over ``ranks``, until they are gone; None: they are not cut."""
    _last[:] = [_Joined(ranks)]
    _last[0].begin(new=True)
