"""The values that an object holds: attributes, also in ``__slots__``, items of containers, and closures of functions.

They are read and written where they lie, past what the user's class defines (``__getattr__``, ``__setattr__``,
``__class__``, ``__iter__`` of a subclass of ``list``): an object may be frozen, pass attributes on to another one, or
read its items from a disk.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from multiprocessing import sharedctypes
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

MISSING: Any = object()  # no such value
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST = 64  # items of a container
_NAMES = (str, int, float, Enum, type(None))  # keys of dictionaries whose text is the same in another process
# Numbers in memory that processes may share, with and without a lock: each has an attribute ``value``.
_SHARED_NUMBERS = (
    *(sharedctypes.Synchronized, ctypes.c_bool, ctypes.c_byte, ctypes.c_ubyte, ctypes.c_short, ctypes.c_ushort),
    *(ctypes.c_int, ctypes.c_uint, ctypes.c_long, ctypes.c_ulong, ctypes.c_longlong, ctypes.c_ulonglong),
    *(ctypes.c_float, ctypes.c_double),
)
_SHARED_ARRAYS = (sharedctypes.SynchronizedArray, ctypes.Array)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` that does not ask the value for its ``__class__``, which may be a property that loads data."""
    return issubclass(type(value), kinds)


def is_shared_number(value: Any) -> bool:
    """True for a number of ``multiprocessing.Value``."""
    return is_a(value, _SHARED_NUMBERS)


def is_shared_array(value: Any) -> bool:
    """True for what ``multiprocessing.Array`` makes."""
    return is_a(value, _SHARED_ARRAYS)


def asked(owner: Any, name: str) -> Any:
    """An attribute as the user's code gets it; None if there is none, or if asking for it fails."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def held_by(owner: Any) -> Iterator[tuple[Any, Any]]:
    """The values that an object holds, each after the key for ``read`` and ``write``, whose text is its name."""
    if is_a(owner, dict):
        yield from [(key, value) for key, value in items_of(owner, _MOST) if is_a(key, _NAMES)]
    elif is_a(owner, (list, tuple, deque)):
        yield from enumerate(items_of(owner, _MOST))
    elif is_a(owner, functools.partial):
        yield from ((name, getattr(owner, name)) for name in ("func", "args", "keywords"))
    elif is_shared_number(owner):
        yield "value", owner.value
    elif is_a(owner, MethodType):
        yield "__self__", owner.__self__
    elif is_a(owner, FunctionType):
        for name in _cells(owner):
            if (value := read(owner, name)) is not MISSING:
                yield name, value
    else:
        yield from attributes_of(owner)


def items_of(owner: Any, most: int | None = None, step: int = 1) -> list[Any]:
    """Each ``step``-th of the first ``most`` items of a container, as its built-in class gives them.

    Those of a dictionary are pairs.
    """
    base = _base_of(owner)

    def read(container: Any) -> list[Any]:
        items = base.items(container) if issubclass(base, dict) else base.__iter__(container)
        return list(islice(items, 0, most, step))

    try:
        return read(owner)
    except RuntimeError:  # another thread adds to it meanwhile; one call copies all, which no thread interrupts
        return read(base.copy(owner))


def size_of(owner: Any) -> int:
    """The number of items of a container."""
    return int(_base_of(owner).__len__(owner))


def _base_of(owner: Any) -> Any:
    """The built-in class of a container."""
    return next(kind for kind in (OrderedDict, *CONTAINERS) if is_a(owner, kind))


def attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, also those in ``__slots__`` of its class and its bases, by their names."""
    yield from list(_attributes(owner).items())
    for name in slots_of(type(owner)):
        if (value := read(owner, name)) is not MISSING:
            yield name, value


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
    if is_a(owner, dict):
        return _base_of(owner).get(owner, key, MISSING)
    if is_a(owner, (list, tuple, deque)):
        items = items_of(owner, key + 1)
        return items[key] if key < len(items) else MISSING
    if is_a(owner, FunctionType):
        try:
            return _cells(owner)[key].cell_contents
        except (KeyError, ValueError):  # an empty cell
            return MISSING
    if is_shared_number(owner):
        return owner.value
    attributes = _attributes(owner)
    if key in attributes:
        return attributes[key]
    try:
        return slots_of(type(owner))[key].__get__(owner)
    except (KeyError, AttributeError):
        return MISSING


def write(owner: Any, key: Any, value: Any) -> None:
    """Let an object hold a value under a key. Does nothing where that is impossible, as in a tuple."""
    if is_a(owner, dict):
        _base_of(owner).__setitem__(owner, key, value)
    elif is_a(owner, (list, deque)):
        if key < size_of(owner):
            _base_of(owner).__setitem__(owner, key, value)
    elif is_a(owner, FunctionType):
        if key in _cells(owner):
            _cells(owner)[key].cell_contents = value
    elif is_shared_number(owner):
        owner.value = value
    elif key in (slots := slots_of(type(owner))):
        slots[key].__set__(owner, value)
    else:
        _attributes(owner)[key] = value


def is_record(value: Any) -> bool:
    """True for an instance of a frozen dataclass that is no iterable: code that counts in one replaces it."""
    settings = getattr(type(value), "__dataclass_params__", None)
    return bool(getattr(settings, "frozen", False)) and not hasattr(type(value), "__iter__")


def is_replaced(owner: Any) -> bool:
    """True for what cannot be changed, or is not by anyone else; then ``replaced`` makes another one."""
    return is_a(owner, tuple) or is_record(owner)


def replaced(owner: Any, key: Any, value: Any) -> Any:
    """A copy of a tuple or record that holds another value under a key of ``held_by``."""
    if is_a(owner, tuple):
        items = [value if number == key else item for number, item in enumerate(items_of(owner))]
        return type(owner)(*items) if hasattr(owner, "_fields") else type(owner)(items)
    other = copy.copy(owner)
    write(other, key, value)
    return other


def _attributes(owner: Any) -> dict[str, Any]:
    """The ``__dict__`` of an object; an empty one if it has none."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except Exception:  # also of a property of the user's
        return {}
    return found if isinstance(found, dict) else {}


def _cells(function: FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
