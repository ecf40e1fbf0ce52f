"""A model with a mixture of experts, and the same on one process, written without what is tested."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lt_zero.parallel import Experts

NUMBER, WIDTH, HIDDEN = 4, 6, 5


class FeedForwards(Experts):
    """Experts with two matrices each."""

    def __init__(self, number: int = NUMBER) -> None:
        super().__init__(number)
        self.up = nn.Parameter(torch.randn(number, WIDTH, HIDDEN) / 2)
        self.down = nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / 2)

    def forward(self, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        mine = self.dispatch(tokens, expert_ids)
        pairs = zip(mine.split(), self.local(self.up), self.local(self.down), strict=True)
        return self.combine(torch.cat([torch.tanh(rows @ up) @ down for rows, up, down in pairs]), mine, scores)


def dense(experts: FeedForwards, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
    """What ``FeedForwards`` with all experts returns: each expert sees all tokens, and those not sent to it count 0."""
    out = torch.zeros_like(tokens)
    for number in range(experts.number):
        share = (scores * (expert_ids == number)).sum(1, keepdim=True)
        out = out + share * (torch.tanh(tokens @ experts.up[number]) @ experts.down[number])
    return out


class MixtureBlock(nn.Module):
    """A router that chooses two experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUMBER)
        self.experts = FeedForwards()
        self.dense = False

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores, expert_ids = self.router(tokens).softmax(-1).topk(2, -1)
        made = (
            dense(self.experts, tokens, expert_ids, scores) if self.dense else self.experts(tokens, expert_ids, scores)
        )
        return x + made.view_as(x)


class Mixture(nn.Module):
    """Two blocks and a head. ``dense``: as one process without experts over ranks."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(MixtureBlock() for _ in range(2)), nn.Linear(WIDTH, 3)
        for layer in self.layers:
            layer.dense = dense  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def send_all_to(model: Mixture, expert: int) -> None:
    """Let the routers choose ``expert`` for all tokens, and the one after it."""
    with torch.no_grad():
        for layer in model.layers:
            layer.router.bias[expert] += 100.0  # type: ignore[union-attr, index]
            layer.router.bias[(expert + 1) % NUMBER] += 50.0  # type: ignore[union-attr, index]
