"""Networks whose blocks are recomputed, and a step of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import ActivationCheckpointing
from tests.support.models import WIDTH, Block, Net, next_token_loss
from tests.support.parity import RELEASE, config_of, full_grads

MODES = ("full", "selective")


FULL = ActivationCheckpointing(mode="full")


class Dropping(Block):
    """Notes how often its forward began."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.began = 0

    def forward(self, x: Tensor) -> Tensor:
        self.began += 1
        return x + self.drop(self.mlp(self.drop(x)))


@dataclass
class Output:
    x: Tensor
    aux: Tensor


class Elaborate(Dropping):
    """Tensors in keywords, dicts and tuples; a dataclass is returned."""

    def forward(self, x: Tensor, *, mask: Tensor, more: dict[str, Any]) -> Output:  # type: ignore[override]
        x = super().forward(x * mask) + more["context"][0] * len(more["context"])
        return Output(x, x.square().mean())


class ElaborateNet(Net):
    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch) * self.scale
        context, aux = x.mean(1, keepdim=True), torch.zeros(())
        for block in self.blocks:
            output = block(x, mask=torch.full((WIDTH,), 0.5), more={"context": (context, 2)})
            x, aux = output.x, aux + output.aux
        return self.head(x) + aux


def net(block: Callable[[], nn.Module] = Dropping, cls: type[Net] = Net, twice: bool = False) -> Net:
    torch.manual_seed(0)
    made = cls(twice=twice)
    made.blocks = nn.ModuleList(block() for _ in range(3))
    return made


Look = dict[str, Tensor]


def run(
    model: nn.Module,
    stage: int,
    block: dict[str, Any],
    loss: Callable[[nn.Module], Tensor] | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
    forwards: int = 1,
    **keys: Any,
) -> Look:
    """Gradients and buffers after forwards and then their backwards."""
    config = config_of(stage, RELEASE if stage == 3 else {}, activation_checkpointing=block, **keys)
    engine = lt_zero.shard(model, config)
    torch.manual_seed(5)
    rank = dist.get_rank()
    found = [loss(model) if loss else next_token_loss(model, 0, micro, rank) for micro in range(forwards)]
    for entry in found:
        backward(entry)
    seen = {**full_grads(engine), **{name: buffer.clone() for name, buffer in model.named_buffers()}}
    assert seen
    engine.detach()
    return seen


def same(got: Look, want: Look, what: Any) -> None:
    assert got.keys() == want.keys(), what
    for name in want:
        assert torch.equal(got[name], want[name]), (what, name)
        assert torch.isfinite(got[name]).all(), (what, name)
