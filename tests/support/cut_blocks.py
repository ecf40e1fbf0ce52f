"""A model of blocks that rules cut, large enough for sizes to be compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class CutBlocks(nn.Module):
    """Blocks that are cut, one of them frozen, and a head that is whole; large enough that alignment is little."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(4)), nn.Linear(width, 2 * width)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


RULES = [
    {"patterns": [r".*up\.weight"], "partition_type": "column"},
    {"patterns": [r".*down\.weight"], "partition_type": "row"},
]
