"""Finds and replaces tensors in nested containers: arguments and results of modules, content of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common.compat import version_of

_LEAVES = (str, bytes, int, float, bool, complex, type(None), type, nn.Module, FunctionType, MethodType)
_MAX_DEPTH = 13
_DEEPEST_READ = 200  # levels of containers in a file


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside nested tuples, lists, mappings, sets, dataclasses and plain objects (caches, outputs).

    Objects are entered through ``__dict__``; each is visited once, so cycles end.
    """
    return _iter((value,), set(), 0)


def iter_containers(value: Any) -> Iterator[Any]:
    """All lists and dicts in ``value``, and the ``__dict__`` of plain objects, wherever ``iter_tensors`` looks."""
    for found in _iter((value,), set(), 0, containers=True):
        if type(found) in (list, dict):
            yield found
        elif not isinstance(found, Tensor) and _is_plain(found):
            yield vars(found)


def _is_plain(value: Any) -> bool:
    return type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__")


def _iter(value: Any, seen: set[int], depth: int, containers: bool = False) -> Iterator[Any]:
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if containers:
        yield value
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        items = value
    elif dataclasses.is_dataclass(value):
        items = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    elif _is_plain(value):
        items = vars(value).values()
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif not isinstance(item, _LEAVES):
            yield from _iter(item, seen, depth + 1, containers)


def rows_of(batch: Any) -> int | None:
    """The first dimension of the first tensor that has one; None if there is none."""
    try:
        return next(sizes_of(batch), None)
    except RecursionError:
        return None


def sizes_of(batch: Any) -> Iterator[int]:
    """The first dimension of all tensors that have one. Does not read iterators (of the data loader).

    Raises:
        RecursionError: the batch contains itself.
    """
    if isinstance(batch, Tensor):
        yield from batch.shape[:1]
    elif isinstance(batch, Mapping):
        yield from sizes_of(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for entry in batch:
            yield from sizes_of(entry)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from sizes_of([getattr(batch, field.name) for field in dataclasses.fields(batch)])


def dense_tensors(value: Any) -> list[Tensor]:
    """The tensors in plain containers that ``torch.load`` made.

    Raises:
        ValueError: one is not dense, not on the CPU, or larger than its bytes in the file; or containers are nested too
            deeply.
    """
    seen: set[int] = set()
    open_: list[tuple[Any, int]] = [(value, 0)]
    found = []
    while open_:
        value, depth = open_.pop()
        if isinstance(value, Tensor):
            dense = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
            if not dense or value.is_conj() or value.is_neg():
                raise ValueError(f"a tensor of layout {value.layout} on {value.device}, or quantized or conjugated")
            if value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"a tensor of shape {tuple(value.shape)} is larger than its values in the file")
            found.append(value)
        elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
            seen.add(id(value))
            if depth > _DEEPEST_READ:
                raise ValueError(f"it is nested too deeply, in more than {_DEEPEST_READ} levels")
            open_ += ((item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))
    return found


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


class ReplacedTensors:
    """A copy of a module's arguments in which each tensor is replaced. The caller's lists and dicts stay unchanged.

    Args:
        value: nested tuples, lists and dicts, as for ``map_tensors``.
        fn: returns the replacement of a tensor; called once per tensor, so that identical arguments stay identical.
    """

    def __init__(self, value: Any, fn: Callable[[Tensor], Tensor]) -> None:
        self._fn = fn
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # id of the original -> original, replacement
        self._containers: list[tuple[Any, Any, Any]] = []  # the caller's, the copy, a shallow copy of the copy
        self._versions: dict[int, int] = {}  # id of a replacement -> its version counter
        self.value = self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, (replacement := self._fn(value))
                if replacement is not value:
                    self._versions[id(replacement)] = version_of(replacement)
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

    def is_unmodified(self, tensor: Tensor) -> bool:
        """True if ``tensor`` is a replacement that was not written in place."""
        return id(tensor) in self._versions and self._versions[id(tensor)] == version_of(tensor)

    def write_back(self) -> list[Any]:
        """Apply the module's changes of lists and dicts to the caller's; returns the items that the module added."""
        originals: dict[int, Any] = {id(new): old for old, new in self._tensors.values()}
        originals |= {id(copy): original for original, copy, _ in self._containers}
        added: list[Any] = []
        for original, copy, before in self._containers:
            if isinstance(original, list):
                if len(copy) == len(before) and all(a is b for a, b in zip(copy, before, strict=True)):
                    continue
                added += [item for item in copy if id(item) not in originals]
                original[:] = [originals.get(id(item), item) for item in copy]
            elif list(copy) != list(before) or any(copy[key] is not before[key] for key in copy):
                added += [item for item in copy.values() if id(item) not in originals]
                entries = {key: originals.get(id(item), item) for key, item in copy.items()}
                original.clear()
                original.update(entries)
        return added
