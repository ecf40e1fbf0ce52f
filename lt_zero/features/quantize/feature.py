"""``quantize``: sharded weights that are not trained rest, and are gathered, in 4 or 8 bits."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from typing_extensions import override

from lt_zero.common.boxes import ParamSpec
from lt_zero.common.errors import ConfigError
from lt_zero.common.users_code import warn
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.layout import ALIGN
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.core.engine.storage_plan import Codecs, StoragePlan
from lt_zero.core.feature import Feature
from lt_zero.exchange.encoded import CODED
from lt_zero.features.quantize.nf4 import RESTING
from lt_zero.features.quantize.quantized import RestingGather


class Quantize(Feature):
    """Weights of sharded buckets that are not trained are encoded; the codes are all that is kept of them."""

    @override
    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        # In inference no wider values are kept beside the codes.
        dtypes = options.dtypes if training else replace(options.dtypes, low_master=True)
        return replace(options, resting=RESTING[self.config.quantize], dtypes=dtypes)

    @override
    def codecs(self, bucket: BucketPlan, group: GroupFacts, training: bool) -> Codecs | None:
        trains = training and bucket.trains
        if not bucket.sharding.params or bucket.dtype not in CODED or trains:
            return None
        return Codecs(rests=RESTING[self.config.quantize])

    @override
    def gathers(self, row: StoragePlan, group: ShardGroup) -> RestingGather | None:
        return RestingGather(row.codecs.rests) if row.codecs.rests is not None else None

    @override
    def check(self, plan: EnginePlan, options: EngineOptions, group: ShardGroup, training: bool) -> None:
        """Raise ConfigError if a model trains, and all of its weights that could rest in few bits do, or are whole."""
        if training and not any(bucket.sharding.params and not bucket.trains for bucket in plan.buckets):
            zero, name, bits = self.config.zero_optimization, type(plan.root).__name__, self.config.quantize
            why = f"{name} has no frozen parameter of at least {zero.stage3_param_persistence_threshold} elements"
            remedy = (
                "Freeze weights (requires_grad_(False)), lower zero_optimization.stage3_param_persistence_threshold"
            )
            if zero.stage < 3:
                why, remedy = f"parameters are not sharded at stage {zero.stage}", "Set zero_optimization.stage=3"
            text = f"quantize={bits} lets frozen parameters rest in {bits} bits if they are sharded, and"
            raise ConfigError.about("quantize", f"{text} {why}. {remedy}, or remove the key.")
        if group.world.rank == 0:
            warn_of_blocks(plan, self.config.quantize)


def warn_of_blocks(plan: EnginePlan, bits: int) -> None:
    """Warn if parts of weights that rest in ``bits`` bits are not whole blocks: codes depend on the parts then."""

    def is_uneven(spec: ParamSpec, block: int) -> bool:
        sizes, shape = spec.local_box.sizes, spec.global_shape
        axis = max((n for n, (size, all_of) in enumerate(zip(sizes, shape, strict=True)) if size < all_of), default=-1)
        return axis >= 0 and prod(sizes[axis:]) % block != 0

    coded = [bucket for bucket in plan.buckets if bucket.align > ALIGN]
    found = [(spec, bucket.align) for bucket in coded for spec in bucket.specs if is_uneven(spec, bucket.align)]
    if found:
        spec, block = found[0]
        others = f", as well as {len(found) - 1} others," if len(found) > 1 else ""
        warn(
            f"quantize={bits}: this rank's part {spec.local_box} of {spec.name!r} {spec.global_shape}{others} cuts "
            f"through blocks of {block} elements, which share a scale. So the codes depend on the number of ranks that "
            "have the parts (tensor or expert ranks), and a run that resumes on another number of them rounds these "
            "weights again. Use numbers of ranks that leave multiples of the block, if weights have to be the same."
        )
