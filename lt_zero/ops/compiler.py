"""Compiles the native kernels on first use and keeps them in the user's cache.

Note [The cache]
    One file per library: ``<tag>-<sources>-<compiler>-<content>.so``. The second part is a hash of sources, headers,
    flags, ABI version and machine architecture; the third of the compiler and the targets; the last of the file
    itself, so that a library cut short by a crash is told without loading it (which could kill the process). The CPU
    model is not part of the key: the library holds code for every instruction set and chooses when it runs.
    Without a compiler, one of the same sources by any compiler will do (containers: ``lt-zero ops build``).

    A library appears under its name by one rename. Who builds holds a file lock (flock: the kernel releases it with
    the process), and who waited for it takes over the result, a failure too: eight ranks do not fail one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
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

log = logging.getLogger("lt_zero")

MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
ABI_VERSION = 1  # LT_ABI_VERSION in csrc/lt_zero.h
CSRC = Path(__file__).resolve().parent.parent / "csrc"

# The references' arithmetic: nothing is fused but where the sources say so. What two flags give up (errno, floating-
# point exceptions) nobody looks at, and it stands in the way of vector code.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# -O2: the vectors are written out, -O3 takes twice as long for the same speed.
CPU_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", *_ARITHMETIC)
CPU_FILE_FLAGS = {
    "avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mavx2"),
    "avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
}
CPU_ONLY_ON = {"avx512.cpp": "x86_64", "avx2.cpp": "x86_64", "neon.cpp": "aarch64"}
CPU_LINK = ("-shared", "-pthread", "-ldl")
CUDA_HOST = "-Wall,-Wextra,-fPIC,-fvisibility=hidden,-ffp-contract=off"
CUDA_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-t", "0", "-Xcompiler", CUDA_HOST)  # see csrc/cuda/runtime.cu
CUDA_LINK = ("-shared", "-cudart", "static")
CUDA_CODES = ("sm_80", "sm_90", "sm_100")  # what `lt-zero ops build --cuda` compiles for, and PTX of the last

TIME_LIMIT, MARGIN = {"cpu": 300.0, "cuda": 900.0}, 30.0  # seconds for the compiler; how much longer others wait
_VARIABLE, _SOURCES = {"cpu": "CXX", "cuda": "NVCC"}, {"cpu": "*.cpp", "cuda": "*.cu"}


class BuildError(RuntimeError):
    """A library cannot be built or loaded. ``log`` is the file with all that the compiler printed, if it ran."""

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(reason)
        self.log = log


@dataclass(frozen=True)
class Compiler:
    """A command, and what tells it from other compilers: its resolved path and what ``--version`` prints."""

    command: tuple[str, ...]
    identity: str


@dataclass(frozen=True)
class Recipe:
    """What a library is made of."""

    kind: str  # "cpu" or "cuda"
    csrc: Path  # the folder with the headers and a folder of sources named `kind`
    compiler: Compiler | None
    codes: tuple[str, ...] = ()  # CUDA targets in nvcc's words: sm_90, compute_90 for PTX
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
        """All of the library's name but the hash of its content."""
        return f"{self.stem()}-{hashlib.sha256(repr((compiler.identity, self.codes)).encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Built:
    """A library in the cache, and the seconds it took to build; None if it was there."""

    path: Path
    seconds: float | None = None


def find_compiler(kind: str) -> Compiler:
    """The compiler for ``kind``: ``CXX``, else c++, g++ or clang++; ``NVCC``, else ``CUDA_HOME``'s nvcc or nvcc.

    Raises:
        BuildError: there is none, or it does not answer ``--version``.
    """
    chosen = os.environ.get(_VARIABLE[kind], "").strip()
    names = ["c++", "g++", "clang++"] if kind == "cpu" else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    if kind == "cuda" and (home := os.environ.get("CUDA_HOME")):
        names.insert(0, os.path.join(home, "bin", "nvcc"))
    for name in [chosen] if chosen else names:
        # A path may hold spaces, and CXX may be a command such as "ccache g++".
        words = [name] if shutil.which(name) else name.split()
        if path := shutil.which(words[0]):
            # Called as found: compilers behind links (ccache's) look at the name that they are called by.
            version = _ask(path, *words[1:], "--version")
            return Compiler((path, *words[1:]), "\n".join([os.path.realpath(path), *words[1:], version]))
    missing = f"{_VARIABLE[kind]}={chosen!r} names no program" if chosen else f"there is none of {', '.join(names)}"
    raise BuildError(f"no {'C++' if kind == 'cpu' else 'CUDA'} compiler: {missing}.")


def recipe_of(kind: str, csrc: Path = CSRC, arches: Sequence[str] | None = None) -> Recipe:
    """The recipe of the kernels for ``kind``; on CUDA for ``arches`` (``["sm_90"]``), or all that are supported.

    Raises:
        BuildError: nvcc does not tell its targets.
    """
    compiler = None
    with contextlib.suppress(BuildError, OSError):  # told by build(), if something has to be built
        compiler = find_compiler(kind)
    if kind == "cpu":
        return Recipe(kind, csrc, compiler)
    wanted = tuple(sorted(set(arches))) if arches is not None else CUDA_CODES
    tag = "cuda_" + ("_".join(wanted) if arches is not None else "all")
    if compiler is None:
        return Recipe(kind, csrc, None, wanted, tag)
    known = [word for word in _ask(*compiler.command, "--list-gpu-code").split() if word.startswith("sm_")]
    if not known:
        raise BuildError(f"{shlex.join(compiler.command)} --list-gpu-code printed no targets: is it nvcc?")
    codes = [code for code in wanted if code in known]
    if arches is None or len(codes) < len(wanted):  # PTX, which the driver compiles for devices newer than nvcc
        newest = max(codes or known, key=lambda code: int(code.removeprefix("sm_").rstrip("af")))
        codes.append(newest.replace("sm_", "compute_"))
    return Recipe(kind, csrc, compiler, tuple(codes), tag)


def cached(recipe: Recipe, cache: Path) -> Path | None:
    """The library of ``recipe`` in the folder ``cache``, if it is there and whole."""
    key = recipe.key(recipe.compiler) if recipe.compiler else recipe.stem()
    for path in sorted(cache.glob(f"{key}-*.so")):
        with contextlib.suppress(OSError):  # removed by a process that builds anew
            if path.stem.rsplit("-", 1)[1] == _content(path):
                return path
    return None


def load(path: Path, kind: str) -> ctypes.CDLL:
    """Load a library and check its version.

    Raises:
        BuildError: it cannot be loaded, or speaks another version of the ABI.
    """
    try:
        library = ctypes.CDLL(str(path))
        version = getattr(library, f"lt_{kind}_abi")()
    except (OSError, AttributeError) as error:
        raise BuildError(f"the library cannot be loaded: {error}.") from error
    if version != ABI_VERSION:
        raise BuildError(f"{path} has ABI version {version}, not {ABI_VERSION}.")
    return library


def build(recipe: Recipe, cache: Path, *, force: bool = False, reject: Path | None = None) -> Built:
    """The library of ``recipe`` in the folder ``cache``, compiled if it is not there. One process at a time compiles.

    Args:
        recipe: what to build.
        cache: is made if it does not exist.
        force: compile even if it is there.
        reject: a library in the cache that cannot be loaded; it is removed.

    Raises:
        BuildError: no compiler, an error of the compiler, no space, no right to write, or a time limit.
    """
    if not recipe.sources():
        raise BuildError(f"{str(recipe.csrc / recipe.kind)!r} has no sources ({_SOURCES[recipe.kind]}).")
    try:
        compiler = recipe.compiler or find_compiler(recipe.kind)
        key = recipe.key(compiler)
        record = cache / f"{key}.log"
        cache.mkdir(parents=True, exist_ok=True)
        if os.statvfs(cache).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise BuildError(f"{str(cache)!r} is mounted noexec: no library can be loaded from there.")
        before = _stamp(record)
        with _locked(cache / f"{key}.lock", TIME_LIMIT[recipe.kind] + MARGIN):
            if reject is not None and reject.parent == cache:
                reject.unlink(missing_ok=True)
            if not force and (path := cached(recipe, cache)):
                return Built(path)
            if not force and _stamp(record) != before:  # somebody built while this process waited, in vain
                raise BuildError(record.read_text(errors="replace").rpartition("\nFailed: ")[2].strip(), record)
            start = time.monotonic()
            path = _compile(recipe, compiler, cache, key)
            for other in {*cache.glob(f"{key}-*.so")} - {path}:  # cut short, or replaced; who has it open keeps it
                other.unlink(missing_ok=True)
            return Built(path, time.monotonic() - start)
    except (OSError, NotImplementedError) as error:  # the latter from file systems without locks
        raise BuildError(f"the cache {str(cache)!r} cannot be used: {error}.") from error


@contextlib.contextmanager
def _locked(path: Path, limit: float) -> Iterator[None]:
    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        what = f"Waiting ({limit:.0f} s at most) for {_holder(path)}, which compiles lt_zero's kernels"
        log.info("%s: %s", what, path)
        try:
            with progress_bar(what):
                lock.acquire(timeout=limit)
        except Timeout:
            raise BuildError(f"{_holder(path)} has held {str(path)!r} for {limit:.0f} s; end it.") from None
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """Who holds the lock on a file, as far as this machine's kernel tells."""
    with contextlib.suppress(OSError, ValueError):
        state = path.stat()
        place = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
            if place in words and words[1] == "FLOCK" and int(words[4]) > 0:
                return f"process {words[4]}"
    return "another process"


def _commands(recipe: Recipe, compiler: Compiler, folder: Path) -> list[list[Job]]:
    """Two steps: all sources, then the library ``folder``/linked."""
    codes = [f"-gencode=arch={code.replace('sm_', 'compute_')},code={code}" for code in recipe.codes]
    flags, link = (CPU_FLAGS, CPU_LINK) if recipe.kind == "cpu" else ((*CUDA_FLAGS, *codes), (*CUDA_LINK, *codes))
    jobs = []
    for source in recipe.sources():
        made = folder / f"{source.name}.o"
        own = (*CPU_FILE_FLAGS.get(source.name, ()), f"-I{recipe.csrc}", "-c", str(source), "-o", str(made))
        jobs.append(Job((*compiler.command, *flags, *own), made))
    objects, linked = [str(job.makes) for job in jobs], folder / "linked"
    return [jobs, [Job((*compiler.command, *objects, *link, "-o", str(linked)), linked)]]


def _compile(recipe: Recipe, compiler: Compiler, cache: Path, key: str) -> Path:
    """Compile, link, try the library, and give it its name."""
    limit, record, temporary = TIME_LIMIT[recipe.kind], cache / f"{key}.log", cache / f"{key}.{os.getpid()}.tmp"
    with tempfile.TemporaryDirectory(prefix="lt_zero-") as folder:
        steps = _commands(recipe, compiler, Path(folder))
        deadline, reason = time.monotonic() + limit, ""
        try:
            with progress_bar(f"Compiling lt_zero's {recipe.kind} kernels", sum(map(len, steps))) as work:
                for step in steps:
                    run(step, deadline - time.monotonic(), work.advance)
                    # Of those that wrote nothing, first those that failed: the others were stopped for that.
                    if failed := [job for job in step if not (job.code == 0 and job.makes and job.makes.exists())]:
                        worst = min(failed, key=lambda job: (job.code is None, job.code == 0))
                        raise BuildError(f"{shlex.quote(worst.command[0])} {worst.trouble(limit)}", record)
            shutil.copyfile(str(steps[-1][0].makes), temporary)
            load(temporary, recipe.kind)
            return temporary.replace(cache / f"{key}-{_content(temporary)}.so")
        except (BuildError, OSError) as error:
            reason = str(error)
            raise BuildError(reason, record) from error
        finally:
            text = "".join(f"$ {shlex.join(job.command)}\n{job.output}\n" for step in steps for job in step)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
                record.write_text(text + (f"\nFailed: {reason}\n" if reason else ""))


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


@dataclass
class Job:
    """A command, the file that it has to write, all that it printed, and its exit code (None: it was stopped)."""

    command: tuple[str, ...]
    makes: Path | None = None
    output: str = ""
    code: int | None = None

    def trouble(self, limit: float) -> str:
        """What went wrong, after the command's name in a sentence."""
        if self.code is None:
            return f"did not end within {limit:.0f} s"
        if self.code == 0:
            return f"wrote no {self.makes.name if self.makes else 'file'}: is it a compiler?"
        lines = [line.strip()[:300] for line in self.output.splitlines() if line.strip()]
        lines = [line for line in lines if "error" in line.lower()] or lines
        lines = lines[:3] or [f"nothing was printed (is {tempfile.gettempdir()} full?)"]
        return f"ended with code {self.code}: " + "\n    ".join(lines)


def run(jobs: Sequence[Job], limit: float, tick: Callable[[], object] = lambda: None) -> None:
    """Run commands side by side until all ended, one failed, or ``limit`` seconds are over; none is left behind.

    ``tick`` is called for each that ended.
    """
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a process that outlives the compiler would keep a pipe open.
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in jobs]
        progress_bar, running = list(zip(jobs, outputs, strict=True)), list[tuple[Job, subprocess.Popen[bytes]]]()
        try:
            while (progress_bar or running) and time.monotonic() < deadline and not any(job.code for job in jobs):
                while progress_bar and len(running) < max(4, os.cpu_count() or 1):
                    running.append((progress_bar[0][0], _start(*progress_bar[0])))
                    progress_bar.pop(0)
                for job, process in running:
                    job.code = process.poll()
                    if job.code is not None:
                        tick()
                running = [(job, process) for job, process in running if job.code is None]
                time.sleep(0.005)
        except OSError as error:  # no program for this machine
            progress_bar[0][0].code = 126
            progress_bar[0][1].write(str(error).encode())
        finally:
            for _, process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for job, output in zip(jobs, outputs, strict=True):
                output.seek(0)
                job.output = output.read().decode(errors="replace")


def _start(job: Job, output: IO[bytes]) -> subprocess.Popen[bytes]:
    env, nothing = {**os.environ, "LC_ALL": "C"}, subprocess.DEVNULL
    # In a session of its own: it can be ended with all of its processes.
    return subprocess.Popen(job.command, env=env, stdin=nothing, stdout=output, stderr=output, start_new_session=True)


def _ask(*command: str) -> str:
    """What a command that takes no time prints; BuildError if it fails."""
    run([job := Job(command)], 30.0)
    if job.code != 0:
        raise BuildError(f"{shlex.join(command)} {job.trouble(30.0)}.")
    return job.output
