"""The plan of an exchange of gradients: pure data, from which the exchange is made, and which forecasts ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.exchange import GradientExchange, PlainExchange
from lt_zero.core.engine.layout import BucketLayout
from lt_zero.core.engine.partition import BucketPlan, GroupFacts
from lt_zero.core.engine.storage_plan import EncodedReduction, StoragePlan


class ExchangePlan:
    """Plan of the exchange between the ranks of an engine. This one sends the mean of each step in full."""

    @property
    def interval(self) -> int:
        """Steps between two exchanges at last."""
        return 1

    @property
    def waits_for_step(self) -> bool:
        """True if gradients that are not sharded are sent by the step, not by backward."""
        return False

    @property
    def sums_replicas_once(self) -> bool:
        """True if the sum over the replicas of a shard waits for the last micro-batch of a step."""
        return True

    @property
    def reduces_each_backward(self) -> bool:
        """True if gradients are reduced in each backward, at every stage, also inside of ``no_sync``."""
        return False

    def everywhere(self, is_cut: bool) -> bool:
        """True if all ranks need all elements of the mean of a bucket; ``is_cut``: each has a shard of it."""
        return not is_cut

    def reduction(self, bucket: BucketPlan, group: GroupFacts) -> EncodedReduction | None:
        """Plan the reduction of a bucket over ``group``, its ranks, that sends codes; None: it is sent in full."""
        return None

    def kept_nbytes(self, row: StoragePlan, layout: BucketLayout) -> int:
        """Bytes that a rank keeps of a bucket from step to step, beside accumulators and states."""
        return 0

    def step_nbytes(self, rows: Sequence[StoragePlan]) -> int:
        """Bytes that a step takes at most, if gradients wait for it; ``rows``: those that train."""
        return 0

    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> GradientExchange:
        """Make the exchange. Collective.

        Args:
            peers: the ranks with the same model.
            groups: of the buckets.

        Raises:
            ConfigError: the ranks cannot exchange in this way.
        """
        return PlainExchange(peers)
