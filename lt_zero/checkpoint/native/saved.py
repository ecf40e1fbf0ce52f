"""State dicts of a checkpoint, whose tensors are read on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lt_zero.checkpoint.source import Source, Spec
from lt_zero.engine.lazy_tensor import LazyTensor, Reader


def saved_weights(source: Source) -> dict[str, Tensor]:
    """The state dict of a source with lazy tensors; tied names share an object."""
    weights: dict[str, Tensor] = {}
    for name, spec in source.weights.items():
        first = source.aliases.get(name, name)
        lazy = weights.get(first)
        weights[name] = lazy if lazy is not None else LazyTensor(spec.shape, spec.dtype, _reader(source, first))
    return weights


def saved_state(source: Source, optimizer: int) -> dict[str, dict[str, Any]]:
    """The states of one optimizer of a source, by parameter name; element-wise ones are lazy."""
    states: dict[str, dict[str, Any]] = {}
    for name, state in source.optimizers[optimizer].state.items():
        states[name] = dict(state)
        for key, value in state.items():
            if isinstance(value, Spec):
                read = _state_reader(source, optimizer, name, key)
                states[name][key] = LazyTensor(value.shape, value.dtype, read)
    return states


def _reader(source: Source, name: str) -> Reader:
    ranges: Callable[[str, int, int], Tensor] | None = getattr(source, "read_range", None)
    if ranges is not None:
        return lambda lo, hi: ranges(name, lo, hi)
    return lambda lo, hi: source.read(name).reshape(-1)[lo:hi]


def _state_reader(source: Source, optimizer: int, name: str, key: str) -> Reader:
    ranges: Callable[[int, str, str, int, int], Tensor] | None = getattr(source, "read_state_range", None)
    if ranges is not None:
        return lambda lo, hi: ranges(optimizer, name, key, lo, hi)
    return lambda lo, hi: source.read_state(optimizer, name, key).reshape(-1)[lo:hi]
