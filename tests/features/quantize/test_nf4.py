"""Weights as 4-bit NormalFloat: nearest levels, exact repetition, and the interface of codecs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_zero.features.quantize.nf4 import LEVELS, NF4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_each_element_is_the_nearest_level_and_stays_it(numel: int, dtype: torch.dtype, seed: int) -> None:
    x = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    codes = NF4.encode(x)
    assert codes.numel() == NF4.nbytes(numel)
    got = torch.empty_like(x)
    NF4.decode_sum([codes], got)
    for first in range(0, numel, NF4.block):
        block = x[first : first + NF4.block].float()
        levels = torch.tensor(LEVELS) * block.abs().max()
        nearest = (block[:, None] - levels).abs().min(1).values
        # Products of levels are rounded to the dtype.
        error = (got[first : first + NF4.block].float() - block).abs() - nearest
        assert error.max() <= block.abs().max() * torch.finfo(dtype).eps
    assert torch.equal(NF4.encode(got), codes)
    assert torch.equal(NF4.decoded(got), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_their_references_to_the_last_bit(isa: str, dtype: torch.dtype) -> None:
    levels = torch.tensor(LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    beside = torch.cat([middles, middles.nextafter(levels[1:]), middles.nextafter(levels[:-1])])
    for numel in (1, 2, 15, 63, 64, 65, 200, 1029):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        x[64:128] *= 1e-41  # a scale of few bits
        x[128:192] = torch.cat([beside, torch.full((64 - len(beside),), 1.0)])[: x[128:192].numel()]
        x[192:250], x[256:300], x[320:321], x[400:401] = 0.0, -0.0, torch.inf, torch.nan
        x = x.to(dtype)
        left, other = torch.randn(2, numel).unbind()
        left.copy_(other)
        dirty = torch.full((NF4.nbytes(numel),), 255, dtype=torch.uint8)
        buffers = [NF4.encode(x, out=dirty), NF4.encode(x.flip(0), left), NF4.encode(-x)]
        wanted = [NF4.encode_reference(x), NF4.encode_reference(x.flip(0), other), NF4.encode_reference(-x)]
        assert all(map(torch.equal, buffers, wanted)), numel
        assert torch.equal(left.view(torch.int32), other.view(torch.int32)), numel
        for count, scale in ((1, 1.0), (3, 1 / 3)):
            ours, theirs = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            NF4.decode_sum(buffers[:count], ours, scale)
            NF4.decode_sum_reference(buffers[:count], theirs, scale)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_codes_of_a_block_depend_on_nothing_else() -> None:
    x = torch.randn(5 * NF4.block)
    whole = NF4.decoded(x)
    for first in range(0, x.numel(), NF4.block):
        part = slice(first, first + NF4.block)
        assert torch.equal(NF4.decoded(x[part].clone()), whole[part])


def test_levels_zeros_and_values_that_are_not_finite() -> None:
    levels = 0.5 * torch.tensor(LEVELS)
    assert torch.equal(NF4.decoded(levels), levels)
    assert not NF4.decoded(torch.zeros(70)).any()
    x = torch.ones(3 * NF4.block)
    x[70], x[2 * NF4.block] = torch.nan, torch.inf
    residual = torch.full_like(x, 0.25)
    NF4.encode(x, residual)
    assert NF4.decoded(x).isfinite().tolist() == [True] * NF4.block + [False] * 2 * NF4.block
    assert residual.tolist() == [0.0] * NF4.block + [0.25] * 2 * NF4.block


def test_sums_rows_and_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.features.quantize.nf4._CHUNK", 2 * NF4.block)
    x, y = torch.randn(2, 5 * NF4.block + 3).unbind()
    total = torch.empty_like(x)
    NF4.decode_sum([NF4.encode(x), NF4.encode(y)], total, 0.5)
    assert torch.equal(total, 0.5 * (NF4.decoded(x) + NF4.decoded(y)))
    residual = torch.randn_like(x)
    exact = x + residual
    NF4.decode_sum([NF4.encode(x, residual)], total)
    assert torch.allclose(total + residual, exact, atol=1e-6)
    assert 0 < residual.abs().max() < exact.abs().max() / 3
    with pytest.raises(ValueError, match=r"buffers\[0\] has shape"):
        NF4.decode_sum([torch.zeros(3, dtype=torch.uint8)], total)
    with pytest.raises(ValueError, match="at least one"):
        NF4.decode_sum([], total)


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Appendix E of arXiv:2305.14314: seven negative ones, 0 and eight positive ones, relative to the largest."""
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2
    positive, negative = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count, dtype=torch.float64)[:-1]) for count in (9, 8)
    )
    wanted = torch.cat([positive, positive.new_zeros(1), -negative]).sort().values / positive.max()
    torch.testing.assert_close(torch.tensor(LEVELS, dtype=torch.float64), wanted, rtol=0, atol=1e-6)
