"""Moments, master weights and frozen weights in fewer bits, on a GPU.

Kernels give the bits of the references on a CPU; training is the same as on a CPU, up to rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from lt_zero import kernels as ops
from lt_zero.kernels.moments import coded_nbytes
from lt_zero.kernels.rounding import ElementRows
from tests.support.features import needs
from tests.support.parity import RELEASE, STAGES, config_of, full_values

pytestmark = pytest.mark.gpu

WIDTH, STEPS, RATE = 128, 4, 1e-3
CPU = torch.device("cpu")
SIZES = [1, 255, 257, 4096, 500_003]


# ---- kernels -------------------------------------------------------------------------------------------------------


def drawn(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stepped(step: Any, device: torch.device) -> list[Tensor]:
    """Weights, codes of both moments, and bf16 copies after three steps of AdamW with moments in 8 bits."""
    weights = [drawn(numel, 0).to(device) for numel in SIZES]
    rows = [[torch.zeros(coded_nbytes(numel), dtype=torch.uint8, device=device) for numel in SIZES] for _ in range(2)]
    copies = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in SIZES]
    options = {"lr": RATE, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for number in (1, 2, 3):
        grads = [(drawn(numel, number) * 1e-2).bfloat16().to(device) for numel in SIZES]
        step(weights, grads, *rows, copies, step=float(number), **options)
    return [tensor.cpu() for tensors in (weights, *rows, copies) for tensor in tensors]


def test_a_step_with_moments_in_8_bits_has_the_bits_of_the_reference(device: torch.device) -> None:
    assert ops.available(device)
    pairs = zip(stepped(ops.adam_step, device), stepped(ops.adam_step_reference, CPU), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)


@needs("quantize")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_has_the_bits_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    from lt_zero.features.quantize.nf4 import NF4

    assert ops.available(device)
    for numel in SIZES:
        x = drawn(numel, 0, dtype)
        x[5:6] = 0
        x[100:101] = torch.nan
        codes, wanted = NF4.encode(x.to(device)), NF4.encode_reference(x)
        assert torch.equal(codes.cpu(), wanted)
        values = torch.empty_like(x)
        got = values.to(device)
        NF4.decode_sum([codes, codes], got, 0.5)
        NF4.decode_sum_reference([wanted, wanted], values, 0.5)
        torch.testing.assert_close(got.cpu(), values, rtol=0, atol=0, equal_nan=True)
        blocks = [block.isnan() for block in values.split(NF4.block)]
        assert [bool(block.all()) for block in blocks] == [bool(block.any()) for block in blocks]
        assert sum(bool(block.any()) for block in blocks) == (numel > 100), "the block of the NaN, and no other"


@pytest.mark.parametrize(
    "rows",
    [ElementRows(500_003, 3, 500_003), ElementRows(40, (1 << 36) + 5, 40), ElementRows(11 * 200, 77, 200, 1003)],
    ids=["whole", "far", "columns"],
)
def test_stochastic_rounding_has_the_bits_of_the_reference(device: torch.device, rows: ElementRows) -> None:
    values = drawn(rows.numel, 0)
    got = torch.empty(rows.numel, dtype=torch.bfloat16, device=device)
    want = torch.empty(rows.numel, dtype=torch.bfloat16)
    for step in (1, (1 << 32) + 3):
        ops.round_stochastic(values.to(device), got, rows, seed=7, step=step)
        ops.round_stochastic_reference(values, want, rows, seed=7, step=step)
        assert torch.equal(got.cpu(), want)
        assert not torch.equal(want, values.bfloat16()), "to the nearest"


# ---- training ------------------------------------------------------------------------------------------------------


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
    config = config_of(stage, RELEASE if stage == 3 else {}, **keys)
    engine = lt_zero.shard(model, config, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    lt_zero.ShardedOptimizer(engine, optimizer)
    low = next(model.parameters()).dtype
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(device, low)
        (model(x) - x.roll(1, 1)).float().square().mean().backward()
        optimizer.step()
    return {name: value.float().cpu() for name, value in full_values(engine).items()}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Sums in another order turn some roundings of moments over, each of which changes a step by 2^-8 at most."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= STEPS * RATE * 2**-6, name


def close_in_the_mean(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    """One rounding that is turned over may change a step by as much as the step is: in the mean by ``share`` of it."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().mean() <= STEPS * RATE * share, name


def feed_forward(place: torch.device, stage: int, **keys: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return trained(place, layers, stage, **keys)


@pytest.mark.parametrize("stage", STAGES)
def test_moments_in_bf16(device: torch.device, stage: int) -> None:
    keys = {"optimizer_states": {"dtype": "bf16"}}
    close(feed_forward(device, stage, **keys), feed_forward(CPU, stage, **keys))


MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "stochastic_rounding": True}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("keys", "share"),
    [({"optimizer_states": {"dtype": "int8"}}, 2**-10), ({"bf16": MASTERS}, 2**-6)],  # a forward in fp32, in bf16
    ids=["moments in 8 bits", "masters in bf16"],
)
def test_fewer_bits_that_a_step_rounds_to(device: torch.device, stage: int, keys: dict[str, Any], share: float) -> None:
    close_in_the_mean(feed_forward(device, stage, **keys), feed_forward(CPU, stage, **keys), share)


@needs("quantize")
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_beside_frozen_weights_in_few_bits(device: torch.device, bits: int) -> None:
    def of(place: torch.device) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return trained(place, [Adapted(), Adapted()], 3, quantize=bits)

    close(of(device), of(CPU))
