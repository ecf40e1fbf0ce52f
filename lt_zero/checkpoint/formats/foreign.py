"""Base class of readers of other formats: names and ties of weights, and the conversion of their content."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.mapped_records import MappedRecords
from lt_zero.checkpoint.formats.reading import has_checksums, load
from lt_zero.checkpoint.native.saved_file import VERSION, opened
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError

_DEPTH = 64  # of nested containers
_SMALL = 4 << 20  # bytes of a file that is not mapped
_KEYS = (str, int, float, bool, bytes, type(None))
_PLAIN = (*_KEYS, complex, torch.dtype, torch.device)


class Saved(NamedTuple):
    """A tensor in a checkpoint: shape and dtype, and the function that reads it."""

    spec: Spec
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Saved:
        return cls(Spec(tuple(tensor.shape), tensor.dtype), lambda: tensor)


class ForeignSource:
    """A checkpoint of another format; a ``CheckpointSource``. Subclasses implement ``_open``.

    Args:
        path: the checkpoint.
        inert: names of further classes whose objects are left out instead of refused.

    Attributes:
        has_tags: whether a folder of this format has several checkpoints, each with a tag.
        notes: sentences about content that cannot be converted.
        parts: ranges of files that were or may be read: path, begin, end (None: of the file).

    Raises:
        CheckpointError: a file is missing, damaged, or has refused content; names it.
    """

    has_tags: ClassVar[bool] = False

    def __init__(self, path: str | os.PathLike[str], inert: Collection[str] = ()) -> None:
        self.path, self._inert = Path(path), inert
        self.notes: list[str] = []
        self.meta: Mapping[str, Any] = {}
        self.weights: Mapping[str, Spec] = {}
        self.aliases: Mapping[str, str] = {}
        self.optimizers: tuple[SavedOptimizer, ...] = ()
        self._prefix = ""
        self._tensors: dict[str, Saved] = {}
        self._states: list[Mapping[str, Mapping[str, Any]]] = []
        self.parts: list[tuple[Path, int, int | None]] = []
        self.records = MappedRecords()
        # Containers and their copies, by id: shared containers stay shared, as separate copies could be huge.
        self._copies: dict[int, tuple[Any, Any]] = {}
        with damage(self.path):
            self._open()
        self._copies.clear()

    @classmethod
    def looks_like(cls, path: str | os.PathLike[str]) -> bool:
        """True if ``path`` is of this format; says nothing about whether it is complete."""
        raise NotImplementedError

    def _open(self) -> None:
        """Set ``meta`` and ``parts``; call ``_set_weights``, then ``_add_optimizer`` for each optimizer."""
        raise NotImplementedError

    def _set_weights(self, tensors: Mapping[str, Saved], ties: Mapping[str, str]) -> None:
        """Publish tensors without the prefix of their names. ``ties``: name in ``tensors`` -> the one it shares."""
        self._prefix = _prefix_of(list(tensors), self.meta)
        self._tensors = {self._named(name): saved for name, saved in tensors.items()}
        self.weights = {name: saved.spec for name, saved in self._tensors.items()}
        self.aliases = {self._named(tied): self._named(first) for tied, first in ties.items()}

    def _add_optimizer(self, groups: list[dict[str, Any]], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Publish an optimizer. ``state``: entries by parameter, a ``Saved`` for an element-wise tensor."""
        self._states.append(state)
        specs = {
            name: {key: value.spec if isinstance(value, Saved) else value for key, value in entries.items()}
            for name, entries in state.items()
        }
        self.optimizers = (*self.optimizers, SavedOptimizer(groups, specs))

    def _named(self, name: Any) -> str:
        return str(name).removeprefix(self._prefix)

    def _is_elementwise(self, name: str, key: str, shape: tuple[int, ...]) -> bool:
        return key != "step" and name in self.weights and self.weights[name].shape == shape

    def load_file(self, file: Path, what: str) -> dict[Any, Any]:
        """The dictionary ``what`` in a file of ``torch.save``."""
        self.parts.append((file, 0, None))
        return mapping(load(file, inert=self._inert, mapped=self.records), what, file)

    def load_apart(self, file: Path) -> tuple[Any, MappedRecords]:
        """The content of one of many files of ``torch.save``, and what its values are checked by.

        A small file is read and checked now, as each mapping makes all later ones slower.
        """
        records = MappedRecords()
        with opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
        if size < _SMALL:
            return load(file, 0, size, self._inert), records
        return load(file, inert=self._inert, mapped=records), records

    def plain(self, value: Any, where: object, path: str = "", outer: tuple[int, ...] = ()) -> Any:
        """``value`` as containers, numbers and tensors; the rest is left out and noted, and ``None`` if all of it is.

        ``where`` and ``path``: the file, and the keys of the value in it, for messages. ``outer``: ids of the
        containers around it.
        """
        if isinstance(value, Tensor):
            return self.records.check(value).detach().clone()
        if isinstance(value, _PLAIN):
            return value
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            kind = getattr(value, "kind", "") or f"{type(value).__module__}.{type(value).__qualname__}"
            self.notes.append(f"{path} of {where} is an object of {kind}; it was left out.")
            return None
        if len(outer) > _DEPTH or id(value) in outer:
            raise CheckpointError(
                f"{path or 'The content'} of {where} is nested too deeply (more than {_DEPTH} levels, or in itself). "
                "Save the checkpoint without it."
            )
        if id(value) not in self._copies:
            inner = (*outer, id(value))
            if isinstance(value, dict):
                keys = [key for key in value if _is_plain(key)]
                if gone := [key for key in value if not _is_plain(key)]:
                    names = ", ".join(str(getattr(key, "kind", "") or key) for key in gone[:3])
                    self.notes.append(f"{path} of {where} has keys that are objects ({names}); they were left out.")
                made: Any = {key: self.plain(value[key], where, f"{path}.{key}".lstrip("."), inner) for key in keys}
            else:
                items = [self.plain(item, where, f"{path}[{n}]", inner) for n, item in enumerate(value)]
                made = tuple(items) if isinstance(value, tuple) else type(value)(items)
            self._copies[id(value)] = value, made
        return self._copies[id(value)][1]

    def read(self, name: str) -> Tensor:
        saved = self._tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{self.path} has no parameter or buffer {name!r}.")
        return self.records.check(saved.read()).detach().contiguous()

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        states = self._states[optimizer] if 0 <= optimizer < len(self._states) else {}
        saved = states.get(name, {}).get(key)
        if not isinstance(saved, Saved):
            raise CheckpointError(f"{self.path} has no state {key!r} of {name!r} in optimizer {optimizer}.")
        return self.records.check(saved.read()).detach().contiguous()

    def verify(self) -> list[str]:
        """Read every byte that has a checksum; returns the files without checksums, and raises if one is damaged."""
        parts = sorted(set(self.parts), key=lambda part: part[:2])
        return list(dict.fromkeys(str(part[0]) for part in parts if not has_checksums(*part)))


def _is_plain(key: Any) -> bool:
    return all(map(_is_plain, key)) if isinstance(key, (tuple, frozenset)) else isinstance(key, _PLAIN)


def _prefix_of(names: list[str], meta: Mapping[str, Any]) -> str:
    """The prefix that wrappers have added to all names; ``""`` if there is none.

    ``_forward_module.`` is Lightning's, for the strategies that have one. ``module.`` comes from DDP and the like, but
    may also be the user's only child: so it stays where Lightning 2 wrote the checkpoint, which saves its own module.
    """
    old = str(meta.get(VERSION, "1."))[:2] in ("0.", "1.")
    wrappers = ("_forward_module.", "module.") if old else ("_forward_module.",)
    prefix = ""
    while names:
        found = next((w for w in wrappers if all(name.startswith(prefix + w) for name in names)), "")
        if not found:
            break
        prefix += found
    return prefix


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors with the same memory: later name -> first name."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            known = first.setdefault(place, name)
            if known != name:
                found[name] = known
    return found


@contextlib.contextmanager
def damage(where: object) -> Iterator[None]:
    """Context that turns errors of Python into those of unexpected content in ``where``."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{where} is damaged or of an unknown version ({type(error).__name__}: {error}). Take another checkpoint."
        ) from error


def mapping(value: Any, what: str, where: object) -> dict[Any, Any]:
    """``value``, which must be a dictionary."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} has no {what} (but {type(value).__name__}): it is not the file it should be.")
    return value
