"""Moments in bf16, and frozen weights in few bits, on a GPU: the same training as on a CPU, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from tests.support.parity import RELEASE, STAGES, config_of, full_values

pytestmark = pytest.mark.gpu

WIDTH, STEPS, RATE = 128, 4, 1e-3


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


def trained(device: torch.device, layers: list[nn.Module], stage: int, **keys: Any) -> dict[str, Tensor]:
    """All values after a few steps of AdamW."""
    model = nn.Sequential(*layers)
    engine = lt_zero.shard(model, config_of(stage, RELEASE if stage == 3 else {}, **keys), device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return {name: value.float().cpu() for name, value in full_values(engine).items()}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Sums in another order turn some roundings of moments over, each of which changes a step by 2^-8 at most."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= STEPS * RATE * 2**-6, name


@pytest.mark.parametrize("stage", STAGES)
def test_moments_in_bf16(device: torch.device, stage: int) -> None:
    def of(place: torch.device) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
        return trained(place, layers, stage, optimizer_states={"dtype": "bf16"})

    close(of(device), of(torch.device("cpu")))


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_beside_frozen_weights_in_few_bits(device: torch.device, bits: int) -> None:
    def of(place: torch.device) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return trained(place, [Adapted(), Adapted()], 3, quantize=bits)

    close(of(device), of(torch.device("cpu")))
