"""``zero_optimization.offload_optimizer`` and ``offload_param``: tensors of buckets in host memory or files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.offload import Offload
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.feature import Feature
from lt_zero.features.offload.manager import open_offload


class OffloadedStates(Feature):
    """States of optimizers, and weights, off the device, and steps in the background."""

    @override
    def join(self, group: ShardGroup) -> None:
        states = self.config.zero_optimization.offload_optimizer
        if states.device != "none" and states.overlap_step is True:
            group.allow_background()

    @override
    def place(self, buckets: Sequence[Bucket], world: World, options: EngineOptions, device: torch.device) -> Offload:
        return open_offload(world, buckets, options, device)
