"""ZeRO++: its keys of ``zero_optimization`` send fewer bytes between nodes."""

from __future__ import annotations

from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.bucket import GatherStrategy
from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.core.engine.storage_plan import Codecs, StoragePlan
from lt_zero.core.feature import Feature
from lt_zero.exchange.encoded import has_codec
from lt_zero.features.zero_plus_plus.zero_plus_plus import (
    WEIGHTS,
    EncodedUpdates,
    QuantizedSums,
    ZeroPlusPlusGather,
    connect_second_copies,
)


class ZeroPlusPlus(Feature):
    """Gathers and sums in few bits, and second copies of parameters in the nodes."""

    @override
    def join(self, group: ShardGroup) -> None:
        # With parts of different sizes, some ranks have a model beside this group's, and are not sharded.
        if len(set(map(len, group.parts))) == 1:
            group.share_second_copies(self.config.zero_optimization.secondary_shards(group.size))
        connect_second_copies(group)

    @override
    def exchange(self, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> QuantizedSums | None:
        zero = self.config.zero_optimization
        return QuantizedSums() if zero.zero_quantized_gradients and zero.stage > 0 else None

    @override
    def codecs(self, bucket: BucketPlan, group: GroupFacts, training: bool) -> Codecs:
        zero, sharding = self.config.zero_optimization, bucket.sharding
        all_of_them = zero.zero_quantized_weights
        coded = WEIGHTS if has_codec(bucket, group) else None
        if sharding.params:
            frozen = all_of_them or zero.zero_quantized_nontrainable_weights
            return Codecs(gathers=coded if all_of_them else None, gathers_frozen=coded if frozen else None)
        return Codecs(updates=coded if all_of_them and zero.stage < 3 and sharding.optim else None)

    @override
    def gathers(self, row: StoragePlan, group: ShardGroup) -> GatherStrategy | None:
        codecs = row.codecs
        if codecs.updates is not None:
            return EncodedUpdates(codecs.updates)
        if row.sharding.params and (codecs.gathers_frozen is not None or group.secondary_shards > 1):
            return ZeroPlusPlusGather(codecs, group)
        return None
