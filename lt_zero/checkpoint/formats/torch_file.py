"""Files of weights, and folders of them: Lightning's ``.ckpt``, flat state dicts of ``torch.save``, safetensors.

Note [Optimizer states with numbers]
    torch numbers the parameters of an optimizer in the order of its groups. A state dict does not tell that order, nor
    which of its entries are parameters, so the numbers are translated only if the file itself has the names: groups
    with ``param_names`` (torch writes them if the optimizer was made of ``named_parameters()``), or with names in
    ``params``. Otherwise there are no optimizers, and a note.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import ForeignSource, Saved, mapping, ties
from lt_zero.checkpoint.native.records import Record, identity_of
from lt_zero.checkpoint.native.saved_file import opened
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.regular_file import open_bytes, own_path, parse_json, read_json

_MOST_INDEX = 1 << 28  # bytes; a million tensors take a half
_NAMES = (  # in this order, as Hugging Face's tools look for them
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


class FileSource(ForeignSource):
    """A ``.ckpt``, ``.pt``, ``.pth``, ``.bin`` or ``.safetensors`` file; a folder of them in Hugging Face's layout."""

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """True if ``path`` is a file with such a name or beginning, or such a folder, which may be incomplete."""
        file = Path(path)
        if not file.is_file():
            return any((file / name).is_file() for name in _NAMES)
        if file.suffix == ".safetensors":
            return True
        with open_bytes(file) as stream:
            return stream.read(4) in (b"PK\x03\x04", b"\x80\x02\x8a\x0a")

    def _open(self) -> None:
        file = self.path
        if file.is_dir():
            file /= next(name for name in _NAMES if (file / name).is_file())
        tensors, content = self._read_index(file) if file.suffix == ".json" else self._read_file(file)
        rest = {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}
        self.meta = self.plain(rest, self.path)
        self._set_weights({name: Saved.of(tensor) for name, tensor in tensors.items()}, ties(tensors))
        states = content.get("optimizer_states")
        found = [self._optimizer(state) for state in states] if isinstance(states, list) else []
        if None in found:
            self.notes.append(
                f"The optimizer states of {self.path} are keyed by number, and nothing in it tells which parameter a "
                "number stands for: they were left out. Save from an optimizer of named_parameters() for that."
            )
            return
        for saved in found:
            if saved is not None:
                self._add_optimizer(*saved)

    def _read_file(self, path: Path) -> tuple[dict[str, Tensor], dict[Any, Any]]:
        """Tensors by name, mapped, so that their bytes are read when they are used; and the content of a ``.ckpt``."""
        if path.suffix == ".safetensors":
            tensors, metadata = self._read_safetensors(path)
            tied = {name: tensors[first] for name, first in metadata if first in tensors and name not in tensors}
            return tensors | tied, {}
        content = self.load_file(path, "state dict")
        is_checkpoint = isinstance(content.get("state_dict"), dict)
        weights = content["state_dict"] if is_checkpoint else content
        tensors = {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}
        left = [str(name) for name in weights if not isinstance(weights[name], Tensor)]
        if not tensors:
            raise CheckpointError(f"{path} has no tensors at its top or under `state_dict`: it is no state dict.")
        if left:
            self.notes.append(f"Entries of {path} that are no tensors were left out: {', '.join(left[:10])}.")
        return tensors, content if is_checkpoint else {}

    def _read_safetensors(self, path: Path) -> tuple[dict[str, Tensor], Iterable[tuple[str, str]]]:
        """Tensors by name, mapped, and the metadata."""
        self.parts.append((path, 0, None))
        with opened(path) as stream:
            try:
                with safe_open(own_path(stream.fileno(), path), framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    # The library's save_model writes one of the tied names, and the others into the metadata.
                    metadata = (file.metadata() or {}).items()
                size = int.from_bytes(stream.read(8), "little")
                header = parse_json(stream.read(size))
            # A header may claim a size that cannot be mapped, which is a MemoryError.
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                raise CheckpointError(f"{path} is damaged: {error}. Take another checkpoint.") from error
            places = {name: header[name]["data_offsets"] for name in tensors}
            records = [Record(name, 8 + size + low, high - low) for name, (low, high) in places.items()]
            some = next((tensor for tensor in tensors.values() if tensor.numel()), None)
            self.records.add(path, identity_of(stream), sorted(records, key=lambda record: record.start), some)
        return tensors, metadata

    def _optimizer(self, state: Any) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]] | None:
        """Groups and entries by name, or None. See Note [Optimizer states with numbers]."""
        if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
            return None
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
            groups.append({**self.plain(rest, self.path), "params": own})
        entries: dict[str, dict[str, Any]] = {}
        for number, found in mapping(state.get("state"), "optimizer state", self.path).items():
            name = names.get(number)
            if name is None or name not in self.weights:
                return None
            entries[name] = {
                key: Saved.of(value)
                if isinstance(value, Tensor) and self._is_elementwise(name, key, tuple(value.shape))
                else self.plain(value, self.path)
                for key, value in mapping(found, "optimizer state", self.path).items()
            }
        return groups, entries

    def _read_index(self, index: Path) -> tuple[dict[str, Tensor], dict[Any, Any]]:
        """Tensors by name, from the files beside ``index`` that it names."""
        try:
            content = read_json(index, _MOST_INDEX)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{index} is damaged: {error}. Take another copy.") from error
        places = mapping(mapping(content, "index", index).get("weight_map"), "weight_map", index)
        if not places:
            raise CheckpointError(f"{index} names no tensors. Take another copy.")
        files: dict[str, dict[str, Tensor]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise CheckpointError(f"{index} says that {name!r} is in {file!r}, which is no file beside it.")
            if file not in files:
                files[file], _ = self._read_file(self.path / file)
            if name not in files[file]:
                raise CheckpointError(f"{self.path / file} has no {name!r}, which the index says: take another copy.")
        tensors = {name: files[file][name] for name, file in places.items()}
        for found in files.values():  # an index may leave out tied names
            tensors |= {name: found[name] for name in ties(found) if name not in tensors}
        return tensors, {}
