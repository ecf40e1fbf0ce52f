"""Selection of the largest magnitudes, sparse tensors as bytes, and what stays in the residual."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels.huffman import CorruptError
from lt_zero.kernels.sparsify import VALUES, pack_sparse, unpack_sparse

INPUTS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "zeros": torch.zeros,
    "ties": lambda numel: torch.randn(numel).round(),
    "sparse": lambda numel: torch.randn(numel) * (torch.rand(numel) < 0.01),
    "denormals": lambda numel: torch.randn(numel) * 1e-41,
}
SIZES = [0, 1, 5, 31, 1000, 100_003]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", INPUTS)
def test_selection_equals_its_reference(isa: str, kind: str) -> None:
    torch.manual_seed(1)
    for numel in SIZES:
        c = INPUTS[kind](numel)
        if numel > 20:
            c[7], c[9], c[11], c[13] = torch.nan, -torch.inf, -torch.nan, 3e38
        for k in {0, min(1, numel), min(3, numel), numel // 100, numel // 3, numel}:
            indices = ops.select_topk(c, k)
            assert torch.equal(indices, ops.select_topk_reference(c, k))
            # The definition, by sorting: magnitude falls, then the index rises.
            order = sorted(range(numel), key=(c.view(torch.int32) & 0x7FFFFFFF).neg().tolist().__getitem__)
            assert indices.tolist() == sorted(order[:k])


def test_selection_does_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(1)
    c, before, results = torch.randn(300_001).mul_(20).round_(), torch.get_num_threads(), list[Tensor]()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(ops.select_topk(c, 12_345))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_bytes_hold_what_was_packed(values: torch.dtype) -> None:
    torch.manual_seed(2)
    for numel in (*SIZES, 3_000_000):
        for k in {0, min(1, numel), numel // 100_000, numel // 1000, numel // 100, min(numel, 1000)}:
            x = torch.randn(numel)
            indices = ops.select_topk(x, k)
            kept = x[indices.long()].to(values)
            buffer = pack_sparse(indices, kept, numel)
            assert buffer.numel() <= ops.topk_max_nbytes(numel, k, values)
            found, there = unpack_sparse(torch.cat([buffer[:0], buffer, torch.zeros(5, dtype=torch.uint8)]), numel)
            assert torch.equal(found.int(), indices)
            assert same_bits(there, kept)


def test_the_first_and_last_elements_and_long_gaps_are_kept() -> None:
    numel = 40_000_000
    for places in ([0], [numel - 1], [0, numel - 1], [0, 1, 2, 70_000, 20_000_000, numel - 2, numel - 1]):
        indices, values = torch.tensor(places, dtype=torch.int32), torch.arange(len(places)).float()
        found, there = unpack_sparse(pack_sparse(indices, values, numel), numel)
        assert found.tolist() == places
        assert torch.equal(there, values)


def test_one_percent_of_a_gaussian_is_one_percent_of_its_bytes() -> None:
    torch.manual_seed(3)
    x = torch.randn(1_000_000)
    assert ops.encode_topk(x, 10_000).numel() <= 0.0099 * 4 * x.numel()
    assert ops.encode_topk(x, 10_000, values=torch.bfloat16).numel() <= 0.0049 * 4 * x.numel()


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_was_sent_and_what_is_left_add_up_to_what_came_in(dtype: torch.dtype, values: torch.dtype) -> None:
    torch.manual_seed(4)
    numel = 2000
    residual, sent, given, size = (
        torch.zeros(numel),
        torch.zeros(numel),
        torch.zeros(numel).double(),
        torch.zeros(numel),
    )
    for _ in range(50):
        x = (torch.randn(numel) * torch.randn(numel).exp()).to(dtype)
        given += x
        size += residual.abs() + x.float().abs()
        out = torch.zeros(numel)
        ops.decode_topk_add(ops.encode_topk(x, 40, residual, values), out)
        sent += out
        size += sent.abs()
    assert ((sent.double() + residual - given).abs() <= size.double() * 2.0**-23).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, 30])
def test_an_overflow_is_sent_and_leaves_the_residual(bad: float, count: int) -> None:
    x, residual = torch.randn(1000), torch.randn(1000)
    x[5 : 5 + count] = bad
    out = torch.zeros(1000)
    ops.decode_topk_add(ops.encode_topk(x, 10, residual), out)
    assert not out.isfinite().all()
    assert residual.isfinite().all()
    assert not residual[5 : 5 + count].any()


def test_a_value_that_bf16_cannot_hold_is_an_overflow() -> None:
    x, residual, out = torch.zeros(100), torch.zeros(100), torch.zeros(100)
    x[3] = 3.4e38
    ops.decode_topk_add(ops.encode_topk(x, 1, residual, torch.bfloat16), out)
    assert out[3].isinf()
    assert residual.isfinite().all()


def test_decoding_adds_and_scales() -> None:
    out = torch.ones(10)
    x = torch.tensor([0.0, 4.0, 0.0, -2.0] + [0.0] * 6)
    ops.decode_topk_add(ops.encode_topk(x, 2), out, 0.5)
    assert out.tolist() == [1.0, 3.0, 1.0, 0.0] + [1.0] * 6


def test_damaged_buffers_are_an_error_or_other_numbers() -> None:
    rng, errors = random.Random(5), 0
    torch.manual_seed(5)
    x = torch.randn(100_000)
    buffers = [ops.encode_topk(x, k, values=values) for k in (1, 50, 1000) for values in VALUES]
    for _ in range(1000):
        buffer = rng.choice(buffers).clone()
        for _ in range(rng.randint(1, 3)):
            buffer[rng.randrange(min(buffer.numel(), rng.choice([24, 120, 10**6])))] = rng.randrange(256)
        if rng.random() < 0.3:
            buffer = buffer[: rng.randrange(buffer.numel())]
        try:
            indices, _ = unpack_sparse(buffer, x.numel())
            assert indices.numel() == 0 or (indices.min() >= 0 and indices.max() < x.numel())
            assert (indices.diff() > 0).all()
        except CorruptError:
            errors += 1
    assert errors > 300


def assembled(numel: int, k: int, *strings: list[int]) -> Tensor:
    """A buffer of strings of one's own, coded and with a header as it should be."""
    coded = [ops.huffman_encode(torch.tensor(string, dtype=torch.uint8)) for string in strings]
    header = struct.pack(f"<qqBB6x{len(coded)}q", numel, k, 1, 0, *[string.numel() for string in coded])
    return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), *coded])


def test_strings_that_do_not_fit_together_are_refused() -> None:
    low, high = [0, 0, 0], [1, 2, 3]
    assert unpack_sparse(assembled(600, 3, [3, 255, 10, 0], low, high), 600)[0].tolist() == [3, 269, 270]
    for strings, text in (
        (([3, 255, 10, 0, 255], low, high), "3 elements has 3 indices"),
        (([3, 10, 10, 10], low, high), "3 elements has 4 indices"),
        (([3, 10], low, high), "3 elements has 2 indices"),
        (([3, 10, 10], [0], high), "strings of other sizes"),
        (([3, 0, 255, 255, 100], low, high), "has an index 615 of 600"),
    ):
        with pytest.raises(CorruptError, match=text):
            unpack_sparse(assembled(600, 3, *strings), 600)


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(10)
    for k in (-1, 11):
        with pytest.raises(ValueError, match=f"k is {k}; from 0 to 10"):
            ops.select_topk(x, k)
    with pytest.raises(ValueError, match="c has .*float64"):
        ops.select_topk(x.double(), 1)
    with pytest.raises(ValueError, match=r"values is torch.float16; torch.float32 or torch.bfloat16"):
        ops.encode_topk(x, 1, values=torch.float16)
    with pytest.raises(ValueError, match="residual has"):
        ops.encode_topk(x, 1, torch.zeros(9))
    with pytest.raises(CorruptError, match="2 of 10 elements, .* a tensor of 11 elements is expected"):
        ops.decode_topk_add(ops.encode_topk(x, 2), torch.zeros(11))
