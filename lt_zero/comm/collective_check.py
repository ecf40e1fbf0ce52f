"""Checks that the ranks run the same collectives in the same order.

Note [Unforeseen collectives]
    Backends match collectives only by order. If one rank runs a module that another does not, two different gathers
    meet: of equal size they swap data, of other sizes they abort a process; and with shared memory nothing meets.
    Comparing each collective before its launch would cost a round trip. But training repeats itself: a rank predicts
    the collective that followed the same two the last time. All ranks have the same history, so they predict the same,
    and at the first difference at least one of them launches a collective that it did not predict. Such a collective is
    compared before its launch (``Comm._agree``): the ranks exchange a checksum of their histories. They agree, or the
    checksums differ, or a rank waits until hang detection ends that (hang_detection.py). A repeated step costs nothing.
"""

from __future__ import annotations

import os
import zlib

Label = tuple[str, str, int]  # operation, name, elements
_FACTOR = 0x01000193  # odd: multiplication loses no bits


def debug_enabled() -> bool:
    """Whether ``LT_ZERO_DEBUG`` asks for the checks that cost time."""
    return os.environ.get("LT_ZERO_DEBUG", "0").lower() not in ("", "0", "false", "no", "off")


class Sequence:
    """The collectives of one channel on this rank."""

    def __init__(self) -> None:
        # The last two collectives -> the one that followed, and its checksum.
        self._followed: dict[tuple[Label | None, Label | None], tuple[Label, int]] = {}
        self._last: tuple[Label | None, Label | None] = (None, None)
        self._count = self._hash = 0

    def add(self, operation: str, name: str, numel: int) -> bool:
        """Add the next collective; returns whether it was predicted. See Note [Unforeseen collectives]."""
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
        """A checksum of the sequence, 63 bits."""
        return (self._count % 2**31) << 32 | self._hash
