"""Files of weights, and folders of them: Lightning's ``.ckpt``, flat state dicts of ``torch.save``, safetensors.

Note [Optimizer states with numbers]
    torch numbers the parameters of an optimizer in the order of its groups. A state dict does not tell that order, nor
    which of its entries are parameters, so the numbers are translated only if the file itself has the names: groups
    with ``param_names`` (torch writes them if the optimizer was made of ``named_parameters()``), or with names in
    ``params``. Otherwise there are no optimizers, and a note.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lt_zero.checkpoint.formats.reading import Plain, damage, has_checksums, load, mapping, prefix_of, spec_of, ties
from lt_zero.checkpoint.source import SavedOptimizer, Spec
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


class FileSource:
    """A ``.ckpt``, ``.pt``, ``.pth``, ``.bin`` or ``.safetensors`` file. A ``Foreign``.

    ``prefix``: what wrappers have put before all names; default: detected.
    """

    def __init__(self, path: str | os.PathLike[str], inert: Collection[str] = (), prefix: str | None = None) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self.meta: Mapping[str, Any] = {}
        self.optimizers: tuple[SavedOptimizer, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._states: list[dict[str, dict[str, Any]]] = []
        self._ties: dict[str, str] = {}
        self._given = prefix
        self._safe = self.path.suffix == ".safetensors"
        with damage(self.path):
            specs = self._open_safetensors() if self._safe else self._open_torch(inert)
        self._prefix = self._prefix_of(specs)
        self._ties |= ties(self._tensors)
        specs |= {tied: specs[first] for tied, first in self._ties.items()}
        self.weights: Mapping[str, Spec] = {name.removeprefix(self._prefix): spec for name, spec in specs.items()}
        self.aliases: Mapping[str, str] = {
            tied.removeprefix(self._prefix): first.removeprefix(self._prefix) for tied, first in self._ties.items()
        }

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

    def read(self, name: str) -> Tensor:
        if name not in self.weights:
            raise CheckpointError(f"{self.path} has no parameter or buffer {name!r}.")
        raw = self._prefix + self.aliases.get(name, name)
        if not self._safe:
            return self._tensors[raw].detach().contiguous()
        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(raw)
                return tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} is damaged at {name!r}: {error}. Take another checkpoint.") from error

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        known = 0 <= optimizer < len(self._states)
        value = self._states[optimizer].get(name, {}).get(key) if known else None
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{self.path} has no state {key!r} of {name!r} in optimizer {optimizer}.")
        return value.detach().contiguous()

    def verify(self) -> list[str]:
        checked = not self._safe and has_checksums(self.path)
        return [] if checked else [str(self.path)]

    def _prefix_of(self, names: Iterable[str]) -> str:
        return self._given if self._given is not None else prefix_of(names, self.meta)

    def _open_safetensors(self) -> dict[str, Spec]:
        try:
            with safe_open(self.path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                # safetensors' save_model writes one of the tied names, and the others here.
                told = (file.metadata() or {}).items()
                self._ties = {tied: first for tied, first in told if first in slices and tied not in slices}
                return {
                    name: Spec(tuple(part.get_shape()), SAFETENSORS[part.get_dtype()]) for name, part in slices.items()
                }
        except KeyError as error:
            raise CheckpointError(f"{self.path} has tensors of the dtype {error}, which is not supported.") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error}. Take another checkpoint.") from error

    def _open_torch(self, inert: Collection[str]) -> dict[str, Spec]:
        content = mapping(load(self.path, inert=inert), "state dict", self.path)
        if isinstance(content.get("state_dict"), dict):
            rest = {k: v for k, v in content.items() if k not in ("state_dict", "optimizer_states")}
            self.meta = Plain(self.path, self.notes).of(rest)
            weights = content["state_dict"]
        else:
            weights, content = content, {}
        self._tensors = {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}
        left = [str(name) for name in weights if not isinstance(weights[name], Tensor)]
        if not self._tensors:
            raise CheckpointError(f"{self.path} has no tensors at its top or under `state_dict`: it is no state dict.")
        if left:
            self.notes.append(f"Entries of {self.path} that are no tensors were left out: {', '.join(left[:10])}.")
        self._prefix = self._prefix_of(self._tensors)
        states = content.get("optimizer_states") or []
        if isinstance(states, list) and states:
            found = [self._optimizer(state) for state in states]
            if all(found):
                self.optimizers = tuple(saved for saved in found if saved is not None)
            else:
                self._states = []
                self.notes.append(
                    f"The optimizer states of {self.path} are keyed by number, and nothing in it tells which parameter "
                    "a number stands for: they were left out. Save from an optimizer of named_parameters() for that."
                )
        return {name: spec_of(tensor) for name, tensor in self._tensors.items()}

    def _optimizer(self, state: Any) -> SavedOptimizer | None:
        """See Note [Optimizer states with numbers]."""
        if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
            return None
        names: dict[Any, str] = {}
        groups = []
        for group in state["param_groups"]:
            numbers = group.get("params", ()) if isinstance(group, dict) else ()
            own = group.get("param_names", numbers) if isinstance(group, dict) else ()
            if not isinstance(own, list) or len(own) != len(numbers) or not all(isinstance(n, str) for n in own):
                return None
            own = [name.removeprefix(self._prefix) for name in own]
            names |= dict(zip(numbers, own, strict=True))
            rest = {key: value for key, value in group.items() if key != "param_names"}
            groups.append({**Plain(self.path, self.notes).of(rest), "params": own})
        plain = Plain(self.path, self.notes)
        entries: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for number, found in mapping(state.get("state"), "optimizer state", self.path).items():
            name = names.get(number)
            weight = self._tensors.get(self._prefix + name) if name is not None else None
            if name is None or weight is None:
                return None
            tensors[name] = mapping(found, "optimizer state", self.path)
            entries[name] = {
                key: spec_of(value)
                if isinstance(value, Tensor) and value.shape == weight.shape and key != "step"
                else plain.of(value)
                for key, value in found.items()
            }
        self._states.append(tensors)
        return SavedOptimizer(groups, entries)


_SINGLE = ("model.safetensors", "pytorch_model.bin")  # in this order, as Hugging Face's tools look for them
_NAMES = [name for single in _SINGLE for name in (single, f"{single}.index.json")]


class ShardsSource:
    """A folder of weights in Hugging Face's layout: one file, or several and an index. A ``Foreign``."""

    def __init__(self, path: str | os.PathLike[str], inert: Collection[str] = ()) -> None:
        self.folder = Path(path)
        self.notes: list[str] = []
        self.meta: Mapping[str, Any] = {}
        self.optimizers: tuple[SavedOptimizer, ...] = ()
        places = self._places()
        # A file's own names may all begin alike by chance, so prefixes are looked for in all files together.
        self._files = {name: FileSource(self.folder / name, inert, prefix="") for name in dict.fromkeys(places)}
        self._file_of = {name: file for file, names in places.items() for name in names or self._files[file].weights}
        for name, file in self._file_of.items():
            if name not in self._files[file].weights:
                raise CheckpointError(f"{self.folder / file} has no {name!r}, which the index says: take another copy.")
        for file, source in self._files.items():
            self.notes += source.notes
            self._file_of |= {tied: file for tied in source.aliases if tied not in self._file_of}
        self._prefix = prefix_of(self._file_of, {})
        self.weights: Mapping[str, Spec] = {
            name.removeprefix(self._prefix): self._files[file].weights[name] for name, file in self._file_of.items()
        }
        self.aliases: Mapping[str, str] = {
            tied.removeprefix(self._prefix): first.removeprefix(self._prefix)
            for file, source in self._files.items()
            for tied, first in source.aliases.items()
            if self._file_of[tied] == file == self._file_of.get(first)
        }

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is such a folder; says nothing about whether it is complete."""
        return any(Path(path, name).is_file() for name in _NAMES)

    def read(self, name: str) -> Tensor:
        file = self._file_of.get(self._prefix + name)
        if file is None:
            raise CheckpointError(f"{self.folder} has no parameter or buffer {name!r}.")
        return self._files[file].read(self._prefix + name)

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        raise CheckpointError(f"{self.folder} has no optimizer states.")

    def verify(self) -> list[str]:
        return [unchecked for source in self._files.values() for unchecked in source.verify()]

    def _places(self) -> dict[str, list[str]]:
        """Names of tensors by file; none: all that it has."""
        found = next(name for name in _NAMES if (self.folder / name).is_file())
        if found in _SINGLE:
            return {found: []}
        index = self.folder / found
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
