"""The formats of exported weights: each written as a stream that holds one tensor at a time."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lt_zero.checkpoint.casting import Cast
from lt_zero.checkpoint.native.torchfile import Stored, TorchFile, Write
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError

# What Lightning leaves out of a checkpoint with `save_weights_only`: of no use without the optimizers.
_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks")
_OWN = "lt_zero"  # what this package alone reads
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_pt(write: Write, cast: Cast, names: Sequence[str]) -> None:
    """A flat state dict of ``names`` for ``torch.load(path, weights_only=True)``; tied names share storage."""
    file = TorchFile(write, checksums=True)
    file.finish(_weights(file, cast, names))


def write_ckpt(write: Write, cast: Cast, training_state: bool) -> None:
    """A Lightning checkpoint that needs nothing of this package.

    Raises:
        CheckpointError: with ``training_state``, the source has none; what is in it besides cannot be pickled.
    """
    file, source = TorchFile(write, checksums=True), cast.source
    meta = {key: value for key, value in source.meta.items() if training_state or key not in _TRAINING}
    meta.pop(_OWN, None)
    if training_state:
        check_training_state(cast)
        meta.setdefault("lr_schedulers", [])
    meta.setdefault("pytorch-lightning_version", _lightning_version())
    value = {**meta, "state_dict": _weights(file, cast, list(source.weights))}
    if training_state:
        value["optimizer_states"] = [_optimizer(file, cast, i, saved) for i, saved in enumerate(source.optimizers)]
    try:
        file.finish(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint's values besides its weights ({', '.join(meta)}) cannot be pickled: {error}. Export the"
            " weights alone: format pt or safetensors."
        ) from error


def check_training_state(cast: Cast) -> None:
    """See that training can be resumed from what the source has.

    Raises:
        CheckpointError: it cannot.
    """
    missing = [] if cast.source.optimizers else ["optimizer states"]
    missing += [key for key in ("loops",) if key not in cast.source.meta]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no {' and no '.join(missing)}, so training cannot go on from it: export without"
            " training_state."
        )


def state_bytes(cast: Cast) -> int:
    """Of the element-wise optimizer states."""
    states = (entry for saved in cast.source.optimizers for entry in saved.state.values())
    return sum(value.nbytes for entry in states for value in entry.values() if isinstance(value, Spec))


def _weights(file: TorchFile, cast: Cast, names: Sequence[str]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for name in names:
        if name not in cast.owner:
            spec = cast.spec(name)
            stored[name] = file.add_parts(spec.shape, spec.dtype, cast.parts(name))
    return {name: stored[cast.owner.get(name, name)] for name in names}


def _optimizer(file: TorchFile, cast: Cast, index: int, saved: SavedOptimizer) -> dict[str, Any]:
    """Torch's form of an optimizer's state: parameters are numbered through the groups."""
    names = [name for group in saved.groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    strangers = [name for name in saved.state if name not in numbers]
    if strangers or len(numbers) != len(names):
        wrong = strangers or sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"Optimizer {index} has {wrong[:5]} not once in its groups: the checkpoint is damaged.")
    state: dict[int, dict[str, Any]] = {}
    for name in names:
        if name in saved.state:
            entries = saved.state[name]
            state[numbers[name]] = {key: _entry(file, cast, index, name, key, v) for key, v in entries.items()}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved.groups]
    return {"state": state, "param_groups": groups}


def _entry(file: TorchFile, cast: Cast, index: int, name: str, key: str, value: Any) -> Any:
    return file.add(cast.state(index, name, key, value)) if isinstance(value, Spec) else value


def _lightning_version() -> str:
    """Of the Lightning that is installed: which migrations a checkpoint needs is told by it."""
    for package in ("lightning", "pytorch-lightning"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise CheckpointError("Lightning is not installed, and the checkpoint does not tell its version: pip install it.")


def write_safetensors(write: Write, cast: Cast, names: Sequence[str]) -> None:
    """A file of the safetensors library. Of tied names one is written; the file's metadata has the others.

    Raises:
        CheckpointError: it has no name for a dtype.
    """
    # Larger elements first, as the library does: all values are aligned to their own size then.
    own = sorted((name for name in names if name not in cast.owner), key=lambda name: -cast.spec(name).dtype.itemsize)
    metadata = {"format": "pt"}
    for alias in names:
        if alias in cast.owner:
            metadata.setdefault(alias, cast.owner[alias])
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in own:
        spec = cast.spec(name)
        if spec.dtype not in _SAFETENSORS or name == "__metadata__":
            raise CheckpointError(f"safetensors cannot hold {name!r} of {spec.dtype}: export to format pt.")
        end = at + spec.nbytes
        header[name] = {"dtype": _SAFETENSORS[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > 100_000_000:
        raise CheckpointError(
            f"safetensors takes names of 100 MB, and these are {len(text)} bytes: export to format pt."
        )
    write(len(text).to_bytes(8, "little") + text)
    for name in own:
        for part in cast.parts(name):
            if part.numel():
                write(part.view(torch.uint8))


def plan_shards(cast: Cast, limit: int) -> list[list[str]]:
    """Names by file, in order: as many as fit into ``limit`` bytes, at least one. Tied names go with their owner."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in cast.names:
        nbytes = cast.spec(name).nbytes
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    place = {name: shard for shard in shards for name in shard}
    for alias, owner in cast.owner.items():
        place[owner].append(alias)
    return shards


def write_index(write: Write, cast: Cast, files: Mapping[str, Sequence[str]], with_aliases: bool) -> None:
    """Hugging Face's index of a sharded checkpoint. ``files``: name of a file -> the tensors in it."""
    places = {name: file for file, names in files.items() for name in names if with_aliases or name not in cast.owner}
    total = sum(cast.spec(name).nbytes for name in cast.names)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write((json.dumps(index, indent=2) + "\n").encode())
