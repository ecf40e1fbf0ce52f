"""Names of parameters that several modules have together, in the order of the module that has all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

OfRanks = Callable[[Any], list[Any]]  # what all ranks give, of what this one gives; collective if there are others


def alone(mine: Any) -> list[Any]:
    """``OfRanks`` where no other rank counts."""
    return [mine]


def merged(orders: Iterable[Collection[str]]) -> list[str]:
    """All names of several ordered collections, each once, in an order that agrees with theirs.

    Where they do not tell, names of one module stay together, and those that first differ in a number are in the order
    of these numbers, as layers of a list are; others are in the order of the collections.

    >>> merged([["scale", "layers.0.weight", "layers.2.weight", "head"], ["scale", "layers.1.weight", "head"]])
    ['scale', 'layers.0.weight', 'layers.1.weight', 'layers.2.weight', 'head']
    """
    left = [list(reversed(dict.fromkeys(order))) for order in orders]  # the next one is the last
    left = [order for number, order in enumerate(left) if order and order not in left[:number]]
    if len(left) == 1:
        return left[0][::-1]
    waiting = Counter(name for order in left for name in order)  # the collections in which a name is still to come
    made, last = list[str](), list[str]()
    while left:
        heads = Counter(order[-1] for order in left)
        free = [name for name, count in heads.items() if count == waiting[name]]
        chosen = (free or list(heads))[0]
        for name in free[1:]:
            if _is_before(name.split("."), chosen.split("."), last):
                chosen = name
        made.append(chosen)
        last = chosen.split(".")
        if free:
            for order in left:
                if order[-1] == chosen:
                    order.pop()
        else:  # they have it in different orders
            left = [[name for name in order if name != chosen] for order in left]
        left = [order for order in left if order]
    return made


def _is_before(name: list[str], other: list[str], last: list[str]) -> bool:
    """True if ``name`` should come before ``other`` in an order that continues after ``last``."""
    if (mine := _common(name, last)) != (its := _common(other, last)):
        return mine > its
    place = _common(name, other)
    one, two = (path[place] if place < len(path) else "" for path in (name, other))
    return one.isdecimal() and two.isdecimal() and int(one) < int(two)


def _common(name: list[str], other: list[str]) -> int:
    """Number of leading parts that two names have in common."""
    return next((n for n, pair in enumerate(zip(name, other, strict=False)) if pair[0] != pair[1]), len(name))
