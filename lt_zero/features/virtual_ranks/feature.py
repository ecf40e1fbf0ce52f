"""``reproducible``: a run has the same bits at any number of data ranks that divides the number of virtual ranks."""

from __future__ import annotations

from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.feature import Feature
from lt_zero.core.rounds import Rounds
from lt_zero.features.virtual_ranks.rounds import rounds_of


class VirtualRanks(Feature):
    """Micro-batches of virtual ranks, whose gradients are added in one order, whichever ranks run them."""

    needs_one_model = "reproducible.virtual_ranks"

    @override
    def rounds(self, group: ShardGroup) -> Rounds:
        return rounds_of(self.config, group)
