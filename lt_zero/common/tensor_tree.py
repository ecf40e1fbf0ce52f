"""Finding and replacing the tensors inside what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lt_zero.common.compat import version_of

_LEAVES = (str, bytes, int, float, bool, complex, type(None), type, nn.Module, FunctionType, MethodType)
_MAX_DEPTH = 12


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside nested tuples, lists, mappings, sets, dataclasses and plain objects (caches, outputs).

    Objects are entered through ``__dict__``; each is visited once, so cycles end.
    """
    yield from _iter(value, set(), 0)


def iter_containers(value: Any) -> Iterator[Any]:
    """All lists and dicts in ``value``, and the ``__dict__`` of plain objects, wherever ``iter_tensors`` looks."""
    for found in _iter(value, set(), 0, containers=True):
        if type(found) in (list, dict):
            yield found
        elif not isinstance(found, Tensor) and _is_plain(found):
            yield vars(found)


def _is_plain(value: Any) -> bool:
    return type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__")


def _iter(value: Any, seen: set[int], depth: int, containers: bool = False) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if containers:
        yield value
    for item in _children(value):
        yield from _iter(item, seen, depth + 1, containers)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    elif _is_plain(value):
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


class Copied:
    """Arguments with other tensors in them. Lists and dicts are copies, so the caller's keep what they hold.

    Args:
        value: nested tuples, lists and dicts, as for ``map_tensors``.
        fn: gives the tensor in place of one; asked once for each, so what was one object is one again.
    """

    def __init__(self, value: Any, fn: Callable[[Tensor], Tensor]) -> None:
        self._fn = fn
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the first: it, and what is in its place
        self._containers: list[tuple[Any, Any, Any]] = []  # the caller's, the copy, and what was in the copy
        self._versions: dict[int, int] = {}  # of what was put in place of others, by id
        self.value = self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, (made := self._fn(value))
                if made is not value:
                    self._versions[id(made)] = version_of(made)
            return self._tensors[id(value)][1]
        if type(value) is tuple:
            return tuple(self._copy(item) for item in value)
        if type(value) is list:
            items = [self._copy(item) for item in value]
            self._containers.append((value, items, list(items)))
            return items
        if type(value) is dict:
            entries = {key: self._copy(item) for key, item in value.items()}
            self._containers.append((value, entries, dict(entries)))
            return entries
        return value

    def is_as_given(self, tensor: Tensor) -> bool:
        """Whether it was put in place of an argument, and nobody has written to it."""
        return self._versions.get(id(tensor)) == version_of(tensor) if id(tensor) in self._versions else False

    def write_back(self) -> list[Any]:
        """What a module has put into a list or dict, or taken out of it, its caller sees. Returns what was put in."""
        given: dict[int, Any] = {id(new): old for old, new in self._tensors.values()}
        given |= {id(copy): theirs for theirs, copy, _ in self._containers}
        put: list[Any] = []
        for theirs, copy, before in self._containers:
            if isinstance(theirs, list):
                if len(copy) == len(before) and all(a is b for a, b in zip(copy, before, strict=True)):
                    continue
                put += [item for item in copy if id(item) not in given]
                theirs[:] = [given.get(id(item), item) for item in copy]
            elif list(copy) != list(before) or any(copy[key] is not before[key] for key in copy):
                put += [item for item in copy.values() if id(item) not in given]
                entries = {key: given.get(id(item), item) for key, item in copy.items()}
                theirs.clear()
                theirs.update(entries)
        return put
