"""Compiles the native kernels on first use and keeps them in the user's cache.

Note [The kernel cache]
    One file per library: ``<tag>-<sources>-<compiler>-<content>.so``. The second part is a hash of sources, headers,
    flags, ABI version and machine architecture; the third of the compiler and the targets; the last of the file
    itself, so that a truncated library is detected without loading it (which could kill the process). The CPU model is
    not part of the key: the library contains code for every instruction set and dispatches at run time. Without a
    compiler, a library of the same sources by any compiler is used (containers: ``lt-zero ops build``). A wheel for one
    platform has such a library beside the sources, and it is looked for before the cache.

    A library is published by a rename. The building process holds a file lock (flock: the kernel releases it with the
    process). Processes that waited for the lock take over its result, also a failure: eight ranks do not fail one by
    one.

    Nothing is loaded from a folder, or a file in it, that another user could have written: ``OwnFolder``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from lt_zero.common.progress_bar import progress_bar
from lt_zero.kernels.header import CONSTANTS, HEADER
from lt_zero.kernels.own_folder import OwnFolder

log = logging.getLogger("lt_zero")

MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
ABI_VERSION = CONSTANTS["LT_ABI_VERSION"]
CSRC = HEADER.parent
SHIPPED = "built"  # the folder beside the sources that a wheel for one platform has, with libraries of them

# As in the references, multiply and add are fused only where the sources say so. Nothing reads errno or floating-point
# exceptions, which would prevent vectorization.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# The sources are vectorized by hand: -O3 compiles twice as long for the same speed.
CPU_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", *_ARITHMETIC)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
CPU_FILE_FLAGS = {"amx.cpp": _AVX512, "avx512.cpp": _AVX512, "avx2.cpp": _AVX2}
CPU_ONLY_ON = {"amx.cpp": "x86_64", "avx512.cpp": "x86_64", "avx2.cpp": "x86_64", "neon.cpp": "aarch64"}
CPU_LINK = ("-shared", "-pthread", "-ldl")
CUDA_HOST = "-Wall,-Wextra,-fPIC,-fvisibility=hidden,-ffp-contract=off"
CUDA_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-t", "0", "-Xcompiler", CUDA_HOST)  # see csrc/cuda/runtime.cu
CUDA_LINK = ("-shared", "-cudart", "static")
CUDA_CODES = ("sm_80", "sm_90", "sm_100")  # targets of `lt-zero ops build --cuda`, with PTX of the last

TIME_LIMIT, MARGIN = {"cpu": 300.0, "cuda": 900.0}, 30.0  # seconds for the compiler; how much longer others wait
_VARIABLE, _SOURCES = {"cpu": "CXX", "cuda": "NVCC"}, {"cpu": "*.cpp", "cuda": "*.cu"}


class BuildError(RuntimeError):
    """A library cannot be built or loaded. ``log`` is the file with the compiler's output, if it ran."""

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(reason)
        self.log = log


@dataclass(frozen=True)
class Compiler:
    """A compiler's command, and its identity: the resolved path with the output of ``--version``."""

    command: tuple[str, ...]
    identity: str


@dataclass(frozen=True)
class Recipe:
    """The inputs of a library's build."""

    kind: str  # "cpu" or "cuda"
    csrc: Path  # the folder with the headers and a folder of sources named `kind`
    compiler: Compiler | None
    codes: tuple[str, ...] = ()  # nvcc's names of CUDA targets: sm_90, compute_90 for PTX
    tag: str = "cpu"  # the first part of the library's name

    def sources(self) -> list[Path]:
        """The files to compile on this machine."""
        files = sorted((self.csrc / self.kind).glob(_SOURCES[self.kind]))
        return [f for f in files if CPU_ONLY_ON.get(f.name, MACHINE) == MACHINE]

    def stem(self) -> str:
        """The parts of the library's name that do not depend on the compiler."""
        key = hashlib.sha256()
        flags = (CPU_FLAGS, CPU_FILE_FLAGS, CPU_LINK) if self.kind == "cpu" else (CUDA_FLAGS, CUDA_LINK)
        key.update(repr((flags, ABI_VERSION, platform.system(), MACHINE)).encode())
        for file in sorted([*self.csrc.glob("*.h"), *(self.csrc / self.kind).glob("*.*")]):
            if file.suffix in (".h", ".cuh", ".cpp", ".cu"):
                key.update(f"\0{file.relative_to(self.csrc)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
        return f"{self.tag}-{key.hexdigest()[:16]}"

    def key(self, compiler: Compiler) -> str:
        """The library's name without the hash of its content."""
        return f"{self.stem()}-{hashlib.sha256(repr((compiler.identity, self.codes)).encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Built:
    """A library in the cache, and the seconds it took to build; None if it was cached."""

    path: Path
    seconds: float | None = None


def find_compiler(kind: str) -> Compiler:
    """The compiler for ``kind``.

    For ``"cpu"`` ``CXX``, else c++, g++ or clang++. For ``"cuda"`` ``NVCC``, else the nvcc of ``CUDA_HOME``, of
    ``PATH``, of /usr/local/cuda, or of the Python package nvidia-cuda-nvcc.

    Raises:
        BuildError: there is none, or its ``--version`` fails.
    """
    chosen = os.environ.get(_VARIABLE[kind], "").strip()
    names = ["c++", "g++", "clang++"] if kind == "cpu" else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    if kind == "cuda" and (home := os.environ.get("CUDA_HOME")):
        names.insert(0, os.path.join(home, "bin", "nvcc"))
    # A path may contain spaces, and CXX may be a command such as "ccache g++".
    commands = [[name] if shutil.which(name) else name.split() for name in ([chosen] if chosen else names)]
    if kind == "cuda" and not chosen:
        commands += _packaged_nvccs()
    for command in commands:
        if path := shutil.which(command[0]):
            # The link is not resolved: ccache dispatches on the name that it is called by.
            version = _output(path, *command[1:], "--version")
            return Compiler((path, *command[1:]), "\n".join([os.path.realpath(path), *command[1:], version]))
    missing = f"{_VARIABLE[kind]}={chosen!r} is not a program" if chosen else f"none of {', '.join(names)} is installed"
    raise BuildError(f"no {'C++' if kind == 'cpu' else 'CUDA'} compiler: {missing}.")


def _packaged_nvccs() -> list[list[str]]:
    """The commands of nvcc in Python packages, the newest CUDA first.

    nvidia-cuda-nvcc of CUDA 13 has nvcc, and with nvidia-cuda-runtime and nvidia-cuda-cccl all that it needs, in one
    folder, nvidia/cu13. The package for CUDA 12 has no nvcc.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    roots = [root for folder in folders for root in folder.glob("cu[1-9]*")]
    roots.sort(key=lambda root: root.name.removeprefix("cu").zfill(4), reverse=True)
    # Its profile names a folder lib64, which the packages do not make.
    return [[str(root / "bin" / "nvcc"), f"-L{root / 'lib'}"] for root in roots]


def recipe_of(kind: str, csrc: Path = CSRC, arches: Sequence[str] | None = None) -> Recipe:
    """The recipe of the kernels for ``kind``; on CUDA for ``arches`` (``["sm_90"]``), or all supported ones.

    Raises:
        BuildError: nvcc does not list its targets.
    """
    compiler = None
    with contextlib.suppress(BuildError, OSError):  # build() reports it, if a build is needed
        compiler = find_compiler(kind)
    if kind == "cpu":
        return Recipe(kind, csrc, compiler)
    wanted = tuple(sorted(set(arches))) if arches is not None else CUDA_CODES
    tag = "cuda_" + ("_".join(wanted) if arches is not None else "all")
    if compiler is None:
        return Recipe(kind, csrc, None, wanted, tag)
    known = [code for code in _output(*compiler.command, "--list-gpu-code").split() if code.startswith("sm_")]
    if not known:
        raise BuildError(f"{shlex.join(compiler.command)} --list-gpu-code printed no targets: is it nvcc?")
    codes = [code for code in wanted if code in known]
    if arches is None or len(codes) < len(wanted):  # PTX, which the driver compiles for devices newer than nvcc
        newest = max(codes or known, key=lambda code: int(code.removeprefix("sm_").rstrip("af")))
        codes.append(newest.replace("sm_", "compute_"))
    return Recipe(kind, csrc, compiler, tuple(codes), tag)


def cached(recipe: Recipe, cache: Path) -> Path | None:
    """The library of ``recipe`` in the folder ``cache``, if it exists, is intact, and may be loaded."""
    key = recipe.key(recipe.compiler) if recipe.compiler else recipe.stem()
    with contextlib.suppress(OSError), OwnFolder(cache) as folder:
        return _cached(key, folder)
    return None


def _cached(key: str, folder: OwnFolder) -> Path | None:
    for name in _libraries(key, folder):
        with contextlib.suppress(OSError):  # removed by a process that rebuilds, or written by another user
            if Path(name).stem.rsplit("-", 1)[1] == _content(folder, name):
                return folder.path / name
    return None


def _libraries(key: str, folder: OwnFolder) -> list[str]:
    return [name for name in folder.names() if name.startswith(f"{key}-") and name.endswith(".so")]


def load(path: Path, kind: str) -> ctypes.CDLL:
    """Load a library and check its version.

    Raises:
        BuildError: it cannot be loaded, another user could have written it, or it has another ABI version.
    """
    try:
        with OwnFolder(path.parent) as folder:
            return _load(folder, path.name, kind)
    except OSError as error:
        raise BuildError(f"the library cannot be loaded: {error}.") from error


def _load(folder: OwnFolder, name: str, kind: str) -> ctypes.CDLL:
    path = folder.path / name
    try:
        os.close(folder.open(name))
        library = ctypes.CDLL(str(folder.inside / name))
        version = getattr(library, f"lt_{kind}_abi")()
    except (OSError, AttributeError) as error:
        said = str(error).replace(str(folder.inside), str(folder.path))
        raise BuildError(f"the library cannot be loaded: {said}.") from error
    if version != ABI_VERSION:
        raise BuildError(f"{path} has ABI version {version}, not {ABI_VERSION}.")
    return library


def build(recipe: Recipe, cache: Path, *, force: bool = False, reject: Path | None = None) -> Built:
    """The library of ``recipe`` in the folder ``cache``, compiled if it is missing. One process at a time compiles.

    Args:
        recipe: the inputs of the build.
        cache: created if it does not exist.
        force: compile even if the library is cached.
        reject: a library in the cache that cannot be loaded; it is removed.

    Raises:
        BuildError: there is no compiler, it fails or exceeds the time limit, or the cache is full or not writable.
    """
    if not recipe.sources():
        raise BuildError(f"{str(recipe.csrc / recipe.kind)!r} has no sources ({_SOURCES[recipe.kind]}).")
    try:
        compiler = recipe.compiler or find_compiler(recipe.kind)
        with OwnFolder(cache, create=True) as folder:
            return _build(recipe, compiler, folder, force, reject)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        raise BuildError(f"the cache {str(cache)!r} cannot be used: {error}.") from error


def _build(recipe: Recipe, compiler: Compiler, folder: OwnFolder, force: bool, reject: Path | None) -> Built:
    key = recipe.key(compiler)
    record = folder.inside / f"{key}.log"
    if os.statvfs(folder.inside).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise BuildError(f"{str(folder.path)!r} is mounted noexec: no library can be loaded from there.")
    before = _stamp(record)
    with _locked(folder, f"{key}.lock", TIME_LIMIT[recipe.kind] + MARGIN):
        if reject is not None and reject.parent == folder.path:
            folder.remove(reject.name)
        if not force and (path := _cached(key, folder)):
            return Built(path)
        # Another process failed while this one waited for the lock.
        if not force and _stamp(record) != before:
            reason = record.read_text(errors="replace").rpartition("\nFailed: ")[2].strip()
            raise BuildError(reason, folder.path / record.name)
        start = time.monotonic()
        name = _compile(recipe, compiler, folder, key)
        for other in {*_libraries(key, folder)} - {name}:  # truncated or replaced; open ones stay usable
            folder.remove(other)
        return Built(folder.path / name, time.monotonic() - start)


@contextlib.contextmanager
def _locked(folder: OwnFolder, name: str, limit: float) -> Iterator[None]:
    path, shown = folder.inside / name, folder.path / name
    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        what = f"Waiting ({limit:.0f} s at most) for {_holder(path)}, which compiles lt_zero's kernels"
        log.info("%s: %s", what, shown)
        try:
            with progress_bar(what):
                lock.acquire(timeout=limit)
        except Timeout:
            raise BuildError(f"{_holder(path)} has held {str(shown)!r} for {limit:.0f} s. End that process.") from None
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """The process that holds the lock on a file, if the kernel knows it."""
    with contextlib.suppress(OSError, ValueError):
        state = path.stat()
        inode = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
            if inode in fields and fields[1] == "FLOCK" and int(fields[4]) > 0:
                return f"process {fields[4]}"
    return "another process"


def _commands(recipe: Recipe, compiler: Compiler, folder: Path) -> list[list[CompileJob]]:
    """The jobs of both steps: compile all sources, then link ``folder``/linked."""
    codes = [f"-gencode=arch={code.replace('sm_', 'compute_')},code={code}" for code in recipe.codes]
    flags, link = (CPU_FLAGS, CPU_LINK) if recipe.kind == "cpu" else ((*CUDA_FLAGS, *codes), (*CUDA_LINK, *codes))
    jobs = []
    for source in recipe.sources():
        output = folder / f"{source.name}.o"
        own = (*CPU_FILE_FLAGS.get(source.name, ()), f"-I{recipe.csrc}", "-c", str(source), "-o", str(output))
        jobs.append(CompileJob((*compiler.command, *flags, *own), output))
    objects, linked = [str(job.target) for job in jobs], folder / "linked"
    return [jobs, [CompileJob((*compiler.command, *objects, *link, "-o", str(linked)), linked)]]


def _compile(recipe: Recipe, compiler: Compiler, cache: OwnFolder, key: str) -> str:
    """Compile and link, load the library as a test, and publish it; returns its name."""
    limit, record = TIME_LIMIT[recipe.kind], cache.path / f"{key}.log"
    # A fresh name: the loader takes a name that was loaded before for the old library.
    temporary = f"{key}.{secrets.token_hex(4)}.tmp"
    with tempfile.TemporaryDirectory(prefix="lt_zero-") as folder:
        steps = _commands(recipe, compiler, Path(folder))
        deadline, reason = time.monotonic() + limit, ""
        try:
            with progress_bar(f"Compiling lt_zero's {recipe.kind} kernels", sum(map(len, steps))) as work:
                for step in steps:
                    run(step, deadline - time.monotonic(), work.advance)
                    # Report a job that failed before those that were stopped because of it.
                    if failed := [job for job in step if not (job.code == 0 and job.target and job.target.exists())]:
                        first = min(failed, key=lambda job: (job.code is None, job.code == 0))
                        raise BuildError(f"{shlex.quote(first.command[0])} {first.failure(limit)}", record)
            made = cache.inside / temporary
            shutil.copyfile(str(steps[-1][0].target), made)
            # Set the mode whatever the umask: a file that others can write to is not loaded.
            made.chmod(0o644)
            _load(cache, temporary, recipe.kind)
            name = f"{key}-{_content(cache, temporary)}.so"
            made.replace(cache.inside / name)
            return name
        except (BuildError, OSError) as error:
            reason = str(error)
            raise BuildError(reason, record) from error
        finally:
            text = "".join(f"$ {shlex.join(job.command)}\n{job.output}\n" for step in steps for job in step)
            with contextlib.suppress(OSError):
                cache.remove(temporary)
                (cache.inside / record.name).write_text(text + (f"\nFailed: {reason}\n" if reason else ""))


def _content(folder: OwnFolder, name: str) -> str:
    with open(folder.open(name), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


@dataclass
class CompileJob:
    """A command, the file that it must write, its output, and its exit code (None: it was stopped)."""

    command: tuple[str, ...]
    target: Path | None = None
    output: str = ""
    code: int | None = None

    def failure(self, limit: float) -> str:
        """The failure, as the predicate of a sentence about the command."""
        if self.code is None:
            return f"did not end within {limit:.0f} s"
        if self.code == 0:
            return f"wrote no {self.target.name if self.target else 'file'}: is it a compiler?"
        lines = [line.strip()[:300] for line in self.output.splitlines() if line.strip()]
        lines = [line for line in lines if "error" in line.lower()] or lines
        lines = lines[:3] or [f"nothing was printed (is {tempfile.gettempdir()} full?)"]
        return f"ended with code {self.code}: " + "\n    ".join(lines)


def run(jobs: Sequence[CompileJob], limit: float, tick: Callable[[], object] = lambda: None) -> None:
    """Run commands in parallel until all ended, one failed, or ``limit`` seconds have passed; then kill the rest.

    ``tick`` is called for each command that ended.
    """
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a process that outlives the compiler would keep a pipe open.
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in jobs]
        waiting, running = list(zip(jobs, outputs, strict=True)), list[tuple[CompileJob, subprocess.Popen[bytes]]]()
        try:
            while (waiting or running) and time.monotonic() < deadline and not any(job.code for job in jobs):
                while waiting and len(running) < max(4, os.cpu_count() or 1):
                    running.append((waiting[0][0], _start(*waiting[0])))
                    waiting.pop(0)
                for job, process in running:
                    job.code = process.poll()
                    if job.code is not None:
                        tick()
                running = [(job, process) for job, process in running if job.code is None]
                time.sleep(0.005)
        except OSError as error:  # the program cannot be executed
            waiting[0][0].code = 126
            waiting[0][1].write(str(error).encode())
        finally:
            for _, process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for job, output in zip(jobs, outputs, strict=True):
                output.seek(0)
                job.output = output.read().decode(errors="replace")


def _start(job: CompileJob, output: IO[bytes]) -> subprocess.Popen[bytes]:
    env, nothing = {**os.environ, "LC_ALL": "C"}, subprocess.DEVNULL
    # A session of its own, so that it can be killed with its child processes.
    return subprocess.Popen(job.command, env=env, stdin=nothing, stdout=output, stderr=output, start_new_session=True)


def _output(*command: str) -> str:
    """The output of a short command; BuildError if it fails."""
    run([job := CompileJob(command)], 30.0)
    if job.code != 0:
        raise BuildError(f"{shlex.join(command)} {job.failure(30.0)}.")
    return job.output
