"""Writers of the export formats, which hold one tensor in memory at a time."""

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

# Keys that Lightning omits with `save_weights_only`.
_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks")
_OWN = "lt_zero"  # the key that only this package reads
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
    file = TorchFile(write)
    file.finish(_weights(file, cast, names))


def write_ckpt(write: Write, cast: Cast, training_state: bool) -> None:
    """A Lightning checkpoint that is readable without this package.

    Raises:
        CheckpointError: the source lacks the ``training_state``, or its other values cannot be pickled.
    """
    file, source = TorchFile(write), cast.source
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
            " weights alone, with format pt or safetensors."
        ) from error


def check_training_state(cast: Cast) -> None:
    """Check that the source has what training resumes from.

    Raises:
        CheckpointError: something is missing.
    """
    missing = [] if cast.source.optimizers else ["optimizer states"]
    missing += [key for key in ("loops",) if key not in cast.source.meta]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no {' and no '.join(missing)}, so training cannot resume from it. Export without"
            " training_state."
        )


def state_bytes(cast: Cast) -> int:
    """Bytes of the element-wise optimizer states."""
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
    """An optimizer's state in torch's form, with parameters numbered through the groups."""
    names = [name for group in saved.groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    ungrouped = [name for name in saved.state if name not in numbers]
    if ungrouped or len(numbers) != len(names):
        wrong = ungrouped or sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(
            f"Optimizer {index} has {wrong[:5]} not once in its groups: the checkpoint is damaged. Use another copy."
        )
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
    """The version of the installed Lightning, which decides the migrations of a checkpoint."""
    for package in ("lightning", "pytorch-lightning"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise CheckpointError("The checkpoint has no version of Lightning, which is not installed: pip install lightning.")


def write_safetensors(write: Write, cast: Cast, names: Sequence[str]) -> None:
    """A file of the safetensors library. Of tied names one is written; the file's metadata lists the others.

    Raises:
        CheckpointError: safetensors does not support a dtype.
    """
    # Larger elements first, as the library does, which aligns all values.
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
            raise CheckpointError(f"safetensors does not support {name!r} of {spec.dtype}. Export to format pt.")
        end = at + spec.nbytes
        header[name] = {"dtype": _SAFETENSORS[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > 100_000_000:
        raise CheckpointError(
            f"safetensors supports a header of 100 MB, and this one has {len(text)} bytes. Export to format pt."
        )
    write(len(text).to_bytes(8, "little") + text)
    for name in own:
        for part in cast.parts(name):
            if part.numel():
                write(part.view(torch.uint8))


def plan_shards(cast: Cast, limit: int) -> list[list[str]]:
    """Names by file, in order: as many as fit into ``limit`` bytes, but at least one. Tied names follow their owner."""
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
