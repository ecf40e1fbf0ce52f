"""Plain descriptions of the keys of containers that are no plain values: plain.py, Note [Keys]."""

from __future__ import annotations

import enum
import importlib
import pathlib
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from lt_zero.checkpoint.native.plain import ATOMS, TORCH, Key, Path, dotted_path


def described(path: Path, key: Any) -> list[Any] | None:
    """A plain description of a key: the path of its container, its plain name, its description, and its path as text.

    None: it has none. ``path``: with ``Key(name)`` at its end.
    """
    parts = [_describe(part) for part in (*path[:-1], key)]
    return [parts[:-1], path[-1].name, parts[-1], dotted_path((*path[:-1], key))] if None not in parts else None


def unknown(records: Iterable[Any]) -> list[str]:
    """The paths of described keys of classes that are not loaded."""
    return [record[-1] for record in records if not described_keys([record])]


def described_keys(records: Iterable[Any], trusted: bool = False) -> dict[Path, Any]:
    """The keys of descriptions, by their paths; those of classes that are not loaded are left out.

    ``trusted``: import the modules of these.
    """
    found: dict[Path, Any] = {}
    for parts, name, last, _ in records:
        try:
            *path, key = (_find(part, trusted) for part in (*parts, last))
        except (LookupError, TypeError, ValueError, AttributeError, ImportError):
            continue
        found[(*path, Key(name))] = key
    return found


def _describe(key: Any) -> list[Any] | None:
    made: list[Any] | None = None
    if type(key) in ATOMS or isinstance(key, TORCH):
        return ["is", key]
    if isinstance(key, enum.Enum):
        made = ["member", type(key).__module__, type(key).__qualname__, key.name]
    elif isinstance(key, type):
        made = ["class", key.__module__, key.__qualname__]
    elif isinstance(key, PurePath):
        made = ["path", isinstance(key, pathlib.Path), str(key)]
    elif type(key) in (tuple, frozenset):
        parts = [_describe(part) for part in (sorted(key, key=repr) if isinstance(key, frozenset) else key)]
        made = [type(key).__name__, parts] if None not in parts else None
    try:
        return made if made is not None and _find(made, trusted=False) == key else None
    except (LookupError, TypeError, ValueError, AttributeError):
        return None  # of a class in a function, or without a name of its own


def _find(description: list[Any], trusted: bool) -> Any:
    kind, *rest = description
    if kind == "is":
        return rest[0]
    if kind == "path":
        return (pathlib.Path if rest[0] else PurePath)(rest[1])
    if kind in ("tuple", "frozenset"):
        return {"tuple": tuple, "frozenset": frozenset}[kind](_find(part, trusted) for part in rest[0])
    module, name, *member = rest
    if trusted:
        importlib.import_module(module)
    found: Any = sys.modules[module]
    for part in name.split("."):
        # Read the dict: ``__getattr__`` may do anything.
        found = vars(found)[part]
    if not isinstance(found, type) or (kind == "member") != bool(member):
        raise TypeError(f"{name} is no class")
    return found.__members__[member[0]] if issubclass(found, enum.Enum) and member else found
