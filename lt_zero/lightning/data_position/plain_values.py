"""Counters and orders: numbers, texts, tensors and arrays, and containers of them; how they are compared and packed."""

from __future__ import annotations

import array
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.lightning.data_position.attributes import attributes_of, is_record, replaced

LONGEST = 1 << 18  # elements of an order that is saved
_DEEPEST = 4  # containers in containers
_LOOKED_AT = 64  # elements of a container whose kind is looked at
_COMPARED = 4096  # elements of a long order that are compared
_SCALARS = (int, float, str, np.integer, np.floating, np.bool_)
_SEQUENCES = (list, tuple, set, frozenset, deque)


def is_plain(value: Any, depth: int = 0) -> bool:
    """True if a value may count passes or be an order of samples."""
    if isinstance(value, (*_SCALARS, Tensor, array.array)):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if depth == _DEEPEST:
        return False
    if not isinstance(value, (*_SEQUENCES, Mapping)) and not is_record(value):
        return False
    inner = _elements(value)
    return all(item is None or is_plain(item, depth + 1) for item in islice(inner, _LOOKED_AT))


def length(value: Any) -> int:
    """The number of elements, also in containers in containers."""
    if isinstance(value, Tensor):
        return int(value.numel())
    if isinstance(value, np.ndarray):
        return int(value.size)
    if isinstance(value, array.array):
        return len(value)
    if isinstance(value, (*_SEQUENCES, Mapping)) or is_record(value):
        return sum(map(length, _elements(value)))
    return 1


def digest(value: Any) -> bytes:
    """Tells whether a value has changed; of long ones some elements are looked at."""
    return hashlib.sha256(repr((length(value), _sample(value))).encode()).digest()


def packed(value: Any) -> Any:
    """A copy that consists of tensors, numbers, texts, lists and dictionaries.

    Raises:
        TypeError: an element is of another kind.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, _SCALARS):
        return value.item() if isinstance(value, np.generic) else _base_of(value)
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (np.ndarray, array.array)):
        return {"kind": "array", "items": torch.from_numpy(np.array(value))}
    if type(value) is list and all(type(item) is int and abs(item) < 1 << 62 for item in value):
        return {"list": torch.tensor(value, dtype=torch.int64)}  # a tenth of the bytes
    if isinstance(value, Mapping):
        return {"kind": "mapping", "items": [[packed(key), packed(item)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"kind": "set", "items": [packed(item) for item in value]}
    if isinstance(value, (list, tuple, deque)):
        items = [packed(item) for item in value]
        kind = {list: "sequence", tuple: "tuple"}.get(type(value), "deque" if isinstance(value, deque) else "tuple")
        return items if kind == "sequence" else {"kind": kind, "items": items}
    if is_record(value):
        return {"kind": "record", "items": {name: packed(item) for name, _, item in attributes_of(value)}}
    raise TypeError(type(value).__name__)


def restored(saved: Any, present: Any) -> Any:
    """The value of ``packed``, of the class of the ``present`` value where that is known.

    Where others may hold the present one, it is changed in place and returned.
    """
    value = _unpacked(saved, present)
    if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
        return present.copy_(value)
    if isinstance(present, np.ndarray) and isinstance(value, np.ndarray) and present.shape == value.shape:
        present[...] = value
        return present
    if isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif isinstance(present, array.array) and isinstance(value, np.ndarray):
        present[:] = array.array(present.typecode, value.tolist())
    elif isinstance(present, deque) and isinstance(value, deque):
        present.clear()
        present.extend(value)
    elif isinstance(present, (dict, set)) and isinstance(value, (dict, set)):
        present.clear()
        present.update(value)
    else:
        return value
    return present


def _unpacked(saved: Any, present: Any) -> Any:
    if isinstance(saved, Tensor):
        return saved.numpy().copy() if isinstance(present, np.ndarray) else saved.clone()
    if isinstance(saved, list):
        like = present if isinstance(present, list) else []
        return [_unpacked(item, like[number] if number < len(like) else None) for number, item in enumerate(saved)]
    if not isinstance(saved, dict):
        return _scalar(saved, present)
    if "list" in saved:
        return saved["list"].tolist()
    kind = saved["kind"]
    items = saved["items"]
    if kind == "array":
        return items.numpy().copy()
    if kind == "mapping":
        entries = present if isinstance(present, Mapping) else {}
        keys = [_unpacked(key, None) for key, _ in items]
        return {key: _unpacked(item, entries.get(key)) for key, (_, item) in zip(keys, items, strict=True)}
    if kind == "record":
        for name, key, item in list(attributes_of(present)) if is_record(present) else ():
            if name in items:
                present = replaced(present, key, _unpacked(items[name], item))
        return present
    members = list(present) if isinstance(present, (tuple, deque)) else []
    found = [_unpacked(item, members[number] if number < len(members) else None) for number, item in enumerate(items)]
    if kind == "set":
        return frozenset(found) if isinstance(present, frozenset) else set(found)
    if kind == "deque":
        return deque(found)
    return type(present)(*found) if hasattr(present, "_fields") else tuple(found)


def _scalar(saved: Any, present: Any) -> Any:
    """A number or text of the class of the present one: numpy's, or a member of an enumeration."""
    numbers = isinstance(saved, (int, float)) and isinstance(present, (np.integer, np.floating, np.bool_))
    derived = isinstance(present, type(saved)) and isinstance(present, _SCALARS)
    return type(present)(saved) if numbers or derived else saved


def _base_of(value: Any) -> Any:
    """A number or text of a class of the user's, such as a member of an enumeration, as Python's own."""
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str.__str__(value)


def _elements(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield item
    elif is_record(value):
        for _, _, item in attributes_of(value):
            yield item
    else:
        yield from value


def _sample(value: Any) -> Any:
    """The compared part of a value, as something whose ``repr`` is the same for the same values."""
    if isinstance(value, (Tensor, np.ndarray)):
        flat = value.reshape(-1)
        return flat[:: max(1, len(flat) // _COMPARED)].tolist()
    if isinstance(value, array.array):
        return value[:: max(1, len(value) // _COMPARED)].tolist()
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, (*_SEQUENCES, Mapping)) and not is_record(value):
        return value
    items = list(_elements(value))
    sample = [_sample(item) for item in items[:: max(1, len(items) // _COMPARED)]]
    return sorted(sample, key=repr) if isinstance(value, (set, frozenset)) else sample
