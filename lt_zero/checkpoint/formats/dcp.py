"""Folders of torch.distributed.checkpoint (DCP): of FSDPStrategy, ModelParallelStrategy, and programs of one's own.

Note [What a DCP folder holds]
    ``.metadata`` is a pickle: the shape of each entry, the boxes that it is cut into, and the bytes of each box in a
    file. These bytes are a file of ``torch.save`` by themselves, as are entries that are no tensors. The pickle and the
    boxes are read as data; DCP's own reader unpickles ``.metadata``, and so runs any code in it. ``planner_data`` has
    the path of each entry in the nested state: ``("optimizer_0", "state", <parameter>, "exp_avg")``. Lightning puts the
    rest of its checkpoint into ``meta.pt``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved, damage, mapping
from lt_zero.checkpoint.formats.reading import Stub, load, load_metadata
from lt_zero.checkpoint.source import Spec
from lt_zero.common.boxes import Box, check_cover
from lt_zero.common.errors import CheckpointError

_OPTIMIZER = re.compile(r"optim(?:izer)?(?:_(\d+))?")
_FLAT = re.compile(r"(state|param_groups)\.(.+)\.(\w+)")  # a key of a flattened optimizer
_MODELS = ("state_dict", "model")  # ModelParallelStrategy, FSDPStrategy

_Keys = tuple[Any, ...]  # the path of an entry in the nested state
_Bytes = tuple[Path, int, int]  # a file, and where the part in it begins and ends
_Part = tuple[Box, _Bytes]


class DcpSource(ForeignSource):
    """A sharded checkpoint of Lightning, by the folder with ``.metadata``."""

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """True if ``path`` is a folder of DCP; says nothing about whether it is complete."""
        return Path(path, ".metadata").is_file()

    def _open(self) -> None:
        self._file = self.path / ".metadata"
        self.parts.append((self._file, 0, None))
        with damage(self._file):
            entries = _unwrapped(self._entries(load_metadata(self._file)))
        meta = self.path / "meta.pt"
        if meta.is_file():
            self.meta = self.plain(self.load_file(meta, "checkpoint"), meta)
        model = next((root for root in _MODELS if any(keys[0] == root for keys in entries)), None)
        weights = {
            keys: entry
            for keys, entry in entries.items()
            if isinstance(entry, Saved) and (keys[0] == model if model else not _OPTIMIZER.fullmatch(str(keys[0])))
        }
        names = self._joined(weights, 1 if model else 0)
        # DCP writes a tied tensor under each of its names.
        self._set_weights({names[keys]: entry for keys, entry in weights.items()}, {})
        roots = {str(keys[0]) for keys in entries if _OPTIMIZER.fullmatch(str(keys[0]))}
        for root in sorted(roots, key=lambda root: (len(root), root)):
            self._optimizer({keys[1:]: entry for keys, entry in entries.items() if keys[0] == root}, root)
        for keys, entry in entries.items():
            if keys[0] not in roots and not (isinstance(entry, Saved) and model in (None, keys[0])):
                self._leave_out(keys)

    def _entries(self, metadata: Any) -> dict[_Keys, Saved | _Bytes]:
        """The entries by path: a tensor, or the part of a file with another value."""
        if not isinstance(metadata, Stub) or not metadata.kind.endswith(".Metadata"):
            raise ValueError("it does not hold the metadata of a checkpoint")
        places: dict[tuple[str, Any], _Bytes] = {}
        for index, info in mapping(metadata.get("storage_data"), "storage_data", self._file).items():
            if info.get("transform_descriptors"):
                raise CheckpointError(f"{self._file}: the files are compressed, which is not supported.")
            name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if not isinstance(name, str) or Path(name).name != name or not _counts((start, length)):
                raise ValueError(f"it names the file {name!r}, bytes {start} and {length} more")
            offset = index.get("offset")  # missing for what is no tensor
            place = self.path / name, start, start + length
            places[str(index.get("fqn")), None if offset is None else _counts(offset)] = place
        paths = metadata.get("planner_data") or {}
        entries: dict[_Keys, Saved | _Bytes] = {}
        for fqn, entry in mapping(metadata.get("state_dict_metadata"), "state_dict_metadata", self._file).items():
            keys = paths.get(fqn, (fqn,))
            if not isinstance(keys, tuple) or not keys or not all(isinstance(key, (str, int)) for key in keys):
                raise ValueError(f"{fqn} has the path {keys!r}")
            if keys in entries:
                raise ValueError(f"{fqn} and another entry have the path {keys!r}")
            if entry.kind.endswith(".BytesStorageMetadata"):
                entries[keys] = places[fqn, None]
                self.parts.append(places[fqn, None])
                continue
            spec = Spec(_counts(entry.get("size")), _dtype(entry.get("properties")))
            boxes = [Box(_counts(box.get("offsets")), _counts(box.get("sizes"))) for box in entry.get("chunks")]
            check_cover(fqn, spec.shape, boxes)
            parts = [(box, places[fqn, box.offsets]) for box in boxes]
            if math.prod(spec.shape) * spec.dtype.itemsize > sum(stop - start for _, (_, start, stop) in parts):
                raise ValueError(f"{fqn} of shape {spec.shape} has less bytes than that")
            self.parts += [part for _, part in parts]
            entries[keys] = Saved(spec, partial(self._tensor, spec, parts, fqn))
        return entries

    def _joined(self, paths: Iterable[_Keys], first: int = 0) -> dict[_Keys, str]:
        """The name of each path, joined from its keys from number ``first`` on.

        Raises:
            CheckpointError: two have the same name: one entry would replace the other.
        """
        names: dict[_Keys, str] = {}
        known: dict[str, _Keys] = {}
        for keys in paths:
            name = names[keys] = ".".join(map(str, keys[first:]))
            if (other := known.setdefault(name, keys)) is not keys:
                raise CheckpointError(
                    f"{self._file} has entries with the paths {other!r} and {keys!r}, which both are named {name!r}: "
                    "one would replace the other. Load the folder with torch.distributed.checkpoint, and save it with "
                    "another key for one of them."
                )
        return names

    def _leave_out(self, keys: _Keys) -> None:
        self.notes.append(f"{'.'.join(map(str, keys))} of {self.path} was left out.")

    def _optimizer(self, saved: dict[_Keys, Saved | _Bytes], root: str) -> None:
        """Publish an optimizer. ``saved``: its entries, by their paths under the key ``root``."""
        groups: dict[Any, dict[str, Any]] = {}
        state: dict[str, dict[str, Any]] = {}
        settings: dict[str, dict[str, Any]] = {}  # of a flattened optimizer, by parameter
        self._joined(saved)
        for keys, entry in saved.items():
            flat = _FLAT.fullmatch(str(keys[0])) if len(keys) == 1 else None
            kind, of, key = flat.groups() if flat else keys if len(keys) == 3 else (None, None, None)
            if kind not in ("param_groups", "state"):
                self._leave_out((root, *keys))
                continue
            name = self._named(of)
            if kind == "state" and isinstance(entry, Saved) and self._is_elementwise(name, str(key), entry.spec.shape):
                state.setdefault(name, {})[str(key)] = entry
                continue
            value = entry.read() if isinstance(entry, Saved) else load(*entry, self._inert)
            rows: dict[Any, dict[str, Any]] = state if kind == "state" else settings if flat else groups
            row = rows.setdefault(of if rows is groups else name, {})
            row[str(key)] = self.plain(value, self.path, ".".join(map(str, (root, *keys))))
        found = [groups[number] for number in sorted(groups)]
        for group in found:
            group["params"] = [self._named(name) for name in group.get("params", ())]
        for name in (name for name in self.weights if name in settings):
            own = {**settings[name], "params": None}
            group = next((group for group in found if {**group, "params": None} == own), {})
            if not group:
                found.append(group := {**own, "params": []})
            group["params"].append(name)
        self._add_optimizer(found, state)

    def _tensor(self, spec: Spec, parts: list[_Part], fqn: str) -> Tensor:
        result = torch.empty(spec.shape, dtype=spec.dtype)
        for box, part in parts:
            values = load(*part, self._inert)
            if not isinstance(values, Tensor) or tuple(values.shape) != box.sizes or values.dtype != spec.dtype:
                raise CheckpointError(
                    f"{part[0]} does not hold the part of {fqn} that .metadata says: the files of the folder do not "
                    "belong together. Take another checkpoint."
                )
            if box.sizes == spec.shape:
                return values
            box.of(result).copy_(values.detach())
        return result


def _unwrapped(entries: dict[_Keys, Saved | _Bytes]) -> dict[_Keys, Saved | _Bytes]:
    """Entries without a key that is around weights and optimizers. See Note [Programs of one's own]."""
    firsts = {keys[0] for keys in entries}
    inner = {str(keys[1]) for keys in entries if len(keys) > 1}
    if (
        len(firsts) == 1
        and "model" in inner
        and any(map(_OPTIMIZER.fullmatch, inner))
        and all(len(keys) > 1 for keys in entries)
    ):
        return {keys[1:]: entry for keys, entry in entries.items()}
    return entries


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise ValueError(f"it has the size or offset {value!r}")
    return value


def _dtype(properties: Any) -> torch.dtype:
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has the dtype {dtype!r}")
    return dtype
