"""``activation_checkpointing``: what is inside of repeated blocks is recomputed in backward."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Feature, Handle, PlaceInRun
from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing, check_modules, install


class ActivationCheckpoints(Feature):
    """Recomputation while a fit lasts: after it the model is called as it was, and stored inputs are freed."""

    ends_with_fit = True

    @override
    def prepare(self, module: nn.Module, group: ShardGroup, training: bool) -> None:
        if training:
            check_modules(module, self.config.activation_checkpointing, group)

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> Handle | None:
        made = install(engine, self.config)
        self.summary = str(made) if isinstance(made, Checkpointing) else ""
        return made
