"""The layout of a bucket: parameters -> bucket -> shards -> pieces. Pure integers, no tensors, no process group.

A bucket is one flat row of elements. Each parameter gets a span of it, starting at a multiple of ``ALIGN`` elements so
that vector loads stay aligned. Where weights rest encoded, parameters and shards begin with a block of elements that
share a scale, so that codes depend neither on a parameter's neighbours nor on the number of ranks. The row is padded so
that all shards have the same length. A piece is the intersection of a shard and a parameter.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import accumulate

from torch import Tensor

from lt_zero.common.boxes import ParamSpec

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
    """One parameter in the bucket: elements ``[lo, hi)`` of the bucket hold it row-major."""

    spec: ParamSpec
    lo: int
    hi: int

    @cached_property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @cached_property
    def numel(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Piece:
    """Elements ``[lo, hi)`` of parameter number ``index``, at ``offset`` in a shard."""

    index: int
    lo: int
    hi: int
    offset: int

    @cached_property
    def numel(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class BucketLayout:
    """The spans of one bucket and how the bucket is cut into ``world`` equal shards."""

    spans: tuple[Span, ...]
    shard_numel: int
    world: int

    @cached_property
    def numel(self) -> int:
        return self.shard_numel * self.world

    @cached_property
    def elements(self) -> int:
        """Elements without padding."""
        return sum(span.numel for span in self.spans)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' elements in ``flat`` (1D, ``numel``), in their shapes."""
        return [flat[span.lo : span.hi].view(span.shape) for span in self.spans]

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
    parameters: Sequence[ParamSpec], world: int, owners: Sequence[int] | None = None, align: int = ALIGN
) -> BucketLayout:
    """Lay parameters out in one bucket for ``world`` ranks.

    Args:
        owners: the rank whose shard has all of each parameter; None: shards cut through parameters.
        align: parameters and shards begin at multiples of so many elements, a multiple of ``ALIGN``.
    """
    sizes = [aligned(spec.local_box.numel, align) for spec in parameters]
    if owners is None:
        starts, shard = [0, *accumulate(sizes)], aligned(-(-sum(sizes) // world), align)
    else:
        ends = [0] * world
        offsets = []
        for size, owner in zip(sizes, owners, strict=True):
            offsets.append(ends[owner])
            ends[owner] += size
        shard = max(ends)
        starts = [owner * shard + offset for owner, offset in zip(owners, offsets, strict=True)]
    spans = (Span(spec, lo, lo + spec.local_box.numel) for spec, lo in zip(parameters, starts, strict=False))
    return BucketLayout(tuple(spans), shard, world)


def aligned(numel: int, align: int = ALIGN) -> int:
    """``numel``, rounded up to a multiple of ``align``."""
    return -(-numel // align) * align


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
        self._loads = [0] * world  # elements of trained parameters so far

    def of(self, numels: Sequence[int], trains: bool) -> tuple[int, ...]:
        """The owner of each parameter of the next bucket; frozen buckets (not ``trains``) do not count as work."""
        ranks = range(len(self._loads))
        shares, sizes = share_out(numels, len(ranks))
        heavy = sorted(ranks, key=lambda share: -sizes[share])
        rank_of = dict(zip(heavy, sorted(ranks, key=self._loads.__getitem__), strict=True))
        for share, rank in rank_of.items() if trains else ():
            self._loads[rank] += sizes[share]
        return tuple(rank_of[share] for share in shares)


def share_out(numels: Sequence[int], world: int) -> tuple[list[int], list[int]]:
    """Divide items among ``world`` shares of about equal size (LPT rule): the share of each item, and their sizes.

    >>> share_out([8, 32, 24, 32], 2)
    ([1, 0, 0, 1], [56, 40])
    """
    heap = [(0, share) for share in range(world)]  # a linear search takes minutes with hundreds of ranks
    found, sizes = [0] * len(numels), [0] * world
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        size, share = heap[0]
        found[index], sizes[share] = share, size + aligned(numels[index])
        heapreplace(heap, (sizes[share], share))
    return found, sizes


def join(numels: Sequence[int], groups: Sequence[Sequence[int]], limit: int, world: int) -> list[list[int]]:
    """Join neighbouring groups of indices until their padding is small, to ``limit`` elements. See Note [Padding]."""

    def measure(group: Sequence[int]) -> tuple[int, int]:  # elements of the parameters, and of the padding
        sizes = [numels[index] for index in group]
        return sum(sizes), max(share_out(sizes, world)[1]) * world - sum(sizes)

    joined: list[list[int]] = []
    current: list[int] = []
    for group in groups:
        if current and sum(numels[index] for index in (*current, *group)) > limit:
            joined.append(current)
            current = []
        current = [*current, *group]
        size, spare = measure(current)
        if spare <= SMALL * size:
            joined.append(current)
            current = []
    while current and joined:
        both = [*joined[-1], *current]  # the rest, such as a large output layer, is joined with the group before
        (size, spare), (size_both, spare_both) = measure(current), measure(both)
        if spare <= SMALL * size or size_both > limit or spare_both >= spare + measure(joined[-1])[1]:
            break
        joined, current = joined[:-1], both
    return [*joined, current] if current else joined
