"""Chooses the exchange of gradients, and the gathers of weights, that a configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lt_zero.comm.shard_group import ShardGroup
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.rules import one_bit
from lt_zero.engine.bucket import GatherStrategy
from lt_zero.engine.exchange import GradientExchange, PlainExchange
from lt_zero.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.exchange.compressed_momentum import MOMENTA, CompressedMomentum
from lt_zero.exchange.gradient_compression import GradientCompression, codec_of
from lt_zero.exchange.late_ranks import TolerantExchange
from lt_zero.exchange.local_steps import LocalSteps
from lt_zero.exchange.quantized import RestingGather, rests_quantized
from lt_zero.exchange.zero_plus_plus import QuantizedGradients, sends_less
from lt_zero.ops.codecs import Codec

log = logging.getLogger("lt_zero")


def exchange_of(
    config: ZeroConfig, plan: EnginePlan, peers: ShardGroup, groups: Iterable[ShardGroup], policy: DtypePolicy
) -> GradientExchange:
    """Make the exchange of an engine. Collective.

    Args:
        config: says which; that it asks for one at most is checked before.
        plan: of the engine's buckets.
        peers: the ranks with the same model.
        groups: of the buckets.
        policy: says whether steps may be skipped.

    Raises:
        ConfigError: the ranks cannot exchange in this way.
    """
    keeps, zero = policy.check_overflow, config.zero_optimization
    if peers.tolerance is not None:
        return TolerantExchange(peers, peers.tolerance)
    if zero.zero_quantized_gradients and zero.stage > 0:
        return QuantizedGradients.prepare(peers, groups)
    if optimizer := one_bit(config):
        if not peers.use_compression(MOMENTA, hierarchical=False):
            return PlainExchange(peers)  # a single rank
        return LocalSteps(peers, keeps) if optimizer == "zerooneadam" else CompressedMomentum(peers, keeps)
    block, codec = config.gradient_compression, codec_of(config)
    if codec is not None and any(bucket.compresses for bucket in plan.buckets):
        # The answer is the same on all ranks, which make their groups for it together.
        if peers.use_compression(codec, block.hierarchical_compress):
            return GradientCompression(peers, block.warmup_steps, keeps)
        if peers.world.rank == 0:
            here = "rank" if peers.size == 1 else "node"
            log.info("gradient_compression has nothing to do: there is one %s.", here)
    return PlainExchange(peers)


def gathers_of(config: ZeroConfig, plan: BucketPlan, group: GroupFacts) -> GatherStrategy:
    """Make the strategy by which the weights of one bucket, which is in ``group``, are gathered."""
    if rests_quantized(config, plan):
        return RestingGather()
    return sends_less(config, plan, group) or GatherStrategy()


def codecs_of(config: ZeroConfig, plan: BucketPlan, group: GroupFacts) -> tuple[Codec | None, Codec | None]:
    """Return what encodes the updates of one bucket, and what encodes its weights at rest, as its strategy does."""
    gathers = gathers_of(config, plan, group)
    return gathers.codec, gathers.rests
