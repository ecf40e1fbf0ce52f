"""Reads a checkpoint directory of this package: any part of any tensor, with every byte checked.

The chunks that contain the requested elements are computed by torch.distributed.checkpoint (resharding); the bytes come
from the places in the manifest. Only ``meta.pt`` is unpickled, by torch with ``weights_only=True``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lt_zero.checkpoint.native import manifest
from lt_zero.checkpoint.native.directory import is_url
from lt_zero.checkpoint.native.manifest import Chunk, Manifest
from lt_zero.checkpoint.native.pieces import boxes, flat_index
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.io.checked_file import BlockReader


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
        place = f"{path}/{manifest.NAME}"
        try:
            data: bytes = Path(place).read_bytes() if fs is None else fs.cat_file(place)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {manifest.NAME} cannot be read ({error}). It is written last; "
                "a kill while saving leaves none. Resume from another checkpoint."
            ) from None
        self.manifest = Manifest.parse(data.decode(errors="replace"), place)
        self._blocks.files = self.manifest.files
        for name, record in self.manifest.files.items():
            file = f"{path}/{name}"
            try:
                size = os.stat(file).st_size if fs is None else fs.size(file)
            except OSError:
                raise CheckpointError(
                    f"{file} is missing. Restore it from a copy, or resume from another checkpoint."
                ) from None
            if size != record.nbytes:
                raise CheckpointError(
                    f"{file} has {size} bytes, and {record.nbytes} were written: something cut or changed it. Restore "
                    "it from a copy, or resume from another checkpoint."
                )
        self.aliases: Mapping[str, str] = self.manifest.aliases
        self.weights: Mapping[str, Spec] = {
            name: Spec(entry.shape, entry.dtype)
            for name in self.manifest.order
            if (entry := self.manifest.tensors.get(self._full(name))) is not None
        }

    @staticmethod
    def is_at(path: str) -> bool:
        """Whether there is a complete checkpoint at a path or URL."""
        if not is_url(path):
            return os.path.isfile(os.path.join(path, manifest.NAME))
        return bool(fsspec.core.url_to_fs(path)[0].exists(f"{path}/{manifest.NAME}"))

    def _full(self, name: str) -> str:
        return f"model.{self.aliases.get(name, name)}"

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """The Lightning checkpoint without weights and optimizer states; plain containers."""
        try:
            found: dict[str, Any] = torch.load(
                io.BytesIO(self.bytes_of("meta.pt")), map_location="cpu", weights_only=True
            )
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}/meta.pt cannot be read: {error}") from None
        return found

    @cached_property
    def optimizers(self) -> Sequence[SavedOptimizer]:
        """Their states and settings, by name of the parameter."""
        packed = self.meta.get("lt_zero", {}).get("optimizers", [])
        known = [{name for group in saved["param_groups"] for name in group["params"]} for saved in packed]
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for name, entry in self.manifest.tensors.items():
            if name.startswith("optimizer_"):
                number = int(name.split(".", 1)[0].removeprefix("optimizer_"))
                rest = name.split(".", 2)[2]  # parameter and key, either of which may have dots
                dots = [i for i, letter in enumerate(rest) if letter == "."]
                at = next((i for i in reversed(dots) if rest[:i] in known[number]), dots[-1])
                parameter, key = rest[:at], rest[at + 1 :]
                found.setdefault(number, {}).setdefault(parameter, {})[key] = Spec(entry.shape, entry.dtype)
        merged = []
        for number, saved in enumerate(packed):
            own = found.get(number, {})
            names = [name for group in saved["param_groups"] for name in group["params"]]
            state = {n: {**own.get(n, {}), **saved["state"].get(n, {})} for n in names}
            merged.append(SavedOptimizer(saved["param_groups"], {n: s for n, s in state.items() if s}))
        return merged

    def objects(self) -> dict[Any, Any]:
        """The values without a plain form, by their path in ``meta``. Unpickles: only for a trusted checkpoint."""
        if "objects.pkl" not in self.manifest.files:
            return {}
        found: dict[Any, Any] = pickle.loads(self.bytes_of("objects.pkl"))
        return found

    def read(self, name: str) -> Tensor:
        """A weight, whole, in its saved dtype."""
        return self._whole(self._full(name))

    def read_range(self, name: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a weight in row-major order (1D)."""
        return self.elements(self._full(name), lo, hi)

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """An element-wise state of a parameter, whole."""
        return self._whole(f"optimizer_{optimizer}.state.{name}.{key}")

    def read_state_range(self, optimizer: int, name: str, key: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of an element-wise state in row-major order (1D)."""
        return self.elements(f"optimizer_{optimizer}.state.{name}.{key}", lo, hi)

    def _whole(self, full: str) -> Tensor:
        entry = self.manifest.tensors[full]
        return self.elements(full, 0, entry.numel).view(entry.shape)

    def elements(self, full: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) (1D) of a tensor by its full name.

        Raises:
            CheckpointError: a file is damaged.
        """
        entry = self.manifest.tensors[full]
        out = torch.empty(max(0, hi - lo), dtype=entry.dtype)
        if hi <= lo:
            return out
        wanted = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes(entry.shape, lo, hi)]
        saved = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        saved_form = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), saved)
        items = create_read_items_for_chunk_list(full, saved_form, wanted)
        pairs = [(entry.chunks[item.storage_index.index or 0], item) for item in items]
        covered = 0
        for chunk, item in sorted(pairs, key=lambda pair: pair[0].start):
            box = wanted[item.dest_index.index or 0]
            first = flat_index(entry.shape, tuple(box.offsets)) - lo
            target = out[first : first + math.prod(box.sizes)].view(box.sizes)
            for axis, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(axis, offset, length)
            self._read_box(chunk, tuple(item.storage_offsets), tuple(item.lengths), target)
            covered += target.numel()
        if covered != hi - lo:
            raise CheckpointError(f"{self.path}: {full} lacks {hi - lo - covered} of elements {lo} to {hi}.")
        return out

    def _read_box(self, chunk: Chunk, offsets: tuple[int, ...], sizes: tuple[int, ...], out: Tensor) -> None:
        """Fill ``out`` (of ``sizes``) from a rectangle of a chunk."""
        size = out.element_size()
        first = flat_index(chunk.sizes, offsets)
        last = flat_index(chunk.sizes, tuple(o + s - 1 for o, s in zip(offsets, sizes, strict=True)))
        start, count = chunk.start + first * size, last + 1 - first
        if out.is_contiguous() and count == out.numel():
            self._blocks.read(chunk.file, start, out.view(-1).view(torch.uint8))
            return
        rows = torch.empty(count, dtype=out.dtype)
        self._blocks.read(chunk.file, start, rows.view(torch.uint8))
        strides = [math.prod(chunk.sizes[axis + 1 :]) for axis in range(len(chunk.sizes))]
        out.copy_(rows.as_strided(sizes, strides))

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
