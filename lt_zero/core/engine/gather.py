"""Gathers of units: units in use, prefetched units, units that stay gathered, and pinned buckets.

All decisions depend only on the sequence of modules and on sizes, so they are the same on all ranks.

Pins: autograd may have saved views of weights that were used outside of their unit, so their bucket is pinned: it stays
gathered until the end of backward, or of a forward without gradients. Several backwards may follow one forward, so such
buckets are gathered and pinned at the start of each, until the next step. A bucket that user code holds (``gathered``)
stays gathered through any number of passes, without a guard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lt_zero.common.compat import outside_of_transforms
from lt_zero.common.phases import NOTHING, TimedSpan
from lt_zero.common.tensor_tree import ReplacedTensors
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.work import CollectiveId
from lt_zero.core.engine.bucket import Bucket, Live
from lt_zero.core.engine.graph_tie import Tie
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import GroupFacts

_RAN = (
    "Every rank has to run the same modules, and the same calls that need all ranks, in the same order: look for a"
    " branch or a loop that depends on the rank or its data. Texts of different lengths: generate with"
    " `synced_gpus=True`, or inside of `lt_zero.gathered(module)` on every rank. Experts that only some ranks call:"
    " name their list in zero_optimization.leaf_module.names."
)


class Unit:
    """A module whose buckets are gathered and released together."""

    def __init__(self, name: str, module: nn.Module, buckets: list[Bucket], needs_weights: bool) -> None:
        self.name = name
        self.module = module
        self.buckets = buckets
        self.sharded = [b for b in buckets if b.sharding.params]
        self.numel = sum(b.storage.counted for b in self.sharded)
        self.backward_needs_weights = needs_weights
        self.keep = False
        self.leases = 0
        self.awaited = 0  # forwards since the last step without a backward yet
        self.calls: list[Call] = []  # running forwards, innermost last


@dataclass(eq=False)
class Call:
    """One forward of a unit, until its backward."""

    range: TimedSpan = NOTHING  # its span in a profiler, while it runs
    tie: Tie[Any] | None = None  # of its graph's hooks to the engine, while it runs
    inputs: ReplacedTensors | None = None  # the arguments with aliases, while it runs
    saves: bool = False  # it runs under the saved-tensor hooks of saved_weights.py, which it entered
    references: list[int] = field(default_factory=list)  # by Python objects, at its beginning
    held: bool = False  # it has a lease
    done: bool = False  # its backward has ended
    passed: bool = False  # it returned no more than its inputs


class GatherOrder:
    """The sequence of a repeated pass (all gathers of a forward, or of a backward)."""

    def __init__(self) -> None:
        self.last: list[Unit] = []  # the recorded pass
        self._now: list[Unit] = []
        self.start()

    def start(self) -> None:
        """Begin a pass; the recorded one becomes the forecast."""
        self.last = self._now or self.last
        self._now = []
        self._cursor = 0
        self.ahead = 0  # the next unit of ``last`` to prefetch: those before it are gathered, or will not be used
        self._places: dict[Unit, list[int]] = {}
        for place, unit in enumerate(self.last):
            self._places.setdefault(unit, []).append(place)

    def next(self, unit: Unit) -> int:
        """The position of the next use of ``unit`` in ``last``; the end of ``last`` if there is none."""
        places = self._places.get(unit, [])
        following = bisect_left(places, self._cursor)
        return places[following] if following < len(places) else len(self.last)

    def visit(self, unit: Unit) -> None:
        """Record the use of ``unit``."""
        self._now.append(unit)
        place = self.next(unit)
        # A unit that the recorded pass does not use from here on shows that the sequence has changed.
        if place < len(self.last):
            self._cursor = place + 1
            self.ahead = max(self.ahead, self._cursor)


@dataclass(frozen=True)
class Residency:
    """Limits on gathered parameters, in elements (``stage3_*`` keys of the same names)."""

    max_live: int = 1_000_000_000  # no prefetch, and no keeping after forward, beyond this many gathered elements
    max_reuse_distance: int = 1_000_000_000  # a unit stays gathered if fewer elements are used before its next use
    prefetch: int = 50_000_000  # elements to gather ahead of their use
    ahead: float = float("inf")  # the most units that these may belong to
    most_buckets: float = float("inf")  # that may be gathered at a time: each needs a buffer for its file

    @classmethod
    def of(cls, options: EngineOptions, groups: Iterable[GroupFacts]) -> Residency:
        """The limits of an engine; ``groups``: of the buckets."""
        limits = cls(options.max_live_parameters, options.max_reuse_distance, options.prefetch_bucket_size)
        params = options.offload_params
        if params.device == "nvme":
            prefetch = min(limits.prefetch, params.buffer_size)
            return replace(limits, prefetch=prefetch, most_buckets=params.buffer_count)
        # A gather that does not overlap with computation is not worth the memory.
        return limits if all(group.gathers_in_background for group in groups) else replace(limits, prefetch=0)

    def without_training(self) -> Residency:
        """Limits for evaluation: no unit stays gathered, and one is prefetched."""
        return replace(self, max_reuse_distance=0, ahead=1)

    def keep_after_forward(self, numels: Sequence[int]) -> list[bool]:
        """Choose the units (sizes in forward order) that stay gathered from their forward to their backward.

        Before the next use of a unit, the units after it run forward and backward.
        """
        keep, behind = [False] * len(numels), 0
        for index in reversed(range(len(numels))):
            distance = 2 * behind
            behind += numels[index]
            keep[index] = distance < self.max_reuse_distance and behind <= self.max_live
        return keep

    def fits_whole(self, numel: int) -> bool:
        """True if all units, of ``numel`` elements, may stay gathered from one evaluation batch to the next."""
        return numel <= self.max_live and numel < self.max_reuse_distance

    def may_prefetch(self, numel: int, buckets: int, live: Live, units: int) -> bool:
        """True if a unit of ``numel`` elements may be gathered ahead, beside ``units`` others that ``live`` counts.

        One unit may be larger than ``prefetch``: no block of a wide model would be prefetched otherwise.
        """
        large = live.in_flight.numel + numel > self.prefetch and units > 0
        full = live.numel + numel > self.max_live or live.in_flight.buckets + buckets > self.most_buckets
        return self.prefetch > 0 and units < self.ahead and not large and not full


class Gatherer:
    """Gathers and releases the ``units`` of one engine; ``root_unit`` stays gathered during a pass.

    ``awaits_steps``: steps may go on beside the next forward.
    """

    def __init__(
        self,
        units: list[Unit],
        root_unit: Unit,
        groups: Sequence[ShardGroup],
        residency: Residency,
        awaits_steps: bool = False,
    ) -> None:
        self._units, self._root_unit = units, root_unit
        self._groups, self._awaits_steps = groups, awaits_steps
        self.limit(residency)
        root_unit.keep = True
        self._live = Live()  # of the units; the root's buckets are not counted
        for unit in units:
            for bucket in unit.sharded:
                bucket.count_in(self._live)
        self.forget_order()
        self._pinned: set[Bucket] = set()
        self._held: set[Bucket] = set()  # held by user code
        self._outside: dict[Bucket, None] = {}  # used outside of their unit since the last step: pinned in backward

    def limit(self, residency: Residency) -> None:
        """Apply other limits from now on."""
        self._residency = residency
        numels = [unit.numel for unit in self._units]
        for unit, keep in zip(self._units, residency.keep_after_forward(numels), strict=True):
            unit.keep = keep
        self.fits_whole = residency.fits_whole(sum(numels) + self._root_unit.numel)

    def forget_order(self) -> None:
        """Prefetch nothing until a pass was recorded."""
        # By the module that was called; None: a step of the user's.
        self._forwards: dict[nn.Module | None, GatherOrder] = {}
        self._forward, self._backward = GatherOrder(), GatherOrder()
        self._order = self._forward  # the order of the running pass

    def begin_order(self, entry: nn.Module | None) -> None:
        """Begin a pass, or a part of one that is repeated by itself, through ``entry``; None: code of the user's."""
        self._forward = self._forwards.setdefault(entry, GatherOrder())
        self._forward.start()

    def begin_backward(self) -> None:
        self._backward.start()
        self.gather(self._root_unit)
        for bucket in self._outside:
            self.pin(bucket)

    def visit(self, unit: Unit, backward: bool = False) -> None:
        """Record the use of ``unit``, and prefetch the units that followed it in the last pass."""
        self._order = order = self._backward if backward else self._forward
        order.visit(unit)
        limits, live = self._residency, self._live
        units = 1 if live.in_flight.buckets else 0
        while limits.prefetch and order.ahead < len(order.last):
            upcoming = order.last[order.ahead]
            released = [bucket for bucket in upcoming.sharded if bucket.released]
            if released:
                if not limits.may_prefetch(upcoming.numel, len(upcoming.sharded), live, units):
                    return
                units += 1
                for bucket in released:
                    bucket.launch_gather()
            order.ahead += 1

    def end_pass(self, keep: bool = False) -> None:
        """End a pass: drop all pins, and call ``release_all``."""
        self._pinned.clear()
        self.release_all(keep)

    def after_step(self) -> None:
        """Forget uses outside of units: after a step no backward of earlier forwards follows."""
        self._outside.clear()

    def gather(self, unit: Unit) -> None:
        """Make the parameters of ``unit`` readable, without a guard."""
        if self._awaits_steps:
            for bucket in unit.buckets:
                bucket.wait_background_step()
        for bucket in unit.sharded:
            # Launch all before waiting for the first, so that the buckets of a unit travel together.
            if bucket.released:
                bucket.launch_gather()
        for bucket in unit.sharded:
            bucket.gather()

    def guard(self, unit: Unit) -> None:
        """Keep ``unit`` gathered, but intercept uses outside of its forward."""
        for bucket in unit.sharded:
            if bucket not in self._held:
                bucket.guard()

    def release(self, unit: Unit, unedited: Collection[Bucket] = ()) -> None:
        """Release the buckets of ``unit`` that are neither pinned nor held.

        Args:
            unedited: buckets whose parameters were searched for edits just before.
        """
        for bucket in unit.sharded:
            if bucket not in self._pinned and bucket not in self._held:
                bucket.release(searched=bucket in unedited)
        # A released unit has to be prefetched again before its next use.
        self._order.ahead = min(self._order.ahead, self._order.next(unit))

    def release_all(self, keep: bool = False) -> None:
        """Release all units; with ``keep`` except those that may stay gathered."""
        for unit in [*self._units, self._root_unit]:
            if keep and unit.keep and self.fits_whole:
                self.guard(unit)
            else:
                self.release(unit)

    def pin(self, bucket: Bucket, again: bool = False) -> None:
        """Gather ``bucket`` until the end of the next backward, or of a forward without gradients.

        ``again``: in each backward until the next step, too.
        """
        bucket.gather()
        self._pinned.add(bucket)
        if again:
            self._outside[bucket] = None

    def use_in_transform(self, unit: Unit, transform: str) -> None:
        """Keep ``unit``, which a transform calls, gathered. See engine.py, Note [Transforms].

        Raises:
            RuntimeError: its weights are not gathered by user code.
        """
        if not all(bucket.readable for bucket in unit.sharded):
            name = f"Module {unit.name!r} ({type(unit.module).__name__})" if unit.name else type(unit.module).__name__
            raise RuntimeError(
                f"{name} is called inside of {transform}, where its weights, which are sharded over "
                f"{self._groups[0].world.size} ranks, cannot be gathered. Wrap the whole call of the transform in "
                "`with lt_zero.gathered(module):` on every rank."
            )
        if self._awaits_steps:
            with outside_of_transforms():
                for bucket in unit.buckets:
                    bucket.wait_background_step()
        for bucket in unit.sharded:
            self.pin(bucket, again=torch.is_grad_enabled())

    def is_pinned(self, bucket: Bucket) -> bool:
        """True if the running forward or backward uses ``bucket`` outside of its unit."""
        return bucket in self._pinned or bucket in self._outside

    def is_only_pinned(self, bucket: Bucket) -> bool:
        """True if the end of a pass would release ``bucket``, although code outside of its unit may read it."""
        return bucket in self._pinned and bucket not in self._held

    def hold(self, bucket: Bucket) -> None:
        """Gather ``bucket``, not rounded, and keep it until ``let_go``."""
        bucket.gather(exact=True)
        self._held.add(bucket)

    def let_go(self, bucket: Bucket, keep: bool) -> None:
        """End ``hold``; ``keep``: the bucket was gathered before it."""
        self._held.discard(bucket)
        if bucket in self._pinned:
            return
        if keep:
            bucket.guard()
        else:
            bucket.release()


def remedy(one: CollectiveId, other: CollectiveId | None) -> str:
    """Tell the user what to do if ranks ran these two collectives."""
    # Only gathers of weights differ for the reasons below.
    if other is None or not ("all-gather" in one.operation and "all-gather" in other.operation):
        return _RAN
    inside = one.name.rpartition(".")[0]
    if inside and other.name != one.name and other.name.rpartition(".")[0] == inside:
        return (
            f"The ranks called different members of {inside!r}. If the data decides which are called (experts), write"
            f' zero_optimization.leaf_module.names: ["{inside}"], and they are gathered together; otherwise look for a'
            " branch or a loop that depends on the rank."
        )
    return _RAN
