"""Norms from exact sums of blocks: the same bits for every cut, and as torch's up to rounding."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero.common.norms import VectorNorm
from tests.support.features import needs

pytestmark = needs("virtual_ranks")

CPU = torch.device("cpu")


def values(seed: int, dtype: torch.dtype) -> Tensor:
    """Values of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(3001, generator=generator, dtype=torch.float64)
    row *= torch.rand(3001, generator=generator, dtype=torch.float64) ** 9
    return (row * 10.0 ** (8 * seed - 20)).to(dtype)


def norm_of(parts: list[Tensor], order: float, factor: Tensor | None = None) -> Tensor:
    """The norm of elements that lie in these tensors, which stay as they are."""
    from lt_zero.features.virtual_ranks.exact_norm import norm_of_order

    kind = norm_of_order(order)
    rows = [kind.part([part], CPU, factor=factor) for part in parts]
    total = kind.nothing(1, CPU)[0]
    for row in rows:
        total = kind.combine(total, row)
    return kind.finish(total[None])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4))
def test_the_2_norm_has_the_same_bits_for_every_cut(seed: int, dtype: torch.dtype) -> None:
    row = values(seed, dtype)
    row = torch.where(row.isfinite(), row, 0.0)
    row[7] = 1e-45 if dtype == torch.float32 else 0.0  # the smallest there is
    exact = sum(Fraction(value) ** 2 for value in row.tolist())
    found = norm_of([row], 2.0).item()
    assert found == pytest.approx(math.sqrt(float(exact)), rel=4e-16)
    parts = [*row.split(64), row[:0]]
    assert norm_of(parts, 2.0).item() == found
    assert norm_of(parts[::-1], 2.0).item() == found
    assert norm_of([row[:640], row[640:704], row[704:]], 2.0).item() == found


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 2.5, 0.5, -1.0, 0.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_orders(order: float, dtype: torch.dtype) -> None:
    row = values(2, dtype)
    wanted = torch.linalg.vector_norm(row.double(), order)
    first = norm_of([row], order)
    torch.testing.assert_close(first, wanted, rtol=1e-12, atol=0)
    for size in (64, 192, 1024):
        assert torch.equal(norm_of(list(row.split(size)), order), first)


def test_a_factor_is_multiplied_as_a_step_does() -> None:
    row, factor = values(2, torch.float32), torch.tensor(1 / 3)
    assert torch.equal(norm_of([row], 2.0, factor), norm_of([row * factor], 2.0))


def test_sums_of_chunks_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one element each: the sum is that of fractions, whatever the chunks."""
    from lt_zero.features.virtual_ranks import exact_norm

    row = torch.zeros(3001, 64)
    row[:, 5] = values(2, torch.float32)
    exact = sum(Fraction(value) ** 2 for value in row[:, 5].tolist())
    for chunk in (64, 1024, 1 << 17):
        monkeypatch.setattr(exact_norm, "_CHUNK", chunk)
        assert norm_of([row], 2.0).item() == math.sqrt(float(exact))


@pytest.mark.parametrize("order", [2.0, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_device_has_the_same_bits(order: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits of all tensors are taken together there, so that the host waits twice, not for each digit of each row."""
    from lt_zero.features.virtual_ranks import exact_norm

    tensors = [torch.where(row.isfinite(), row, 0.0) for row in (values(seed, dtype) for seed in range(4))]
    tensors += [torch.zeros(7, dtype=dtype), torch.full((100,), 1e-45, dtype=dtype)]
    kind: Any = exact_norm.norm_of_order(order)
    wanted = kind.part(tensors, CPU)
    monkeypatch.setattr(exact_norm.accelerator, "holds", lambda _: True)
    monkeypatch.setattr(exact_norm, "_ROW", 1024)
    for together in (1, 20, 1 << 22):
        monkeypatch.setattr(exact_norm, "_SUMS_OF_DEVICE", together)
        assert torch.equal(kind.part(tensors, CPU), wanted)
    assert torch.equal(kind.part([torch.zeros(3)], CPU), kind.part([torch.zeros(3)] * 2, CPU).clamp(max=1.0))
    assert kind.finish(kind.part([*tensors, torch.tensor([math.nan])], CPU)[None]).isnan().all()


def test_what_is_not_finite() -> None:
    row = values(2, torch.float32)
    row[3] = math.inf
    assert norm_of(list(row.split(128)), 2.0).item() == math.inf
    row[1003] = math.nan
    assert math.isnan(norm_of(list(row.split(128)), 2.0).item())
    assert norm_of([torch.tensor([1e200], dtype=torch.float64)], 2.0).item() == math.inf
    assert norm_of([], 2.0).item() == 0.0
    assert norm_of([torch.zeros(3)], 2.0).item() == 0.0


def test_complex_and_sparse_gradients() -> None:
    row = torch.complex(values(2, torch.float32), values(3, torch.float32))
    for order in (2.0, 3.0):
        wanted = torch.linalg.vector_norm(row.to(torch.complex128), order)
        torch.testing.assert_close(norm_of([row], order), wanted, rtol=1e-6, atol=0)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 3, 1]]), torch.tensor([1.0, 2.0, 3.0]), (5,), check_invariants=True
    )
    assert norm_of([sparse], 2.0).item() == math.sqrt(20)


def test_each_element_is_counted_by_one_rank() -> None:
    from lt_zero.features.virtual_ranks.exact_norm import norm_of_order

    with pytest.raises(ValueError, match="share=0.5"):
        norm_of_order(2.0).part([torch.ones(1)], CPU, 0.5)
    assert isinstance(norm_of_order(math.inf), VectorNorm)
