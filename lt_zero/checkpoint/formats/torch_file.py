"""Files of weights, and folders of them: Lightning's ``.ckpt``, flat state dicts of ``torch.save``, safetensors.

Note [Optimizer states with numbers]
    torch numbers the parameters of an optimizer in the order of its groups. A state dict does not tell that order, nor
    which of its entries are parameters, so the numbers are translated only if the file itself has the names: groups
    with ``param_names`` (torch writes them if the optimizer was made of ``named_parameters()``), or with names in
    ``params``. Otherwise there are no optimizers, and a note.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Plain, Saved, mapping, ties
from lt_zero.checkpoint.formats.reading import load
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class FileSource(ForeignSource):
    """A ``.ckpt``, ``.pt``, ``.pth``, ``.bin`` or ``.safetensors`` file."""

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is a file with such a name or beginning."""
        file = Path(path)
        if not file.is_file():
            return False
        if file.suffix == ".safetensors":
            return True
        with file.open("rb") as stream:
            return stream.read(4) in (b"PK\x03\x04", b"\x80\x02\x8a\x0a")

    def _open(self) -> None:
        tensors, tied, content = self._read_file(self.path)
        rest = {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}
        self.meta = Plain(self.path, self.notes).of(rest)
        self._set_weights(tensors, tied)
        states = content.get("optimizer_states")
        if not isinstance(states, list) or not states:
            return
        found = [self._optimizer(state) for state in states]
        for saved in found:
            if saved is not None and None not in found:
                self._add_optimizer(*saved)
        if None in found:
            self.notes.append(
                f"The optimizer states of {self.path} are keyed by number, and nothing in it tells which parameter a "
                "number stands for: they were left out. Save from an optimizer of named_parameters() for that."
            )

    def _read_file(self, path: Path) -> tuple[dict[str, Saved], dict[str, str], dict[Any, Any]]:
        """Tensors by name, including tied ones; tied name -> the name that it shares; the content of a ``.ckpt``."""
        self._parts.append((path, 0, None))
        if path.suffix == ".safetensors":
            return *_read_safetensors(path), {}
        content = mapping(load(path, inert=self._inert), "state dict", path)
        is_checkpoint = isinstance(content.get("state_dict"), dict)
        weights = content["state_dict"] if is_checkpoint else content
        tensors = {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}
        left = [str(name) for name in weights if not isinstance(weights[name], Tensor)]
        if not tensors:
            raise CheckpointError(f"{path} has no tensors at its top or under `state_dict`: it is no state dict.")
        if left:
            self.notes.append(f"Entries of {path} that are no tensors were left out: {', '.join(left[:10])}.")
        saved = {name: Saved.of(tensor) for name, tensor in tensors.items()}
        return saved, ties(tensors), content if is_checkpoint else {}

    def _optimizer(self, state: Any) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]] | None:
        """Groups and entries by name, or None. See Note [Optimizer states with numbers]."""
        if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
            return None
        plain = Plain(self.path, self.notes)
        names: dict[Any, str] = {}
        groups = []
        for group in state["param_groups"]:
            numbers = group.get("params", ()) if isinstance(group, dict) else ()
            own = group.get("param_names", numbers) if isinstance(group, dict) else ()
            if not isinstance(own, list) or len(own) != len(numbers) or not all(isinstance(n, str) for n in own):
                return None
            own = [self._named(name) for name in own]
            names |= dict(zip(numbers, own, strict=True))
            rest = {key: value for key, value in group.items() if key != "param_names"}
            groups.append({**plain.of(rest), "params": own})
        entries: dict[str, dict[str, Any]] = {}
        for number, found in mapping(state.get("state"), "optimizer state", self.path).items():
            name = names.get(number)
            if name is None or name not in self.weights:
                return None
            entries[name] = {
                key: Saved.of(value)
                if isinstance(value, Tensor) and self._is_elementwise(name, key, tuple(value.shape))
                else plain.of(value)
                for key, value in mapping(found, "optimizer state", self.path).items()
            }
        return groups, entries


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Take another checkpoint.") from error


def _read_tensor(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _read_safetensors(path: Path) -> tuple[dict[str, Saved], dict[str, str]]:
    with _opened(path) as file:
        tensors: dict[str, Saved] = {}
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            dtype = SAFETENSORS.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{path} has {name!r} of dtype {part.get_dtype()}, which is not supported.")
            tensors[name] = Saved(Spec(tuple(part.get_shape()), dtype), partial(_read_tensor, path, name))
        # The library's save_model writes one of the tied names, and the others into the metadata.
        metadata = (file.metadata() or {}).items()
    tied = {name: first for name, first in metadata if first in tensors and name not in tensors}
    return tensors | {name: tensors[first] for name, first in tied.items()}, tied


_SINGLE = ("model.safetensors", "pytorch_model.bin")  # in this order, as Hugging Face's tools look for them
_NAMES = [name for single in _SINGLE for name in (single, f"{single}.index.json")]


class ShardsSource(FileSource):
    """A folder of weights in Hugging Face's layout: one file, or several and an index."""

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is such a folder; says nothing about whether it is complete."""
        return any(Path(path, name).is_file() for name in _NAMES)

    def _open(self) -> None:
        places = self._places()
        files = {file: self._read_file(self.path / file) for file in places}
        file_of = {name: file for file, names in places.items() for name in names or files[file][0]}
        for name, file in file_of.items():
            if name not in files[file][0]:
                raise CheckpointError(f"{self.path / file} has no {name!r}, which the index says: take another copy.")
        for file, (_, tied, _) in files.items():
            file_of |= {name: file for name in tied if name not in file_of}
        shared = {
            name: first
            for file, (_, tied, _) in files.items()
            for name, first in tied.items()
            if file_of[name] == file == file_of.get(first)
        }
        self._set_weights({name: files[file][0][name] for name, file in file_of.items()}, shared)

    def _places(self) -> dict[str, list[str]]:
        """Names of tensors by file; none: all that it has."""
        found = next(name for name in _NAMES if (self.path / name).is_file())
        if found in _SINGLE:
            return {found: []}
        index = self.path / found
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{index} is damaged: {error}. Take another copy.") from error
        names = mapping(mapping(content, "index", index).get("weight_map"), "weight_map", index)
        places: dict[str, list[str]] = {}
        for name, file in names.items():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise CheckpointError(f"{index} says that {name!r} is in {file!r}, which is no file beside it.")
            places.setdefault(file, []).append(name)
        if not places:
            raise CheckpointError(f"{index} names no tensors. Take another copy.")
        return places
