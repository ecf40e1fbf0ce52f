"""Block-wise compression: kernels equal their references, errors are bounded, and error feedback loses nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels import dispatch, library
from lt_zero.kernels.blocks import BITS, check_buffer, dequantize_rows, quantize_rows
from tests.support.kernel_inputs import LOW
from tests.support.matrix import cover

SIZES = [0, 1, 5, 15, 16, 17, 255, 256, 257, 1000, 70_001]
BLOCKS = [16, 48, 256, 4096]


def heavy_tailed(numel: int, seed: int = 0) -> Tensor:
    """Magnitudes over many orders, with zeros."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=make) * torch.randn(numel, generator=make).mul_(2).exp_()
    return x * (torch.rand(numel, generator=make) > 0.1)


def decoded(buffer: Tensor, numel: int, bits: int, block: int) -> Tensor:
    out = torch.empty(numel)
    ops.dequantize(buffer, out, bits, block)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("bits", "block", "dtype"), cover(BITS, BLOCKS, LOW, strength=2))
def test_kernels_equal_their_references_to_the_last_bit(isa: str, bits: int, block: int, dtype: torch.dtype) -> None:
    for numel in SIZES:
        x, residual = heavy_tailed(numel).to(dtype), heavy_tailed(numel, 1)
        if numel > 255:
            x[200] = torch.inf
            x[70:90] = 0.0
            residual[70:90] = 0.0
        left, other = residual.clone(), residual.clone()
        dirty = torch.full((ops.quantized_nbytes(numel, bits, block),), 255, dtype=torch.uint8)
        buffer = ops.quantize(x, bits, block, left, dirty)
        expected = ops.quantize_reference(x, bits, block, other)
        assert torch.equal(buffer, expected), numel
        assert same_bits(left, other), numel
        buffers = [buffer, ops.quantize(x.flip(0), bits, block), ops.quantize(-x, bits, block)]
        for count, scale in ((1, 1.0), (3, 1 / 3)):
            ours, theirs = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            ops.dequantize_sum(buffers[:count], ours, bits, block, scale)
            ops.dequantize_sum_reference(buffers[:count], theirs, bits, block, scale)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_rows_in_one_call_equal_calls_of_their_own(bits: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(dispatch, "_loaded", {})
        monkeypatch.setattr(library, "cpu", lambda: None)
    # Rows of whole blocks, of broken ones, without elements; residuals with other rows between them.
    for rows, numel, block in ((3, 1000, 48), (5, 2048, 256), (2, 0, 16), (1, 7, 16), (0, 16, 16), (3, 40_960, 4096)):
        x = heavy_tailed(rows * numel).view(rows, numel)
        left = heavy_tailed(rows * 2 * numel, 1).view(rows, 2, numel)
        other, nbytes = left.clone(), ops.quantized_nbytes(numel, bits, block)
        x[1:2, 3:4] = torch.nan
        out = torch.full((rows, nbytes), 255, dtype=torch.uint8)
        quantize_rows(x, bits, block, left[:, 1], out)
        values, expected = torch.empty(rows, numel).bfloat16(), torch.empty(rows, numel).bfloat16()
        dequantize_rows(out, values, bits, block, 1 / 3)
        for row in range(rows):
            assert torch.equal(out[row], ops.quantize(x[row], bits, block, other[row, 1]))
            ops.dequantize_sum([out[row]], expected[row], bits, block, 1 / 3)
        assert same_bits(left, other)
        assert same_bits(values, expected)
    with pytest.raises(ValueError, match="residual has shape"):
        quantize_rows(torch.zeros(0, 16), bits, 16, torch.zeros(0, 17), out[:0, : ops.quantized_nbytes(16, bits, 16)])


@pytest.mark.parametrize("bits", BITS)
def test_results_do_not_depend_on_the_number_of_threads(bits: int) -> None:
    x, before, results = heavy_tailed(200_003), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            residual = torch.zeros_like(x)
            buffer = ops.quantize(x, bits, 256, residual)
            results.append((buffer, residual, decoded(buffer, x.numel(), bits, 256)))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_an_element_is_off_by_half_a_scale_at_most(bits: int, levels: int) -> None:
    for seed, block in itertools.product(range(5), BLOCKS):
        x = heavy_tailed(10_007, seed)
        error = (decoded(ops.quantize(x, bits, block), x.numel(), bits, block) - x).abs()
        for values, errors in zip(x.split(block), error.split(block), strict=True):
            scale = values.abs().max() / levels
            # x / scale is computed with three roundings before it is rounded to an integer of at most `levels`.
            assert errors.max() <= scale * (0.5 + 4 * levels * 2.0**-24)


def test_halves_are_rounded_to_even() -> None:
    x = torch.zeros(256)
    x[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert decoded(ops.quantize(x, 8, 256), 256, 8, 256)[:6].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros_and_tiny_blocks_stay_finite(bits: int) -> None:
    assert not decoded(ops.quantize(torch.zeros(1000), bits, 256), 1000, bits, 256).any()
    for size in (1e-45, 1e-40, 1.1e-38, 1e-36):
        x, residual = torch.linspace(-size, size, 512), torch.zeros(512)
        out = decoded(ops.quantize(x, bits, 256, residual), 512, bits, 256)
        assert out.isfinite().all()
        torch.testing.assert_close(out + residual, x, rtol=0, atol=1e-45 + size * 2.0**-22)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", BITS)
def test_an_overflow_stays_visible_and_does_not_spoil_the_residual(isa: str, bits: int, bad: float) -> None:
    for place in (0, 300, 511, 999):
        x, residual = heavy_tailed(1000), heavy_tailed(1000, 1)
        x[place] = bad
        before = residual.clone()
        out = decoded(ops.quantize(x, bits, 256, residual), 1000, bits, 256)
        hit = torch.arange(1000) // 256 == place // 256
        assert out[hit].isnan().all()
        assert out[~hit].isfinite().all()
        assert same_bits(residual[hit], before[hit])
        assert residual.isfinite().all()
        total = torch.empty(1000, dtype=torch.float16)
        ops.dequantize_sum([ops.quantize(x, bits, 256), ops.quantize(before, bits, 256)], total, bits, 256, 0.0)
        assert total[hit].isnan().all()


@pytest.mark.parametrize("bits", BITS)
def test_what_was_sent_and_what_is_left_add_up_to_what_came_in(bits: int) -> None:
    steps, numel, block = 50, 5000, 256
    residual, sent, given = torch.zeros(numel), torch.zeros(numel).double(), torch.zeros(numel).double()
    size = torch.zeros(numel)
    for step in range(steps):
        x = heavy_tailed(numel, step)
        given += x
        before = residual.clone()
        out = decoded(ops.quantize(x, bits, block, residual), numel, bits, block)
        sent += out
        size += before.abs() + x.abs() + out.abs() + residual.abs()
    # Two fp32 additions a step, each rounded once.
    assert ((sent + residual - given).abs() <= size.double() * 2.0**-23 + 1e-45).all()


@pytest.mark.parametrize(("bits", "share", "loss"), [(1, 1.0, 0.3634), (2, 0.81, 0.1175)])
def test_levels_of_one_and_two_bits_lose_what_the_theory_says(bits: int, share: float, loss: float) -> None:
    normal = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    error = normal - decoded(ops.quantize(normal, bits, 4096), normal.numel(), bits, 4096)
    assert abs(error.square().mean().item() - loss) < 0.003
    spike = torch.zeros(256)
    spike[17] = -3.0
    for x in (spike, torch.ones(256), *heavy_tailed(256 * 200, 3).view(-1, 256)):
        error = (x - decoded(ops.quantize(x, bits, 256), 256, bits, 256)).double()
        bound = x.double().square().sum() - share * x.double().abs().sum().square() / 256
        assert error.square().sum() <= bound * (1 + 1e-5)


@pytest.mark.parametrize(
    ("bits", "block", "fewer"), [(8, 256, 0.745), (4, 256, 0.87), (2, 256, 0.93), (2, 512, 0.935), (1, 4096, 0.96)]
)
def test_bytes(bits: int, block: int, fewer: float) -> None:
    numel = 1_000_003
    nbytes = ops.quantized_nbytes(numel, bits, block)
    assert nbytes <= (1 - fewer) * 4 * numel
    assert nbytes % 16 == 0
    assert ops.quantize(torch.zeros(numel), bits, block).numel() == nbytes
    assert ops.quantized_nbytes(0, bits, block) == 0


def test_bad_arguments_are_named() -> None:
    x, good = torch.zeros(100), torch.zeros(ops.quantized_nbytes(100, 8, 16), dtype=torch.uint8)
    for arguments, text in (
        ((x, 3, 16), "bits is 3; it must be one of 8, 4, 2, 1"),
        ((x, 8, 24), "block is 24; it must be a multiple of 16"),
        ((x, 8, 1 << 17), "block is 131072"),
        ((x.double(), 8, 16), "x has shape .* float32, bfloat16, float16 on cpu are needed"),
        ((x[::2], 8, 16), "x has shape .* contiguous: False"),
        ((x.view(10, 10), 8, 16), "x has shape"),
        ((x, 8, 16, torch.zeros(99)), "residual has shape"),
        ((x, 8, 16, x.half()), "residual has .*float16"),
        ((x, 8, 16, None, good[1:]), "out has shape"),
        ((x.to("meta"), 8, 16, x), "residual has .*meta"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.quantize(*arguments)
    with pytest.raises(ValueError, match="buffers is empty"):
        ops.dequantize_sum([], x, 8, 16)
    with pytest.raises(ValueError, match=r"buffers\[1\] has shape"):
        ops.dequantize_sum([good, good[:-16]], x, 8, 16)
    with pytest.raises(ValueError, match="numel is -1"):
        ops.quantized_nbytes(-1, 8, 16)
    shifted = torch.zeros(64, dtype=torch.uint8)[1:33]
    with pytest.raises(ValueError, match="b starts 1 bytes after a multiple of 16"):
        check_buffer("b", shifted, 32, shifted.device)
