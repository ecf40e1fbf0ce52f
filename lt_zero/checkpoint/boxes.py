"""Checks that parts of a saved tensor are all of it, and that a description has the types that it should have.

Note [Exact cover]
    Boxes cover a tensor exactly if the sum of their indicator functions is that of the tensor. Such a sum is known by
    its corners, each with a sign: a polynomial with a variable for each coordinate of each axis. So the sums are equal
    if the polynomials are, which is tried at one random point modulo a large prime: equal polynomials always agree, and
    others do by chance in one of 2**50 cases. That takes a time proportional to the number of boxes, where comparing
    them with each other would let a file of some megabytes keep its reader for hours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
_PRIME = (1 << 61) - 1
_MOST = 1 << 62  # elements or bytes: more do not exist


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Check that each element of a tensor is in exactly one box. See Note [Exact cover].

    Raises:
        ValueError: a box is not inside of the tensor, boxes overlap, or elements are in none; names the tensor.
    """
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return  # most tensors
    total = 0
    for low, sizes in boxes:
        inside = len(low) == len(sizes) == len(shape)
        if not inside or any(a < 0 or n < 0 or a + n > size for a, n, size in zip(low, sizes, shape, strict=True)):
            raise ValueError(f"{name} of shape {shape} has a part of {sizes} at {low}")
        total += math.prod(sizes)
    if total != math.prod(shape):
        what = "lacks" if total < math.prod(shape) else "has twice"
        raise ValueError(
            f"{name} of shape {shape} {what} elements: its parts have {total} of {math.prod(shape)} together"
        )
    chance = random.SystemRandom()
    values: list[dict[int, int]] = [{} for _ in shape]  # of the variables, by axis

    def volume(box: Box) -> int:
        product = 1
        for known, low, size in zip(values, *box, strict=True):
            ends = [known.setdefault(end, chance.randrange(_PRIME)) for end in (low, low + size)]
            product = product * (ends[1] - ends[0]) % _PRIME
        return product

    if (sum(map(volume, boxes)) - volume(((0,) * len(shape), shape))) % _PRIME:
        raise ValueError(f"{name} of shape {shape} has parts that overlap, and lacks elements")


def count(value: Any, what: str) -> int:
    """``value``, which must be a number of elements or bytes."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{what} is {value!r:.100}, no number of elements or bytes")
    return value


def counts(value: Any, what: str) -> tuple[int, ...]:
    """``value``, which must be a list of numbers of elements."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is {value!r:.100}, no list of numbers")
    return tuple(count(item, what) for item in value)


def texts(value: Any, what: str) -> tuple[str, ...]:
    """``value``, which must be a list of names."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{what} is {value!r:.100}, no list of names")
    return tuple(value)


def table(value: Any, what: str) -> dict[str, Any]:
    """``value``, which must be a dictionary with names as keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} is {value!r:.100}, no table by names")
    return value


def dtype_of(value: Any, what: str) -> torch.dtype:
    """The dtype with a name."""
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{what} is {value!r:.100}, which is none")
    return found
