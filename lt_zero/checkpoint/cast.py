"""The tensors of a checkpoint as they are exported: renamed, cast chunk by chunk, checked against what was declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lt_zero.checkpoint.source import CheckpointSource, Spec
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import CheckpointError
from lt_zero.common.users_code import warn

_CHUNK = 1 << 20  # elements that are cast at a time
_SHOWN = 8  # names in a warning


class Cast:
    """The tensors of a source as they are exported: floating-point ones in ``dtype``, others unchanged.

    Attributes:
        weights: all exported names and their saved specs, in the source's order.
        owner: tied name -> the exported name with its values.
        names: those of ``weights`` that are not tied to another.

    Args:
        dtype: None: each tensor's own.
        keep_fp32: patterns (``*``, ``?``) for names that stay in fp32. ``blocks.0`` includes all names below it.
        tick: called with the bytes of each chunk.
        prefix: to remove from names, also from those in ``keep_fp32``.

    Raises:
        ValueError: a pattern matches no name; no name begins with ``prefix``, or names are not unique without it.
        CheckpointError: the source's aliases are inconsistent.
    """

    def __init__(
        self,
        source: CheckpointSource,
        dtype: torch.dtype | None,
        keep_fp32: Sequence[str],
        tick: Callable[[int], object],
        prefix: str = "",
    ) -> None:
        self.source, self.dtype, self._tick = source, dtype, tick
        plain = {clean_name(name): name for name in source.weights}
        self._saved = {name.removeprefix(prefix) or name: saved for name, saved in plain.items()}
        others = [name for name in plain if not name.startswith(prefix)]
        if prefix and len(others) == len(source.weights):
            raise ValueError(f"strip_prefix: no name begins with {prefix!r}. Names are {some(source.weights)}.")
        if twice := some(sorted(set(source.weights) - set(self._saved.values()))):
            raise ValueError(f"strip_prefix={prefix!r}: without it, {twice} would have the name of another weight.")
        if others:
            warn(f"These names do not begin with {prefix!r} and are kept: {some(others)}.")
        self.weights = {name: source.weights[saved] for name, saved in self._saved.items()}
        exported = {saved: name for name, saved in self._saved.items()}
        self.owner = {exported[tied]: exported[_owner(source, tied)] for tied in exported if tied in source.aliases}
        self.names = [name for name in self.weights if name not in self.owner]
        self._kept: set[str] = set()
        for pattern in [clean_name(pattern).removeprefix(prefix) for pattern in keep_fp32]:
            found = {n for n in self.weights if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
            if not found:
                raise ValueError(f"keep_fp32: {pattern!r} matches no weight of the checkpoint. Correct or remove it.")
            self._kept |= {self.owner.get(name, name) for name in found}
        self._overflows: dict[str, tuple[int, float]] = {}  # by name: count, largest value

    def spec(self, name: str) -> Spec:
        """Shape and dtype of an exported tensor; of a tied name those of its owner."""
        name = self.owner.get(name, name)
        saved = self.weights[name]
        if not saved.dtype.is_floating_point:
            return saved
        return Spec(saved.shape, torch.float32 if name in self._kept else self.dtype or saved.dtype)

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
        narrows = torch.finfo(target.dtype).max < torch.finfo(flat.dtype).max
        for chunk in flat.split(_CHUNK):
            cast = buffer[: chunk.numel()].copy_(chunk)
            if narrows and (infinite := cast.isinf()).any():
                self._count_overflows(name, chunk, infinite)
            yield cast
            self._tick(cast.nbytes)

    def saved(self, name: str) -> str:
        """The source's name of an exported one."""
        return self._saved[name]

    def state(self, optimizer: int, name: str, key: str, saved: Spec) -> Tensor:
        """An element-wise state of an optimizer, unchanged."""
        value = self.source.read_state(optimizer, name, key)
        self._tick(saved.nbytes)
        return _checked(value, saved, f"State {key!r} of {name!r} in optimizer {optimizer}")

    def _count_overflows(self, name: str, chunk: Tensor, infinite: Tensor) -> None:
        values = chunk[infinite].double().abs()
        values = values[values.isfinite()]
        if values.numel():
            count, largest = self._overflows.get(name, (0, 0.0))
            self._overflows[name] = count + values.numel(), max(largest, float(values.max()))

    def warn(self) -> None:
        """Warn of finite values that overflowed."""
        if not self._overflows:
            return
        kinds = {self.spec(name).dtype for name in self._overflows}
        shown = [f"{name} ({count}, the largest {size:.4g})" for name, (count, size) in self._overflows.items()]
        more = f" and {len(shown) - _SHOWN} more tensors" if len(shown) > _SHOWN else ""
        total = sum(count for count, _ in self._overflows.values())
        limits = sorted(f"{str(k).removeprefix('torch.')} (at most {torch.finfo(k).max:.4g})" for k in kinds)
        remedy = "bf16 or fp32" if kinds == {torch.float16} else "fp32" if kinds == {torch.bfloat16} else "fp64"
        warn(
            f"{total} finite values overflow {' and '.join(limits)} and were exported as inf: "
            f"{', '.join(shown[:_SHOWN])}{more}. Export with dtype {remedy}.",
        )


def some(names: Iterable[str]) -> str:
    """The first names, for a message."""
    shown = list(names)
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def _owner(source: CheckpointSource, name: str) -> str:
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
