"""``communication.slow_node_tolerance``: sums of gradients go on without late nodes."""

from __future__ import annotations

import torch
from typing_extensions import override

from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.feature import Feature
from lt_zero.features.late_nodes.late_ranks import TolerantPlan, tolerate

_KEY = "communication.slow_node_tolerance"


class LateNodes(Feature):
    """Sums that do not wait for late nodes; what these send later is in a later sum."""

    needs_one_model = _KEY

    @property
    def share(self) -> float:
        """The share of the ranks for which a sum does not wait."""
        return float(self.config.communication.slow_node_tolerance)

    @override
    def join(self, group: ShardGroup) -> None:
        tolerate(group, self.share, self.config.zero_optimization.stage > 0)

    @override
    def exchange(self, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> TolerantPlan | None:
        return None if group.alone else TolerantPlan()

    @override
    def check(self, plan: EnginePlan, options: EngineOptions, group: ShardGroup, training: bool) -> None:
        """Raise ConfigError if gradients of different loss scales could be added."""
        if options.dtypes.compute == torch.float16:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self.share} adds late gradients to those of a later step, whose loss scale differs in fp16. "
                "Train in bf16 or fp32, or remove the key.",
            )
