"""The Huffman coder: equal to its reference, near the entropy, and safe on damaged input."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels import library
from lt_zero.kernels.huffman import OVERHEAD, CorruptError


def bytes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def fibonacci() -> Tensor:
    """Counts whose unlimited code has words of 21 bits."""
    counts = [1, 1]
    while len(counts) < 22:
        counts.append(counts[-1] + counts[-2])
    return torch.cat([torch.full((count,), symbol, dtype=torch.uint8) for symbol, count in enumerate(counts)])


def strings() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    found = {"empty": bytes_of(), "one": bytes_of(7), "same": bytes_of(*[9] * 5000), "two": bytes_of(1, 2)}
    for size in (10, 1000, 50_000):
        found[f"uniform {size}"] = torch.randint(0, 256, (size,), generator=make).to(torch.uint8)
        normal = torch.randn(size, generator=make) * 5
        found[f"normal {size}"] = normal.to(torch.int8).view(torch.uint8)
        gaps = torch.empty(size).geometric_(0.02, generator=make)
        found[f"geometric {size}"] = gaps.clamp(max=255).to(torch.uint8)
    return found | {"fibonacci": fibonacci(), "all": torch.arange(256).to(torch.uint8).repeat(20)}


STRINGS = strings()


@pytest.mark.parametrize("name", STRINGS)
def test_what_was_coded_comes_back(name: str) -> None:
    assert library.cpu() is not None, library.status("cpu").why
    data = STRINGS[name]
    coded = ops.huffman_encode(data)
    assert torch.equal(coded, ops.huffman_encode_reference(data))
    assert torch.equal(ops.huffman_decode(coded, data.numel()), data)
    assert torch.equal(ops.huffman_decode_reference(coded, data.numel()), data)
    assert coded.numel() <= data.numel() + OVERHEAD


@pytest.mark.parametrize("name", ["normal 50000", "geometric 50000"])
def test_the_size_is_near_the_entropy(name: str) -> None:
    data = STRINGS[name]
    share = torch.bincount(data.int()).double() / data.numel()
    entropy = -(share * share.clamp(min=1e-9).log2()).sum().item() / 8 * data.numel()
    # A Huffman code needs less than one bit a symbol more; on these, a few percent and its table.
    assert entropy <= ops.huffman_encode(data).numel() <= 1.02 * entropy + 256 + OVERHEAD


def damaged(coded: Tensor, rng: random.Random) -> Tensor:
    data = bytearray(coded.numpy().tobytes())
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.5 and data:
            data[rng.randrange(min(len(data), rng.choice([9, 60, 10**6])))] = rng.randrange(256)
        elif kind < 0.75:
            del data[rng.randrange(len(data) + 1) :]
        else:
            data += rng.randbytes(rng.randint(1, 20))
    return torch.frombuffer(data, dtype=torch.uint8) if data else bytes_of()


@pytest.mark.parametrize("decode", [ops.huffman_decode, ops.huffman_decode_reference])
def test_damaged_data_is_an_error_or_other_data(decode: Callable[[Tensor, int], Tensor]) -> None:
    rng, errors = random.Random(3), 0
    for _ in range(400):
        data = STRINGS[rng.choice(["one", "same", "normal 10", "normal 1000", "geometric 1000", "all"])]
        coded = damaged(ops.huffman_encode(data), rng)
        try:
            assert decode(coded, 6000).numel() <= 6000
        except CorruptError:
            errors += 1
    assert errors > 100


def test_both_decoders_refuse_the_same_data() -> None:
    rng = random.Random(4)
    for _ in range(400):
        coded, results = damaged(ops.huffman_encode(STRINGS["normal 1000"]), rng), list[list[int] | None]()
        for decode in (ops.huffman_decode, ops.huffman_decode_reference):
            try:
                results.append(decode(coded, 2000).tolist())
            except CorruptError:
                results.append(None)
        assert results[0] == results[1]


@pytest.mark.parametrize("decode", [ops.huffman_decode, ops.huffman_decode_reference])
def test_codes_that_are_none_are_refused(decode: Callable[[Tensor, int], Tensor]) -> None:
    coded = ops.huffman_encode(STRINGS["same"])  # one symbol, whose word is a 0
    coded[-1] |= 0x80
    with pytest.raises(CorruptError):
        decode(coded, 5000)
    header = bytes_of(1, 8, *[0] * 7)
    sixteen_words_of_one_bit = bytes_of(0x1F, *[0x0F] * 15, 0x55)
    words_of_13_bits, too_few_lengths = bytes_of(0xDF, *[0x0F] * 15, 0x55), bytes_of(*[0x0F] * 15)
    for body in (sixteen_words_of_one_bit, words_of_13_bits, too_few_lengths, bytes_of(*[0x0F] * 15, 0x01, 0x0F)):
        with pytest.raises(CorruptError):
            decode(torch.cat([header, body]), 8)


def test_a_size_that_is_too_large_is_refused_before_memory_is_allocated() -> None:
    coded = ops.huffman_encode(STRINGS["same"])
    with pytest.raises(CorruptError, match="says it had 5000 bytes; from 0 to 4999 are possible"):
        ops.huffman_decode(coded, 4999)
    coded[8] = 0x7F
    with pytest.raises(CorruptError, match="bytes; from 0 to 4999"):
        ops.huffman_decode(coded, 4999)


def test_other_tensors_are_refused() -> None:
    for tensor in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="data has shape"):
            ops.huffman_encode(tensor)
        with pytest.raises(ValueError, match="coded has shape"):
            ops.huffman_decode(tensor, 10)
