"""What the readers of other people's checkpoints share: names, ties, and values without classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

_DEPTH = 64  # of nested containers
_KEYS = (str, int, float, bool, bytes, type(None))
_PLAIN = (*_KEYS, complex, torch.dtype, torch.device)
VERSION = "pytorch-lightning_version"  # in every checkpoint that Lightning wrote


def prefix_of(names: Iterable[str], meta: Mapping[str, Any]) -> str:
    """What wrappers put before all names; ``""`` if nothing.

    ``_forward_module.`` is Lightning's, for the strategies that have one. ``module.`` comes from DDP and the like, but
    may also be the user's only child: so it stays where Lightning 2 wrote the checkpoint, which saves its own module.
    """
    names = list(names)
    prefix = ""
    wrappers = ["_forward_module."]
    if str(meta.get(VERSION, "1."))[:2] in ("0.", "1."):
        wrappers.append("module.")
    found = True
    while found and names:
        found = False
        for wrapper in wrappers:
            if all(name.startswith(prefix + wrapper) for name in names):
                prefix += wrapper
                found = True
    return prefix


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensors are the same values in memory: later name -> first name."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            known = first.setdefault(place, name)
            if known != name:
                found[name] = known
    return found


def spec_of(tensor: Tensor) -> Spec:
    """Shape and dtype."""
    return Spec(tuple(tensor.shape), tensor.dtype)


class Plain:
    """Turns what a file holds into containers, numbers and tensors; the rest is left out and listed.

    Args:
        where: the file, for errors.
        dropped: gets a line for each value that was left out.
    """

    def __init__(self, where: object, dropped: list[str]) -> None:
        self._where = where
        self._dropped = dropped
        self._done: dict[int, Any] = {}  # shared containers stay shared: copies could be huge
        self._open: set[int] = set()
        self._kept: list[Any] = []  # so that an id stands for one object

    def of(self, value: Any, path: str = "", depth: int = 0) -> Any:
        """The value; ``None`` where nothing is left of it."""
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, _PLAIN):
            return value
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            kind = getattr(value, "kind", "") or f"{type(value).__module__}.{type(value).__qualname__}"
            self._dropped.append(f"{path} of {self._where} is an object of {kind}; it was left out.")
            return None
        if depth > _DEPTH or id(value) in self._open:
            raise CheckpointError(
                f"{path or 'The content'} of {self._where} is nested too deeply (more than {_DEPTH} levels, or in "
                "itself). Save the checkpoint without it."
            )
        if id(value) not in self._done:
            self._open.add(id(value))
            self._done[id(value)] = self._container(value, path, depth + 1)
            self._open.remove(id(value))
            self._kept.append(value)
        return self._done[id(value)]

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            keys = [key for key in value if _is_key(key)]
            if len(keys) < len(value):
                self._dropped.append(f"{path} of {self._where} has keys that are objects; they were left out.")
            return {key: self.of(value[key], f"{path}.{key}".lstrip("."), depth) for key in keys}
        items = [self.of(item, f"{path}[{n}]", depth) for n, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else type(value)(items)


def _is_key(value: Any) -> bool:
    return isinstance(value, _KEYS) or (isinstance(value, tuple) and all(isinstance(item, _KEYS) for item in value))


@contextlib.contextmanager
def damage(where: object) -> Iterator[None]:
    """What goes wrong inside is the file's fault: its content is not built as it should be."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{where} is damaged or of an unknown version ({type(error).__name__}: {error}). Take another checkpoint."
        ) from error


def mapping(value: Any, what: str, where: object) -> dict[Any, Any]:
    """``value``, if it is a dictionary.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} has no {what} (but {type(value).__name__}): it is not the file it should be.")
    return value
