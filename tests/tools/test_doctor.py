"""``lt-zero doctor`` tells what is there and what to do about the rest, and a probe that fails is a row."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner, Result

from lt_zero import cli
from lt_zero.common import accelerator, compat, host_memory
from lt_zero.core.comm.shared_memory import SharedArena
from lt_zero.core.stores import direct_file
from lt_zero.kernels import library
from lt_zero.kernels.library import Status
from lt_zero.tools import doctor
from lt_zero.tools.doctor import Row

NATIVE = Status("cpu", True, Path("cpu.so"), "from the cache", "avx512")
NO_DEVICE = Status("cuda", False, None, "torch sees no CUDA device")
NAMES = [
    *("lt_zero", "python", "torch", "lightning", "torchmetrics", "omegaconf", "other packages", "NCCL", "gloo"),
    *("launcher", "C++ compiler", "nvcc", "instruction sets", "cpu kernels", "cuda kernels", "memory", "cgroup limit"),
    *("disk", "tmp folder", "O_DIRECT", "shared memory", "pinned memory"),
    *("file descriptors", "GPUs"),
]
NEEDS = [
    "torch<3,>=2.11",
    "lightning<3,>=2.6",
    "torchmetrics>=1.0",
    "omegaconf>=2.3",
    "rich",
    'nowhere; extra == "dev"',
]
Probe = Callable[[Path], Iterator[Row]]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were built, requirements and versions that are the same wherever the tests run."""
    for name in ("LT_ZERO_NATIVE", "LT_ZERO_SHARED_MEMORY", "CXX", "NVCC", "CUDA_HOME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "status", lambda kind: NATIVE if kind == "cpu" else NO_DEVICE)
    monkeypatch.setattr(metadata, "requires", lambda name: NEEDS)
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": ">=3.10"})
    versions_are(monkeypatch)


def versions_are(monkeypatch: pytest.MonkeyPatch, **others: str | None) -> None:
    """Versions that lt_zero works with, but for ``others``; None: not installed."""
    found = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "torchmetrics": "1.9.0", "omegaconf": "2.3.1", "rich": "15.0"}

    def version(name: str) -> str:
        answer = {**found, **others}[name]
        if answer is None:
            raise metadata.PackageNotFoundError(name)
        return answer

    monkeypatch.setattr(metadata, "version", version)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def rows(probe: Probe, path: Path = Path(".")) -> dict[str, Row]:
    return {row.name: row for row in probe(path)}


# ---- the command ---------------------------------------------------------------------------------------------------


def test_all_rows_for_programs(tmp_path: Path) -> None:
    result = run("--json", "--path", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["trains_on_cpu"] is True
    assert [row["name"] for row in found["rows"]] == NAMES
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name["torch"] == {
        "name": "torch",
        "found": "2.13.0+cpu (needs >=2.11,<3; checked on 2.11 to 2.15)",
        "verdict": "ok",
        "remedy": "",
        "required": True,
    }
    assert str(tmp_path) in by_name["disk"]["found"]
    assert [row["name"] for row in found["rows"] if row["verdict"] != "ok" and not row["remedy"]] == []


def test_each_row_is_one_line_of_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reason = "error: a [bold] word :smile:\n   " + "and a long line " * 10
    monkeypatch.setattr(library, "status", lambda kind: Status(kind, False, None, reason))
    result = run("--path", str(tmp_path))
    lines = result.stdout.splitlines()
    assert [line[9 : 9 + 16].strip() for line in lines[:-1]] == NAMES
    assert all(line.startswith(("ok  ", "limited  ", "missing  ")) for line in lines[:-1])
    assert lines[-1] == "Training on the CPU works."
    (kernels,) = (line for line in lines if "cpu kernels" in line)
    assert "a [bold] word :smile: and a long line and a" in kernels
    assert "Install a C++ compiler" in kernels


@pytest.mark.parametrize("error", [RuntimeError("no such\ncounter"), OSError(errno.EIO, "broken"), KeyError("Mem")])
def test_a_failing_probe_is_a_row(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("psutil.virtual_memory", fail)
    result = run("--json", "--path", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(found) == [name for name in NAMES if name != "cgroup limit"]
    assert found["memory"]["verdict"] == "limited"
    assert f"this probe failed: {type(error).__name__}: " in found["memory"]["found"]
    assert "\n" not in found["memory"]["found"]


def test_a_failing_probe_of_what_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ValueError(f"bad record of {name}")

    monkeypatch.setattr(metadata, "version", fail)
    result = run("--path", str(tmp_path))
    assert result.exit_code == 1
    assert "missing  versions" in result.stdout
    assert "bad record of torch" in result.stdout
    assert result.stdout.endswith("Training on the CPU needs: versions.\n")


def test_neither_the_command_nor_its_help_needs_torch() -> None:
    code = (
        "import sys, types; package = types.ModuleType('lt_zero'); sys.modules['lt_zero'] = package\n"
        f"package.__path__ = [{str(Path(doctor.__file__).parents[1])!r}]\n"
        "import lt_zero.cli, lt_zero.tools.doctor; print(sorted({'torch', 'lightning', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# ---- versions ------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions_are(monkeypatch, lightning=None, rich=None)
    result = run("--path", str(tmp_path))
    assert result.exit_code == 1
    assert "not installed. Run: pip install 'lightning>=2.6,<3'\n" in result.stdout
    assert "not installed. Run: pip install rich\n" in result.stdout
    assert result.stdout.endswith("Training on the CPU needs: lightning, rich.\n")


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("torch", "2.9.1", "missing"),
        ("torch", "2.11.0", "ok"),
        ("torch", "2.13.1+cu130", "ok"),
        ("torch", "2.16.0", "limited"),
        ("torch", "2.16.0.dev20261101", "limited"),
        ("torch", "3.0.0", "missing"),
        ("lightning", "2.4.0", "missing"),
        ("lightning", "2.7", "limited"),
        ("torchmetrics", "0.11.4", "missing"),
        ("omegaconf", "2.4.0", "limited"),
    ],
)
def test_versions_are_compared(name: str, version: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions_are(monkeypatch, **{name: version})
    row = rows(doctor._versions)[name]
    assert row.verdict == verdict
    assert row.required
    assert row.found.startswith(version)
    assert (name in row.remedy) == (verdict != "ok")


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(doctor._versions)["python"].found == f"{platform.python_version()} (needs >=3.10)"
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.18")
    row = rows(doctor._versions)["python"]
    assert (row.verdict, row.remedy, row.required) == ("missing", "Install python >=3.10.", True)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", nothing)
    found = rows(doctor._versions)
    assert found["lt_zero"].verdict == "limited"
    assert "not installed" in found["lt_zero"].found
    assert found["torch"].found == "2.13.0+cpu (checked on 2.11 to 2.15)"


def test_internals_that_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lt_zero.common.compat", None)
    row = rows(doctor._versions)["lt_zero"]
    assert (row.verdict, row.required) == ("missing", True)
    assert "lt_zero.common.compat" in row.found


def test_the_versions_are_those_that_compat_tells() -> None:
    files = sorted(Path(compat.__file__).parent.glob("*.py"))
    text = " ".join(" ".join(file.read_text() for file in files).split())
    told: dict[str, set[tuple[str, str]]] = {}
    for name, first, _, last in re.findall(r"[Cc]hecked on ([a-z-]+) (\d[\d.]*\d)( to (\d[\d.]*\d))?", text):
        told.setdefault(name, set()).add((first, last or first))
    assert set(told) == set(compat.CHECKED)
    for name, ranges in told.items():
        assert max((last for _, last in ranges), key=Version) == compat.CHECKED[name][1]
        assert compat.CHECKED[name] in ranges


# ---- compilers and kernels -----------------------------------------------------------------------------------------


def test_no_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NVCC", "nowhere/nvcc")
    found = rows(doctor._compilers)
    assert {name: row.verdict for name, row in found.items()} == {"C++ compiler": "missing", "nvcc": "missing"}
    assert "none of c++, g++, clang++" in found["C++ compiler"].found
    assert "CXX" in found["C++ compiler"].remedy
    assert not any(row.required for row in found.values())


def test_versions_of_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("my c++", "tool 1.2\\nCopyright"),
        ("nvcc", "nvcc: driver\\nCuda compilation tools, release 9"),
    ):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "{text}\\n"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "my c++"))
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))
    found = rows(doctor._compilers)
    assert found["C++ compiler"] == Row("C++ compiler", f"tool 1.2 ('{tmp_path}/my c++')")
    assert found["nvcc"] == Row("nvcc", f"release 9 ({tmp_path}/nvcc)")


@pytest.mark.parametrize(
    ("status", "sets", "kernels", "remedy"),
    [
        (NATIVE, "ok", "ok", ""),
        (Status("cpu", True, Path("cpu.so"), "from the cache", "portable"), "limited", "ok", ""),
        (Status("cpu", False, None, "no C++ compiler"), "ok", "limited", "Install a C++ compiler"),
        (Status("cpu", False, None, "LT_ZERO_NATIVE=0"), "ok", "limited", "Unset LT_ZERO_NATIVE."),
    ],
)
def test_kernels(status: Status, sets: str, kernels: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "status", lambda kind: status if kind == "cpu" else NO_DEVICE)
    cpuinfo = "processor\t: 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: cpuinfo)
    found = rows(doctor._kernels)
    assert (found["instruction sets"].verdict, found["cpu kernels"].verdict) == (sets, kernels)
    used = f"native kernels use {status.isa}" if status.available else "no native kernels"
    assert found["instruction sets"].found == f"avx2 avx512; {used}"
    assert status.why in found["cpu kernels"].found
    assert ("native" if status.available else "torch reference") in found["cpu kernels"].found
    assert found["cpu kernels"].remedy.startswith(remedy)
    assert bool(found["cpu kernels"].remedy) == bool(remedy)
    assert (found["cuda kernels"].verdict, found["cuda kernels"].remedy) == ("missing", "Only GPUs need them.")


def test_instruction_sets_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "flags : avx2 fma f16c avx512f avx512bw avx512vl\n")
    assert rows(doctor._kernels)["instruction sets"].found.startswith("avx2; ")
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "flags : sse2\n")
    assert rows(doctor._kernels)["instruction sets"].verdict == "limited"


# ---- memory and disks ----------------------------------------------------------------------------------------------


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**9, total=32 * 10**9))
    groups = [
        host_memory.Available(5 * 10**9, "the limit 8.0 GB of control group /"),
        host_memory.Available(10**9, "that of /job"),
    ]
    monkeypatch.setattr(host_memory, "cgroup_limits", lambda: groups)
    found = rows(doctor._memory)
    assert found["memory"][:3] == ("memory", "1.00 GB available of 32.00 GB", "limited")
    assert found["cgroup limit"][:3] == ("cgroup limit", "1.00 GB left of that of /job", "limited")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=3 * 10**9, total=32 * 10**9))
    monkeypatch.setattr(host_memory, "cgroup_limits", lambda: groups[:1])
    assert {row.verdict for row in rows(doctor._memory).values()} == {"ok"}
    monkeypatch.setattr(host_memory, "cgroup_limits", lambda: [])
    assert rows(doctor._memory)["cgroup limit"] == Row("cgroup limit", "none")


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("lt_zero.core.stores.direct_file.free_bytes", lambda path: 3 * 10**9)
    monkeypatch.setattr("lt_zero.core.stores.direct_file.filesystem_of", lambda path: "tmpfs")
    found = rows(doctor._disks, tmp_path)
    assert found["disk"].found == f"3.00 GB free in {tmp_path} (tmpfs)"
    assert (found["disk"].verdict, found["tmp folder"].verdict) == ("limited", "ok")  # the latter may be memory
    assert "This is memory" in found["disk"].remedy
    monkeypatch.setattr("lt_zero.core.stores.direct_file.free_bytes", lambda path: 10**9)
    assert "Free space" in rows(doctor._disks, tmp_path)["tmp folder"].remedy
    row = rows(doctor._disks, tmp_path / "nowhere")["disk"]
    assert (row.verdict, row.found) == ("missing", f"{tmp_path}/nowhere is not a folder")


def test_direct_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        direct_file, "go_direct", lambda fd, unit, nbytes: seen.append(nbytes) is None and nbytes == unit
    )
    assert rows(doctor._direct, tmp_path)["O_DIRECT"] == Row("O_DIRECT", "works")
    monkeypatch.setattr(direct_file, "go_direct", lambda fd, unit, nbytes: False)
    assert rows(doctor._direct, tmp_path)["O_DIRECT"].verdict == "limited"
    row = rows(doctor._direct, tmp_path / "nowhere")["O_DIRECT"]
    assert (row.verdict, row.found) == (
        "missing",
        f"no file can be created in {tmp_path}/nowhere: {os.strerror(errno.ENOENT)}",
    )
    assert seen[0] > 0  # a request was made
    assert list(tmp_path.iterdir()) == []


# ---- between processes, and devices --------------------------------------------------------------------------------


def test_memory_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(doctor._shared_memory)["shared memory"].verdict == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "_NUMBER", 1)  # what is read is compared
        assert rows(doctor._shared_memory)["shared memory"].verdict == "limited"
    with monkeypatch.context() as patch:
        patch.setattr(SharedArena, "connect", lambda *_: False)
        row = rows(doctor._shared_memory)["shared memory"]
        assert (row.verdict, "hidepid" in row.remedy) == ("limited", True)
    monkeypatch.setenv("LT_ZERO_SHARED_MEMORY", "0")
    row = rows(doctor._shared_memory)["shared memory"]
    assert (row.found, "Unset LT_ZERO_SHARED_MEMORY" in row.remedy) == ("off, LT_ZERO_SHARED_MEMORY=0", True)


@pytest.mark.parametrize(
    ("variables", "verdict", "found"),
    [
        ({}, "ok", "none has started this process"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "ok", "SLURM: rank 1 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "ok", "torchrun, .*: rank 1 of 2, local rank 0"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "limited", "2 tasks, this is number 1"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "limited", "A job of Kubeflow has started 2 tasks"),
        ({"PET_NNODES": "1"}, "ok", "A job of Kubeflow has started 1 tasks"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "limited", "this probe failed: ValueError: RANK='x'"),
    ],
)
def test_launchers(variables: dict[str, str], verdict: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "PROBES", (doctor._launcher,))
    (row,) = doctor.examine(Path("."))
    assert row.verdict == verdict
    assert re.search(found, row.found), row.found
    assert bool(row.remedy) == (verdict == "limited")


@pytest.mark.parametrize(
    ("limit", "capability", "verdict", "found"),
    [
        (resource.RLIM_INFINITY, 63, "ok", "ulimit -l: unlimited"),
        (64 * 1024, 63, "limited", "ulimit -l: 64 kB"),
        (64 * 1024, 14, "ok", "ulimit -l: 64 kB, lifted by CAP_IPC_LOCK"),
    ],
)
def test_pinned_memory(limit: int, capability: int, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(Path, "read_text", lambda path: f"Name:\tpython\nCapEff:\t{1 << 14:016x}\n")
    monkeypatch.setattr(doctor, "_IPC_LOCK", capability)
    row = rows(doctor._pinned_memory)["pinned memory"]
    assert (row.verdict, row.found) == (verdict, found)


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "found"),
    [
        (1024, 524288, "ok", "ulimit -n: 1024, which a run raises to 65536"),
        (1024, 1024, "limited", "ulimit -n: 1024"),
        (524288, resource.RLIM_INFINITY, "ok", "ulimit -n: 524288"),
    ],
)
def test_descriptors(soft: int, hard: int, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    row = rows(doctor._descriptors)["file descriptors"]
    assert (row.verdict, row.found) == (verdict, found)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(name: str, major: int) -> Any:
        return SimpleNamespace(name=name, total_memory=80 * 10**9, major=major, minor=0)

    devices = [device("H100", 9), device("H100", 9)]
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "count", lambda: len(devices))
    monkeypatch.setattr(accelerator, "properties", lambda index: devices[index])
    assert rows(doctor._gpus)["GPUs"] == Row("GPUs", "2 x H100, 80.00 GB, compute capability 9.0")
    devices.append(device("V100", 7))
    row = rows(doctor._gpus)["GPUs"]
    assert (row.verdict, "8.0" in row.remedy) == ("limited", True)
    assert row.found.endswith("; 1 x V100, 80.00 GB, compute capability 7.0")


@pytest.mark.parametrize(
    ("variable", "verdict"),
    [("PYTORCH_ALLOC_CONF", "ok"), ("PYTORCH_CUDA_ALLOC_CONF", "ok"), ("OTHER", "limited")],
)
def test_the_allocator_of_a_gpu(variable: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert not rows(doctor._allocator), "a CPU has none"
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setenv(variable, "expandable_segments:True,max_split_size_mb:64")
    row = rows(doctor._allocator)["GPU allocator"]
    assert (row.verdict, row.required) == (verdict, False)


@pytest.mark.parametrize(
    ("cuda", "found"), [(None, "torch is built without CUDA"), ("13.0", "torch sees no CUDA device")]
)
def test_no_gpus(cuda: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    row = rows(doctor._gpus)["GPUs"]
    assert (row.verdict, row.found, row.required) == ("missing", found, False)


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    found = rows(doctor._backends)
    assert (found["NCCL"], found["gloo"].verdict) == (Row("NCCL", "2.27.5"), "ok")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert rows(doctor._backends)["NCCL"].verdict == "missing"
    assert not torch.distributed.is_initialized()


def test_gloo_without_an_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_if")
    result = run("--path", str(tmp_path))
    assert result.exit_code == 1
    assert "missing  gloo" in result.stdout
    assert result.stdout.endswith("Training on the CPU needs: gloo.\n")


def test_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    row = rows(doctor._backends)["gloo"]
    assert (row.verdict, row.found, row.required) == ("missing", "torch is built without gloo.", True)
