"""``reproducible``: a run has the same bits at any number of data ranks that divides the number of virtual ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from typing_extensions import override

from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.feature import Feature, Handle, PlaceInRun, Restorable
from lt_zero.core.rounds import Rounds
from lt_zero.features.virtual_ranks.contract import KEY, Contract, check_deterministic, use_threads
from lt_zero.features.virtual_ranks.exact_norm import BLOCK, norm_of_order
from lt_zero.features.virtual_ranks.exchange import FoldPlan
from lt_zero.features.virtual_ranks.fold import folding
from lt_zero.features.virtual_ranks.rounds import rounds_of

_ACCUMULATE = "data_types.grad_accum_dtype"
# Libraries of matrix products may choose other vector loops for other addresses. Where a parameter begins in a flat
# tensor depends on those before it, and thus on the number of ranks: so each begins at a line of the cache.
_ALIGN = BLOCK  # elements: sums of squares are those of whole blocks, too


class VirtualRanks(Feature):
    """Micro-batches of virtual ranks, whose gradients are added in one order, whichever ranks run them."""

    needs_one_model = KEY
    ends_with_fit = True

    _contract: Contract | None = None

    @property
    def virtual_ranks(self) -> int:
        """The micro-batches of a round."""
        return int(self.config.reproducible.virtual_ranks)

    @override
    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        return replace(options, align=_ALIGN, adds_one_by_one=True, norms=norm_of_order)

    @override
    def exchange(self, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> FoldPlan:
        return FoldPlan(self.config.fused_step)

    @override
    def join(self, group: ShardGroup) -> None:
        count = self.virtual_ranks
        if count % group.size:
            divisors = ", ".join(str(ranks) for ranks in range(1, count + 1) if count % ranks == 0)
            raise ConfigError.about(
                KEY,
                f"{KEY}={count} is no multiple of {group.size}, the number of data ranks: each has to run as many "
                f"micro-batches of a round. Start {divisors} ranks, or set the key to a multiple of {group.size} (the "
                "results of a run depend on it).",
            )
        group.sum_by(folding(group, count))

    @override
    def rounds(self, group: ShardGroup) -> Rounds:
        return rounds_of(self.config, group)

    @override
    def check(self, plan: EnginePlan, options: EngineOptions, group: ShardGroup, training: bool) -> None:
        """Raise ConfigError if gradients are added up in 16 bits, or a GPU may give other bits each time."""
        check_deterministic(group.device, self.virtual_ranks)
        for bucket in plan.buckets:
            accumulate = options.dtypes.accumulate_of(bucket.dtype)
            if training and bucket.trains and accumulate.itemsize < torch.float32.itemsize:
                raise ConfigError.about(
                    _ACCUMULATE,
                    f"{KEY}={self.virtual_ranks} adds up the gradients of all micro-batches one by one, for which "
                    f"{str(accumulate).removeprefix('torch.')} has too few bits. Set {_ACCUMULATE}=fp32.",
                )

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> Handle | None:
        block = self.config.reproducible
        self._contract = Contract(block.virtual_ranks, block.threads, engine.device)
        return use_threads(engine, block.threads)

    @override
    def states(self) -> Mapping[str, Restorable]:
        return {"virtual_ranks": self._contract} if self._contract is not None else {}
