"""What the tests of stores for checkpointed inputs share: a network of blocks, and places to rest in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lt_zero.config.blocks import ActivationCheckpointing, Aio
from lt_zero.config.options import io_options
from lt_zero.features.activation_checkpointing.checkpointing import open_store
from lt_zero.features.activation_checkpointing.stores import ActivationStore

CPU = torch.device("cpu")
WIDTH = 32
ROWS = 64  # 8 KiB a saved input
NBYTES = ROWS * WIDTH * 4
PLACES: dict[str, dict[str, Any]] = {
    "host": {"cpu_checkpointing": True},
    "host arena": {"cpu_checkpointing": True, "contiguous_memory_optimization": True},
    "arena": {"contiguous_memory_optimization": True},
    "files": {"nvme_path": "here"},
}


class Feed(nn.Module):
    """A block with a residual and, if there is one, a mask."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return y if mask is None else y * mask


def blocks(depth: int = 6, width: int = WIDTH) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Feed(width) for _ in range(depth))


def rows(seed: int = 0, count: int = ROWS, device: torch.device = CPU) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def opened(place: str, folder: Path, count: int = 6, device: torch.device = CPU, **keys: Any) -> ActivationStore:
    block = PLACES[place] | ({"nvme_path": folder} if place == "files" else {}) | keys
    store = open_store(ActivationCheckpointing(**block), device, count, io_options(Aio(checksum=True)))
    assert isinstance(store, ActivationStore)
    return store


def forward(net: nn.ModuleList, x: Tensor, store: Any = None, *others: Tensor) -> Tensor:
    """The sum of what the blocks make of ``x``, each checkpointed; without a store saved inputs stay."""
    for block in net:
        if store is None:
            x = checkpoint(block, x, *others, use_reentrant=False)
        else:
            with saved_tensors_hooks(store.pack, store.unpack):
                x = checkpoint(block, x, *others, use_reentrant=False)
    return x.square().sum()


def gradients(net: nn.ModuleList) -> list[Tensor]:
    """What backward left, taken away."""
    found = [p.grad for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
