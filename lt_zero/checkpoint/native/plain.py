"""Converts content beside weights to plain containers, and back: any process can load them, and they run no code.

Note [Plain values]
    ``torch.load(weights_only=True)`` reads tensors, numbers, strings, lists, tuples, dicts and a few classes of torch.
    Everything else would make a checkpoint unreadable without the code that wrote it. So OmegaConf containers become
    dicts and lists, paths strings, numpy's numbers and arrays Python's numbers and tensors, enums their values. Values
    without a plain form are named in a warning and go to a separate file, which is only unpickled on request
    (``weights_only=False``). Keys stay what they are: see Note [Keys].

Note [Keys]
    A key is looked up by those who put it there: its text would not be found. ``to_plain`` puts a plain name in its
    place and tells the key. A directory has its description: the name of a class or member, a path's text, a tuple or
    frozen set of such. Read again, the name is looked up among the classes that are loaded, so nothing of the file is
    imported or executed; if it is not among them, no code can ask for the key, and the plain name stays. Other objects
    are pickled, like values without a plain form, and their keys come back with them. A single file has the keys as
    they are.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lt_zero.core.engine.lazy_tensor import Fragment, LazyTensor

ATOMS: tuple[Any, ...] = (type(None), bool, int, float, complex, str, bytes)
Path = tuple[Any, ...]  # keys from the outermost container to a value
TORCH = (torch.dtype, torch.Size, torch.device)
MISSING = "<left out: not a plain value>"
_DEEPEST = 150  # levels of containers; readers refuse 200, as strangers could use up their stack


class Key(NamedTuple):
    """The last part of the path to a key: its plain name in the container."""

    name: Any


def dotted_path(path: Path) -> str:
    """The path of a value as text."""
    return ".".join(str(part.name if isinstance(part, Key) else part) for part in path)


def has_missing(value: Any) -> bool:
    """True if something inside of plain containers had no plain form, and was not unpickled."""
    seen = set[int]()  # a stranger's file may have one container very often
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            if found == MISSING:
                return True
        elif isinstance(found, (Mapping, list, tuple, set, frozenset)) and id(found) not in seen:
            seen.add(id(found))
            waiting += found.values() if isinstance(found, Mapping) else found
    return False


def to_plain(value: Any, swap: Callable[[Path, Tensor], Any] = lambda _, tensor: tensor) -> tuple[Any, dict[Path, Any]]:
    """``value`` in plain containers, and the values without a plain form by their path.

    A key without a plain form is one of these, at the path that ends with ``Key(name)``; ``name`` has its place. Parts
    of paths are the keys themselves.

    Args:
        value: any nesting of containers.
        swap: returns the replacement of a tensor, given its path.

    >>> to_plain({"a": (1, {"b": object})})[0]
    {'a': (1, {'b': '<left out: not a plain value>'})}
    """
    rest: dict[Path, Any] = {}
    return _Converter(swap, rest, set()).convert(value, ()), rest


@dataclass
class _Converter:
    """Converts a value recursively; values without a plain form go to ``rest``."""

    swap: Callable[[Path, Tensor], Any]
    rest: dict[Path, Any]
    open: set[int]  # ids of the containers around the value
    # Containers and their plain forms, by id, if these do not depend on the path: copies of a shared one, apart, could
    # be huge. ``_bound`` counts what depends on it.
    _made: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _bound: int = 0

    def convert(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor) and _is_dense(value):
            self._bound += isinstance(value, Fragment | LazyTensor)
            return self.swap(path, value)
        if type(value) in ATOMS or isinstance(value, TORCH):
            return value
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, ATOMS):  # a number or string of a subclass
            return next(kind(value) for kind in ATOMS[2:] if isinstance(value, kind))
        # Who has a container of OmegaConf has imported it.
        if (omegaconf := sys.modules.get("omegaconf")) is not None and isinstance(value, omegaconf.Container):
            # It may contain enums, paths and objects.
            plain = omegaconf.OmegaConf.to_container(value, resolve=not _has_missing(value, omegaconf.OmegaConf))
            return self.convert(plain, path)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
            return self.convert(value.item(), path)
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError):  # strings, objects, dtypes that torch lacks
                return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C", copy=True))
        holds = isinstance(value, Mapping | tuple | list | set | frozenset)
        if holds and id(value) not in self.open and len(path) < _DEEPEST:
            if id(value) in self._made:
                return self._made[id(value)][1]
            self.open.add(id(value))
            before = self._bound
            try:
                made = self._container(value, path)
            finally:
                self.open.discard(id(value))
            if self._bound == before:
                self._made[id(value)] = value, made
            return made
        return self._aside(value, path)

    def _aside(self, value: Any, path: Path) -> str:
        self.rest[path] = value
        self._bound += 1
        return MISSING

    def _entries(self, value: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
        names = {key: _key(key) for key in value}
        exact = {key for key, name in names.items() if _is_equal(name, key)}
        taken = {names[key] for key in exact}
        inner = {}
        for key, item in value.items():
            name = names[key]
            if key not in exact:
                while name in taken:  # a path and its text
                    name = f"{name}'"
                taken.add(name)
                self.rest[(*path, Key(name))] = key
                self._bound += 1
            inner[name] = self.convert(item, (*path, name if key in exact else key))
        return inner

    def _container(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            inner = self._entries(value, path)
            return collections.OrderedDict(inner) if type(value) is collections.OrderedDict else inner
        if isinstance(value, tuple | list):
            items = [self.convert(v, (*path, i)) for i, v in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        members, rest = to_plain(sorted(value, key=repr))
        if rest:
            return self._aside(value, path)  # ``restore`` does not support sets
        return set(members) if all(map(_is_hashable, members)) else members


def _is_dense(value: Tensor) -> bool:
    """True if any process can load ``value``: a tensor of a standard class and layout."""
    if isinstance(value, LazyTensor):
        # Raise now instead of during the write.
        value.check_values()
    if isinstance(value, Fragment | LazyTensor):
        return True
    known = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return known and value.layout == torch.strided and not value.is_quantized and not value.is_meta


def _key(key: Any) -> Any:
    made, rest = to_plain(key)
    return made if not rest and not isinstance(made, Tensor) and _is_hashable(made) else str(key)


def _is_equal(name: Any, key: Any) -> bool:
    """True if a plain form of a key finds the same entries."""
    return name is key or (hash(name) == hash(key) and bool(name == key))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _has_missing(value: Any, omegaconf: Any) -> bool:
    try:
        omegaconf.to_container(value, resolve=True, throw_on_missing=True)
    except Exception:  # an interpolation without its root or a missing value, which are kept as text
        return True
    return False


# ---- back ------------------------------------------------------------------------------------------------------------


def restore(value: Any, rest: Mapping[Path, Any]) -> None:
    """Put keys and values without a plain form back into the containers; tuples around values become lists."""
    for path, item in rest.items():  # a key before what lies below it
        inner = value
        for part in path[:-1]:
            if isinstance(inner[part], tuple) and not isinstance(path[-1], Key):
                inner[part] = list(inner[part])
            inner = inner[part]
        if isinstance(path[-1], Key):
            _rename(inner, path[-1].name, item)
        else:
            inner[path[-1]] = item


def _rename(container: dict[Any, Any], name: Any, key: Any) -> None:
    """Give the entry ``name`` the key ``key``, in its place in the order; nothing if there is no such entry."""
    if name in container:
        items = [(key if k == name else k, value) for k, value in container.items()]
        container.clear()
        container.update(items)
