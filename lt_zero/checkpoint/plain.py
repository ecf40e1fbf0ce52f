"""Plain containers for what is saved beside weights: any process can load it, and nothing in it can run.

Note [Plain]
    ``torch.load(weights_only=True)`` reads tensors, numbers, strings, lists, tuples, dicts and a few classes of torch.
    Everything else would make a checkpoint unreadable without the code that wrote it. So OmegaConf containers become
    dicts and lists, paths strings, numpy's numbers and arrays Python's numbers and tensors, enums their values. What
    has no plain form is taken out, is named in a warning, and goes to a file of its own that is only unpickled on
    request (``weights_only=False``).
"""

from __future__ import annotations

import collections
import enum
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from torch import Tensor

Path = tuple[Any, ...]  # keys from the outermost container to a value

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_TORCH = (torch.dtype, torch.Size, torch.device)
MISSING = "<left out: not a plain value>"


def plain(value: Any, swap: Callable[[Path, Tensor], Any] | None = None) -> tuple[Any, dict[Path, Any]]:
    """``value`` in plain containers, and what has no plain form, by where it was.

    Args:
        value: any nesting of containers.
        swap: replaces tensors, given where they are; default: they are kept.

    >>> plain({"a": (1, {"b": object})})[0]
    {'a': (1, {'b': '<left out: not a plain value>'})}
    """
    rest: dict[Path, Any] = {}
    return _plain(value, (), swap or (lambda path, tensor: tensor), rest), rest


def _plain(value: Any, path: Path, swap: Callable[[Path, Tensor], Any], rest: dict[Path, Any]) -> Any:
    if isinstance(value, Tensor):
        return swap(path, value)
    if isinstance(value, enum.Enum):
        return _plain(value.value, path, swap, rest)
    if isinstance(value, _ATOMS):
        return value if type(value) in _ATOMS else _base_of(value)
    if isinstance(value, _TORCH):
        return value
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=not _has_missing(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(value).copy())
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        inner = {_key(k): _plain(v, (*path, _key(k)), swap, rest) for k, v in value.items()}
        return collections.OrderedDict(inner) if type(value) is collections.OrderedDict else inner
    if isinstance(value, tuple | list):
        items = [_plain(v, (*path, i), swap, rest) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return set(_plain(v, (*path, i), swap, rest) for i, v in enumerate(sorted(value, key=repr)))
    rest[path] = value
    return MISSING


def _base_of(value: Any) -> Any:
    """A number or string of a subclass as what it is."""
    kinds: tuple[Any, ...] = (int, float, complex, str, bytes)
    return next(kind(value) for kind in kinds if isinstance(value, kind))


def _key(key: Any) -> Any:
    if isinstance(key, enum.Enum):
        return key.value
    return key if isinstance(key, (*_ATOMS, tuple)) else str(key)


def _has_missing(value: Container) -> bool:
    try:
        OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except Exception:  # an interpolation without its root, a value that was never given: kept as text
        return True
    return False


def where(path: Path) -> str:
    """A readable place of a value."""
    return ".".join(str(part) for part in path)


def put_back(value: Any, rest: Mapping[Path, Any]) -> None:
    """Put what was taken out back into the containers (not into tuples, which become lists)."""
    for path, item in rest.items():
        inner = value
        for part, _ in zip(path[:-1], path[1:], strict=True):
            if isinstance(inner[part], tuple):
                inner[part] = list(inner[part])
            inner = inner[part]
        inner[path[-1]] = item
