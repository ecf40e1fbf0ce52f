"""The CUDA sources as a library for the CPU (``cuda_on_cpu``), and the races that it found."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lt_zero.kernels.compiler import CSRC, CompileJob, run
from tests.support.paths import SUPPORT

HERE = SUPPORT / "cuda_on_cpu"


def compile_emulated(folder: Path, names: Sequence[str] = ()) -> ctypes.CDLL:
    """The CUDA sources with these names (``"topk"``), or all, compiled in ``folder``; skips the test without g++.

    Misaligned accesses and overrun arrays are reported on stderr, races by ``races``.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{HERE}"]
    flags.append("-fno-gnu-unique")  # a process that loads two libraries must not have one shared memory for both
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        flags.append("-DUNFUSED")  # the references run on torch's vector code, which fuses with AVX2 and up
    jobs = []
    for source in [HERE / "emulation.cpp", *sorted((CSRC / "cuda").glob("*.cu"))]:
        made = folder / f"{source.stem}.o"
        checks = "-fsanitize=alignment,bounds" + ",thread" * (source.suffix == ".cu")  # Note [Races]
        if source.suffix == ".cpp" or not names or source.stem in names:
            own = (checks, "-x", "c++", "-c", str(source), "-o", str(made))
            jobs.append(CompileJob((compiler, *flags, *own), made))
    linked, objects = folder / "emulated.so", [str(job.target) for job in jobs]
    link = CompileJob((compiler, "-shared", "-fsanitize=alignment,bounds", *objects, "-o", str(linked)), linked)
    for step in (jobs, [link]):
        run(step, 100.0)
        assert all(job.code == 0 for job in step), "\n".join(job.output for job in step)
    return ctypes.CDLL(str(linked))


def races(emulated: ctypes.CDLL) -> list[str]:
    """The races for shared memory since the last call: pairs of lines, ``"topk.cu:1 and topk.cu:2"``."""
    places, found = (ctypes.c_uint64 * 2)(), list[str]()
    while emulated.emulation_race(places):
        before = [hex(place - 1) for place in places]  # of a call, the next instruction is known
        command = ["addr2line", "-e", emulated._name, *before]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(" and ".join(re.sub(r".*/| \(.*", "", line) for line in output.splitlines()))
    return sorted(set(found))
