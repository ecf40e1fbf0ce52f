"""``lt-zero doctor``: checks whether this machine is ready for training, with a remedy for each problem.

A probe checks one thing and yields rows. An exception of a probe becomes a row, so that a broken driver or package
hides nothing else. Probes import torch, and what needs it, themselves: it may be missing.
"""

from __future__ import annotations

import json as json_format
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.markup import escape

import lt_zero
from lt_zero.common.console import Console

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}
_NAMED = ("torch", "lightning", "torchmetrics", "omegaconf")  # packages with a row of their own
_LITTLE = 2 * 10**9  # bytes of memory or disk; a process needs a quarter of it even without a model
_IPC_LOCK = 14  # CAP_IPC_LOCK of linux/capability.h: memory may be pinned beyond the limit
_INSTRUCTIONS = {  # flags in /proc/cpuinfo that the kernels need
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "amx": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "amx_tile", "amx_bf16"},
    "neon": {"asimd"},
}
_DESCRIPTORS = 4096  # fewer do for small runs only
_NUMBER = 4711
_PEER = f"""
import os, sys
file = os.memfd_create("lt_zero")
os.write(file, ({_NUMBER}).to_bytes(8, sys.byteorder))
print(f"/proc/{{os.getpid()}}/fd/{{file}}", flush=True)
sys.stdin.read()
"""  # a process that shares memory as SharedArena does, until its input ends


class Row(NamedTuple):
    """A line of the table: the name of a check, what was found, the verdict, and the remedy.

    ``limited`` means that it works, but slower or with fewer features. ``required``: training on the CPU needs it.
    """

    name: str
    found: str
    verdict: Literal["ok", "limited", "missing"] = "ok"
    remedy: str = ""
    required: bool = False


def doctor_command(
    path: Annotated[Path, typer.Option(help="A folder on the disk for offloaded states and checkpoints.")] = Path("."),
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check whether this machine is ready for training, with a remedy for each problem.

    Compiles missing native kernels. The exit code is 0 if training on the CPU works, else 1.
    """
    rows = examine(path)
    lacking = [row.name for row in rows if row.required and row.verdict == "missing"]
    if json:
        print(json_format.dumps({"trains_on_cpu": not lacking, "rows": [row._asdict() for row in rows]}, indent=2))
    else:
        console = Console(soft_wrap=True, highlight=False, emoji=False)  # one line per row, however long
        width = max(len(row.name) for row in rows)
        for row in rows:
            text = f"{row.found.rstrip('.')}. {row.remedy}" if row.remedy else row.found
            console.print(f"[{_COLOURS[row.verdict]}]{row.verdict:7}[/]  {row.name:{width}}  {escape(text)}")
        console.print("Training on the CPU " + (f"needs: {', '.join(lacking)}." if lacking else "works."), markup=False)
    raise typer.Exit(int(bool(lacking)))


def examine(path: Path) -> list[Row]:
    """Run all probes; ``path`` is a folder on the disk for offloaded states and checkpoints."""
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows the same
        for probe in PROBES:
            try:
                rows.extend(probe(path))
            except Exception as error:
                name, required = probe.__name__[1:].replace("_", " "), probe in _REQUIRED
                found = f"this probe failed: {type(error).__name__}: {error}"
                remedy = "Repair what the error names, and run `lt-zero doctor` again."
                rows.append(Row(name, found, "missing" if required else "limited", remedy, required))
    # Messages of compilers and drivers may have several lines.
    return [row._replace(found=" ".join(row.found.split()), remedy=" ".join(row.remedy.split())) for row in rows]


def _row(name: str, found: str, problem: bool, remedy: str) -> Row:
    return Row(name, found, "limited", remedy) if problem else Row(name, found)


def _versions(path: Path) -> Iterator[Row]:
    python, needs, checked = "", list[str](), dict[str, tuple[str, str]]()
    installed = f"{lt_zero.__version__} in {Path(lt_zero.__file__).parent}"
    row = Row("lt_zero", installed, required=True)
    try:
        python, needs = metadata.metadata("lt-zero")["Requires-Python"], metadata.requires("lt-zero") or []
    except metadata.PackageNotFoundError:
        remedy = "Install it with pip, so that the versions of packages can be checked."
        row = Row("lt_zero", f"{installed}, not installed", "limited", remedy, True)
    try:
        checked = import_module("lt_zero.common.compat").CHECKED
    except Exception as error:  # torch is missing, or its internals have moved
        found = f"{installed} cannot be imported: {type(error).__name__}: {error}"
        row = Row("lt_zero", found, "missing", "Install the missing package, in a version that was checked.", True)
    yield row
    yield _version("python", SpecifierSet(python), None)
    parsed = [requirement for requirement in map(Requirement, needs) if requirement.marker is None]  # no extras
    allowed = dict.fromkeys(_NAMED, SpecifierSet()) | {each.name: each.specifier for each in parsed}
    allowed |= {name: SpecifierSet() for name in checked if name not in allowed and find_spec(name) is not None}
    rows = {name: _version(name, allowed[name], checked.get(name)) for name in allowed}
    yield from (rows.pop(name) for name in _NAMED)
    if not (wrong := [row for row in rows.values() if row.verdict != "ok"]):
        yield Row("other packages", f"{len(rows)} of {len(rows)} that lt_zero needs")
    yield from wrong


def _version(name: str, allowed: SpecifierSet, checked: tuple[str, str] | None) -> Row:
    bounds = ",".join(sorted(map(str, allowed), reverse=True))  # lower bounds first
    try:
        found = platform.python_version() if name == "python" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return Row(name, "not installed", "missing", f"Run: pip install {shlex.quote(name + bounds)}", True)
    notes = [f"needs {bounds}"] if bounds else []
    notes += [f"checked on {' to '.join(dict.fromkeys(checked))}"] if checked else []
    text = f"{found} ({'; '.join(notes)})" if notes else found
    if not allowed.contains(found, prereleases=True):
        return Row(name, text, "missing", f"Install {name} {bounds}.", True)
    if checked is not None:
        release, (first, last) = Version(found).release, (Version(bound).release for bound in checked)
        if not first <= release[: len(first)] or not release[: len(last)] <= last:
            remedy = f"lt_zero uses internals of {name}: if something fails, install a version that was checked."
            return Row(name, text, "limited", remedy, True)
    return Row(name, text, required=True)


def _compilers(path: Path) -> Iterator[Row]:
    from lt_zero.kernels.compiler import BuildError, find_compiler

    cpu = "Install g++ or clang++, or set CXX; or copy kernels that `lt-zero ops build` built elsewhere."
    cuda = "Only GPUs need it: install the CUDA toolkit, set NVCC, or install nvidia-cuda-nvcc 13 with pip."
    for kind, name, remedy in (("cpu", "C++ compiler", cpu), ("cuda", "nvcc", cuda)):
        try:
            compiler = find_compiler(kind)
        except BuildError as error:
            yield Row(name, str(error), "missing", remedy)
            continue
        version = compiler.identity.splitlines()[len(compiler.command) :] or ["no version"]
        line = next((line for line in version if "release" in line), version[0])  # nvcc prints it further down
        yield Row(name, f"{line.removeprefix('Cuda compilation tools, ')} ({shlex.join(compiler.command)})")


def _kernels(path: Path) -> Iterator[Row]:
    from lt_zero.kernels import library
    from lt_zero.kernels.report import implementation

    states = {kind: library.status(kind) for kind in ("cpu", "cuda")}
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set[str]())
    sets, used = [name for name, needs in _INSTRUCTIONS.items() if needs <= flags], states["cpu"].isa
    found = f"{' '.join(sets) or 'no vectors'}; {f'native kernels use {used}' if used else 'no native kernels'}"
    remedy = "Steps on the CPU are slower. On a virtual machine, pass the host's CPU flags through."
    yield _row("instruction sets", found, not sets or used == "portable", remedy)
    for kind, status in states.items():
        found = f"{implementation(status)} for all {len(library.names(status.kind))} operations, {status.why}"
        if kind == "cuda" and status.why.startswith("torch"):  # without CUDA, or without a device
            yield Row("cuda kernels", found, "missing", "Only GPUs need them.")
        else:
            remedy = library.remedy(status)
            yield _row(f"{kind} kernels", found, not status.available, remedy[0].upper() + remedy[1:])


def _launcher(path: Path) -> Iterator[Row]:
    from lt_zero.core.health.launchers import launched_tasks, remedy_for, unjoined_tasks

    if waiting := unjoined_tasks():
        found = f"{waiting.launcher} has started {waiting.world} tasks, this is number {waiting.rank}"
        yield _row("launcher", found, waiting.world > 1, remedy_for(waiting))
        return
    tasks = launched_tasks()
    if tasks is None:
        yield Row("launcher", "none has started this process")
        return
    name = "torchrun, or another that sets RANK" if tasks.launcher == "RANK" else tasks.launcher
    local = "" if tasks.local_rank is None else f", local rank {tasks.local_rank}"
    place = f"; rank 0 is on {tasks.address}" if tasks.address else ""
    yield Row("launcher", f"{name}: rank {tasks.rank} of {tasks.world}{local}{place}")


def _memory(path: Path) -> Iterator[Row]:
    import psutil

    from lt_zero.common.host_memory import cgroup_limits
    from lt_zero.common.units import format_bytes

    memory = psutil.virtual_memory()
    found = f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}"
    yield _row("memory", found, memory.available < _LITTLE, "End other processes, or use a larger machine.")
    least = min(cgroup_limits(), key=lambda limit: limit.nbytes, default=None)
    found = f"{format_bytes(least.nbytes)} left of {least.source}" if least else "none"
    little, remedy = least is not None and least.nbytes < _LITTLE, "Start the container or job with more memory."
    yield _row("cgroup limit", found, little, remedy)


def _disks(path: Path) -> Iterator[Row]:
    from lt_zero.common.units import format_bytes
    from lt_zero.core.stores.direct_file import filesystem_of, free_bytes

    for name, folder in (("disk", path.absolute()), ("tmp folder", Path(tempfile.gettempdir()))):
        if not folder.is_dir():
            yield Row(name, f"{folder} is not a folder", "missing", "Create it, or name another one with --path.")
            continue
        kind, free = filesystem_of(folder), free_bytes(folder)
        is_memory = name == "disk" and kind in ("tmpfs", "ramfs")
        remedy = "Free space there, or name another folder (--path, TMPDIR)."
        if is_memory:
            remedy = "This is memory: offloading to it frees nothing. Name a folder on a disk with --path."
        found = f"{format_bytes(free)} free in {folder}" + (f" ({kind})" if kind else "")
        yield _row(name, found, is_memory or free < _LITTLE, remedy)


def _direct(path: Path) -> Iterator[Row]:
    from lt_zero.core.stores.direct_file import go_direct, logical_block
    from lt_zero.core.stores.pinned import BLOCK

    try:
        with tempfile.TemporaryFile(dir=path) as file:
            works = go_direct(file.fileno(), max(BLOCK, logical_block(path)), BLOCK)
    except OSError as error:
        found = f"no file can be created in {path.absolute()}: {error.strerror}"
        yield Row("O_DIRECT", found, "missing", "Name a writable folder with --path.")
    else:
        remedy = "Offloading goes through the page cache, which is slower. ext4 and xfs support O_DIRECT."
        yield _row("O_DIRECT", "works" if works else "does not work", not works, remedy)


def _shared_memory(path: Path) -> Iterator[Row]:
    from lt_zero.core.comm.shared_memory import SharedArena, host_identity, supported

    slower = "Ranks of a host exchange data through sockets, which is slower."
    if not supported():
        value = os.environ.get("LT_ZERO_SHARED_MEMORY")
        found = f"off, LT_ZERO_SHARED_MEMORY={value}" if value else "this system has no memfd_create or preadv"
        yield Row("shared memory", found, "limited", f"{slower} Unset LT_ZERO_SHARED_MEMORY." if value else slower)
        return
    command = [sys.executable, "-I", "-S", "-c", _PEER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        arena = SharedArena()
        addresses = [arena.address(), (host_identity(), peer.stdout.readline().strip())]
        works = arena.connect(0, addresses, range(len(addresses))) and arena.posted(0) == [_NUMBER]
    found = "memory of another process was read" if works else "/proc/PID/fd of another process cannot be opened"
    remedy = f"{slower} Check how /proc is mounted (hidepid), and whether a sandbox hides processes."
    yield _row("shared memory", found, not works, remedy)


def _pinned_memory(path: Path) -> Iterator[Row]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = Path("/proc/self/status").read_text().split()
    lifted = bool(int(fields[fields.index("CapEff:") + 1], 16) >> _IPC_LOCK & 1)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} kB"
    found = f"ulimit -l: {limit}{', lifted by CAP_IPC_LOCK' * lifted}"
    remedy = "Only offloading from a GPU needs it. Run ulimit -l unlimited, or docker run --ulimit memlock=-1."
    yield _row("pinned memory", found, limit != "unlimited" and not lifted, remedy)


def _descriptors(path: Path) -> Iterator[Row]:
    from lt_zero.common.descriptors import limits

    soft, raised = limits()
    found = f"ulimit -n: {soft}" + (f", which a run raises to {raised}" if raised != soft else "")
    remedy = "A run of n ranks takes about n of them for each process group. Run ulimit -n 65536 as root, or raise"
    remedy += " LimitNOFILE of the service that starts the job."
    yield _row("file descriptors", found, raised != resource.RLIM_INFINITY and raised < _DESCRIPTORS, remedy)


def _gpus(path: Path) -> Iterator[Row]:
    import torch

    from lt_zero.common import accelerator
    from lt_zero.common.units import format_bytes

    if not accelerator.is_available():
        found = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        remedy = "Training uses the CPU. A GPU needs its driver and a torch with CUDA."
        yield Row("GPUs", found, "missing", remedy)
        return
    devices = [accelerator.properties(index) for index in range(accelerator.count())]
    versions = [(d.major, d.minor) if hasattr(d, "major") else None for d in devices]  # CUDA's alone
    kinds = Counter(
        f"{d.name}, {format_bytes(d.total_memory)}" + (f", compute capability {v[0]}.{v[1]}" if v else "")
        for d, v in zip(devices, versions, strict=True)
    )
    found = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    remedy = "The native kernels need CUDA and compute capability 8.0 (V100 and T4 have less): torch's operations run."
    yield _row("GPUs", found, any(v is None or v < (8, 0) for v in versions), remedy)


def _allocator(path: Path) -> Iterator[Row]:
    from lt_zero.common import accelerator

    if accelerator.is_available():
        found = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        remedy = "Near the limit of memory set PYTORCH_ALLOC_CONF=expandable_segments:True, which fragments it less."
        yield _row("GPU allocator", found or "as torch sets it", "expandable_segments:True" not in found, remedy)


def _backends(path: Path) -> Iterator[Row]:
    from lt_zero.core.comm.process_groups import nccl_version, try_gloo

    version = nccl_version()
    lacking = Row("NCCL", "torch is built without it", "missing", "Only GPUs need it.")
    yield Row("NCCL", version) if version else lacking
    try:
        try_gloo()
        yield Row("gloo", "a process group was opened", required=True)
    except RuntimeError as error:
        remedy = "Set GLOO_SOCKET_IFNAME to a network interface (on a single machine: lo), or install torch with gloo."
        yield Row("gloo", str(error), "missing", remedy, True)


_REQUIRED = (_versions, _backends)  # their rows decide whether training on the CPU works
PROBES = (
    *_REQUIRED,
    _launcher,
    _compilers,
    _kernels,
    _memory,
    _disks,
    _direct,
    _shared_memory,
    _pinned_memory,
    _descriptors,
    _gpus,
    _allocator,
)
