"""Folders that torch.distributed.checkpoint (DCP) wrote for Lightning's FSDPStrategy and ModelParallelStrategy.

Note [What a DCP folder holds]
    ``.metadata`` is a pickle: for each entry its shape, and the boxes that it is cut into; for each box the file and
    the bytes of it, which are a file of ``torch.save`` by themselves (as are entries that are no tensors). It is read
    as data, and so are the boxes: DCP's own reader unpickles ``.metadata`` with all that it may call. ``planner_data``
    tells the path of each entry in the nested state: ``("optimizer_0", "state", <parameter>, "exp_avg")``. Lightning
    puts the rest of its checkpoint into ``meta.pt``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.reading import (
    Plain,
    Stub,
    damage,
    has_checksums,
    load,
    load_metadata,
    mapping,
    prefix_of,
)
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError

_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?")
_MODELS = ("state_dict", "model")  # ModelParallelStrategy, FSDPStrategy


@dataclass(frozen=True)
class _Bytes:
    """A part of a file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class _Entry:
    """A tensor, or a value (``spec`` is None)."""

    spec: Spec | None
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], _Bytes], ...]  # offsets, sizes, where


class DcpSource:
    """A sharded checkpoint of Lightning, by the folder with ``.metadata``. A ``Foreign``."""

    def __init__(self, path: str | os.PathLike[str], inert: Collection[str] = ()) -> None:
        self.folder = Path(path)
        self.notes: list[str] = []
        self._inert = inert
        self._states: list[dict[str, dict[str, _Entry]]] = []
        self._file = self.folder / ".metadata"
        metadata = load_metadata(self._file)
        with damage(self._file):
            self._entries = self._understood(metadata)
        meta = self.folder / "meta.pt"
        plain = Plain(meta, self.notes)
        found = mapping(load(meta, inert=inert), "checkpoint", meta) if meta.is_file() else {}
        self.meta: Mapping[str, Any] = plain.of(found)
        with damage(self.folder):
            self._sort_out()

    def _sort_out(self) -> None:
        """Which entries are weights, and which are whose states."""
        model = next((root for root in _MODELS if any(keys[0] == root for keys in self._entries)), None)
        self._weights = {
            ".".join(map(str, keys[1:] if model else keys)): entry
            for keys, entry in self._entries.items()
            if (keys[0] == model if model else not _OPTIMIZER.fullmatch(str(keys[0])))
        }
        self._prefix = prefix_of(self._weights, self.meta)
        self.weights: Mapping[str, Spec] = {
            name.removeprefix(self._prefix): entry.spec
            for name, entry in self._weights.items()
            if entry.spec is not None
        }
        self.aliases: Mapping[str, str] = {}  # DCP writes a tied tensor under each of its names
        roots = {str(keys[0]) for keys in self._entries if _OPTIMIZER.fullmatch(str(keys[0]))}
        self.optimizers = tuple(self._optimizer(root) for root in sorted(roots, key=lambda r: (len(r), r)))

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is a folder of DCP; says nothing about whether it is complete."""
        return Path(path, ".metadata").is_file()

    def read(self, name: str) -> Tensor:
        entry = self._weights.get(self._prefix + name)
        if entry is None or entry.spec is None:
            raise CheckpointError(f"{self.folder} has no parameter or buffer {name!r}.")
        return self._tensor(entry, entry.spec, name)

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        known = 0 <= optimizer < len(self._states)
        entry = self._states[optimizer].get(name, {}).get(key) if known else None
        if entry is None or entry.spec is None:
            raise CheckpointError(f"{self.folder} has no state {key!r} of {name!r} in optimizer {optimizer}.")
        return self._tensor(entry, entry.spec, f"{name}, {key}")

    def verify(self) -> list[str]:
        parts = {part for entry in self._entries.values() for *_, part in entry.boxes}
        meta = self.folder / "meta.pt"
        whole = {_Bytes(meta, 0, meta.stat().st_size)} if meta.is_file() else set()
        unchecked = {self._file}  # a bare pickle
        for part in sorted(parts | whole, key=lambda part: (part.path, part.start)):
            if not has_checksums(part.path, part.start, part.stop):
                unchecked.add(part.path)
        return sorted(map(str, unchecked))

    # ---- metadata ----------------------------------------------------------------------------------------------

    def _understood(self, metadata: Any) -> dict[tuple[Any, ...], _Entry]:
        if not isinstance(metadata, Stub) or not metadata.kind.endswith(".Metadata"):
            raise ValueError("it does not hold the metadata of a checkpoint")
        places: dict[tuple[str, Any], _Bytes] = {}
        for index, info in mapping(metadata.get("storage_data"), "storage_data", self._file).items():
            if info.get("transform_descriptors"):
                raise CheckpointError(f"{self._file}: the files are compressed, which is not supported.")
            # ``offset`` is missing for what is no tensor.
            offset = index.get("offset")
            places[str(index.get("fqn")), None if offset is None else _counts(offset)] = self._bytes(info)
        paths = metadata.get("planner_data") or {}
        entries: dict[tuple[Any, ...], _Entry] = {}
        for fqn, entry in mapping(metadata.get("state_dict_metadata"), "state_dict_metadata", self._file).items():
            keys = paths.get(fqn, (fqn,))
            if not isinstance(keys, tuple) or not keys or not all(isinstance(key, (str, int)) for key in keys):
                raise ValueError(f"{fqn} has the path {keys!r}")
            if entry.kind.endswith(".BytesStorageMetadata"):
                entries[keys] = _Entry(None, (((), (), places[fqn, None]),))
                continue
            spec = Spec(_counts(entry.get("size")), _dtype(entry.get("properties")))
            boxes = [(_counts(box.get("offsets")), _counts(box.get("sizes"))) for box in entry.get("chunks")]
            _check_boxes(fqn, spec, boxes)
            parts = tuple((low, sizes, places[fqn, low]) for low, sizes in boxes)
            if math.prod(spec.shape) * spec.dtype.itemsize > sum(part.stop - part.start for *_, part in parts):
                raise ValueError(f"{fqn} of shape {spec.shape} has less bytes than that")
            entries[keys] = _Entry(spec, parts)
        return entries

    def _bytes(self, info: Stub) -> _Bytes:
        name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or Path(name).name != name or not _counts((start, length)):
            raise ValueError(f"it names the file {name!r}, bytes {start} and {length} more")
        return _Bytes(self.folder / name, start, start + length)

    # ---- optimizers --------------------------------------------------------------------------------------------

    def _optimizer(self, root: str) -> SavedOptimizer:
        plain = Plain(self.folder, self.notes)
        groups: dict[Any, dict[str, Any]] = {}
        state: dict[str, dict[str, Any]] = {}
        entries: dict[str, dict[str, _Entry]] = {}
        for keys, entry in self._entries.items():
            if keys[0] != root:
                continue
            if len(keys) == 4 and keys[1] == "param_groups":
                groups.setdefault(keys[2], {})[str(keys[3])] = plain.of(self._value(entry), ".".join(map(str, keys)))
            elif len(keys) == 4 and keys[1] == "state":
                name, key = str(keys[2]).removeprefix(self._prefix), str(keys[3])
                spec = entry.spec
                weight = self.weights.get(name)
                elementwise = spec is not None and weight is not None and spec.shape == weight.shape and key != "step"
                entries.setdefault(name, {})[key] = entry
                state.setdefault(name, {})[key] = spec if elementwise else plain.of(self._value(entry))
            else:
                self.notes.append(f"{'.'.join(map(str, keys))} of {self.folder} was left out.")
        rows = [groups[number] for number in sorted(groups)]
        for row in rows:
            row["params"] = [str(name).removeprefix(self._prefix) for name in row.get("params", ())]
        self._states.append(entries)
        return SavedOptimizer(rows, state)

    def _value(self, entry: _Entry) -> Any:
        """Of an entry that is small: a number, a list, or a tensor that is not element-wise."""
        if entry.spec is not None:
            return self._tensor(entry, entry.spec, "a state")
        ((_, _, part),) = entry.boxes
        return load(part.path, part.start, part.stop, self._inert)

    # ---- tensors -----------------------------------------------------------------------------------------------

    def _tensor(self, entry: _Entry, spec: Spec, what: str) -> Tensor:
        result = torch.empty(spec.shape, dtype=spec.dtype)
        for low, sizes, part in entry.boxes:
            values = load(part.path, part.start, part.stop, self._inert)
            if not isinstance(values, Tensor) or tuple(values.shape) != sizes or values.dtype != spec.dtype:
                raise CheckpointError(
                    f"{part.path} does not hold the part of {what} that .metadata says: the files of the folder do not "
                    "belong together. Take another checkpoint."
                )
            if sizes == spec.shape:
                return values.detach().contiguous()
            box = result
            for dimension, (start, size) in enumerate(zip(low, sizes, strict=True)):
                box = box.narrow(dimension, start, size)
            box.copy_(values.detach())
        return result


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise ValueError(f"it has the size or offset {value!r}")
    return value


def _dtype(properties: Any) -> torch.dtype:
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has the dtype {dtype!r}")
    return dtype


def _check_boxes(fqn: str, spec: Spec, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Boxes must lie inside, and have as many elements together as the tensor: nothing stays unwritten."""
    total = 0
    for low, sizes in boxes:
        inside = len(low) == len(sizes) == len(spec.shape)
        if not inside or any(a + n > size for a, n, size in zip(low, sizes, spec.shape, strict=True)):
            raise ValueError(f"{fqn} of shape {spec.shape} has a part of {sizes} at {low}")
        total += math.prod(sizes)
    ordered = sorted(boxes)
    for number, (low, sizes) in enumerate(ordered):
        for other, extent in ordered[number + 1 :]:
            if spec.shape and other[0] >= low[0] + sizes[0]:
                break  # sorted by the first dimension
            if all(a < b + m and b < a + n for a, n, b, m in zip(low, sizes, other, extent, strict=True)):
                raise ValueError(f"{fqn} has parts at {low} and {other} that overlap")
    if total != math.prod(spec.shape):
        raise ValueError(f"{fqn} of shape {spec.shape} has parts with {total} elements together")
