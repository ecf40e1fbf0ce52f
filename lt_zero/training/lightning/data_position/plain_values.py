"""Counters and orders: numbers, texts, tensors and arrays, and containers of them; how they are compared and packed."""

from __future__ import annotations

import array
import hashlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.training.lightning.data_position.attributes import (
    CONTAINERS,
    attributes_of,
    is_a,
    is_record,
    items_of,
    replaced,
    size_of,
)

LONGEST = 1 << 18  # elements of an order that is saved
_DEEPEST = 4  # containers in containers
_LOOKED_AT = 64  # elements of a container whose kind is looked at
_COMPARED = 4096  # elements of a long order that are compared
_FEWEST = 8  # of each container in a container
_SCALARS = (int, float, str, np.integer, np.floating, np.bool_)
_AS_ONE = 8  # characters of a text that count as one element
_LARGEST = 255 * 8 - 1  # bits of an integer that torch reads with weights_only


def is_plain(value: Any, depth: int = 0) -> bool:
    """True if a value may count passes or be an order of samples."""
    if is_a(value, (*_SCALARS, array.array)):
        return not is_a(value, array.array) or value.typecode in "bBhHiIlLqQfd"
    if type(value) in (Tensor, Parameter):
        dense = value.layout == torch.strided and not value.is_nested
        return dense and value.device.type != "meta" and not (value.is_quantized or value.is_complex())
    if type(value) is np.ndarray:  # others read from files, or have more than values
        return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    if depth == _DEEPEST or not (is_a(value, CONTAINERS) or is_record(value)):
        return False
    inner = _elements(value, _LOOKED_AT)
    return all(item is None or is_plain(item, depth + 1) for item in inner)


def length(value: Any) -> int:
    """The number of elements, also in containers in containers; of long values some number above LONGEST."""
    if type(value) in (int, float, bool):
        return 1
    if is_a(value, Tensor):
        return int(value.numel())
    if is_a(value, np.ndarray):
        return int(value.size)
    if is_a(value, array.array):
        return len(value)
    if is_a(value, str):
        return 1 + str.__len__(value) // _AS_ONE
    if not is_a(value, CONTAINERS) and not is_record(value):
        return 1
    if is_a(value, CONTAINERS) and size_of(value) > LONGEST:
        return size_of(value)
    total = 0
    for item in _elements(value):
        total += length(item)
        if total > LONGEST:
            break
    return total


def digest(value: Any) -> bytes:
    """Tells whether a value has changed; of long ones some elements are looked at, and nothing is copied."""
    return hashlib.sha256(repr(_sample(value, _COMPARED)).encode(errors="surrogatepass")).digest()


def packed(value: Any) -> Any:
    """A copy that consists of tensors, numbers, texts, lists and dictionaries.

    Raises:
        TypeError: an element is of another kind.
    """
    if isinstance(value, int) and int(value).bit_length() > _LARGEST:
        return {"kind": "integer", "digits": hex(int(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, _SCALARS):
        return value.item() if isinstance(value, np.generic) else _base_of(value)
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (np.ndarray, array.array)):
        copied = np.array(value, order="C")
        return {"kind": "array", "items": torch.from_numpy(copied.astype(copied.dtype.newbyteorder("="), copy=False))}
    if type(value) is list and all(type(item) is int and abs(item) < 1 << 62 for item in value):
        return {"list": torch.tensor(value, dtype=torch.int64)}  # a tenth of the bytes
    if isinstance(value, dict):
        return {"kind": "mapping", "items": [[packed(key), packed(item)] for key, item in items_of(value)]}
    if isinstance(value, (set, frozenset)):
        return {"kind": "set", "items": [packed(item) for item in items_of(value)]}
    if isinstance(value, (list, tuple, deque)):
        items = [packed(item) for item in items_of(value)]
        kind = {list: "sequence", tuple: "tuple"}.get(type(value), "deque" if isinstance(value, deque) else "tuple")
        return items if kind == "sequence" else {"kind": kind, "items": items}
    if is_record(value):
        return {"kind": "record", "items": {name: packed(item) for name, item in attributes_of(value)}}
    raise TypeError(type(value).__name__)


def restored(saved: Any, present: Any) -> Any:
    """The value of ``packed``, of the class of the ``present`` value where that is known.

    Where others may hold the present one, it is changed in place and returned.
    """
    value = _unpacked(saved, present)
    if isinstance(present, (Tensor, np.ndarray)) and type(value) is type(_bare(present)):
        return present if present.shape == value.shape and _copied_into(present, value) else value
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


def _bare(present: Any) -> Any:
    return present.data if isinstance(present, Tensor) else present


def _copied_into(present: Any, value: Any) -> bool:
    """Give a tensor or an array the elements of another one of its shape; False if it cannot be written to."""
    try:
        if isinstance(present, Tensor):
            present.detach().copy_(value)
        else:
            present[...] = value
    except (RuntimeError, ValueError):  # elements that share memory, inference mode, arrays that are read only
        return False
    return True


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
    if kind == "integer":
        return int(saved["digits"], 16)
    items = saved["items"]
    if kind == "array":
        return items.numpy().copy()
    if kind == "mapping":
        entries = dict(items_of(present)) if isinstance(present, dict) else {}
        keys = [_unpacked(key, None) for key, _ in items]
        return {key: _unpacked(item, entries.get(key)) for key, (_, item) in zip(keys, items, strict=True)}
    if kind == "record":
        for name, item in list(attributes_of(present)) if is_record(present) else ():
            if name in items:
                present = replaced(present, name, _unpacked(items[name], item))
        return present
    members = items_of(present) if isinstance(present, (tuple, deque)) else []
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


def _elements(value: Any, most: int | None = None, step: int = 1) -> list[Any]:
    """The elements of a record, or of each ``step``-th of the first ``most`` items of a container.

    Those of an item of a dictionary are its key and its value.
    """
    if is_record(value):
        return [item for _, item in attributes_of(value)]
    items = items_of(value, most, step)
    return [element for pair in items for element in pair] if is_a(value, dict) else items


def _sample(value: Any, most: int) -> Any:
    """The size of a value and the compared part of it, as something whose ``repr`` is the same for the same values."""
    if is_a(value, (Tensor, np.ndarray)):
        return tuple(value.shape), _some(value, most)
    if is_a(value, array.array):
        return len(value), value[:: max(1, len(value) // most)].tolist()
    if is_a(value, str):
        return str.__len__(value), str.__getitem__(value, slice(None, None, max(1, str.__len__(value) // most)))
    if is_a(value, np.generic):
        return value.item()
    if is_a(value, int):
        return int(value) if int(value).bit_length() <= _LARGEST else hash(int(value))
    if is_a(value, float):
        return float(value)
    if not is_a(value, CONTAINERS) and not is_record(value):
        return value if value is None else type(value).__name__
    size = size_of(value) if is_a(value, CONTAINERS) else 0
    chosen = _elements(value, step=max(1, size // most))
    each = max(_FEWEST, most // max(1, len(chosen)))
    sample = [_sample(item, each) for item in chosen]
    return size, sorted(sample, key=repr) if is_a(value, (set, frozenset)) else sample


def _some(value: Any, most: int) -> list[Any]:
    """Elements of a tensor or an array at equal distances, without a copy of all of it."""
    count = length(value)
    step = max(1, count // most)
    if value.is_contiguous() if isinstance(value, Tensor) else value.flags.c_contiguous:
        found = value.reshape(-1)[::step]
    else:
        places = np.unravel_index(np.arange(0, count, step), tuple(value.shape))
        found = value[tuple(map(torch.from_numpy, places)) if isinstance(value, Tensor) else places]
    return list(found.tolist())
