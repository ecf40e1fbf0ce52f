"""No thread of a CUDA block reads or writes shared memory that another writes, and every barrier is needed for that.

Without a GPU: Note [Races] in ``tests/support/cuda_on_cpu/emulation.cpp``. A test of all kernels is test_cuda_build.py.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable

import pytest
import torch

from lt_zero.kernels.codecs import BlockCodec
from lt_zero.kernels.compiler import CSRC
from lt_zero.kernels.header import STRUCTS
from tests.support.emulated_cuda import compile_emulated, races
from tests.support.matrix import only_rows

BARRIERS = [
    (file.name, number)
    for file in sorted((CSRC / "cuda").glob("*.cu*"))
    for number, line in enumerate(file.read_text().splitlines(), 1)
    if re.search(r"__syncthreads\(\)", line)
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """The emulated library of one source, by its name."""
    return functools.cache(lambda source: compile_emulated(tmp_path_factory.mktemp("emulated"), [source, "runtime"]))


def run_kernels(library: ctypes.CDLL, source: str) -> None:
    """Run the kernels of a file that has barriers, with more chunks than blocks."""
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    if source == "topk":
        out, scratch = torch.empty(2 * x.numel(), dtype=torch.int32), torch.empty(10_000, dtype=torch.int64)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out, scratch)]
        given = (pointers[0], ctypes.c_int64(x.numel()), ctypes.c_int64(1000), *pointers[1:], None)
        assert library.lt_cuda_select_topk(*given) == 0
    elif source == "blocks":
        codes = BlockCodec(4, 64).encode(x)
        shape = STRUCTS["lt_blocks"](rows=1, numel=x.numel(), residual_row=0, block=64, bits=4, dtype=0, normal=1)
        buffers = (ctypes.c_void_p * 1)(codes.data_ptr())
        given = (ctypes.byref(shape), ctypes.c_int64(1), buffers, ctypes.c_double(1.0), ctypes.c_void_p(x.data_ptr()))
        assert library.lt_cuda_decode_blocks(*given, None) == 0
    else:
        one, sizes, dtype = (ctypes.c_void_p * 1)(x.data_ptr()), (ctypes.c_int64 * 1)(x.numel()), (ctypes.c_int32 * 1)()
        tensors = STRUCTS["lt_mixed"](count=1, numel=sizes, data=one, dtype=dtype)
        sums = torch.empty(100, dtype=torch.float64)
        pointers = [ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(sums[1:].data_ptr())]
        assert library.lt_cuda_norm_squared(ctypes.byref(tensors), *pointers, None) == 0


@pytest.mark.parametrize(("file", "line"), only_rows([], BARRIERS))
def test_without_a_barrier_threads_race(compiled: Callable[[str], ctypes.CDLL], file: str, line: int) -> None:
    source = {"topk.cu": "topk", "blocks.cu": "blocks"}.get(file, "norm")
    library = compiled(source)
    run_kernels(library, source)
    assert races(library) == []
    library.emulation_leave_out(file.encode(), line)
    run_kernels(library, source)
    library.emulation_leave_out(b"", 0)
    found = races(library)
    assert found
    assert all(re.fullmatch(rf"{file}:\d+ and {file}:\d+", race) for race in found)
