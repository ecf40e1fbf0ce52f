"""Reads a checkpoint directory of this package: any part of any tensor, with every byte checked.

The bytes come from the places in the manifest; torch.distributed.checkpoint, whose import takes half a second, is not
needed. Only ``meta.pt`` is unpickled, by torch with ``weights_only=True``.

Note [Boxes]
    A shard of a bucket cuts through parameters: a rank owns elements [lo, hi) of a parameter, in row-major order.
    torch.distributed.checkpoint supports rectangles only. A flat range consists of a few: the rest of a row, full rows,
    the beginning of a row, and so on for each dimension. Each is contiguous in the range, and the intersection of two
    of them is contiguous in both, so nothing is copied to be written.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor

from lt_zero.checkpoint.native.directory import MANIFEST, Manifest, is_url
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.lazy_tensor import LazyTensor
from lt_zero.io.checked_file import BlockReader

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


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
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # full rows are [first, last)

    def within(number: int, start: int, stop: int) -> list[Box]:
        """Rectangles of elements [start, stop) of the tensor, which lie in one row."""
        inner = _cut(shape[1:], start - number * row, stop - number * row)
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in inner]

    if first > last:
        return within(last, lo, hi)
    body: list[Box] = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return within(first - 1, lo, first * row) + body + within(last, last * row, hi)


def _split(box: Box, largest: int) -> list[Box]:
    """Cut a box into boxes of at most ``largest`` elements, along the first dimension longer than 1."""
    offsets, sizes = box
    axis = next((i for i, size in enumerate(sizes) if size > 1), None)
    if axis is None or math.prod(sizes) <= largest:
        return [box]
    step = max(1, largest // math.prod(sizes[axis + 1 :]))
    parts = []
    for cut in range(0, sizes[axis], step):
        at, size = offsets[axis] + cut, min(step, sizes[axis] - cut)
        parts.append(((*offsets[:axis], at, *offsets[axis + 1 :]), (*sizes[:axis], size, *sizes[axis + 1 :])))
    return parts


def flat_index(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """The row-major index of the element at ``offsets``."""
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def _common(box: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    ends = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(*box, *other, strict=True)]
    if any(low >= high for low, high in ends):
        return None
    return tuple(low for low, _ in ends), tuple(high - low for low, high in ends)


class Archive:
    """An open checkpoint directory; a ``Source``.

    Args:
        path: the directory, or its URL.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing, cut short or damaged; names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        fs: Any = fsspec.core.url_to_fs(path)[0] if is_url(path) else None
        self._blocks = BlockReader(path, fs)
        place = f"{path}/{MANIFEST}"
        try:
            data: bytes = Path(place).read_bytes() if fs is None else fs.cat_file(place)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {MANIFEST} cannot be read ({error}). It is written last; "
                "a kill while saving leaves none. Resume from another checkpoint."
            ) from None
        self.manifest = Manifest.parse(data.decode(errors="replace"), place)
        self._blocks.files = self.manifest.files
        for name, record in self.manifest.files.items():
            file, remedy = f"{path}/{name}", "Restore it from a copy, or resume from another checkpoint."
            try:
                size = os.stat(file).st_size if fs is None else fs.size(file)
            except OSError:
                raise CheckpointError(f"{file} is missing. {remedy}") from None
            if size != record.nbytes:
                raise CheckpointError(
                    f"{file} has {size} bytes, and {record.nbytes} were written: something cut or changed it. {remedy}"
                )
        self.aliases: Mapping[str, str] = self.manifest.aliases
        self.weights: Mapping[str, Spec] = {
            name: Spec(entry.shape, entry.dtype)
            for name in self.manifest.order
            if (entry := self.manifest.tensors.get(f"model.{self.aliases.get(name, name)}")) is not None
        }

    @staticmethod
    def is_at(path: str) -> bool:
        """Whether there is a complete checkpoint at a path or URL."""
        if not is_url(path):
            return os.path.isfile(os.path.join(path, MANIFEST))
        return bool(fsspec.core.url_to_fs(path)[0].exists(f"{path}/{MANIFEST}"))

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """The Lightning checkpoint without weights and optimizer states; plain containers."""
        data = io.BytesIO(self.bytes_of("meta.pt"))
        try:
            found: dict[str, Any] = torch.load(data, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}/meta.pt cannot be read: {error}") from None
        return found

    @cached_property
    def optimizers(self) -> Sequence[SavedOptimizer]:
        """Their states and settings, by name of the parameter."""
        packed = self.meta.get("lt_zero", {}).get("optimizers", [])
        names = [[name for group in saved["param_groups"] for name in group["params"]] for saved in packed]
        states: list[dict[str, dict[str, Any]]] = [{name: {} for name in of_one} for of_one in names]
        for full, entry in self.manifest.tensors.items():
            if full.startswith("optimizer_"):
                head, _, rest = full.split(".", 2)
                known = states[int(head.removeprefix("optimizer_"))]
                cuts = [i for i, letter in enumerate(rest) if letter == "."]  # parameter and key may have dots, too
                cut = next((i for i in reversed(cuts) if rest[:i] in known), cuts[-1])
                known.setdefault(rest[:cut], {})[rest[cut + 1 :]] = Spec(entry.shape, entry.dtype)
        merged = []
        for saved, of_one, known in zip(packed, names, states, strict=True):
            every = {name: {**known[name], **saved["state"].get(name, {})} for name in of_one}
            merged.append(SavedOptimizer(saved["param_groups"], {n: state for n, state in every.items() if state}))
        return merged

    def objects(self) -> dict[Any, Any]:
        """The values without a plain form, by their path in ``meta``. Unpickles: only for a trusted checkpoint."""
        if "objects.pkl" not in self.manifest.files:
            return {}
        found: dict[Any, Any] = pickle.loads(self.bytes_of("objects.pkl"))
        return found

    def lazy(self, full: str) -> LazyTensor:
        """A tensor by its full name, to be read when its values are needed."""
        entry = self.manifest.tensors[full]
        return LazyTensor(entry.shape, entry.dtype, partial(self.elements, full))

    def read(self, name: str) -> Tensor:
        """A weight, whole, in its saved dtype."""
        return self.lazy(f"model.{self.aliases.get(name, name)}").whole()

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """An element-wise state of a parameter, whole."""
        return self.lazy(f"optimizer_{optimizer}.state.{name}.{key}").whole()

    def elements(self, full: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) (1D, row-major) of a tensor by its full name.

        Raises:
            CheckpointError: a file is damaged.
        """
        entry = self.manifest.tensors[full]
        out = torch.empty(max(0, hi - lo), dtype=entry.dtype)
        if hi <= lo:
            return out
        covered, size = 0, entry.dtype.itemsize
        pairs = itertools.product(sorted(entry.chunks, key=lambda chunk: chunk.start), boxes(entry.shape, lo, hi))
        for chunk, box in pairs:
            common = _common(box, (chunk.offsets, chunk.sizes))
            if common is None:
                continue
            offsets, lengths = common
            first = flat_index(entry.shape, box[0]) - lo
            target = out[first : first + math.prod(box[1])].view(box[1])
            for axis, (offset, start, length) in enumerate(zip(offsets, box[0], lengths, strict=True)):
                target = target.narrow(axis, offset - start, length)
            inner = tuple(offset - start for offset, start in zip(offsets, chunk.offsets, strict=True))
            first = flat_index(chunk.sizes, inner)
            last = flat_index(chunk.sizes, tuple(o + s - 1 for o, s in zip(inner, lengths, strict=True)))
            whole = target.is_contiguous() and last + 1 - first == target.numel()
            rows = target.view(-1) if whole else torch.empty(last + 1 - first, dtype=entry.dtype)
            self._blocks.read(chunk.file, chunk.start + first * size, rows.view(torch.uint8))
            if not whole:
                strides = [math.prod(chunk.sizes[axis + 1 :]) for axis in range(len(chunk.sizes))]
                target.copy_(rows.as_strided(lengths, strides))
            covered += target.numel()
        if covered != hi - lo:
            raise CheckpointError(f"{self.path}: {full} lacks {hi - lo - covered} of elements {lo} to {hi}.")
        return out

    def bytes_of(self, name: str) -> bytes:
        """A whole file, checked."""
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{self.path} has no {name}.")
        out = torch.empty(record.nbytes, dtype=torch.uint8)
        self._blocks.read(name, 0, out)
        return out.numpy().tobytes()

    def verify(self, tick: Callable[[int], object] = lambda _: None) -> int:
        """Read every byte; returns their number. ``tick`` is called with the bytes of each block.

        Raises:
            CheckpointError: one is not what was written; names its file.
        """
        for name in self.manifest.files:
            self._blocks.verify(name, tick)
        return sum(record.nbytes for record in self.manifest.files.values())

    def close(self) -> None:
        self._blocks.close()
