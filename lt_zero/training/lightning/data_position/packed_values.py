"""Counters and orders (plain_values.py) as plain containers and tensors, and back."""

from __future__ import annotations

import array
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.training.lightning.data_position.attributes import attributes_of, is_record, items_of, replaced
from lt_zero.training.lightning.data_position.plain_values import LARGEST, SCALARS


def packed(value: Any) -> Any:
    """A copy that consists of tensors, numbers, texts, lists and dictionaries.

    Raises:
        TypeError: an element is of another kind.
    """
    if isinstance(value, int) and int(value).bit_length() > LARGEST:
        return {"kind": "integer", "digits": hex(int(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, SCALARS):
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
    derived = isinstance(present, type(saved)) and isinstance(present, SCALARS)
    return type(present)(saved) if numbers or derived else saved


def _base_of(value: Any) -> Any:
    """A number or text of a class of the user's, such as a member of an enumeration, as Python's own."""
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str.__str__(value)
