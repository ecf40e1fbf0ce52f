"""``reproducible``: a run has the same bits at any number of data ranks that divides the number of virtual ranks."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.feature import Feature
from lt_zero.core.rounds import Rounds
from lt_zero.features.virtual_ranks.exact_norm import norm_of_order
from lt_zero.features.virtual_ranks.exchange import FoldPlan
from lt_zero.features.virtual_ranks.fold import folding
from lt_zero.features.virtual_ranks.rounds import rounds_of

_KEY = "reproducible.virtual_ranks"
# Libraries of matrix products may choose other vector loops for other addresses. Where a parameter begins in a flat
# tensor depends on those before it, and thus on the number of ranks: so each begins at a line of the cache.
_ALIGN = 64  # elements


class VirtualRanks(Feature):
    """Micro-batches of virtual ranks, whose gradients are added in one order, whichever ranks run them."""

    needs_one_model = _KEY

    @property
    def virtual_ranks(self) -> int:
        """The micro-batches of a round."""
        return int(self.config.reproducible.virtual_ranks)

    @override
    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        return replace(options, align=_ALIGN, divides_alone=True, norms=norm_of_order)

    @override
    def exchange(self, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> FoldPlan:
        return FoldPlan()

    @override
    def join(self, group: ShardGroup) -> None:
        count = self.virtual_ranks
        if count % group.size:
            divisors = ", ".join(str(ranks) for ranks in range(1, count + 1) if count % ranks == 0)
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={count} is no multiple of {group.size}, the number of data ranks: each has to run as many "
                f"micro-batches of a round. Start {divisors} ranks, or set the key to a multiple of {group.size} (the "
                "results of a run depend on it).",
            )
        group.sum_by(folding(group, count))

    @override
    def rounds(self, group: ShardGroup) -> Rounds:
        return rounds_of(self.config, group)
