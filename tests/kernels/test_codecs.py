"""All codecs through one interface, as a collective uses them."""

from __future__ import annotations

import pytest
import torch

from lt_zero.ops import INT4, INT8, ONE_BIT, TWO_BITS, BlockCodec, Codec, TopK
from tests.support.kernel_inputs import LOW

CODECS: dict[str, Codec] = {
    "int8": INT8,
    "int4": INT4,
    "two bits": TWO_BITS,
    "one bit": ONE_BIT,
    "topk": TopK(0.01),
    "topk bf16": TopK(0.05, torch.bfloat16),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_sum_of_ranks_with_error_feedback_loses_nothing(name: str, dtype: torch.dtype) -> None:
    codec, numel, ranks, steps = CODECS[name], 1001, 3, 30
    torch.manual_seed(0)
    residuals = [torch.zeros(numel) for _ in range(ranks)]
    given, received, size = torch.zeros(numel).double(), torch.zeros(numel).double(), 0.0
    for _ in range(steps):
        inputs = [torch.randn(numel).to(dtype) for _ in range(ranks)]
        out = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
        buffers = [codec.encode(inputs[0], residuals[0], out)]
        assert buffers[0].data_ptr() == out.data_ptr()
        buffers += [codec.encode(x, left) for x, left in zip(inputs[1:], residuals[1:], strict=True)]
        assert all(buffer.numel() <= codec.nbytes(numel) for buffer in buffers)
        assert not codec.fixed_size or all(buffer.numel() == codec.nbytes(numel) for buffer in buffers)
        total = torch.full((numel,), torch.nan)
        codec.decode_sum(buffers, total, 0.25)
        given += sum(x.double() for x in inputs)
        received += total.double() * 4
        size += float(total.abs().max() * 4 + max(left.abs().max() for left in residuals)) * ranks
    rest = sum(left.double() for left in residuals)
    assert (received + rest - given).abs().max() <= 4 * size * 2.0**-24
    # And the residuals do not grow: error feedback sends what it held back.
    assert max(left.abs().max() for left in residuals) < steps


@pytest.mark.parametrize("name", CODECS)
def test_sums_are_rounded_once_to_the_dtype_of_the_result(name: str) -> None:
    codec, x = CODECS[name], torch.randn(1000)
    buffers, exact = [codec.encode(x), codec.encode(-2 * x)], torch.empty(1000)
    codec.decode_sum(buffers, exact)
    for dtype in LOW:
        out = torch.empty(1000, dtype=dtype)
        codec.decode_sum(buffers, out)
        assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_overflow_of_one_rank_reaches_the_sum_and_no_residual(name: str, bad: float) -> None:
    codec, x, residual = CODECS[name], torch.randn(2000).half(), torch.zeros(2000)
    good, out = codec.encode(x), torch.empty(2000, dtype=torch.float16)
    x[1234] = bad
    codec.decode_sum([good, codec.encode(x, residual)], out)
    assert not out[1234].isfinite()
    assert residual.isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_few_elements(name: str) -> None:
    codec = CODECS[name]
    for numel in (0, 1, 2, 17):
        x, out = torch.arange(1.0, numel + 1), torch.empty(numel)
        codec.decode_sum([codec.encode(x)], out)
        assert numel == 0 or out.any()
        assert (out - x).abs().sum() <= x.abs().sum()
    with pytest.raises(ValueError, match="buffers is empty"):
        codec.decode_sum([], torch.zeros(3))


@pytest.mark.parametrize(("codec", "fewer"), [(INT8, 0.74), (INT4, 0.87), (TWO_BITS, 0.93), (ONE_BIT, 0.96)])
def test_bytes_of_a_million_elements(codec: BlockCodec, fewer: float) -> None:
    assert codec.nbytes(1_000_000) <= 4_000_000 * (1 - fewer)


def test_impossible_codecs_are_refused() -> None:
    with pytest.raises(ValueError, match="bits is 5"):
        BlockCodec(5, 256)
    with pytest.raises(ValueError, match="block is 100"):
        BlockCodec(8, 100)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"share is {share}"):
            TopK(share)
    with pytest.raises(ValueError, match="values is torch.float16"):
        TopK(0.1, torch.float16)
