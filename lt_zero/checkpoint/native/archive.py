"""A checkpoint directory of ours, for reading: any part of any tensor, with every byte checked.

Which parts of which chunks make up what is asked for is torch.distributed.checkpoint's reckoning (resharding);
the bytes come from the manifest's places. Nothing is unpickled but ``meta.pt``, by torch, with weights only.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import fsspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lt_zero.checkpoint.native import manifest
from lt_zero.checkpoint.native.directory import is_url
from lt_zero.checkpoint.native.manifest import Chunk, Entry, Manifest
from lt_zero.checkpoint.native.pieces import boxes, flat_index
from lt_zero.checkpoint.native.plain import put_back
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.io.checked_file import BlockReader, FileRecord


class Archive:
    """An open checkpoint directory; a ``Source``.

    Args:
        path: the directory, or its URL.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing, cut short or damaged; names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs: Any = fsspec.core.url_to_fs(path)[0] if is_url(path) else None
        self._blocks = BlockReader(path, self._fs)
        try:
            text = self._text(manifest.NAME)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {manifest.NAME} cannot be read ({error}). It is written last; "
                "a kill while saving leaves none. Resume from another checkpoint."
            ) from None
        except UnicodeDecodeError:
            text = ""  # its checksum will not match
        self.manifest = Manifest.parse(text, f"{path}/{manifest.NAME}")
        self._blocks.files = self.manifest.files
        for name, record in self.manifest.files.items():
            self._check_size(name, record)
        tensors = self.manifest.tensors
        self.aliases: Mapping[str, str] = self.manifest.aliases
        self.weights: Mapping[str, Spec] = {
            name: Spec(entry.shape, entry.dtype)
            for name in self.manifest.order
            if (entry := tensors.get(f"model.{self.aliases.get(name, name)}")) is not None
        }
        self._meta: dict[str, Any] | None = None

    @staticmethod
    def is_at(path: str) -> bool:
        """Whether there is a complete checkpoint at a path or URL."""
        if not is_url(path):
            return os.path.isfile(os.path.join(path, manifest.NAME))
        return bool(fsspec.core.url_to_fs(path)[0].exists(f"{path}/{manifest.NAME}"))

    # ---- what it holds -----------------------------------------------------------------------------------------

    @property
    def meta(self) -> Mapping[str, Any]:
        """The Lightning checkpoint without weights and optimizer states; plain containers."""
        if self._meta is None:
            try:
                self._meta = torch.load(io.BytesIO(self.bytes_of("meta.pt")), map_location="cpu", weights_only=True)
            except (RuntimeError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{self.path}/meta.pt cannot be read: {error}") from None
        assert self._meta is not None
        return self._meta

    @cached_property
    def optimizers(self) -> Sequence[SavedOptimizer]:
        """Their states and settings, by name of the parameter."""
        packed = self.meta.get("lt_zero", {}).get("optimizers", [])
        known = [{name for group in saved["param_groups"] for name in group["params"]} for saved in packed]
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for name, entry in self.manifest.tensors.items():
            if name.startswith("optimizer_"):
                number = int(name.split(".", 1)[0].removeprefix("optimizer_"))
                parameter, key = split_state(name, known[number])
                state = found.setdefault(number, {}).setdefault(parameter, {})
                state[key] = Spec(entry.shape, entry.dtype)
        merged = []
        for number, saved in enumerate(packed):
            own = found.get(number, {})
            names = [name for group in saved["param_groups"] for name in group["params"]]
            state = {n: {**own.get(n, {}), **saved["state"].get(n, {})} for n in names}
            merged.append(SavedOptimizer(saved["param_groups"], {n: s for n, s in state.items() if s}))
        return merged

    def objects(self) -> dict[Any, Any]:
        """What had no plain form. Unpickles: only for a checkpoint that is trusted."""
        if "objects.pkl" not in self.manifest.files:
            return {}
        found: dict[Any, Any] = pickle.loads(self.bytes_of("objects.pkl"))
        return found

    def meta_with_objects(self) -> dict[str, Any]:
        """``meta`` with everything that has no plain form. Unpickles: only for a checkpoint that is trusted."""
        meta = dict(self.meta)
        put_back(meta, self.objects())
        return meta

    def left_out(self) -> list[tuple[Any, ...]]:
        """Where in ``meta`` something without a plain form was taken out."""
        return [tuple(path) for path in self.meta.get("lt_zero", {}).get("left_out", [])]

    # ---- values ------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """A weight, whole, in its saved dtype."""
        spec = self.weights[name]
        return self.read_range(name, 0, spec.numel).view(spec.shape)

    def read_range(self, name: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a weight in row-major order (1D)."""
        return self.elements(f"model.{self.aliases.get(name, name)}", lo, hi)

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """An element-wise state of a parameter, whole."""
        full = f"optimizer_{optimizer}.state.{name}.{key}"
        entry = self.manifest.tensors[full]
        return self.elements(full, 0, math.prod(entry.shape)).view(entry.shape)

    def read_state_range(self, optimizer: int, name: str, key: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of an element-wise state in row-major order (1D)."""
        return self.elements(f"optimizer_{optimizer}.state.{name}.{key}", lo, hi)

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
        items = create_read_items_for_chunk_list(full, _torch_form(entry), wanted)
        chunks = {chunk.offsets: chunk for chunk in entry.chunks}
        covered = 0
        for item in sorted(items, key=lambda item: chunks[tuple(item.storage_index.offset or ())].start):
            chunk = chunks[tuple(item.storage_index.offset or ())]
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
            self._blocks.read(
                chunk.file, start, out.view(-1).view(torch.uint8) if out.dim() else out.view(1).view(torch.uint8)
            )
            return
        rows = torch.empty(count, dtype=out.dtype)
        self._blocks.read(chunk.file, start, rows.view(torch.uint8))
        strides = [math.prod(chunk.sizes[axis + 1 :]) for axis in range(len(chunk.sizes))]
        out.copy_(rows.as_strided(sizes, strides))

    # ---- files -------------------------------------------------------------------------------------------------

    def bytes_of(self, name: str) -> bytes:
        """A whole file, checked."""
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{self.path} has no {name}.")
        out = torch.empty(record.nbytes, dtype=torch.uint8)
        self._blocks.read(name, 0, out)
        return out.numpy().tobytes()

    def verify(self, tick: Callable[[int], object] = lambda _: None) -> int:
        """Read every byte; how many there are. ``tick`` is told how many more were read.

        Raises:
            CheckpointError: one is not what was written; names its file.
        """
        for name in self.manifest.files:
            self._blocks.verify(name, tick)
        return sum(record.nbytes for record in self.manifest.files.values())

    def close(self) -> None:
        self._blocks.close()

    def _text(self, name: str) -> str:
        if self._fs is not None:
            data: bytes = self._fs.cat_file(f"{self.path}/{name}")
            return data.decode()
        with open(os.path.join(self.path, name), encoding="utf-8") as file:
            return file.read()

    def _check_size(self, name: str, record: FileRecord) -> None:
        path = f"{self.path}/{name}"
        try:
            size = os.stat(path).st_size if self._fs is None else self._fs.size(path)
        except OSError:
            raise CheckpointError(
                f"{path} is missing. Restore it from a copy, or resume from another checkpoint."
            ) from None
        if size != record.nbytes:
            raise CheckpointError(
                f"{path} has {size} bytes, and {record.nbytes} were written: something cut or changed it. Restore it "
                "from a copy, or resume from another checkpoint."
            )


def split_state(full: str, parameters: Collection[str]) -> tuple[str, str]:
    """Parameter and key of a full name; either may have dots."""
    _, _, rest = full.split(".", 2)
    dots = [i for i, letter in enumerate(rest) if letter == "."]
    at = next((i for i in reversed(dots) if rest[:i] in parameters), dots[-1])
    return rest[:at], rest[at + 1 :]


def _torch_form(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
