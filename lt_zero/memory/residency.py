"""Simulates on sizes alone how many bytes of sharded weights the engine has gathered at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lt_zero.config.schema import ZeroOptimization
from lt_zero.engine.gather_order import Residency


@dataclass(frozen=True)
class Gathered:
    """Elements, bytes and buckets that one unit gathers, and whether its backward needs them."""

    numel: int
    nbytes: int
    buckets: int
    needs_weights: bool


@dataclass(frozen=True)
class Ahead:
    """Limits of prefetching, in elements and buckets."""

    numel: int
    buckets: float = float("inf")


def residency_of(zero: ZeroOptimization) -> Residency:
    """The limits on what stays gathered."""
    return Residency(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size)


def gathered_peak(units: Sequence[Gathered], root: Gathered, residency: Residency, ahead: Ahead, window: bool) -> int:
    """Peak bytes of gathered weights in a forward and backward after the first, which records the order.

    Args:
        units: all but the root, in forward order; small parameters, which are never released, are not counted.
        root: the root unit, which always stays gathered.
        residency: limits on what stays gathered after its forward.
        ahead: limits of prefetching; none if ``numel`` is 0.
        window: weights stay gathered between micro-batches if the whole model may (Gatherer.fits_whole).
    """
    total = root.numel + sum(unit.numel for unit in units)
    stays = residency.keep_after_forward([unit.numel for unit in units])
    keep = {i for i, unit in enumerate(units) if stays[i] and unit.needs_weights}
    fits = total <= residency.max_live and total < residency.max_reuse_distance
    play = _Play(units, residency, ahead, keep if window and fits else ())
    for index in range(len(units)):
        play.visit(index, range(index + 1, len(units)))
        if index not in keep:
            play.release(index)
    for index in reversed(range(len(units))):
        if units[index].needs_weights:
            # A unit is released when its inputs have gradients, before backward reaches the previous unit.
            play.visit(index, (i for i in range(index - 1, -1, -1) if units[i].needs_weights))
            play.release(index)
    return root.nbytes + play.peak


class _Play:
    """Gathers and releases units, and records the peak."""

    def __init__(self, units: Sequence[Gathered], residency: Residency, ahead: Ahead, start: Iterable[int]) -> None:
        self._units, self._residency, self._ahead = units, residency, ahead
        self._here: set[int] = set()
        self._early: set[int] = set()  # prefetched, not visited yet
        self._numel = self._nbytes = self.peak = 0
        for index in start:
            self._gather(index)

    def _gather(self, index: int) -> None:
        if index not in self._here:
            self._here.add(index)
            self._numel += self._units[index].numel
            self._nbytes += self._units[index].nbytes
            self.peak = max(self.peak, self._nbytes)

    def release(self, index: int) -> None:
        if index in self._here:
            self._here.remove(index)
            self._numel -= self._units[index].numel
            self._nbytes -= self._units[index].nbytes

    def visit(self, index: int, upcoming: Iterable[int]) -> None:
        """Gather a unit, and prefetch those that ``Gatherer.visit`` would."""
        self._gather(index)
        self._early.discard(index)
        flying = sum(self._units[i].numel for i in self._early)
        buckets = sum(self._units[i].buckets for i in self._early)
        for other in upcoming if self._ahead.numel > 0 else ():
            unit = self._units[other]
            if other in self._here:
                continue
            if len(self._early) >= self._residency.ahead:
                return
            flying, buckets = flying + unit.numel, buckets + unit.buckets
            live = self._numel + unit.numel
            if flying > self._ahead.numel or live > self._residency.max_live or buckets > self._ahead.buckets:
                return
            self._gather(other)
            self._early.add(other)
