"""``long_sequences``: the models of transformers in a module compute in tiles."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.feature import Feature, Undo
from lt_zero.features.tiles.huggingface import install


class Tiles(Feature):
    """MLPs and losses over tiles of tokens. What is computed in tiles is one unit, so buckets are planned after it."""

    @override
    def prepare(self, module: nn.Module, group: ShardGroup, training: bool) -> Undo:
        return install(module, self.config.long_sequences, group.world.rank)
