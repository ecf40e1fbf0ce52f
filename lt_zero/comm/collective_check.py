"""Whether the ranks run the same collectives in the same order.

Note [Unforeseen collectives]
    Backends match collectives by their order alone. If one rank runs a module that another does not, two different
    gathers meet: of equal size they swap data, of other sizes they abort a process; and where ranks read each other's
    memory nothing meets at all. To compare each one before its launch would cost a round trip. But training repeats
    itself: a rank foresees its next collective as the one that followed the same two the last time. All ranks have the
    same past, so they foresee the same, and at the first difference at least one of them does what it had not foreseen.
    Such a collective is agreed upon before it is launched (``Comm._agree``): the ranks exchange a number that stands
    for all they have run. Either they agree, or the numbers differ, or a rank waits until it finds out that the others
    will never come (hang_detection.py). A step like the last one costs nothing.
"""

from __future__ import annotations

import os
import zlib

Label = tuple[str, str, int]  # operation, name, elements
_FACTOR = 0x01000193  # odd, so that no collective is forgotten


def debug_enabled() -> bool:
    """Whether ``LT_ZERO_DEBUG`` asks for the checks that cost time."""
    return os.environ.get("LT_ZERO_DEBUG", "0").lower() not in ("", "0", "false", "no", "off")


class Sequence:
    """The collectives of one channel on this rank."""

    def __init__(self) -> None:
        # The last two -> what came then, and its checksum.
        self._followed: dict[tuple[Label | None, Label | None], tuple[Label, int]] = {}
        self._last: tuple[Label | None, Label | None] = (None, None)
        self._count = self._hash = 0

    def add(self, operation: str, name: str, numel: int) -> bool:
        """The next one; returns whether it was foreseen. See Note [Unforeseen collectives]."""
        label = (operation, name, numel)
        before, checksum = self._followed.get(self._last, (None, 0))
        foreseen = before == label
        if not foreseen:
            checksum = zlib.crc32(f"{operation} {name} {numel}".encode())
            self._followed[self._last] = label, checksum
        self._last = (self._last[1], label)
        self._count += 1
        self._hash = (self._hash * _FACTOR + checksum) % 2**32
        return foreseen

    @property
    def sign(self) -> int:
        """A number of 63 bits that is equal on two ranks if their sequences are."""
        return (self._count % 2**31) << 32 | self._hash
