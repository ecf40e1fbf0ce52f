"""A rank's elements of a tensor, in the form that torch.distributed.checkpoint saves.

Note [Boxes]
    A shard of a bucket cuts through parameters: a rank owns elements [lo, hi) of a parameter, in row-major order.
    torch.distributed.checkpoint supports rectangles only. A flat range consists of a few: the rest of a row, full rows,
    the beginning of a row, and so on for each dimension. Each is contiguous in the range, and the intersection of two
    of them is contiguous in both, so nothing is copied to be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lt_zero.common.compat import no_torch_function, wrapper_tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes

LARGEST = 1 << 30  # maximum bytes of a box, so that replicated tensors can be divided among the ranks


def boxes(shape: tuple[int, ...], lo: int, hi: int, largest: int | None = None) -> list[Box]:
    """Cut elements [lo, hi) of a row-major tensor into rectangles, in order. See Note [Boxes].

    ``largest``: maximum elements of a rectangle, if cutting along its first long dimension suffices.

    >>> boxes((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if math.prod(shape) == 0:
        return [((0,) * len(shape), shape)]
    found = _cut(shape, lo, hi)
    return [part for box in found for part in _split(box, largest)] if largest else found


def _cut(shape: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    if lo >= hi:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((lo,), (hi - lo,))]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-lo // row), hi // row  # full rows are [first, last)
    if first > last:  # the range lies within row ``last``
        return _within(last, _cut(inner, lo - last * row, hi - last * row))
    head = _within(first - 1, _cut(inner, lo - (first - 1) * row, row)) if lo < first * row else []
    body: list[Box] = [((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    return head + body + _within(last, _cut(inner, 0, hi - last * row))


def _within(row: int, parts: list[Box]) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in parts]


def _split(box: Box, largest: int) -> list[Box]:
    """Cut a box into boxes of at most ``largest`` elements, along the first dimension longer than 1."""
    offsets, sizes = box
    axis = next((i for i, size in enumerate(sizes) if size > 1), None)
    if axis is None or math.prod(sizes) <= largest:
        return [box]
    step = max(1, largest // math.prod(sizes[axis + 1 :]))
    cuts = range(0, sizes[axis], step)
    return [
        (
            (*offsets[:axis], offsets[axis] + cut, *offsets[axis + 1 :]),
            (*sizes[:axis], min(step, sizes[axis] - cut), *sizes[axis + 1 :]),
        )
        for cut in cuts
    ]


def flat_index(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """The row-major index of the element at ``offsets``."""
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


class Fragment(Tensor):
    """Elements [lo, hi) of a tensor of ``shape``, which are read when they are written.

    It has the shape and dtype of the full tensor, but no values.

    Args:
        local: returns the elements (1D, contiguous).
        shape: of the full tensor.
        lo, hi: the range of this rank's elements in row-major order; empty if they are equal.
        dtype: of the elements.
        done: called when the elements are no longer needed, until ``local`` is called again.
    """

    local: Callable[[], Tensor]
    lo: int
    hi: int
    done: Callable[[], object] | None
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls,
        local: Callable[[], Tensor],
        shape: tuple[int, ...],
        lo: int,
        hi: int,
        dtype: torch.dtype,
        done: Callable[[], object] | None = None,
    ) -> Fragment:
        made: Fragment = wrapper_tensor(cls, shape, dtype)
        made.local, made.lo, made.hi, made.done = local, lo, hi, done
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fragment({tuple(self.shape)}, {self.dtype}, elements {self.lo} to {self.hi})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _no_values(str(func))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_values("Pickling")

    def __deepcopy__(self, memo: dict[int, Any]) -> Fragment:
        return self

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        limit = max(1, LARGEST // self.dtype.itemsize)
        parts = boxes(tuple(self.shape), self.lo, self.hi, limit)
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in parts]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        whole = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=whole, size=self.shape),
            )
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        shape = tuple(self.shape)
        for chunk in self.chunks:
            if chunk.offsets == index.offset:
                first = flat_index(shape, tuple(chunk.offsets)) - self.lo if self.hi > self.lo else 0
                return self.local()[first : first + math.prod(chunk.sizes)].view(chunk.sizes)
        raise KeyError(index)


def _no_values(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} needs values that are on several ranks: while a sharded checkpoint is being saved, its tensors "
        'have shapes and dtypes only. Read weights under `lt_zero.gathered(...)`, or set checkpoint.format="full".'
    )
