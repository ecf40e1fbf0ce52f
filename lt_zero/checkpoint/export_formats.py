"""Writers of the export formats, which hold one tensor in memory at a time."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lt_zero.checkpoint.formats.reading import VERSION
from lt_zero.checkpoint.native.torchfile import Stored, TorchFile, Write
from lt_zero.checkpoint.source import SavedOptimizer, Source, Spec
from lt_zero.common.errors import CheckpointError

_CHUNK = 1 << 20  # elements that are cast at a time
_SHOWN = 8  # names in a warning
# Keys that Lightning omits with `save_weights_only`.
_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks")
_OWN = "lt_zero"  # the key that only this package reads


class Cast:
    """The tensors of a source as they are exported: floating-point ones in ``dtype``, others unchanged.

    Attributes:
        weights: all exported names and their saved specs, in the source's order.
        names: those of ``weights`` that are not aliases.
        owner: tied name -> the one of ``names`` with its values.

    Args:
        source: the checkpoint.
        dtype: for floating-point tensors.
        keep_fp32: patterns (``*``, ``?``) for names that stay in fp32. ``blocks.0`` includes all names below it.
        tick: called with the bytes of each chunk.
        prefix: to remove from names, also from those in ``keep_fp32``.

    Raises:
        ValueError: a pattern matches no name; no name begins with ``prefix``, or names are not unique without it.
        CheckpointError: the source's aliases are inconsistent.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype,
        keep_fp32: Sequence[str],
        tick: Callable[[int], object],
        prefix: str = "",
    ) -> None:
        self.source, self.dtype, self._tick = source, dtype, tick
        self._saved = {name.removeprefix(prefix) or name: name for name in source.weights}
        others = [name for name in source.weights if not name.startswith(prefix)]
        if prefix and len(others) == len(source.weights):
            raise ValueError(f"strip_prefix: no name begins with {prefix!r}. Names are {some(source.weights)}.")
        if len(self._saved) < len(source.weights):
            twice = set(source.weights) - set(self._saved.values())
            raise ValueError(
                f"strip_prefix={prefix!r}: without it, {some(sorted(twice))} would have the name of another weight."
            )
        if others:
            warnings.warn(f"These names do not begin with {prefix!r} and are kept: {some(others)}.", stacklevel=3)
        self.weights = {name: source.weights[saved] for name, saved in self._saved.items()}
        exported = {saved: name for name, saved in self._saved.items()}
        self.owner = {exported[tied]: exported[_owner(source, tied)] for tied in exported if tied in source.aliases}
        self.names = [name for name in self.weights if name not in self.owner]
        self._kept: set[str] = set()
        for pattern in [pattern.removeprefix(prefix) for pattern in keep_fp32]:
            found = {n for n in self.weights if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
            if not found:
                raise ValueError(f"keep_fp32: {pattern!r} matches no weight of the checkpoint. Correct or remove it.")
            self._kept |= {self.owner.get(name, name) for name in found}
        self._overflows: dict[str, tuple[int, float, torch.dtype]] = {}  # by name: count, largest value, dtype

    def spec(self, name: str) -> Spec:
        """Shape and dtype of an exported tensor; of a tied name those of its owner."""
        name = self.owner.get(name, name)
        saved = self.weights[name]
        if not saved.dtype.is_floating_point:
            return saved
        return Spec(saved.shape, torch.float32 if name in self._kept else self.dtype)

    def parts(self, name: str) -> Iterator[Tensor]:
        """The values of one of ``names``, row-major: 1D, contiguous, on the CPU, in the dtype of ``spec``.

        Each chunk is valid until the next one is requested.

        Raises:
            CheckpointError: the source cannot read them, or their shape or dtype differs from its spec.
        """
        target = self.spec(name)
        flat = _checked(self.source.read(self._saved[name]), self.weights[name], f"Weight {name!r}").reshape(-1)
        if flat.dtype == target.dtype:
            self._tick(target.nbytes)
            yield flat
            return
        buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=target.dtype, device="cpu")
        for chunk in flat.split(_CHUNK):
            cast = buffer[: chunk.numel()].copy_(chunk)
            self._count_overflows(name, chunk, cast)
            yield cast
            self._tick(cast.nbytes)

    def state(self, optimizer: int, name: str, key: str, saved: Spec) -> Tensor:
        """An element-wise state of an optimizer, unchanged."""
        what = f"State {key!r} of {name!r} in optimizer {optimizer}"
        value = _checked(self.source.read_state(optimizer, name, key), saved, what)
        self._tick(saved.nbytes)
        return value

    def _count_overflows(self, name: str, chunk: Tensor, cast: Tensor) -> None:
        if torch.finfo(cast.dtype).max >= torch.finfo(chunk.dtype).max:
            return
        infinite = cast.isinf()
        if infinite.any():
            values = chunk[infinite].double().abs()
            values = values[values.isfinite()]
            count, largest, _ = self._overflows.get(name, (0, 0.0, cast.dtype))
            if values.numel():
                self._overflows[name] = (count + values.numel(), max(largest, float(values.max())), cast.dtype)

    def warn(self, stacklevel: int) -> None:
        """Warn of finite values that overflowed."""
        if not self._overflows:
            return
        kinds = {dtype for *_, dtype in self._overflows.values()}
        shown = [f"{name} ({count}, the largest {size:.4g})" for name, (count, size, _) in self._overflows.items()]
        more = f" and {len(shown) - _SHOWN} more tensors" if len(shown) > _SHOWN else ""
        total = sum(count for count, *_ in self._overflows.values())
        limits = sorted(f"{str(k).removeprefix('torch.')} (at most {torch.finfo(k).max:.4g})" for k in kinds)
        remedy = "bf16 or fp32" if kinds == {torch.float16} else "fp32" if kinds == {torch.bfloat16} else "fp64"
        warnings.warn(
            f"{total} finite values overflow {' and '.join(limits)} and were exported as inf: "
            f"{', '.join(shown[:_SHOWN])}{more}. Export with dtype {remedy}.",
            stacklevel=stacklevel + 1,
        )


def some(names: Iterable[str]) -> str:
    """The first names, for a message."""
    shown = list(names)
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def _owner(source: Source, name: str) -> str:
    """The name that has the values of a tied one."""
    seen, found = {name}, source.aliases[name]
    while found in source.aliases and found not in seen:
        seen.add(found)
        found = source.aliases[found]
    if found in seen or source.weights.get(found) != source.weights[name]:
        raise CheckpointError(
            f"The checkpoint ties {name!r} to {found!r}, which is not a weight of the same shape and dtype: it is "
            "damaged or was edited. Use another copy."
        )
    return found


def _checked(tensor: Tensor, saved: Spec, what: str) -> Tensor:
    if tuple(tensor.shape) != tuple(saved.shape) or tensor.dtype != saved.dtype:
        raise CheckpointError(
            f"{what} was read as {tuple(tensor.shape)} of {tensor.dtype}, but the checkpoint declares"
            f" {tuple(saved.shape)} of {saved.dtype}: it is damaged. Use another copy."
        )
    return tensor.detach().to("cpu").contiguous()


def write_pt(write: Write, cast: Cast, names: Sequence[str]) -> None:
    """A flat state dict of ``names`` for ``torch.load(path, weights_only=True)``; tied names share storage."""
    file = TorchFile(write)
    file.finish(_weights(file, cast, names))


def write_ckpt(write: Write, cast: Cast, training_state: bool) -> None:
    """A Lightning checkpoint that is readable without this package.

    Raises:
        CheckpointError: its values besides weights cannot be pickled, or its optimizer states are damaged.
    """
    file, source = TorchFile(write), cast.source
    meta = {k: v for k, v in source.meta.items() if k != _OWN and (training_state or k not in _TRAINING)}
    if training_state:
        meta.setdefault("lr_schedulers", [])
    meta.setdefault(VERSION, _lightning_version())
    value = {**meta, "state_dict": _weights(file, cast, list(cast.weights))}
    if training_state:
        value["optimizer_states"] = [_optimizer(file, cast, i, saved) for i, saved in enumerate(source.optimizers)]
    try:
        file.finish(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint's values besides its weights ({', '.join(meta)}) cannot be pickled: {error}. Export the"
            " weights alone, with format pt or safetensors."
        ) from error


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
    state = {
        numbers[name]: {
            key: file.add(cast.state(index, name, key, value)) if isinstance(value, Spec) else value
            for key, value in saved.state[name].items()
        }
        for name in names
        if name in saved.state
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved.groups]
    return {"state": state, "param_groups": groups}


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
    metadata = {**{name: cast.owner[name] for name in names if name in cast.owner}, "format": "pt"}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in own:
        spec = cast.spec(name)
        try:  # the library's own name of the dtype
            dtype = json.loads(safetensors.torch.save({"": torch.empty(0, dtype=spec.dtype)})[8:])[""]["dtype"]
        except KeyError:
            dtype = None
        if dtype is None or name == "__metadata__":
            raise CheckpointError(f"safetensors does not support {name!r} of {spec.dtype}. Export to format pt.")
        end = at + spec.nbytes
        header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
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
