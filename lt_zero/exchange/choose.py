"""Makes the exchange of gradients, and the gathers of weights, that plans ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lt_zero.comm.shard_group import ShardGroup
from lt_zero.engine.bucket import GatherStrategy
from lt_zero.engine.exchange import GradientExchange, PlainExchange
from lt_zero.engine.partition import EnginePlan
from lt_zero.engine.storage_plan import StoragePlan
from lt_zero.exchange.compressed_momentum import CompressedMomentum
from lt_zero.exchange.gradient_compression import GradientCompression
from lt_zero.exchange.late_ranks import TolerantExchange
from lt_zero.exchange.local_steps import LocalSteps
from lt_zero.exchange.plan import ExchangeKind, ExchangePlan
from lt_zero.exchange.quantized import RestingGather
from lt_zero.exchange.zero_plus_plus import QuantizedGradients, ZeroPlusPlusGather

log = logging.getLogger("lt_zero")


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
        assert peers.tolerance is not None
        return TolerantExchange(peers, peers.tolerance)
    if kind is ExchangeKind.QUANTIZED:
        return QuantizedGradients(peers, groups)
    if plan.codec is None:
        wanted = plan.asked.kind is ExchangeKind.COMPRESSED and any(bucket.compresses for bucket in buckets.buckets)
        if wanted and peers.world.rank == 0:
            here = "rank" if peers.size == 1 else "node"
            log.info("gradient_compression has nothing to do: there is one %s.", here)
        return PlainExchange(peers)
    # The answer is the same on all ranks, which make their groups for it together.
    peers.use_compression(plan.codec, plan.hierarchical)
    if kind is ExchangeKind.LOCAL_STEPS:
        return LocalSteps(peers, plan)
    if kind is ExchangeKind.MOMENTA:
        return CompressedMomentum(peers, plan)
    return GradientCompression(peers, plan, plan.asked.warmup_steps)


def gathers_of(row: StoragePlan) -> GatherStrategy:
    """Make the strategy by which the weights of one bucket are gathered."""
    codecs, secondary = row.codecs, row.group.secondary_shards
    if codecs.rests is not None:
        return RestingGather(codecs.rests)
    if row.sharding.params and (codecs.gathers_frozen is not None or secondary > 1):
        return ZeroPlusPlusGather(codecs, secondary)
    return GatherStrategy()
