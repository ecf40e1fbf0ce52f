"""The CUDA kernels: that they compile, what they compile to, and, without a GPU, that every kernel does what it should.

Note [Emulation]
    ``tests/support/cuda_on_cpu`` stands in for the CUDA headers, so that a C++ compiler makes a library of the same
    sources that runs every block and thread on the CPU. The operators of ``lt_zero.ops`` then run on CPU tensors with
    it, and the results must have the bits of the torch references. It also reports races. With a GPU the same tests run
    there too.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import itertools
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_zero import kernels as ops
from lt_zero.kernels import dispatch, library
from lt_zero.kernels.blocks import dequantize_rows, quantize_rows
from lt_zero.kernels.compiler import CSRC, CUDA_FLAGS, build, load, recipe_of
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.places import place_table
from lt_zero.kernels.rounding import ElementRows
from tests.support.emulated_cuda import compile_emulated, races
from tests.support.features import needs
from tests.support.kernel_inputs import places_of
from tests.support.matrix import only, only_rows

FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
BAD_ARGUMENT, CUDA_ERROR = 1, 1000  # lt_zero.h
NULL, NEGATIVE = (ctypes.c_void_p * 1)(), (ctypes.c_int64 * 1)(-1)
STRICT = "-Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
without_gpu = pytest.mark.skipif(bool(glob.glob("/dev/nvidia*")), reason="there is a GPU")


# ---- PTX -----------------------------------------------------------------------------------------------------------

SOURCES = ["adam", "steps", "lamb", "norm", "pairs", "edits", "blocks"]


@functools.cache
def ptx_of(source: str, arch: str = "sm_90") -> str:
    """One file, compiled with the flags of the library and warnings as errors."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{source}.ptx"
        target = (f"-arch={arch}", f"-I{CSRC}", "-ptx", str(CSRC / "cuda" / f"{source}.cu"), "-o", str(made))
        subprocess.run(("nvcc", *STRICT.split(), *CUDA_FLAGS, *target), check=True)
        return made.read_text()


# The fast suite compiles the file that takes the least time and has loads of both widths, stores and arithmetic.
FAST = "pairs"


@needs_nvcc
@pytest.mark.parametrize("source", only([FAST], SOURCES))
def test_arithmetic_is_neither_fused_nor_approximate(source: str) -> None:
    arithmetic = set(re.findall(r"\b((?:add|sub|mul|fma|div|sqrt|rcp|rsqrt)\.[a-z0-9.]*f(?:32|64))\b", ptx_of(source)))
    # A product or sum without a rounding mode may be fused when machine code is made of PTX.
    assert bool(arithmetic) == (source != "edits")  # which compares only
    assert all(re.fullmatch(r"[a-z]+\.rn\.f(32|64)", instruction) for instruction in arithmetic)


@needs_nvcc
@pytest.mark.parametrize("source", only([FAST], SOURCES))
def test_memory_is_accessed_16_bytes_at_a_time(source: str) -> None:
    accesses = set(re.findall(r"\b((?:ld|st)\.[a-z0-9.]+)", ptx_of(source)))
    accesses = {access for access in accesses if not access.startswith("ld.param")}
    assert "ld.global.v4.f32" in accesses
    assert source not in ("norm", "pairs") or "ld.global.v4.u32" in accesses  # eight 16-bit elements
    assert source == "norm" or "st.global.v4.f32" in accesses
    assert ({"ld.global.cs.v4.u32", "st.global.cs.v4.u32"} <= accesses) == (source in ("adam", "steps"))  # STREAMED
    # Nothing in a thread's own (slow) memory, and the compiler knows that all pointers are to global memory.
    assert {access.split(".")[1] for access in accesses} <= {"global", "shared"}


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "arch"),
    only_rows([(FAST, "sm_90")], itertools.product([*SOURCES, "topk", "rounding"], ["sm_80", "sm_90", "sm_120"])),
)
def test_registers_suffice_and_leave_room_for_other_blocks(source: str, arch: str, tmp_path: Path) -> None:
    listed = subprocess.run(("nvcc", "--list-gpu-code"), capture_output=True, text=True, check=True).stdout.split()
    if arch not in listed:
        pytest.skip(f"this nvcc does not know {arch}")
    ptx = tmp_path / f"{source}.ptx"
    ptx.write_text(ptx_of(source, arch))
    command = ("nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", str(ptx), "-o", str(tmp_path / "cubin"))
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    pattern = (
        r"function '(\w+)' .*\n.*\n +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) .*\n.* Used (\d+) reg"
    )
    kernels = re.findall(pattern, said)
    assert len(kernels) == ptx.read_text().count(".entry")
    for name, stack, stores, loads, registers in kernels:
        assert max(int(stack), int(stores), int(loads)) <= 8, name
        # Of 65,536 per SM, for blocks of 256 threads: 5 blocks; LAMB's first pass and the scan of 1,024 threads 4. What
        # holds many elements, so that its loads are on their way together, needs no more than 2 or 3.
        most = 64 if re.search("lamb_update|place_chunks", name) else 48
        most = 80 if re.search("fill_bins|count_chunks|coded_adam", name) else most
        most = 128 if re.search("encode_kernel.*Li1E|write_indices", name) else most
        assert int(registers) <= most, name


# ---- compiled ------------------------------------------------------------------------------------------------------


def compile_strictly(folder: Path, arches: list[str] | None) -> Path:
    """The library for ``arches``, with warnings as errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVCC", f"nvcc {STRICT}")
        return build(recipe_of("cuda", arches=arches), folder).path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The library for one architecture."""
    folder = tmp_path_factory.mktemp("cuda")
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    path = compile_strictly(folder, [f"sm_{major}{minor}"])
    return SimpleNamespace(path=path, library=library.declare(load(path, "cuda"), "cuda"))


@needs_nvcc
@pytest.mark.slow
def test_exports_the_abi_and_nothing_else(compiled: SimpleNamespace) -> None:
    declared = set(re.findall(r"\b(lt_cuda_\w+)\(", (CSRC / "lt_zero.h").read_text()))
    symbols = subprocess.run(["nm", "-D", "--defined-only", compiled.path], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in symbols.stdout.splitlines()} == declared


@needs_nvcc
@pytest.mark.slow
def test_bad_arguments_are_refused(compiled: SimpleNamespace) -> None:
    refuses_bad_arguments(compiled.library)


@needs_nvcc
@without_gpu
@pytest.mark.slow
def test_a_launch_without_a_gpu_is_an_error_with_a_text(compiled: SimpleNamespace) -> None:
    lib, x = compiled.library, torch.zeros(5)
    pairs = pairs_of(x)
    for _ in range(2):
        code = lib.lt_cuda_cast_scale(ctypes.byref(pairs), None)
        assert code > CUDA_ERROR
        with pytest.raises(RuntimeError, match=r"CUDA|device|driver"):
            library.check(lib, code)
    assert lib.lt_cuda_norm_squared(ctypes.byref(STRUCTS["lt_mixed"]()), x.data_ptr(), None, None) == code


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_architectures_compile(tmp_path: Path) -> None:
    assert load(compile_strictly(tmp_path, None), "cuda").lt_cuda_abi() == 1


# ---- emulated, or on a GPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The sources as a library for the CPU."""
    return library.declare(compile_emulated(tmp_path_factory.mktemp("emulated")), "cuda")


class InPlaceOfCpu:
    """Looks like the library for the CPU, but runs the emulated CUDA kernels."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self.lt_cpu_error = cuda.lt_cuda_error
        for name in library.operations("cuda"):
            setattr(self, f"lt_cpu_{name}", self._operation(cuda, name))

    @staticmethod
    def _operation(cuda: ctypes.CDLL, name: str) -> Callable[..., int]:
        def operation(*args: Any) -> int:
            run = getattr(cuda, f"lt_cuda_{name}")
            if name not in ("lamb_update", "norm_squared", "select_topk"):
                return run(*args[:-1], None)
            if name == "select_topk":
                nbytes = cuda.lt_cuda_topk_scratch(args[1])
            else:
                nbytes = cuda.lt_cuda_scratch(args[0]._obj.count, args[0]._obj.numel)
            scratch = torch.full((nbytes // 8,), torch.nan, dtype=torch.float64)  # nothing may rely on its content
            return run(*args[:-1], scratch.data_ptr(), None)

        return operation


@pytest.fixture(
    params=[pytest.param("emulated", marks=pytest.mark.slow), pytest.param("gpu", marks=[needs_nvcc, pytest.mark.gpu])]
)
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[torch.device]:
    """Where the operators of lt_zero.ops run the CUDA kernels."""
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        cuda = request.getfixturevalue("compiled").library
        monkeypatch.setattr(library, "cuda", lambda force=False: cuda)
        monkeypatch.setattr(dispatch, "_loaded", {})
        yield torch.device("cuda")
        torch.cuda.synchronize()
    else:
        emulated = request.getfixturevalue("emulated")
        stand_in = InPlaceOfCpu(emulated)
        monkeypatch.setattr(library, "cpu", lambda: stand_in)
        monkeypatch.setattr(dispatch, "_loaded", {})
        yield torch.device("cpu")
        assert "runtime error" not in capfd.readouterr().err
        assert races(emulated) == []


SEED = 0x9ABCDEF012345678
ROUNDED = [
    *(ElementRows(numel, first, numel) for numel in (0, 1, 127, 128, 129, 30_003) for first in (0, 8, 4_000_123)),
    ElementRows(40, (1 << 36) + 5, 40),  # numbers of more than 32 bits
    *(ElementRows(11 * row, 77, row, stride) for row, stride in [(1, 1), (3, 64), (200, 1003), (10_000, 20_000)]),
]

# Around the sizes of an access, a block's pass and a chunk; several passes of a grid of 8 blocks; nothing.
SIZES = [
    *(0, 1025, 8193, 1027, 2049, 5000, 8192, 4097),
    *(90000, 1, 3, 4, 5, 7, 16384, 8),
    *(30001, 0, 9, 31, 255, 1023, 8191, 1024, 0),
]
MANY = [n % 11 for n in range(300)]  # several batches


class Arena:
    """One list of tensors in one buffer, with gaps that nothing may write to.

    Of eight tensors, two are aligned in all lists, one in none; the others are unaligned in one list of five each.
    """

    def __init__(self, sizes: list[int], dtype: torch.dtype, seed: int, kind: str = "normal") -> None:
        generator = torch.Generator().manual_seed(seed)
        starts, at = [], 0
        for number, size in enumerate(sizes):
            starts.append(at + (number % 8 in (seed + 1, 7)))
            at += (size + 1 + 15) // 16 * 16 + 16
        flat = torch.randn(at + 16, generator=generator)
        flat *= torch.logspace(-9, 2, 997).repeat(flat.numel() // 997 + 1)[: flat.numel()]  # small and large
        if kind == "squares":
            flat = flat.square()
        self.flat, self.ranges = flat.to(dtype), list(zip(starts, sizes, strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + size] for start, size in self.ranges]


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    ordered = ~expected.isnan()
    integers = {4: torch.int32, 2: torch.int16}[expected.element_size()]
    actual = actual.cpu()
    same = actual.view(integers) == expected.view(integers)
    return bool((actual.isnan() == expected.isnan()).all() and same[ordered].all())


def compare(name: str, device: torch.device, arenas: list[Any], **options: Any) -> tuple[Any, Any]:
    """Run operator ``name`` and its reference on the same lists; all buffers must be equal, gaps too. Their results."""
    expected = [arena.flat.clone() if arena else None for arena in arenas]
    actual = [arena.flat.to(device, copy=True) if arena else None for arena in arenas]
    on_device = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}

    def lists(flats: list[Any]) -> list[Any]:
        return [arena.views(flat) if arena else [] for arena, flat in zip(arenas, flats, strict=True)]

    results = (
        getattr(ops, name)(*lists(actual), **on_device),
        getattr(ops, f"{name}_reference")(*lists(expected), **options),
    )
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one is None or same_bits(one, other), f"list {number} of {name}"
    return results


ADAM = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3.0}
LION = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
ADAGRAD = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.01}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": False, "first": False}
RULES: list[tuple[str, dict[str, Any], str]] = [  # operator, options, the kinds of its states
    ("adam_step", ADAM | {"decoupled": True}, "ns"),
    ("adam_step", ADAM | {"decoupled": False}, "ns"),
    ("lion_step", LION, "n"),
    ("adagrad_step", ADAGRAD, "s"),
    ("sgd_step", SGD, "n"),
    ("sgd_step", SGD | {"first": True}, "n"),
    ("sgd_step", SGD | {"dampening": 0.0, "nesterov": True}, "n"),
]
DTYPES = [(FP32, FP32, None), (BF16, FP32, BF16), (FP16, BF16, FP16), (BF16, BF16, None), (FP16, FP32, FP32)]


def step_arenas(sizes: list[int], dtypes: tuple[Any, ...], states: str) -> list[Arena | None]:
    grad, state, out = dtypes
    kinds = [Arena(sizes, state, 2 + n, "squares" if kind == "s" else "normal") for n, kind in enumerate(states)]
    return [Arena(sizes, FP32, 0), Arena(sizes, grad, 1), *kinds, Arena(sizes, out, 4) if out else None]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_steps(device: torch.device, rule: tuple[str, dict[str, Any], str], dtypes: tuple[Any, ...]) -> None:
    name, options, states = rule
    compare(name, device, step_arenas(SIZES, dtypes, states), **options)


@pytest.mark.parametrize("at_random", [True, False], ids=["at random", "nearest"])
@pytest.mark.parametrize("dtypes", [(BF16, FP32, BF16), (FP32, BF16, None), (BF16, BF16, None)], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_steps_of_bf16_weights(
    device: torch.device, rule: tuple[str, dict[str, Any], str], dtypes: tuple[Any, ...], at_random: bool
) -> None:
    """Several chunks, parameters that begin anywhere in one, rows of one element and of many; several batches."""
    name, options, states = rule
    for sizes in (SIZES, MANY) if dtypes[2] else (SIZES,):
        arenas = [Arena(sizes, BF16, 0), *step_arenas(sizes, dtypes, states)[1:]]
        places = place_table(places_of(sizes, random.Random(name)), torch.device("cpu")) if at_random else None
        compare(name, device, arenas, **options, places=places)


@pytest.mark.parametrize("given", [("scale",), ("clip",), ("scale", "clip")], ids=str)
def test_gradients_are_scaled_clipped_and_flipped(device: torch.device, given: tuple[str, ...]) -> None:
    scalars = {name: torch.tensor(value) for name, value in (("scale", 1 / 3), ("clip", 0.7)) if name in given}
    for maximize in (False, True):
        arenas = step_arenas(SIZES, (BF16, FP32, BF16), "ns")
        compare("adam_step", device, arenas, **ADAM, **scalars, maximize=maximize)


def test_many_small_tensors(device: torch.device) -> None:
    compare("adam_step", device, step_arenas(MANY, (BF16, FP32, BF16), "ns"), **ADAM)
    compare("cast_scale", device, [Arena(MANY, BF16, 0), Arena(MANY, FP32, 1)])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_nothing_is_written_after_an_overflow(device: torch.device, rule: tuple[str, dict[str, Any], str]) -> None:
    name, options, states = rule
    for found_inf in (1.0, 0.0):
        arenas = step_arenas(MANY, (BF16, FP32, BF16), states)
        compare(name, device, arenas, **options, found_inf=torch.tensor(found_inf))


def test_sgd_without_momentum_has_no_state(device: torch.device) -> None:
    arenas = step_arenas(SIZES, (FP16, FP32, BF16), "")
    options = SGD | {"momentum": 0.0, "dampening": 0.0}
    compare("sgd_step", device, [*arenas[:2], None, arenas[-1]], **options)


@pytest.mark.parametrize(
    ("sizes", "grad", "state", "found_inf"),
    [
        (SIZES, FP32, FP32, 0.0),
        (SIZES, BF16, BF16, 0.0),
        (SIZES, FP16, FP32, 1.0),
        (MANY[:70], BF16, FP32, 0.0),  # two batches
    ],
    ids=["fp32", "bf16", "skipped", "many"],
)
def test_lamb(device: torch.device, sizes: list[int], grad: torch.dtype, state: torch.dtype, found_inf: float) -> None:
    rule = {"eps": 1e-6, "weight_decay": 0.01}
    betas = {"beta1": 0.9, "beta2": 0.99}
    skip = torch.tensor(found_inf)
    param, out = Arena(sizes, FP32, 0), Arena(sizes, BF16, 1)
    moments = [Arena(sizes, state, 2), Arena(sizes, state, 3, "squares")]
    arenas, scale = [param, Arena(sizes, grad, 1), *moments], torch.tensor(0.3)
    norms, expected = compare("lamb_update", device, arenas, **rule, **betas, scale=scale, found_inf=skip)
    torch.testing.assert_close(norms.cpu(), expected, rtol=1e-14, atol=0.0)

    flat = torch.rand(len(sizes), generator=torch.Generator().manual_seed(6)) + 0.5
    rates = SimpleNamespace(flat=flat, views=lambda flat: flat)
    compare("lamb_apply", device, [param, *moments, rates, out], **rule, found_inf=skip)


@pytest.mark.parametrize("at_random", [True, False], ids=["at random", "nearest"])
def test_lamb_of_bf16_weights(device: torch.device, at_random: bool) -> None:
    rule, sizes = {"eps": 1e-6, "weight_decay": 0.01}, [8193, 0, 5, 4097, *MANY[:70]]  # two batches
    param = Arena(sizes, BF16, 0)
    out = Arena(sizes, BF16, 1)
    moments = [Arena(sizes, FP32, 2), Arena(sizes, FP32, 3, "squares")]
    arenas = [param, Arena(sizes, BF16, 1), *moments]
    norms, expected = compare("lamb_update", device, arenas, **rule, beta1=0.9, beta2=0.99)
    torch.testing.assert_close(norms.cpu(), expected, rtol=1e-14, atol=0.0)
    rates = SimpleNamespace(flat=torch.rand(len(sizes)) + 0.5, views=lambda flat: flat)
    places = place_table(places_of(sizes, random.Random(0)), torch.device("cpu")) if at_random else None
    compare("lamb_apply", device, [param, *moments, rates, out], **rule, places=places)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_accumulate(device: torch.device, dtype: torch.dtype) -> None:
    for options in ({}, {"factor": 1 / 3}, {"factor": 2.0, "scale": torch.tensor(0.3)}):
        compare("accumulate", device, [Arena(SIZES, FP32, 0), Arena(SIZES, dtype, 1)], **options)


@pytest.mark.parametrize("src", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("dst", [FP32, BF16, FP16], ids=str)
def test_cast_scale(device: torch.device, dst: torch.dtype, src: torch.dtype) -> None:
    for options in ({}, {"factor": 1 / 3}, {"scale": torch.tensor(1.7)}):
        compare("cast_scale", device, [Arena(SIZES, dst, 0), Arena(SIZES, src, 1)], **options)


@pytest.mark.parametrize("dst", [BF16, FP16], ids=str)
def test_rounding_of_every_kind_of_number(device: torch.device, dst: torch.dtype) -> None:
    bits = torch.arange(-(2**31), 2**31, 7919, dtype=torch.int64).to(torch.int32)  # NaNs, infinities, denormals
    ties = (torch.arange(2**16) << 16 | 0x8000).to(torch.int32)  # halfway between two bf16 numbers
    values = torch.cat([bits, ties, ties >> 3]).view(FP32)
    actual = torch.empty(values.numel(), dtype=dst, device=device)
    ops.cast_scale([actual], [values.to(device)])
    assert same_bits(actual, values.to(dst))
    assert dst is FP16 or bool((actual.cpu().view(torch.int16)[values.isnan()] == 0x7FC0).all())


@pytest.mark.parametrize("shown", [BF16, FP16], ids=str)
def test_take_edits(device: torch.device, shown: torch.dtype) -> None:
    for sizes, every in ((SIZES, 1), (MANY, 1), (SIZES, 7), (SIZES, None)):
        arenas = [Arena(sizes, FP32, 0), Arena(sizes, shown, 0)]
        if every is not None:
            arenas[1].flat[::every] = 0.25
        arenas[0].flat[3::50] = torch.nan
        compare("take_edits", device, arenas)


def test_round_stochastic(device: torch.device) -> None:
    """Rows of parameters, a counter on the device, and what has no neighbours: gaps stay as they were."""
    for rows, counts in itertools.product(ROUNDED, (False, True)):
        values = torch.randn(rows.numel, generator=torch.Generator().manual_seed(rows.numel))
        values[::37] = torch.inf
        values[1::37] = torch.nan
        values[2::37] = -3.3961e38
        values[3::37] = 1e-40
        wanted, made = (torch.full((rows.numel + 2,), 7.0, dtype=BF16, device=d) for d in ("cpu", device))
        step = torch.tensor(12345.0) if counts else (1 << 32) + 3
        ops.round_stochastic_reference(values, wanted[1:-1], rows, seed=SEED, step=step)
        ops.round_stochastic(
            values.to(device), made[1:-1], rows, seed=SEED, step=step.to(device) if isinstance(step, Tensor) else step
        )
        assert same_bits(made, wanted), rows


# ---- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SIZES, MANY, [0], []], ids=["sizes", "many", "empty", "none"])
def test_norm_squared(device: torch.device, sizes: list[int]) -> None:
    arenas = [Arena(sizes, dtype, seed) for seed, dtype in enumerate((FP32, BF16, FP16))]
    tensors = [view for arena in arenas for view in arena.views(arena.flat)][::-1]
    actual = ops.norm_squared([tensor.to(device) for tensor in tensors]).cpu()
    torch.testing.assert_close(actual, ops.norm_squared_reference(tensors), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 3, 8191, 8192, 20000])
def test_one_bad_element_spoils_the_norm(device: torch.device, value: float, place: int) -> None:
    for dtype in (FP32, BF16, FP16):
        tensors = [torch.ones(5000, device=device), torch.full((20001,), 3e38 if dtype != FP16 else 6e4, dtype=dtype)]
        tensors[1] = tensors[1].to(device)
        assert ops.norm_squared(tensors).isfinite()
        tensors[1][place] = value
        assert not ops.norm_squared(tensors).isfinite()


@pytest.mark.slow
def test_sums_do_not_depend_on_the_size_of_the_gpu(emulated: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = InPlaceOfCpu(emulated)
    monkeypatch.setattr(library, "cpu", lambda: stand_in)
    monkeypatch.setattr(dispatch, "_loaded", {})
    tensors = Arena([300001, 5, 70000], FP32, 1)
    sums = []
    for processors in (1, 2, 7):
        emulated.emulation_processors(processors)
        sums.append(ops.norm_squared(tensors.views(tensors.flat)).item())
    emulated.emulation_processors(1)
    assert sums[0] == sums[1] == sums[2]


# ---- compression ---------------------------------------------------------------------------------------------------


def codec_input(numel: int, seed: int, offset: int = 0) -> Tensor:
    """Heavy-tailed, with runs of zeros and an infinity, ``offset`` elements into its storage."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(numel + offset, generator=make) * torch.randn(numel + offset, generator=make).exp()
    x[60:90] = 0.0
    x[200:201] = torch.inf
    return x[offset:]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_blocks(device: torch.device, bits: int, dtype: torch.dtype) -> None:
    for numel, block, offset in itertools.product([0, 1, 7, 8, 255, 1000, 20_001], [16, 48, 256, 4096], [0, 3]):
        x, residual = codec_input(numel, 0, offset).to(dtype), codec_input(numel, 1, offset).nan_to_num(0, 0, 0)
        expected_left = residual.clone()
        expected = ops.quantize_reference(x, bits, block, expected_left)
        left = residual.clone().to(device)
        out = torch.full_like(expected, 255).to(device)
        made = x.to(device) if device.type == "cuda" else x  # a copy on the GPU is aligned, x is not
        assert torch.equal(ops.quantize(made, bits, block, left, out).cpu(), expected), (numel, block)
        assert same_bits(left, expected_left)
        assert torch.equal(ops.quantize(made, bits, block).cpu(), ops.quantize_reference(x, bits, block))
        buffers = [expected, ops.quantize_reference(x.flip(0), bits, block), ops.quantize_reference(-x, bits, block)]
        total, wanted = torch.empty(numel + offset, dtype=dtype).to(device)[offset:], torch.empty(numel, dtype=dtype)
        ops.dequantize_sum([buffer.to(device) for buffer in buffers], total, bits, block, 1 / 3)
        ops.dequantize_sum_reference(buffers, wanted, bits, block, 1 / 3)
        torch.testing.assert_close(total.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@needs("quantize")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_normal_floats(device: torch.device, dtype: torch.dtype) -> None:
    from lt_zero.features.quantize.nf4 import NF4

    for numel, offset in itertools.product([1, 7, 8, 63, 64, 1000, 20_001], [0, 3]):
        x, residual = codec_input(numel, 0, offset).to(dtype), codec_input(numel, 1, offset).nan_to_num(0, 0, 0)
        expected_left = residual.clone()
        expected = NF4.encode_reference(x, expected_left)
        left, out = residual.clone().to(device), torch.full_like(expected, 255).to(device)
        made = x.to(device) if device.type == "cuda" else x  # a copy on the GPU is aligned, x is not
        assert torch.equal(NF4.encode(made, left, out).cpu(), expected), numel
        assert same_bits(left, expected_left)
        buffers = [expected, NF4.encode_reference(x.flip(0)), NF4.encode_reference(-x)]
        total, wanted = torch.empty(numel + offset, dtype=dtype).to(device)[offset:], torch.empty(numel, dtype=dtype)
        NF4.decode_sum([buffer.to(device) for buffer in buffers], total, 1 / 3)
        NF4.decode_sum_reference(buffers, wanted, 1 / 3)
        torch.testing.assert_close(total.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def test_rows_of_blocks(device: torch.device) -> None:
    for bits, (numel, block) in itertools.product([8, 1], [(1000, 48), (4096, 256), (5, 16)]):
        x = torch.stack([codec_input(numel, seed) for seed in range(3)])
        residual = torch.ones(3, 2, numel, device=device)
        out = torch.full((3, ops.quantized_nbytes(numel, bits, block)), 255, dtype=torch.uint8, device=device)
        quantize_rows(x.to(device), bits, block, residual[:, 1], out)
        values = torch.empty(3, numel, dtype=BF16, device=device)
        dequantize_rows(out, values, bits, block, 1 / 3)
        left, expected = torch.ones(3, 2, numel), torch.empty(3, numel, dtype=BF16)
        for row in range(3):
            assert torch.equal(out[row].cpu(), ops.quantize_reference(x[row], bits, block, left[row, 1]))
            ops.dequantize_sum_reference([out[row].cpu()], expected[row], bits, block, 1 / 3)
        assert same_bits(residual, left)
        torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_more_buffers_than_a_launch_takes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 333, generator=torch.Generator().manual_seed(1))
    buffers = [ops.quantize_reference(row, 4, 16).to(device) for row in x for _ in range(6)]
    out, expected = torch.empty(333, device=device), torch.empty(333)
    ops.dequantize_sum(buffers, out, 4, 16, 0.1)
    ops.dequantize_sum_reference([buffer.cpu() for buffer in buffers], expected, 4, 16, 0.1)
    assert same_bits(out, expected)
    if device.type == "cuda":
        low = torch.empty(333, device=device, dtype=FP16)
        ops.dequantize_sum(buffers, low, 4, 16, 0.1)
        assert same_bits(low, expected.half())


def test_selection(device: torch.device) -> None:
    for numel in (0, 1, 33, 8191, 8192, 30_001):
        x = codec_input(numel, 2)
        x[5:6] = torch.nan
        for c in (x, (3 * x).round(), torch.zeros(numel), -x):
            for k in {0, min(1, numel), numel // 100, numel // 2, numel}:
                assert torch.equal(ops.select_topk(c.to(device), k).cpu(), ops.select_topk_reference(c, k)), (numel, k)


@pytest.mark.slow
def test_a_selection_writes_nothing_but_its_result(emulated: ctypes.CDLL) -> None:
    c, room = torch.zeros(20_001), torch.full((116,), -7, dtype=torch.int32)  # all are ties
    scratch = torch.empty(emulated.lt_cuda_topk_scratch(c.numel()), dtype=torch.uint8)
    given = (c.data_ptr(), c.numel(), 100, room.data_ptr(), scratch.data_ptr(), None)
    assert emulated.lt_cuda_select_topk(*given) == 0
    assert room.tolist() == [*range(100), *[-7] * 16]


# ---- arguments -----------------------------------------------------------------------------------------------------


def pairs_of(x: Tensor, **changes: Any) -> ctypes.Structure:
    one = (ctypes.c_void_p * 1)(x.data_ptr())
    sizes = (ctypes.c_int64 * 1)(x.numel())
    return STRUCTS["lt_pairs"](**({"count": 1, "numel": sizes, "dst": one, "src": one, "factor": 1.0} | changes))


def refuses_bad_arguments(lib: ctypes.CDLL) -> None:
    x = torch.zeros(4)
    refuses_bad_steps(lib, x)
    refuses_bad_pairs(lib, x)
    refuses_bad_sums(lib, x)
    refuses_bad_codes(lib, x)
    refuses_bad_rounding(lib, x)
    takes_nothing_to_do(lib)


def lists_of(x: Tensor, **changes: Any) -> ctypes.Structure:
    """The lists of one tensor for a step, in which each has its bytes."""
    one = (ctypes.c_void_p * 1)(x.data_ptr())
    lists: dict[str, Any] = dict.fromkeys(("param", "grad", "state1", "state2", "out"), one)
    return STRUCTS["lt_tensors"](**({"count": 1, "numel": (ctypes.c_int64 * 1)(x.numel()), **lists} | changes))


def refuses_bad_steps(lib: ctypes.CDLL, x: Tensor) -> None:
    adam = STRUCTS["lt_adam"](step=1.0)
    lion = STRUCTS["lt_lion"]()
    adagrad = STRUCTS["lt_adagrad"]()
    sgd = STRUCTS["lt_sgd"](momentum=0.9)
    lamb = STRUCTS["lt_lamb"]()
    by = ctypes.byref
    here = x.data_ptr()

    def codes(t: ctypes.Structure, states: int) -> list[int]:
        steps = [
            lib.lt_cuda_adam_step(by(t), by(adam), None),
            lib.lt_cuda_lamb_update(by(t), by(lamb), here, here, None),
            lib.lt_cuda_lamb_apply(by(t), by(lamb), here, None),
        ]
        if states < 2:
            steps += [lib.lt_cuda_lion_step(by(t), by(lion), None), lib.lt_cuda_sgd_step(by(t), by(sgd), None)]
            steps += [lib.lt_cuda_adagrad_step(by(t), by(adagrad), None)]
        return steps

    bad: list[dict[str, Any]] = [{"count": -1}, {"numel": NEGATIVE}, {"numel": None}, {"grad_dtype": 3}]
    bad += [{"grad_dtype": -1}, {"state_dtype": 2}, {"out_dtype": 7}, {"param": None}, {"grad": NULL}]
    bad += [{"param_dtype": 2}, {"param_dtype": 1, "out_dtype": 0}, {"places": here, "place_count": 1}]
    bad += [{"param_dtype": 1, "out_dtype": 1, "places": here}]
    for change in bad:
        assert set(codes(lists_of(x, **change), 0)) == {BAD_ARGUMENT}, change
    assert set(codes(lists_of(x, state1=None), 1)) == {BAD_ARGUMENT}
    assert set(codes(lists_of(x, state2=NULL), 2)) == {BAD_ARGUMENT}
    tensors = lists_of(x)
    assert lib.lt_cuda_adam_step(None, by(adam), None) == BAD_ARGUMENT
    assert lib.lt_cuda_adam_step(by(tensors), None, None) == BAD_ARGUMENT
    for norms, scratch in ((None, here), (here, None)):
        assert lib.lt_cuda_lamb_update(by(tensors), by(lamb), norms, scratch, None) == BAD_ARGUMENT
    assert lib.lt_cuda_lamb_apply(by(tensors), by(lamb), None, None) == BAD_ARGUMENT
    assert lib.lt_cuda_lamb_apply(by(tensors), None, here, None) == BAD_ARGUMENT


def refuses_bad_pairs(lib: ctypes.CDLL, x: Tensor) -> None:
    bad: list[dict[str, Any]] = [{"count": -1}, {"numel": NEGATIVE}, {"dst": None}, {"src": NULL}]
    bad += [{"dst_dtype": 3}, {"src_dtype": 9}]
    for change in bad:
        assert lib.lt_cuda_cast_scale(ctypes.byref(pairs_of(x, **change)), None) == BAD_ARGUMENT, change
        assert lib.lt_cuda_accumulate(ctypes.byref(pairs_of(x, **change)), None) == BAD_ARGUMENT, change
        edits = pairs_of(x, **{"src_dtype": 1, **change})
        assert lib.lt_cuda_take_edits(ctypes.byref(edits), None) == BAD_ARGUMENT, change
    for operation in (lib.lt_cuda_accumulate, lib.lt_cuda_take_edits):
        assert operation(ctypes.byref(pairs_of(x, dst_dtype=1)), None) == BAD_ARGUMENT
    # There is no copy of fp32 in fp32.
    assert lib.lt_cuda_take_edits(ctypes.byref(pairs_of(x)), None) == BAD_ARGUMENT


def refuses_bad_sums(lib: ctypes.CDLL, x: Tensor) -> None:
    here, unknown = x.data_ptr(), (ctypes.c_int32 * 1)(3)

    def norm(out: int | None, scratch: int | None, **changes: Any) -> int:
        one, sizes = (ctypes.c_void_p * 1)(here), (ctypes.c_int64 * 1)(x.numel())
        good = {"count": 1, "numel": sizes, "data": one, "dtype": (ctypes.c_int32 * 1)(0)}
        return int(lib.lt_cuda_norm_squared(ctypes.byref(STRUCTS["lt_mixed"](**(good | changes))), out, scratch, None))

    bad: list[dict[str, Any]] = [{"count": -1}, {"numel": NEGATIVE}, {"data": NULL}, {"dtype": unknown}]
    for change in [*bad, {"dtype": None}]:
        assert norm(here, here, **change) == BAD_ARGUMENT, change
    assert norm(None, here) == norm(here, None) == BAD_ARGUMENT


def refuses_bad_codes(lib: ctypes.CDLL, x: Tensor) -> None:
    """Of blocks, and of the largest elements."""
    here = x.data_ptr()
    one = (ctypes.c_void_p * 1)(x.data_ptr())
    coded = torch.zeros(64, dtype=torch.uint8)
    here16 = coded.data_ptr()

    def blocks(**changes: int) -> Any:
        return ctypes.byref(STRUCTS["lt_blocks"](**({"numel": 4, "block": 16, "bits": 8, "dtype": 0} | changes)))

    bad = [{"numel": -1}, {"block": 24}, {"block": 0}, {"block": 1 << 17}, {"bits": 3}, {"dtype": 3}, {"normal": 1}]
    for change in bad:
        assert lib.lt_cuda_encode_blocks(blocks(**change), here, None, here16, None) == BAD_ARGUMENT, change
        assert lib.lt_cuda_decode_blocks(blocks(**change), 1, one, 1.0, here, None) == BAD_ARGUMENT, change
    assert lib.lt_cuda_encode_blocks(blocks(), here, None, here16 + 8, None) == BAD_ARGUMENT
    assert lib.lt_cuda_decode_blocks(blocks(), 0, one, 1.0, here, None) == BAD_ARGUMENT
    assert lib.lt_cuda_decode_blocks(blocks(), 1, NULL, 1.0, here, None) == BAD_ARGUMENT
    many = (ctypes.c_void_p * 257)()
    assert lib.lt_cuda_decode_blocks(blocks(dtype=2), 257, many, 1.0, here, None) == BAD_ARGUMENT
    selections = [(here, -1, 0, here, here), (here, 4, 5, here, here), (None, 4, 1, here, here)]
    for given in [*selections, (here, 4, 1, here, None)]:
        assert lib.lt_cuda_select_topk(*given, None) == BAD_ARGUMENT
    assert lib.lt_cuda_topk_scratch(-1) == -1
    assert lib.lt_cuda_scratch(1, NEGATIVE) == -1


def refuses_bad_rounding(lib: ctypes.CDLL, x: Tensor) -> None:
    good = {"numel": 4, "src": x.data_ptr(), "dst": x.data_ptr()}
    rows = {"first": 0, "row": 2, "stride": 2}
    bad: list[dict[str, Any]] = [{"numel": -1}, {"row": 0}, {"row": 3}, {"first": -1}, {"stride": -1}]
    for change in [*bad, {"src": None}, {"dst": None}]:
        place = STRUCTS["lt_place"](**(rows | {key: change[key] for key in change if key in rows}))
        given = good | {key: change[key] for key in change if key in good}
        rounding = STRUCTS["lt_rounding"](**given, place=place)
        assert lib.lt_cuda_round_stochastic(ctypes.byref(rounding), None) == BAD_ARGUMENT, change
    assert lib.lt_cuda_round_stochastic(None, None) == BAD_ARGUMENT
    assert lib.lt_cuda_round_stochastic(ctypes.byref(STRUCTS["lt_rounding"]()), None) == 0


def takes_nothing_to_do(lib: ctypes.CDLL) -> None:
    """Nothing to do is no error, and needs no launch."""
    adam, by = STRUCTS["lt_adam"](step=1.0), ctypes.byref
    empty = dict.fromkeys(("param", "grad", "state1", "state2", "out"), NULL)
    nothing = lists_of(torch.zeros(4), numel=(ctypes.c_int64 * 1)(0), **empty)
    assert lib.lt_cuda_adam_step(by(nothing), by(adam), None) == 0
    assert lib.lt_cuda_adam_step(by(STRUCTS["lt_tensors"]()), by(adam), None) == 0
    assert lib.lt_cuda_encode_blocks(by(STRUCTS["lt_blocks"](block=16, bits=8)), None, None, None, None) == 0
    assert lib.lt_cuda_select_topk(None, 0, 0, None, None, None) == 0
    assert lib.lt_cuda_scratch(0, None) == 0
    assert b"bad argument" in lib.lt_cuda_error(BAD_ARGUMENT)
    assert lib.lt_cuda_error(999)


@pytest.mark.slow
def test_bad_arguments_are_refused_when_emulated(emulated: ctypes.CDLL) -> None:
    refuses_bad_arguments(emulated)
