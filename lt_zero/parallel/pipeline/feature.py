"""Pipelines, as a feature beside the mesh of ranks (parallel/feature.py), which has an axis for them."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.feature import Feature
from lt_zero.parallel.pipeline.layers import pipelines_in


class Pipelines(Feature):
    """Layers on ranks one after the other, and the recomputation of some of them together."""

    @override
    def prepare(self, module: nn.Module, group: ShardGroup, training: bool) -> None:
        # Also before an evaluation: training may go on with its engine, and does not prepare the module again.
        key = "pipeline.activation_checkpoint_interval"
        interval = self.config.pipeline.activation_checkpoint_interval
        if interval and not any(pipelines_in(module)):
            raise ConfigError.about(
                key,
                f"{key}={interval} recomputes layers of a lt_zero.parallel.Pipeline, and {type(module).__name__} has "
                "none. Write activation_checkpointing.mode=full in its place.",
            )
