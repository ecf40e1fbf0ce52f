"""Which rank owns which parameter, if shards must not cut through parameters. Pure integers.

Within a bucket the largest parameter is assigned first, to the smallest share (Graham's LPT rule: the longest shard is
at most 4/3 of the shortest possible). The largest share goes to the rank with the least elements in earlier buckets: so
the optimizer's work is balanced over the engine although no single bucket is.

Note [Padding]
    All shards of a bucket are as long as the longest, so a bucket of few parameters is padded: four matrices on eight
    ranks take twice their memory. Below stage 3 a bucket may hold parameters of several units, so units are joined
    until the padding is small or the bucket is full. At stage 3 each unit is gathered alone, and cannot be joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from lt_zero.engine.layout import aligned

SMALL = 1 / 16  # of a bucket's elements: units are not joined to reduce smaller padding


class Owners:
    """Assigns the parameters of one bucket after the other to ranks.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._loads = [0] * world  # elements of trained parameters so far

    def of(self, numels: Sequence[int], trains: bool) -> tuple[int, ...]:
        """The owner of each parameter of the next bucket; frozen buckets (not ``trains``) do not count as work."""
        shares = share_out(numels, self._world)
        sizes = shares_of(numels, shares, self._world)
        heavy = sorted(range(self._world), key=lambda share: (-sizes[share], share))
        light = sorted(range(self._world), key=lambda rank: (self._loads[rank], rank))
        rank_of = dict(zip(heavy, light, strict=True))
        for share, rank in rank_of.items():
            self._loads[rank] += sizes[share] if trains else 0
        return tuple(rank_of[share] for share in shares)


def share_out(numels: Sequence[int], world: int) -> tuple[int, ...]:
    """Divide items among ``world`` shares of about equal size (LPT rule): the share of each item.

    >>> share_out([1, 4, 3, 4], 2)
    (1, 0, 0, 1)
    """
    sizes = [(0, share) for share in range(world)]  # a heap: a linear search takes minutes with hundreds of ranks
    found = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        size, share = sizes[0]
        found[index] = share
        heapreplace(sizes, (size + aligned(numels[index]), share))
    return tuple(found)


def shares_of(numels: Sequence[int], shares: Sequence[int], world: int) -> list[int]:
    """The elements of each share, alignment included."""
    sizes = [0] * world
    for numel, share in zip(numels, shares, strict=True):
        sizes[share] += aligned(numel)
    return sizes


def padding(numels: Sequence[int], world: int) -> float:
    """The padding of a bucket with owners, per element of its parameters."""
    total = sum(numels)
    longest = max(shares_of(numels, share_out(numels, world), world))
    return longest * world / total - 1 if total else 0.0


def join(numels: Sequence[int], groups: Sequence[Sequence[int]], limit: int, world: int) -> list[list[int]]:
    """Join neighbouring groups of indices until their padding is small, to ``limit`` elements. See Note [Padding]."""

    def size(group: Sequence[int]) -> int:
        return sum(numels[index] for index in group)

    def spare(group: Sequence[int]) -> float:
        return padding([numels[index] for index in group], world)

    joined: list[list[int]] = []
    current: list[int] = []
    for group in groups:
        if current and size(current) + size(group) > limit:
            joined.append(current)
            current = []
        current = [*current, *group]
        if spare(current) <= SMALL:
            joined.append(current)
            current = []
    while current and joined and spare(current) > SMALL and size(joined[-1]) + size(current) <= limit:
        both = [*joined[-1], *current]  # the rest, such as a large output layer, is joined with the group before
        if spare(both) * size(both) >= spare(current) * size(current) + spare(joined[-1]) * size(joined[-1]):
            break
        joined, current = joined[:-1], both
    return [*joined, current] if current else joined
