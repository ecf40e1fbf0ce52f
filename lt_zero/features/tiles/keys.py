"""The block ``long_sequences`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lt_zero.common.errors import Problem
from lt_zero.common.fields import Block, IdleKeys, Positive, key

_KEY = "long_sequences"
_RECOMPUTED = "activation_checkpointing.mode"


class LongSequences(Block):
    """The ``long_sequences`` block: what a model of transformers computes a tile of tokens at a time."""

    tiled_mlp: bool = key(False, "compute MLPs in tiles of tokens, in forward and again in backward")
    mlp_tokens_per_tile: Positive | None = key(None, "tokens of a tile of MLPs; null: as many as the hidden size")
    tiled_loss: bool = key(False, "compute logits, the loss and its gradients in tiles of tokens")
    loss_tokens_per_tile: Positive | None = key(
        None, "tokens of a tile of logits; null: a quarter of the hidden size, and at least 128"
    )

    @property
    def tiles(self) -> bool:
        """True if anything is computed in tiles."""
        return self.tiled_mlp or self.tiled_loss

    @classmethod
    @override
    def at_top(cls) -> tuple[Any, Any]:
        return cls, key(cls(), "computation in tiles of tokens, for models of transformers")

    @override
    def problems_in(self, config: Any) -> Iterator[Problem]:
        if self.tiled_mlp and config.activation_checkpointing.mode == "selective":
            text = f"{_KEY}.tiled_mlp=true and {_RECOMPUTED}='selective' contradict each other: that mode keeps the"
            remedy = "products of all tiles, so no memory would be saved. Write 'full' or 'none', or leave out"
            yield Problem(f"{_KEY}.tiled_mlp", f"{text} {remedy} tiled_mlp.")

    @override
    def idle_in(self, config: Any) -> Iterator[IdleKeys]:
        for part, tiles in (("mlp", self.tiled_mlp), ("loss", self.tiled_loss)):
            yield IdleKeys(not tiles, _KEY, f"{part}_tokens_per_tile", f"{_KEY}.tiled_{part} is false")
