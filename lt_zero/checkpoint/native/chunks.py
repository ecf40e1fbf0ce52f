"""The chunks of saved tensors: where the elements of each box of a tensor are.

Note [Chunks on demand]
    A tensor has about three chunks for each rank that saved a part of it: millions in all with thousands of ranks, of
    which a rank that loads reads a few hundred. So their text is parsed when a tensor is read. What is kept then is a
    row of numbers for each chunk, and objects are made of those that are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from lt_zero.checkpoint.native.directory import Chunk
from lt_zero.common.boxes import Box, Shape

_MOST = 1 << 58  # elements: their bytes fit into 64 bits

Table = np.ndarray[Any, np.dtype[np.int64]]


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, from their text in a manifest. See Note [Chunks on demand].

    Args:
        text: a JSON list, of [offsets, sizes, number of the file, start] for each chunk.
        shape: of the tensor, of elements of ``itemsize`` bytes.
        files: names of the files, in the order of their numbers.
        lengths: bytes of each file.
        check: raises an error that says what is wrong with a parsed text, if something is.
    """

    def __init__(
        self,
        text: memoryview,
        shape: Shape,
        itemsize: int,
        files: Sequence[str],
        lengths: Table,
        check: Callable[[Any], object],
    ) -> None:
        self._text = text
        self._shape = shape
        self._itemsize = itemsize
        self._files = files
        self._lengths = lengths
        self._check = check

    @cached_property
    def _table(self) -> Table:
        """A row of offsets, sizes, number of the file and start for each chunk.

        Raises what ``check`` raises.
        """
        text = bytes(self._text)
        width = 2 * len(self._shape) + 2
        table = _numbers(text, width)
        if table is None or not self._is_whole(table):
            # Boxes that do not follow each other, as those of columns, or an error.
            listed = _parsed(text)
            self._check(listed)
            table = np.array([_row(*chunk) for chunk in listed], dtype=np.int64).reshape(-1, width)
        return table

    def _is_whole(self, table: Table) -> bool:
        """True if each chunk is inside of its file, and they follow each other to the end of the tensor."""
        axes = len(self._shape)
        sizes = table[:, axes : 2 * axes]
        files = table[:, -2]
        starts = table[:, -1]
        if (files < 0).any() or (files >= len(self._lengths)).any() or (starts < 0).any():
            return False
        if not _follow_each_other(self._shape, table[:, :axes], sizes):
            return False
        return bool((starts <= self._lengths[files] - sizes.prod(axis=1) * self._itemsize).all())

    def meeting(self, boxes: Sequence[Box]) -> list[Chunk]:
        """The chunks with elements of any of the ``boxes``, in the order of the text."""
        axes = len(self._shape)
        low = self._table[:, :axes]
        high = low + self._table[:, axes : 2 * axes]
        found = np.zeros(len(low), dtype=bool)
        for offsets, sizes in boxes:
            first = np.array(offsets, dtype=np.int64)
            found |= ((low < first + np.array(sizes, dtype=np.int64)) & (high > first)).all(axis=1)
        return self._made(self._table[found])

    def _made(self, table: Table) -> list[Chunk]:
        axes = len(self._shape)
        return [
            Chunk(Box(tuple(row[:axes]), tuple(row[axes : 2 * axes])), self._files[row[-2]], row[-1])
            for row in table.tolist()
        ]

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        if isinstance(index, slice):
            return self._made(self._table[index])
        return self._made(self._table[index][None])[0]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._made(self._table))


def meeting(chunks: Sequence[Chunk], boxes: Sequence[Box]) -> list[Chunk]:
    """The chunks with elements of any of the ``boxes``."""
    if isinstance(chunks, Chunks):
        return chunks.meeting(boxes)
    return [chunk for chunk in chunks if any(chunk.box.common(box) is not None for box in boxes)]


def _follow_each_other(shape: Shape, low: Table, sizes: Table) -> bool:
    """True if the boxes, [number, axis], cover the tensor without a gap and each is contiguous in it."""
    total = math.prod(shape)
    lengths = np.array(shape, dtype=np.int64)
    # Products of sizes are no larger than ``total`` then, and do not overflow.
    if total >= _MOST or (low < 0).any() or (sizes < 0).any() or (low > lengths - sizes).any():
        return False
    index = np.zeros(len(low), dtype=np.int64)
    numel = np.ones(len(low), dtype=np.int64)
    for axis, length in enumerate(shape):
        if ((numel > 1) & (sizes[:, axis] != length)).any():
            return False
        index = index * length + low[:, axis]
        numel = numel * sizes[:, axis]
    order = np.argsort(index, kind="stable")
    ends = (index + numel)[order]
    return len(low) > 0 and bool((index[order] == [0, *ends[:-1]]).all()) and int(ends[-1]) == total


def _numbers(text: bytes, width: int) -> Table | None:
    """The numbers of a list of chunks, ``width`` of each; None if there is something else in it.

    Brackets are ignored: whatever numbers there are, they are checked as boxes. A parser of JSON takes ten times as
    long, and the chunks of a tensor are as many as ranks.
    """
    numbers = text.translate(None, b"[] ")
    if numbers.translate(None, b"0123456789,") or b",," in numbers or numbers.strip(b",") != numbers:
        return None
    table = np.fromstring(numbers, dtype=np.int64, sep=",") if numbers else np.empty(0, dtype=np.int64)
    return table.reshape(-1, width) if table.size % width == 0 else None


def _parsed(text: bytes) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _row(offsets: Sequence[int], sizes: Sequence[int], file: int, start: int) -> list[int]:
    return [*offsets, *sizes, file, start]
