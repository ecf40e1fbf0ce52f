"""A small GPT in plain PyTorch: pre-norm blocks, rotary positions, and a head tied to the embedding.

An ordinary `nn.Module`: it knows nothing of Lightning or of sharding, so that the same class trains under any
strategy and loads in a process that has torch alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = 32


def rotary_table(context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, `(context, HEAD_DIM)` each, that turn a head's vectors by their position."""
    rates = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(context), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair `(x[i], x[i + HEAD_DIM / 2])` by its position's angle, in the precision of the tables."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Causal(nn.Module):
    """Dense attention to all earlier positions, of `(batch, heads, length, HEAD_DIM)` each."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention: the positions enter by rotating queries and keys."""

    def __init__(self, width: int, attend: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attend = attend()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, width // HEAD_DIM, HEAD_DIM).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        y = self.attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm and added to the stream."""

    def __init__(self, width: int, attend: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, attend)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        fed: Tensor = self.feed(self.feed_norm(x))
        return x + fed


class GPT(nn.Module):
    """Maps token numbers `(batch, length)` to next-token logits `(batch, length, vocabulary)`."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = 256,
        depth: int = 4,
        width: int = 192,
        context: int = 128,
        attend: Callable[[], nn.Module] = Causal,
    ) -> None:
        """`attend` makes the module that computes attention of queries, keys and values."""
        super().__init__()
        if width % HEAD_DIM:
            raise ValueError(f"width must be a multiple of {HEAD_DIM}, the size of a head: got {width}")
        self.context = context
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, attend) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        cos, sin = rotary_table(context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        """Draw small weights; smaller still where a layer writes to the stream, so that depth does not widen it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("attention.out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if writes else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits
