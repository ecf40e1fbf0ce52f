"""The CUDA kernels: they compile everywhere, and on a GPU they give the bits of the CPU's."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels import compiler, library
from tests.support.gpu import GPU
from tests.support.kernel_inputs import LOW, STATES, STEPS, options_of, rows

SIZES = [0, 1, 7, 33, 4097, 70_001, 1_000_003]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.slow
def test_they_compile_without_a_warning_and_export_the_abi(tmp_path: Path) -> None:
    made = compiler.build(compiler.recipe_of("cuda", arches=["sm_90"]), tmp_path)
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert "warning" not in logs
    lib = ctypes.CDLL(str(made.path))
    header = (compiler.CSRC / "lt_zero.h").read_text()
    for name in set(re.findall(r"\b(lt_cuda_\w+)\(", header)):
        assert hasattr(lib, name), name
    lib = library.declare(lib, "cuda")
    assert lib.lt_cuda_adam_step(None, None, None) == 1  # LT_BAD_ARGUMENT, before anything is launched
    assert lib.lt_cuda_error(1)


def on(device: str | torch.device, lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone().to(device) for tensor in tensors] for tensors in lists]


def assert_equal(cuda: list[list[Tensor]], cpu: list[list[Tensor]]) -> None:
    for a, b in zip(cuda, cpu, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", range(6))
def test_steps_equal_the_cpu(name: str, seed: int) -> None:
    assert ops.available(GPU), library.status(GPU.type).why
    rng, offset = random.Random(f"{name} {seed}"), seed % 4
    torch.manual_seed(seed)
    state = rng.choice([torch.float32, torch.bfloat16])
    lists = [rows(SIZES, torch.float32, offset), rows(SIZES, rng.choice(LOW), offset)]
    lists += [rows(SIZES, state, offset, torch.rand) for _ in range(STATES.get(name, 1))]
    lists += [rows(SIZES, rng.choice(LOW), offset)] if name != "lamb_update" else []
    options: dict[str, Any] = options_of(name, rng) | {"maximize": seed % 2 == 1}
    scale = torch.tensor(0.37) if seed % 3 else None
    ours, theirs = on(GPU, lists), on("cpu", lists)
    norms = getattr(ops, name)(*ours, **options, scale=scale.to(GPU) if scale is not None else None)
    expected = getattr(ops, name)(*theirs, **options, scale=scale)
    assert_equal(ours, theirs)
    if norms is not None:
        torch.testing.assert_close(norms.cpu(), expected, rtol=1e-12, atol=0)
    before = [[t.clone() for t in tensors] for tensors in ours]
    getattr(ops, name)(*ours, **options, found_inf=torch.ones((), device=GPU))
    assert_equal(before, [[t.cpu() for t in tensors] for tensors in ours])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_other_passes_equal_the_cpu(offset: int) -> None:
    torch.manual_seed(offset)
    for source in LOW:
        values = rows(SIZES, source, offset)
        norm = ops.norm_squared(on(GPU, [values])[0])
        torch.testing.assert_close(norm.cpu(), ops.norm_squared(values), rtol=1e-12, atol=0)
        for target in LOW:
            outs = rows(SIZES, target, offset)
            for operation in [ops.cast_scale] + [ops.accumulate] * (target == torch.float32):
                for factor in (1.0, 0.3):
                    ours, theirs = on(GPU, [outs, values]), on("cpu", [outs, values])
                    operation(*ours, factor=factor)
                    operation(*theirs, factor=factor)
                    assert_equal(ours, theirs)
    bad = torch.ones(10_001, device=GPU)
    for position in (0, 5, 10_000):
        bad[position] = float("nan")
        assert not ops.norm_squared([bad]).isfinite()
        bad[position] = 1.0
    lists = [rows(SIZES, torch.float32, offset, torch.rand) for _ in range(3)]
    ours, theirs, rates = on(GPU, lists), on("cpu", lists), torch.rand(len(SIZES))
    ops.lamb_apply(*ours, rates.to(GPU), eps=1e-6, weight_decay=0.1)
    ops.lamb_apply(*theirs, rates, eps=1e-6, weight_decay=0.1)
    assert_equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "codec", [ops.INT8, ops.INT4, ops.TWO_BITS, ops.ONE_BIT, ops.TopK(0.01), ops.TopK(0.02, torch.bfloat16)], ids=str
)
def test_codecs_equal_the_cpu(codec: ops.Codec) -> None:
    for numel in SIZES:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(3))
        ours, theirs = torch.zeros_like(x, device=GPU), torch.zeros_like(x)
        sent, expected = codec.encode(x.to(GPU), ours), codec.encode(x, theirs)
        total, wanted = torch.empty_like(ours), torch.empty_like(theirs)
        codec.decode_sum([sent, sent], total, 0.5)
        codec.decode_sum([expected, expected], wanted, 0.5)
        assert_equal([[sent, ours, total]], [[expected, theirs, wanted]])
