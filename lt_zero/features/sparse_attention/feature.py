"""``sparse_attention``: the attention of a model computes the blocks that a pattern names."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.feature import Feature, Undo
from lt_zero.features.sparse_attention.huggingface import install


class BlockSparseAttention(Feature):
    """Sparse attention of the model, which it keeps: with another attention it would be another model."""

    stays = True

    @override
    def prepare(self, module: nn.Module, group: ShardGroup, training: bool) -> Undo:
        return install(module, self.config, group.world.rank)
