"""Finding and replacing the tensors inside what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_LEAVES = (str, bytes, int, float, bool, complex, type(None), type, nn.Module, FunctionType, MethodType)
_MAX_DEPTH = 12


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside nested tuples, lists, mappings, sets, dataclasses and plain objects (caches, outputs).

    Objects are entered through ``__dict__``; each is visited once, so cycles end.
    """
    yield from _iter(value, set(), 0)


def _iter(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    for item in _children(value):
        yield from _iter(item, seen, depth + 1)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    elif type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__"):
        yield from vars(value).values()


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``fn`` applied to the tensors in nested tuples, lists and dicts; anything else is kept."""
    if isinstance(value, Tensor):
        return fn(value)
    if type(value) is tuple:
        return tuple(map_tensors(item, fn) for item in value)
    if type(value) is list:
        return [map_tensors(item, fn) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, fn) for key, item in value.items()}
    return value
