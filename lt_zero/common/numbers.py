"""Numbers as configurations write them."""

from __future__ import annotations

from typing import Any


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
    """``to_number``, and 5e8 as an integer; fractions stay floats."""
    value = to_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
