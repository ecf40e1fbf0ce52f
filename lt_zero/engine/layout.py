"""The layout of a bucket: parameters -> bucket -> shards -> pieces. Pure integers, no tensors, no process group.

A bucket is one flat row of elements. Each parameter gets a span of it, starting at a multiple of ``ALIGN`` elements so
that vector loads stay aligned. The row is padded so that all shards have the same length. A piece is the intersection
of a shard and a parameter.

Span number i is parameter number i. Spans are in the order of elements if shards cut through parameters. Where each
parameter has an owner they are in that order only within a shard; ``pieces`` always are.

Owners are assigned to the largest parameter of a bucket first, to the smallest share (Graham's LPT rule: the longest
shard is at most 4/3 of the shortest possible). The largest share goes to the rank with the least elements in earlier
buckets: so the optimizer's work is balanced over the engine although no single bucket is.

Note [Padding]
    All shards of a bucket are as long as the longest, so a bucket of few parameters is padded: four matrices on eight
    ranks take twice their memory. Below stage 3 a bucket may hold parameters of several units, so units are joined
    until the padding is small or the bucket is full. At stage 3 each unit is gathered alone, and cannot be joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import accumulate

ALIGN = 8  # elements: 16 bytes in a 16-bit dtype, 32 bytes in fp32


@dataclass(frozen=True)
class Sharding:
    """A ZeRO stage (arXiv:1910.02054, section 5) as data: what is sharded over the ranks."""

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of_stage(cls, stage: int) -> Sharding:
        return cls(optim=stage >= 1, grads=stage >= 2, params=stage >= 3)


@dataclass(frozen=True)
class Span:
    """One parameter in the bucket: elements ``[lo, hi)`` of the bucket hold ``shape`` row-major."""

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True)
class Piece:
    """Elements ``[lo, hi)`` of parameter number ``index``, at ``offset`` in a shard."""

    index: int
    lo: int
    hi: int
    offset: int

    @property
    def numel(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class BucketLayout:
    """The spans of one bucket and how the bucket is cut into ``world`` equal shards."""

    spans: tuple[Span, ...]
    shard_numel: int
    world: int

    @property
    def numel(self) -> int:
        return self.shard_numel * self.world

    def shard(self, rank: int) -> tuple[int, int]:
        """The bucket elements ``[lo, hi)`` that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, lo: int, hi: int) -> tuple[Piece, ...]:
        """The non-empty pieces of parameters inside bucket elements ``[lo, hi)``, in the order of elements."""
        cuts = ((index, span.lo, max(span.lo, lo), min(span.hi, hi)) for index, span in enumerate(self.spans))
        found = (Piece(index, a - start, z - start, a - lo) for index, start, a, z in cuts if a < z)
        return tuple(sorted(found, key=lambda piece: piece.offset))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The bucket elements that belong to no parameter (alignment and tail padding)."""
        return gaps_between(sorted((span.lo, span.hi) for span in self.spans), self.numel)


def plan_bucket(
    parameters: Iterable[tuple[str, Sequence[int]]], world: int, owners: Sequence[int] | None = None
) -> BucketLayout:
    """Lay ``(name, shape)`` parameters out in one bucket for ``world`` ranks.

    ``owners``: the rank whose shard has all of each parameter; None: shards cut through parameters.
    """
    shapes = [(name, tuple(shape)) for name, shape in parameters]
    sizes = [aligned(math.prod(shape)) for _, shape in shapes]
    if owners is None:
        starts, shard = [0, *accumulate(sizes)], aligned(-(-sum(sizes) // world))
    else:
        ends = [0] * world
        offsets = []
        for size, owner in zip(sizes, owners, strict=True):
            offsets.append(ends[owner])
            ends[owner] += size
        shard = max(ends)
        starts = [owner * shard + offset for owner, offset in zip(owners, offsets, strict=True)]
    spans = (Span(n, s, lo, lo + math.prod(s)) for (n, s), lo in zip(shapes, starts, strict=False))
    return BucketLayout(tuple(spans), shard, world)


def aligned(numel: int) -> int:
    """``numel``, rounded up to a multiple of ``ALIGN``."""
    return -(-numel // ALIGN) * ALIGN


def split_by_size(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Group consecutive indices so that no group exceeds ``limit`` elements, except a single larger item.

    >>> split_by_size([3, 3, 9, 1], 6)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    size = 0
    for index, numel in enumerate(numels):
        if not groups or size + numel > limit:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += numel
    return groups


def gaps_between(ranges: Iterable[tuple[int, int]], numel: int) -> tuple[tuple[int, int], ...]:
    """The non-empty ranges [lo, hi) between ordered ``ranges`` of a row of ``numel`` elements."""
    edges = [0, *(edge for pair in ranges for edge in pair), numel]
    return tuple((lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True) if lo < hi)


# ---- which rank owns which parameter, if shards must not cut through parameters ------------------------------------

SMALL = 1 / 16  # of a bucket's elements: units are not joined to reduce smaller padding


class Owners:
    """Assigns the parameters of one bucket after the other to ``world`` ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._loads = [0] * world  # elements of trained parameters so far

    def of(self, numels: Sequence[int], trains: bool) -> tuple[int, ...]:
        """The owner of each parameter of the next bucket; frozen buckets (not ``trains``) do not count as work."""
        shares = share_out(numels, self._world)
        sizes = shares_of(numels, shares, self._world)
        heavy = sorted(range(self._world), key=lambda share: -sizes[share])
        light = sorted(range(self._world), key=lambda rank: self._loads[rank])
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

    def measure(group: Sequence[int]) -> tuple[int, float]:
        sizes = [numels[index] for index in group]
        return sum(sizes), padding(sizes, world)

    joined: list[list[int]] = []
    current: list[int] = []
    for group in groups:
        if current and measure(current)[0] + measure(group)[0] > limit:
            joined.append(current)
            current = []
        current = [*current, *group]
        if measure(current)[1] <= SMALL:
            joined.append(current)
            current = []
    while current and joined:
        both = [*joined[-1], *current]  # the rest, such as a large output layer, is joined with the group before
        size, spare = measure(current)
        size_before, spare_before = measure(joined[-1])
        size_both, spare_both = measure(both)
        worse = spare_both * size_both >= spare * size + spare_before * size_before
        if spare <= SMALL or size_both > limit or worse:
            break
        joined, current = joined[:-1], both
    return [*joined, current] if current else joined
