"""Numbers as configurations and command lines write them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def to_number(value: Any) -> Any:
    """Convert text that is a number, such as "2e8" or "500_000_000"; any other value stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(value) if value.strip().lstrip("+-").isdecimal() else number


def to_whole_number(value: Any) -> Any:
    """``to_number`` for counts: also "7B" and "350M" are numbers, and 5e8 is an integer; fractions stay floats."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if text[-1:] in _SUFFIXES and isinstance(number := to_number(text[:-1]), (int, float)) and text[-2:-1].isdigit():
        if not number or not math.isfinite(number):  # 1e-999999999 is 0 as a float, and as a fraction takes for ever
            return number
        exact = Fraction(text[:-1].replace("_", "")) * _SUFFIXES[text[-1]]  # 1.1e9 is not 1.1 * 10**9 in floats
        return exact.numerator if exact.denominator == 1 else float(exact)
    value = to_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def count_of(value: Any, name: str) -> int:
    """A count that a user wrote: a number, or text such as "7e9", "1.5B" or "350M".

    Raises:
        ValueError: it is none, or not at least 1; names ``name``.
    """
    number = to_whole_number(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 1 <= number < math.inf:
        raise ValueError(f"{name}={value!r} is no count: write a number of at least 1, such as 7e9, 7B or 350M.")
    return int(number)
