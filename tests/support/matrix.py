"""Which combinations of parameters run in the fast suite; the others are marked slow and run in ``make test-slow``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")


def only(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` of one parameter; those that are not in ``fast`` are slow.

    Raises:
        ValueError: something in ``fast`` is no value.
    """
    return only_rows([(value,) for value in fast], [(value,) for value in values])


def only_rows(fast: Iterable[tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """``rows`` of several parameters; those that are not in ``fast`` are slow.

    Raises:
        ValueError: something in ``fast`` is no row.
    """
    fast, rows = list(fast), list(rows)
    if unknown := [row for row in fast if row not in rows]:
        raise ValueError(f"{unknown} are not among {rows}")
    return [pytest.param(*row, marks=() if row in fast else pytest.mark.slow) for row in rows]


def cover(*axes: Sequence[Any], strength: int = 1) -> list[Any]:
    """All combinations of the axes as parameters; the fast ones hold every value of each axis at least once.

    Args:
        axes: the values of each parameter.
        strength: 2 lets the fast ones hold every pair of values of any two axes, too (pairwise testing).
    """
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    fast = covering(every, list(itertools.combinations(range(len(axes)), strength)))
    rows = {row: [axis[i] for axis, i in zip(axes, row, strict=True)] for row in every}
    return [pytest.param(*rows[row], marks=() if row in fast else pytest.mark.slow) for row in every]


def covering(rows: Sequence[tuple[_T, ...]], places: Iterable[tuple[int, ...]]) -> list[tuple[_T, ...]]:
    """Few of ``rows`` that together hold all values which any of them has in ``places`` (columns) together."""
    columns = list(places)
    held = [_held(row, columns) for row in rows]
    left, chosen = set().union(*held), list[tuple[_T, ...]]()
    while left:
        gains = [len(left & has) for has in held]
        most = max(gains)
        # The most that is new; among equals the one whose values were used least, so that axes are mixed.
        best = min((number for number, gain in enumerate(gains) if gain == most), key=lambda n: _uses(rows[n], chosen))
        chosen.append(rows[best])
        left -= held[best]
    return chosen


def _uses(row: tuple[int, ...], rows: Iterable[tuple[int, ...]]) -> int:
    return sum(value == other for used in rows for value, other in zip(row, used, strict=True))


def _held(row: tuple[int, ...], columns: list[tuple[int, ...]]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(place, tuple(row[i] for i in place)) for place in columns}
