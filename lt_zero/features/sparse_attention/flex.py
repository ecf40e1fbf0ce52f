"""Block-sparse attention on a GPU: torch's FlexAttention, with a block mask that is made once for a length."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lt_zero.features.sparse_attention.patterns import Pattern, distinct_layouts

TILE = 128  # tokens of a tile of FlexAttention's kernels; smaller blocks are masked in it


def flex(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, bias: Tensor | None, dropout: float, scale: float,
    heads: int, first: int,
) -> Tensor:  # fmt: skip
    """``sparse_attention`` of ``query``'s heads, number ``first`` and following of all ``heads``.

    Raises:
        ValueError: there is dropout, which FlexAttention has not.
    """
    if dropout:
        raise ValueError(
            f"dropout={dropout}: FlexAttention, which computes sparse attention on {query.device.type}, has no dropout "
            "of attention weights. Set it to 0 (attention_dropout, attn_pdrop, attention_probs_dropout_prob)."
        )
    mask = block_mask(pattern, heads, first, query.shape[1], query.shape[2], query.device)

    def modify(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + bias[batch, column] if bias is not None else score

    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled(query.device.type)
    shared = query.shape[1] != key.shape[1]
    out: Tensor = run(query, key, value, modify if bias is not None else None, mask, scale=scale, enable_gqa=shared)
    return out


@functools.cache
def _compiled(device: str) -> Any:
    return torch.compile(flex_attention) if device not in ("cpu", "mps") else flex_attention


@functools.lru_cache(64)
def block_mask(pattern: Pattern, heads: int, first: int, here: int, length: int, device: torch.device) -> BlockMask:
    """The mask of heads ``first`` to ``first + here``: tiles without an allowed element, full ones, and the others."""
    # Backward keeps these tensors, also if a validation made them.
    with torch.inference_mode(False):
        return _block_mask(pattern, heads, first, here, length, device)


def _block_mask(
    pattern: Pattern, heads: int, first: int, here: int, length: int, device: torch.device
) -> BlockMask:  # fmt: skip
    layout = distinct_layouts(pattern, heads, -(-length // pattern.block), first, here).to(device)
    shared, block, causal = layout.shape[0] == 1, pattern.block, pattern.causal

    def allowed(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        inside = layout[0 if shared else head, row // block, column // block]
        return inside & (row >= column) if causal else inside

    tiles = -(-length // TILE)
    at = torch.arange(tiles * TILE, device=device).clamp_(max=length - 1)
    count = torch.zeros(layout.shape[0], tiles, tiles, dtype=torch.int32, device=device)
    # One row of tiles at a time: full matrices would take quadratic memory.
    for tile in range(tiles):
        rows = at[tile * TILE : (tile + 1) * TILE]
        elements = layout[:, rows // block][:, :, at // block]
        if causal:
            elements = elements & (rows[:, None] >= at)
        count[:, tile] = elements.unflatten(-1, (tiles, TILE)).sum((1, 3), dtype=torch.int32)
    full = count == TILE * TILE
    return BlockMask.from_kv_blocks(
        *_ordered((count > 0) & ~full), *_ordered(full), BLOCK_SIZE=TILE, mask_mod=allowed, seq_lengths=(length, length)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The number of set tiles of each row, and the columns, set ones first: [1, heads, rows(, columns)]."""
    columns = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    return tiles.sum(-1, dtype=torch.int32)[None], columns[None].contiguous()
