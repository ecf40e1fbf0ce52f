"""What script.py trains on each kind of mesh, and its batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lt_zero.parallel import Experts, LayerSpec, Pipeline, sequence_attention, token_mean

MICRO, WIDTH, CLASSES = 4, 17, 3  # odd, so that parts are padded
HIDDEN, EXPERTS, HEADS, HEAD_WIDTH, LENGTH = 22, 4, 2, 3, 6  # which are divided over two ranks

Watch = Callable[[nn.Module, nn.Module], None]  # is told of the first part that a rank has, and of a later one


class Feed(nn.Sequential):
    """Two layers, which tensor ranks cut."""

    def __init__(self, dropout: float) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Dropout(dropout), nn.Linear(HIDDEN, WIDTH))


class FeedForwards(Experts):
    def __init__(self) -> None:
        super().__init__(EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 2)

    def forward(self, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        mine = self.dispatch(tokens, expert_ids)
        experts = zip(mine.split(), self.local(self.up), self.local(self.down), strict=True)
        return self.combine(torch.cat([torch.tanh(rows @ up) @ down for rows, up, down in experts]), mine, scores)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), FeedForwards()

    def forward(self, rows: Tensor) -> Tensor:
        scores, expert_ids = self.router(rows).softmax(-1).topk(2)
        result: Tensor = rows + self.experts(rows, expert_ids, scores)
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_WIDTH), nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.attend = sequence_attention()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3 * HEADS, HEAD_WIDTH).transpose(1, 2)
        found = self.attend(*heads.chunk(3, 1), is_causal=True)
        result: Tensor = x + self.out(found.transpose(1, 2).flatten(2))
        return result


class Net(nn.Module):
    """Returns the mean loss. ``middle``: its second part; a Feed if there is none."""

    def __init__(self, dropout: float, watch: Watch, middle: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(Feed(dropout), middle() if middle else Feed(dropout), Feed(dropout))
        self.head = nn.Linear(WIDTH, CLASSES)
        watch(self.body[0], self.body[1])

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(
            self.head(self.body(rows)).flatten(0, -2), labels.flatten(), reduction="none"
        )
        return losses.mean() if rows.dim() == 2 else token_mean(losses)

    def sequence_batch(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """The dimensions that sequence ranks cut."""
        return {"rows": 1, "labels": 1}


class Stages(nn.Module):
    """Layers in stages: a rank has some of them."""

    def __init__(self, dropout: float, watch: Watch) -> None:
        super().__init__()
        torch.manual_seed(5)
        layers = [*(LayerSpec(Feed, dropout) for _ in range(5)), LayerSpec(nn.Linear, WIDTH, CLASSES)]
        self.pipe = Pipeline(layers, loss_fn=nn.functional.cross_entropy)
        mine = list(self.pipe.layers.values())
        watch(mine[0], mine[-1])

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.pipe(rows, labels)
        return loss


def net_of(mesh: str, dropout: float, watch: Watch) -> nn.Module:
    """The model of a mesh; with pipelines the layers of this rank, so that it is made where the ranks are known."""
    if mesh == "pipeline":
        return Stages(dropout, watch)
    return Net(dropout, watch, {"expert": Mixture, "sequence": Attention}.get(mesh))


def batch_of(mesh: str, number: int) -> dict[str, Tensor]:
    """A batch, whole, by its number: what ``net_of`` is called with."""
    source = torch.Generator().manual_seed(number)
    shape = (MICRO, LENGTH) if mesh == "sequence" else (MICRO,)
    rows = torch.randn(*shape, WIDTH, generator=source)
    return {"rows": rows, "labels": torch.randint(CLASSES, shape, generator=source)}
