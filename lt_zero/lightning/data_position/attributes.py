"""The values that an object holds: attributes, also in ``__slots__``, items of containers, and closures of functions.

They are read and written where they lie, past the ``__getattr__`` and ``__setattr__`` of the user's class: an object
may be frozen, or pass attributes on to another one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

MISSING: Any = object()  # no such value
_MOST = 64  # items of a container


def held_by(owner: Any) -> Iterator[tuple[str, Any, Any]]:
    """The values that an object holds: a name, the key for ``read`` and ``write``, and the value."""
    if isinstance(owner, dict):
        yield from [(str(key), key, value) for key, value in islice(owner.items(), _MOST)]
    elif isinstance(owner, (list, tuple, deque)):
        yield from [(str(number), number, value) for number, value in enumerate(islice(owner, _MOST))]
    elif isinstance(owner, functools.partial):
        yield from ((name, name, getattr(owner, name)) for name in ("func", "args", "keywords"))
    elif isinstance(owner, MethodType):
        yield "__self__", "__self__", owner.__self__
    elif isinstance(owner, FunctionType):
        for name in _cells(owner):
            if (value := read(owner, name)) is not MISSING:
                yield name, name, value
    else:
        yield from attributes_of(owner)


def attributes_of(owner: Any) -> Iterator[tuple[str, Any, Any]]:
    """The attributes of an object, also those in ``__slots__`` of its class and its bases, as ``held_by``."""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        yield name, name, value
    for name in slots_of(type(owner)):
        if (value := read(owner, name)) is not MISSING:
            yield name, name, value


def slots_of(kind: type) -> dict[str, Any]:
    """The members of a class that lie in ``__slots__``, by the name of their attribute."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__slots__" in base.__dict__:  # which may have been an iterator, and does not have the names of private ones
            members = base.__dict__.items()
            found.update((name, member) for name, member in members if isinstance(member, MemberDescriptorType))
    return found


def read(owner: Any, key: Any) -> Any:
    """The value that an object holds under a key of ``held_by``; MISSING if there is none."""
    if isinstance(owner, dict):
        return owner.get(key, MISSING)
    if isinstance(owner, (list, tuple, deque)):
        return owner[key] if key < len(owner) else MISSING
    if isinstance(owner, FunctionType):
        try:
            return _cells(owner)[key].cell_contents
        except (KeyError, ValueError):  # an empty cell
            return MISSING
    attributes = getattr(owner, "__dict__", {})
    if key in attributes:
        return attributes[key]
    try:
        return slots_of(type(owner))[key].__get__(owner)
    except (KeyError, AttributeError):
        return MISSING


def write(owner: Any, key: Any, value: Any) -> None:
    """Let an object hold a value under a key. Does nothing where that is impossible, as in a tuple."""
    if isinstance(owner, dict):
        owner[key] = value
    elif isinstance(owner, (list, deque)):
        if key < len(owner):
            owner[key] = value
    elif isinstance(owner, FunctionType):
        if key in _cells(owner):
            _cells(owner)[key].cell_contents = value
    elif key in (slots := slots_of(type(owner))):
        slots[key].__set__(owner, value)
    elif hasattr(owner, "__dict__"):
        vars(owner)[key] = value


def is_record(value: Any) -> bool:
    """True for an instance of a frozen dataclass that is no iterable: code that counts in one replaces it."""
    settings = getattr(type(value), "__dataclass_params__", None)
    return (
        bool(getattr(settings, "frozen", False)) and dataclasses.is_dataclass(value) and not hasattr(value, "__iter__")
    )


def is_replaced(owner: Any) -> bool:
    """True for what cannot be changed, or is not by anyone else; then ``replaced`` makes another one."""
    return isinstance(owner, tuple) or is_record(owner)


def replaced(owner: Any, key: Any, value: Any) -> Any:
    """A copy of a tuple or record that holds another value under a key of ``held_by``."""
    if isinstance(owner, tuple):
        items = [value if number == key else item for number, item in enumerate(owner)]
        return type(owner)(*items) if hasattr(owner, "_fields") else type(owner)(items)
    other = copy.copy(owner)
    write(other, key, value)
    return other


def _cells(function: FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
