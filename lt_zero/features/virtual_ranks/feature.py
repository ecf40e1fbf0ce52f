"""``reproducible``: a run has the same bits at any number of data ranks that divides the number of virtual ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from typing_extensions import override

from lt_zero.common.errors import ConfigError
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.feature import Feature, Handle, PlaceInRun, Restorable
from lt_zero.core.rounds import Rounds
from lt_zero.features.virtual_ranks.contract import KEY, Contract, check_deterministic, sizes_of, use_threads
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
        sizes = ParallelSizes.of(self.config, group.world.size)
        if count % sizes.data:
            divisors = ", ".join(str(ranks) for ranks in range(1, count + 1) if count % ranks == 0)
            raise ConfigError.about(
                KEY,
                f"{KEY}={count} is no multiple of {sizes.data}, the number of data ranks: each has to run as many "
                f"micro-batches of a round. Start {divisors} data ranks, or set the key to a multiple of {sizes.data} "
                "(the results of a run depend on it).",
            )
        # Ranks are numbered by stages first, and stages share some parameters.
        order = sorted(range(group.size), key=lambda number: sizes.data_rank(group.ranks[number]))
        group.sum_by(folding(group, count // sizes.data, order))

    @override
    def rounds(self, group: ShardGroup) -> Rounds:
        return rounds_of(self.config, group)

    @override
    def check(self, plan: EnginePlan, options: EngineOptions, group: ShardGroup, training: bool) -> None:
        """Raise ConfigError if gradients are added up in 16 bits, or at the step, or a GPU may give other bits.

        Collective over all ranks of a pipeline.
        """
        check_deterministic(group.device, self.virtual_ranks)
        if self.config.pipeline.ranks > 1:
            # Not all stages have such parameters.
            with group.world.agree("the check of parameters that stages share", ConfigError):
                self._refuse_shared(plan)
        for bucket in plan.buckets:
            accumulate = options.dtypes.accumulate_of(bucket.dtype)
            if training and bucket.trains and accumulate.itemsize < torch.float32.itemsize:
                raise ConfigError.about(
                    _ACCUMULATE,
                    f"{KEY}={self.virtual_ranks} adds up the gradients of all micro-batches one by one, for which "
                    f"{str(accumulate).removeprefix('torch.')} has too few bits. Set {_ACCUMULATE}=fp32.",
                )

    def _refuse_shared(self, plan: EnginePlan) -> None:
        """Raise ConfigError if a parameter is trained at several stages of a pipeline, which add it up at the step."""
        shared = [name for bucket in plan.buckets if bucket.is_wide and bucket.trains for name, _ in bucket.parameters]
        if shared:
            raise ConfigError.about(
                KEY,
                f"{KEY}={self.virtual_ranks} adds up the gradients of each micro-batch by itself, and several stages "
                f"of the pipeline train {shared[0]!r}, whose gradients they add up at the step. Let one stage have it "
                "(no TiedLayerSpec, no parameter of the module beside its pipeline), or remove one of the keys.",
            )

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> Handle | None:
        block = self.config.reproducible
        self._contract = Contract(block.virtual_ranks, block.threads, engine.device, sizes_of(self.config))
        return use_threads(engine, block.threads)

    @override
    def states(self) -> Mapping[str, Restorable]:
        return {"virtual_ranks": self._contract} if self._contract is not None else {}
