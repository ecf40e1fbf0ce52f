"""``optimizer_states.dtype: int8``: moments are kept as codes of 8 bits."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from lt_zero.common.users_code import warn
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan
from lt_zero.core.feature import Feature
from lt_zero.kernels.moments import CodedMoments


class CodedStates(Feature):
    """Moments in 8 bits."""

    @override
    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        return replace(options, moments=CodedMoments())

    @override
    def check(self, plan: EnginePlan, options: EngineOptions, group: ShardGroup, training: bool) -> None:
        """Warn if the moments of no parameter are kept so."""
        least = CodedMoments().least
        trained = [bucket for bucket in plan.buckets if bucket.trains]
        if training and group.world.rank == 0 and trained and all(bucket.moments is None for bucket in trained):
            warn(
                "optimizer_states.dtype=int8 changes nothing: moments of embeddings and of parameters of less than "
                f"{least} elements stay wide, and {type(plan.root).__name__} trains no others. Remove the key."
            )
