"""The ranks that have the stages of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.world import World


class StageRanks(Ranks):
    """Agreement and broadcasts between the ranks of one pipeline. They reduce no gradients, so one group is enough.

    Args:
        world: all ranks of the run. Collective.
        parts: the ranks of each pipeline, in order of their stages; the same on all ranks.
    """

    def __init__(self, world: World, parts: Sequence[Sequence[int]]) -> None:
        ranks = next(part for part in parts if world.rank in part)
        everyone = len(ranks) == world.size
        order = world.order_of(ranks)
        group = world.process_group if everyone else world.new_group(None, parts, closes=True)
        super().__init__(group, ranks, ranks.index(world.rank), world.device, world.watch, order, world.log)
        if order.host is None:
            order.host = group if self.backend in ("gloo", "fake") else world.new_group("gloo", parts)
        if self._gloo and self.device.type == "cpu" and world.detector is not None:
            order.arena = order.arena or world.share_memory(ranks)
