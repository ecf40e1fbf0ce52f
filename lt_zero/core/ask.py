"""Asks the features of a run, in the order of their table: for exchanges and gathers the first answer counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lt_zero.core.comm.options import GroupOptions
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.division import Division, PlannedDivision
from lt_zero.core.engine.bucket import Bucket, GatherStrategy
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.offload import Offload
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.core.engine.storage_plan import Codecs, CodecsOf, StoragePlan
from lt_zero.core.feature import Feature
from lt_zero.core.rounds import Rounds


def configure_group(group: ShardGroup, options: GroupOptions, features: Sequence[Feature]) -> None:
    """Let ``group`` shard, gather and reduce as the options and features say. Before anything is sharded. Collective.

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
    )
    # Features make process groups here, where all ranks configure their groups in one order.
    for feature in features:
        feature.join(group)


def divide(features: Sequence[Feature], group: ShardGroup, config: Any) -> Division:
    """Divide the run of ``group``, all ranks, as a feature does, or else plainly. Collective.

    Raises:
        ConfigError: the ranks cannot be divided as ``config`` says.
    """
    for feature in features:
        if (found := feature.divide(group)) is not None:
            return found
    return Division(group, config)


def rounds_of(features: Sequence[Feature], group: ShardGroup) -> Rounds:
    """Say which micro-batches the ranks of ``group``, all ranks, run at the same time, or else plain ones. Collective.

    Raises:
        ConfigError: the ranks cannot run them.
    """
    for feature in features:
        if (found := feature.rounds(group)) is not None:
            return found
    return Rounds()


def plan_division(features: Sequence[Feature], ranks: int) -> PlannedDivision:
    """Plan the division of a run of so many ranks, as ``divide`` makes it.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    for feature in features:
        if (found := feature.plan_division(ranks)) is not None:
            return found
    return PlannedDivision()


def adapted(options: EngineOptions, features: Sequence[Feature], training: bool = True) -> EngineOptions:
    """The options of an engine with what the features change of them; ``training``: as for ``lt_zero.shard``."""
    for feature in features:
        options = feature.options(options, training)
    return options


def plan_exchange(features: Sequence[Feature], plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> ExchangePlan:
    """Plan the exchange of an engine: that of a feature, or else the mean of each step.

    ``plan``, ``skips_steps``, ``group``: as for ``Feature.exchange``.
    """
    for feature in features:
        if (found := feature.exchange(plan, skips_steps, group)) is not None:
            return found
    return ExchangePlan()


def codecs_by(features: Sequence[Feature], exchange: ExchangePlan, training: bool) -> CodecsOf:
    """Return what plans the codecs of a bucket; ``training``: trainable weights have master weights."""

    def codecs_of(bucket: BucketPlan, group: GroupFacts) -> Codecs:
        asked = (feature.codecs(bucket, group, training) for feature in features)
        weights = next((codecs for codecs in asked if codecs is not None), Codecs())
        return weights._replace(reductions=exchange.reduction(bucket, group))

    return codecs_of


def place(
    features: Sequence[Feature], buckets: Sequence[Bucket], world: World, options: EngineOptions, device: torch.device
) -> Offload:
    """Say where the tensors of buckets are kept, before values are loaded: where a feature says, or on the device.

    Collective. ``buckets``, ``world``, ``options``, ``device``: as for ``Feature.place``.
    """
    for feature in features:
        if (found := feature.place(buckets, world, options, device)) is not None:
            return found
    return Offload()


def gathers_of(features: Sequence[Feature], row: StoragePlan, group: ShardGroup) -> GatherStrategy:
    """Make the strategy by which the weights of one bucket of ``group`` are gathered: a feature's, or plain gathers."""
    for feature in features:
        if (found := feature.gathers(row, group)) is not None:
            return found
    return GatherStrategy()
