"""Folders of Hugging Face's layout: weights in one file or several, and an index that tells which."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lt_zero.checkpoint.formats.foreign import mapping, prefix_of
from lt_zero.checkpoint.formats.torch_file import FileSource
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError

_SINGLE = ("model.safetensors", "pytorch_model.bin")  # in this order, as Hugging Face's tools look for them
_NAMES = [name for single in _SINGLE for name in (single, f"{single}.index.json")]


class ShardsSource:
    """A folder of weights as a ``Source``.

    Args:
        path: the folder.
        inert: names of classes whose objects in the files are skipped instead of refused.

    Attributes:
        notes: what could not be taken over, one sentence each.

    Raises:
        CheckpointError: the index or a file is missing or damaged; names it.
    """

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
        """See ``Source``."""
        file = self._file_of.get(self._prefix + name)
        if file is None:
            raise CheckpointError(f"{self.folder} has no parameter or buffer {name!r}.")
        return self._files[file].read(self._prefix + name)

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """See ``Source``."""
        raise CheckpointError(f"{self.folder} has no optimizer states.")

    def verify(self) -> list[str]:
        """See ``Foreign``."""
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
