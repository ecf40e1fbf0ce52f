"""Counters and orders: numbers, texts, tensors and arrays, and containers of them; how they are compared."""

from __future__ import annotations

import array
import hashlib
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
    size_of,
)

LONGEST = 1 << 18  # elements of an order that is saved
_DEEPEST = 4  # containers in containers
_LOOKED_AT = 64  # elements of a container whose kind is looked at
_COMPARED = 4096  # elements of a long order that are compared
_FEWEST = 8  # of each container in a container
SCALARS = (int, float, str, np.integer, np.floating, np.bool_)
_AS_ONE = 8  # characters of a text that count as one element
LARGEST = 255 * 8 - 1  # bits of an integer that torch reads with weights_only


def is_plain(value: Any, depth: int = 0) -> bool:
    """True if a value may count passes or be an order of samples."""
    if is_a(value, (*SCALARS, array.array)):
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
        return int(value) if int(value).bit_length() <= LARGEST else hash(int(value))
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
