"""Small models with the shapes that break sharding: odd sizes, tied weights, frozen layers, branches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH = 11, 10


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, checkpointed: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.checkpointed = checkpointed

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed == "inside" and torch.is_grad_enabled():
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        return x + self.mlp(x)


class Net(nn.Module):
    """Embedding, a parameter of its own, blocks, head (tied to the embedding by default)."""

    def __init__(self, depth: int = 3, tied: bool = True, checkpointed: str = "", twice: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed, self.twice = checkpointed, twice

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            for _ in range(2 if self.twice else 1):
                if self.checkpointed.startswith("outside") and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_reentrant=self.checkpointed == "outside-reentrant")
                else:
                    x = block(x)
        return self.head(x)


def tokens(step: int, micro: int, rank: int, rows: int = 3, length: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def next_token_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    batch = tokens(step, micro, rank)
    return F.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())
