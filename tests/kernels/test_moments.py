"""Moments in 8 bits: what is decoded has the same codes, and a step is the same on the CPU, on CUDA and in torch."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels.dispatch import step_tensors
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.moments import (
    BLOCK,
    CodedMoments,
    CodedTensor,
    PlainMoments,
    coded_nbytes,
    decode,
    encode,
    levels_of,
)
from lt_zero.kernels.places import place_table
from tests.support.emulated_cuda import compile_emulated, races
from tests.support.kernel_inputs import places_of

CPU = torch.device("cpu")
SIZES = [1, 255, 256, 257, 70_001]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def drawn(numel: int, signed: bool, magnitude: float = 1.0) -> Tensor:
    x = torch.randn(numel) * torch.rand(numel).pow(8) * magnitude
    x[::7] = 0.0
    return x if signed else x.abs()


def codes_of(x: Tensor, signed: bool) -> Tensor:
    out = torch.full((coded_nbytes(x.numel()),), 7, dtype=torch.uint8)
    encode(x, signed, out)
    return out


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_what_was_decoded_gives_the_same_codes(signed: bool) -> None:
    torch.manual_seed(0)
    for numel in SIZES:
        for magnitude in (1.0, 1e-15, 1e-30, 1e-38, 1e30):
            x = drawn(numel, signed, magnitude)
            codes = codes_of(x, signed)
            values = decode(codes, numel, signed)
            assert torch.equal(codes_of(values, signed), codes), (numel, magnitude)
            blocks = torch.nn.functional.pad(x, (0, -numel % BLOCK)).view(-1, BLOCK).abs().amax(1)
            bound = (blocks * (0.0107 if signed else 0.0036)).repeat_interleave(BLOCK)[:numel] + 1.1e-30
            assert ((values - x).abs() <= bound).all(), (numel, magnitude)  # half a step of the uppermost decade
            assert ((values == 0) == (x == 0))[blocks.repeat_interleave(BLOCK)[:numel] > 1e-30].all() or signed


def test_every_code_is_reached() -> None:
    for signed, count in ((True, 128), (False, 256)):
        levels, _ = levels_of(CPU, signed)
        assert levels.numel() == count
        assert (levels[1:] > levels[:-1]).all()
        assert codes_of(levels, signed)[:count].tolist() == list(range(count))


def test_a_block_with_a_value_that_is_not_finite() -> None:
    x = torch.ones(2 * BLOCK)
    for bad in (torch.inf, torch.nan):
        x[3] = bad
        values = decode(codes_of(x, True), x.numel(), True)
        assert values[:BLOCK].isnan().all()
        assert (values[BLOCK:] == 1).all()


def lists(dtype: torch.dtype, out: bool) -> list[list[Tensor]]:
    torch.manual_seed(1)
    found = [[torch.randn(n) for n in SIZES], [(torch.randn(n) * torch.rand(n).pow(4)).to(dtype) for n in SIZES]]
    found += [[codes_of(drawn(n, signed, 0.1), signed) for n in SIZES] for signed in (True, False)]
    return [*found, [torch.zeros(n, dtype=torch.bfloat16) for n in SIZES] if out else []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_is_the_reference(isa: str, dtype: torch.dtype) -> None:
    mine, theirs = (lists(dtype, dtype == torch.bfloat16) for _ in range(2))
    for step in (1.0, 2.0, 3.0):
        ops.adam_step(*mine, step=step, **OPTIONS)
        ops.adam_step_reference(*theirs, step=step, **OPTIONS)
        for some, others in zip(mine, theirs, strict=True):
            assert all(map(torch.equal, some, others)), step


def in_blocks(values: Tensor, scale: float) -> Tensor:
    """Blocks of these multiples of ``scale``, each with 1."""
    rows = torch.nn.functional.pad(values, (0, -values.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    return (torch.nn.functional.pad(rows, (1, 0), value=1.0) * scale).flatten()


def codes_from(step: Any, gradients: Tensor, roots: Tensor) -> list[Tensor]:
    """The codes of ``gradients`` as first moments, and of the squares of ``roots`` as second ones, by a step."""
    still: dict[str, Any] = {"lr": 0.0, "eps": 1.0, "weight_decay": 0.0, "step": 1.0, "beta1": 0.0, "beta2": 0.0}
    made = []
    for state, grad in enumerate((gradients, roots)):
        rows = [[torch.ones(coded_nbytes(grad.numel()), dtype=torch.uint8)] for _ in range(2)]
        step([torch.zeros_like(grad)], [grad], *rows, **still)
        made.append(rows[state][0])
    return made


@pytest.mark.parametrize("scale", [1.0, 0.7, 1.5 * 2.0**-100, 2.0**-100, 2.0**-101, 1e-40, 3e38])
def test_codes_are_the_reference_at_every_turn(isa: str, scale: float) -> None:
    """Numbers around all upper halves of fp32, and around all middles, for both codes."""
    halves = torch.arange(0x3300 << 16, (0x3F80 << 16) + 1, 1 << 16, dtype=torch.int32)
    near = torch.cat([halves, halves + 0x7FFF, halves - 1]).view(torch.float32)
    for signed in (True, False):
        bits = levels_of(CPU, signed)[1].view(torch.int32)
        near = torch.cat([near, *((bits + ulps).view(torch.float32) for ulps in range(-3, 4))])
    near = torch.cat([near.clamp(max=1.0), torch.tensor([0.0, 1e-45, 1e-40, 2.0**-126])])
    gradients = in_blocks(torch.cat([near, -near]), scale)
    roots = in_blocks(near, scale).sqrt()
    if scale == 0.7:
        gradients[5 * BLOCK] = torch.nan
        gradients[7 * BLOCK + 9] = -torch.inf
        roots[3 * BLOCK] = torch.inf
    mine, theirs = (codes_from(step, gradients, roots) for step in (ops.adam_step, ops.adam_step_reference))
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_emulated_is_the_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    library = compile_emulated(tmp_path, ["adam", "runtime"])
    table = place_table(places_of(SIZES, random.Random(0)), CPU)
    for weights, places in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, table)):
        mine, theirs = (lists(dtype, True) for _ in range(2))
        mine[0], theirs[0] = ([p.to(weights) for p in some] for some in (mine[0], theirs[0]))
        options = STRUCTS["lt_adam"](step=2.0, decoupled=1, **OPTIONS)
        described = step_tensors(mine[0], mine[1], (mine[2], mine[3]), mine[4], codes=True, places=places)
        assert library.lt_cuda_adam_step(ctypes.byref(described), ctypes.byref(options), None) == 0
        ops.adam_step(*theirs, step=2.0, **OPTIONS, places=places)
        for some, others in zip(mine, theirs, strict=True):
            assert all(map(torch.equal, some, others)), (weights, places is None)
    assert races(library) == []


def test_arguments_that_do_not_fit() -> None:
    rows = lists(torch.float32, False)
    with pytest.raises(ValueError, match=r"260 contiguous bytes on cpu.* for codes of 1 elements"):
        ops.adam_step(rows[0], rows[1], [r[:-4] for r in rows[2]], rows[3], step=1.0, **OPTIONS)
    with pytest.raises(ValueError, match="uint8"):
        ops.lion_step(rows[0], rows[1], rows[2], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0)


def test_zeros_are_filled_in_without_values() -> None:
    """The first step fills in moments of whole parameters, and had their values in memory, at many times the bytes."""
    coded = CodedMoments().kept(drawn(3000, True), "exp_avg")
    with mock.patch.object(CodedTensor, "decoded", side_effect=AssertionError):
        assert coded.fill_(0.0) is coded
    assert isinstance(coded, CodedTensor)
    assert torch.equal(coded.rows, CodedMoments().kept(torch.zeros(3000), "exp_avg").rows)  # type: ignore[attr-defined]
    assert coded.fill_(0.25).decoded().unique().tolist() == [0.25]  # type: ignore[attr-defined]


def test_a_coded_tensor_is_read_and_written_as_any_other() -> None:
    form, x = CodedMoments(), drawn(600, True).view(20, 30)
    coded = form.kept(x, "exp_avg")
    assert isinstance(coded, CodedTensor)
    values = PlainMoments(torch.float32).kept(coded, "exp_avg")
    assert (coded.shape, coded.dtype, values.shape) == (x.shape, torch.float32, x.shape)
    assert torch.equal(coded + 1, values + 1)
    assert torch.equal(coded.clone(), values)
    assert coded.mul_(2) is coded
    assert torch.equal(PlainMoments(torch.float32).kept(coded, ""), values * 2)
    coded.copy_(values)
    torch.testing.assert_close(coded.decoded(), values, rtol=0, atol=0)
    assert torch.equal(form.kept(coded, "exp_avg"), values)
