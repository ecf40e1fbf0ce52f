"""Casts the tensors of a checkpoint to the dtype of an export, chunk by chunk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lt_zero.checkpoint.source import Source, Spec
from lt_zero.common.errors import CheckpointError

_CHUNK = 1 << 20  # elements that are cast at a time
_SHOWN = 8  # names in a warning


class Cast:
    """The tensors of a source as they are exported: floating-point ones in ``dtype``, others unchanged.

    Attributes:
        names: of the tensors that are not aliases, in the source's order.
        owner: tied name -> the one of ``names`` with its values.

    Args:
        source: the checkpoint.
        dtype: for floating-point tensors.
        keep_fp32: patterns (``*``, ``?``) for names that stay in fp32. ``blocks.0`` includes all names below it.
        tick: called with the bytes of each chunk.

    Raises:
        ValueError: a pattern matches no name.
        CheckpointError: the source's aliases are inconsistent.
    """

    def __init__(
        self, source: Source, dtype: torch.dtype, keep_fp32: Sequence[str], tick: Callable[[int], object]
    ) -> None:
        self.source, self.dtype, self._tick = source, dtype, tick
        self.owner = {name: _owner(source, name) for name in source.weights if name in source.aliases}
        self.names = [name for name in source.weights if name not in self.owner]
        self._kept = self._find(keep_fp32)
        self._overflows: dict[str, tuple[int, float, torch.dtype]] = {}  # by name: count, largest value, dtype

    def _find(self, patterns: Sequence[str]) -> set[str]:
        kept: set[str] = set()
        for pattern in patterns:
            found = {n for n in self.source.weights if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
            if not found:
                raise ValueError(f"keep_fp32: {pattern!r} matches no weight of the checkpoint. Correct or remove it.")
            kept |= {self.owner.get(name, name) for name in found}
        return kept

    def spec(self, name: str) -> Spec:
        """Shape and dtype of an exported tensor; of a tied name those of its owner."""
        name = self.owner.get(name, name)
        saved = self.source.weights[name]
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
        flat = _checked(self.source.read(name), self.source.weights[name], f"Weight {name!r}").reshape(-1)
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
        shown = [
            f"{name} ({count}, the largest {largest:.4g})"
            for name, (count, largest, _) in list(self._overflows.items())[:_SHOWN]
        ]
        more = f" and {len(self._overflows) - _SHOWN} more tensors" if len(self._overflows) > _SHOWN else ""
        total = sum(count for count, *_ in self._overflows.values())
        kinds = {dtype for *_, dtype in self._overflows.values()}
        limits = " and ".join(sorted(f"{_name(kind)} (at most {torch.finfo(kind).max:.4g})" for kind in kinds))
        remedy = "bf16 or fp32" if kinds == {torch.float16} else "fp32" if kinds == {torch.bfloat16} else "fp64"
        warnings.warn(
            f"{total} finite values overflow {limits} and were exported as inf: {', '.join(shown)}{more}."
            f" Export with dtype {remedy}.",
            stacklevel=stacklevel + 1,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
