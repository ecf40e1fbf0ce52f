"""Makes the groups, the exchange of gradients, and the gathers of weights that plans ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.bucket import GatherStrategy
from lt_zero.core.engine.exchange import GradientExchange, PlainExchange
from lt_zero.core.engine.partition import EnginePlan
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.exchange.plan import ExchangeKind, ExchangePlan, GroupOptions
from lt_zero.features.compression.gradient_compression import GradientCompression
from lt_zero.features.late_nodes.late_ranks import TolerantExchange, tolerant_sum, tolerate
from lt_zero.features.one_bit.compressed_momentum import CompressedMomentum
from lt_zero.features.one_bit.local_steps import LocalSteps
from lt_zero.features.quantize.quantized import EncodedUpdates, RestingGather
from lt_zero.features.zero_plus_plus.zero_plus_plus import QuantizedGradients, ZeroPlusPlusGather, connect_second_copies

log = logging.getLogger("lt_zero")


def configure_group(group: ShardGroup, options: GroupOptions) -> None:
    """Let ``group`` shard, gather and reduce as the options say. Before anything is sharded. Collective.

    Raises:
        ConfigError: they do not fit the ranks.
    """
    predivide = None
    if options.prescales:
        predivide = group.divisor
    elif options.predivides:
        predivide = options.predivide_factor
    group.configure(
        shards=options.shards(max(map(len, group.parts))),
        topology=options.topology,
        scatters=options.scatters,
        sums_gradients=options.sums_gradients,
        predivide=predivide,
        # With parts of different sizes, some ranks have a model beside this group's, and are not sharded.
        secondary_shards=options.secondary_shards(group.size) if len(set(map(len, group.parts))) == 1 else 1,
    )
    connect_second_copies(group)
    tolerate(group, options.late_share, options.shards_optimizer)
    # This makes process groups. It is done here, where all ranks configure their groups in one order.
    if options.steps_beside_forward:
        group.allow_background()


def exchange_of(
    plan: ExchangePlan, buckets: EnginePlan, peers: ShardGroup, groups: Iterable[ShardGroup]
) -> GradientExchange:
    """Make the exchange of an engine. Collective.

    Args:
        plan: says which, and how it begins.
        buckets: of the engine.
        peers: the ranks with the same model.
        groups: of the buckets.

    Raises:
        ConfigError: the ranks cannot exchange in this way.
    """
    kind = plan.kind
    if kind is ExchangeKind.TOLERANT:
        tolerance = tolerant_sum(peers)
        assert tolerance is not None
        return TolerantExchange(peers, tolerance)
    if kind is ExchangeKind.QUANTIZED:
        return QuantizedGradients(peers, groups)
    if plan.codec is None:
        wanted = plan.asked.kind is ExchangeKind.COMPRESSED and any(bucket.compresses for bucket in buckets.buckets)
        if wanted and peers.world.rank == 0:
            here = "rank" if peers.size == 1 else "node"
            log.info("gradient_compression has nothing to do: there is one %s.", here)
        return PlainExchange(peers)
    # The kind is the same on all ranks, which make their groups for it together.
    if kind is ExchangeKind.LOCAL_STEPS:
        return LocalSteps(peers, plan)
    if kind is ExchangeKind.MOMENTA:
        return CompressedMomentum(peers, plan)
    return GradientCompression(peers, plan, plan.asked.warmup_steps)


def gathers_of(row: StoragePlan, group: ShardGroup) -> GatherStrategy:
    """Make the strategy by which the weights of one bucket of ``group`` are gathered."""
    codecs = row.codecs
    if codecs.rests is not None:
        return RestingGather(codecs.rests)
    if codecs.updates is not None:
        return EncodedUpdates(codecs.updates)
    if row.sharding.params and (codecs.gathers_frozen is not None or group.secondary_shards > 1):
        return ZeroPlusPlusGather(codecs, group)
    return GatherStrategy()
