"""A module whose gradients a test chooses."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Constant(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, numel: int = 13) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight.float() * grad).sum()
