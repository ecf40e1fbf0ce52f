"""Loads the native kernels as ctypes libraries, built on first use.

If they are unavailable, ``cpu()`` and ``cuda()`` return None and the torch references run, with equal results (the last
bits of sums aside) and one warning per process. ``LT_ZERO_NATIVE=0`` selects the references without a warning;
``LT_ZERO_ISA=avx2`` selects the instruction set of the CPU kernels, which is the best one of the machine otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import logging
import os
import shutil
import tempfile
import threading
import warnings
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from lt_zero.common.output import printable, say
from lt_zero.common.progress_bar import local_rank
from lt_zero.common.users_code import warn
from lt_zero.common.variables import switched
from lt_zero.kernels.compiler import CSRC, SHIPPED, BuildError, Built, Recipe, build, cached, load, recipe_of
from lt_zero.kernels.header import FUNCTIONS, STRUCTS
from lt_zero.kernels.own_folder import OwnFolder, UntrustedError

log = logging.getLogger("lt_zero")

# Names of the same in ``lt_zero.ops`` and the documentation, where they differ.
_PUBLIC = {
    "encode_blocks": "quantize",
    "decode_blocks": "dequantize_sum",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "huffman_size": "huffman_decode",
}
_TOO_OLD = "the CUDA kernels need 8.0 or more"  # of the compute capability: V100 has 7.0, T4 has 7.5
# Functions of a library that are no operations.
_SERVICE = ("abi", "error", "isa", "pool", "use_isa", "scratch", "topk_scratch")


def operations(kind: str) -> list[str]:
    """The operations that have a kernel for ``"cpu"`` or ``"cuda"``, by their names in the header."""
    names = [name.removeprefix(f"lt_{kind}_") for name in FUNCTIONS if name.startswith(f"lt_{kind}_")]
    return [name for name in names if name not in _SERVICE]


def names(kind: str) -> list[str]:
    """The operations that have a kernel for ``"cpu"`` or ``"cuda"``, as users know them."""
    return list(dict.fromkeys(_PUBLIC.get(name, name) for name in operations(kind)))


def declare(library: ctypes.CDLL, kind: str) -> ctypes.CDLL:
    """Set the argument and result types of all functions of a library, and return it.

    Raises:
        AttributeError: a function is missing.
    """
    for name, (result, arguments) in FUNCTIONS.items():
        if name.startswith(f"lt_{kind}_"):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def check(library: ctypes.CDLL, code: int) -> None:
    """Check the return code of a kernel of ``library``.

    Raises:
        RuntimeError: the code is not 0.
    """
    if code != 0:
        kind = "cpu" if hasattr(library, "lt_cpu_error") else "cuda"
        text = getattr(library, f"lt_{kind}_error")(code).decode()
        raise RuntimeError(f"A native {kind} kernel failed: {text} (code {code}). LT_ZERO_NATIVE=0 runs without them.")


def _ready(library: ctypes.CDLL, kind: str) -> ctypes.CDLL:
    """Declare the functions of a library, try those of CUDA if there is a device, and return it.

    Raises:
        AttributeError: a function is missing.
        BuildError: a kernel fails.
    """
    declare(library, kind)
    if kind == "cuda" and torch.cuda.is_available():
        try_kernel(library)
    return library


def try_kernel(library: ctypes.CDLL) -> None:
    """Run a CUDA kernel on the current device: with a driver that is too old, libraries load and kernels fail.

    Raises:
        BuildError: it fails.
    """
    values = torch.zeros(2, device=torch.device("cuda", torch.cuda.current_device()))
    one, (dst, src) = (c_int64 * 1)(1), ((c_void_p * 1)(value.data_ptr()) for value in values)
    pairs = STRUCTS["lt_pairs"](count=1, numel=one, dst=dst, src=src, dst_dtype=0, src_dtype=0, factor=1.0, scale=None)
    code = library.lt_cuda_cast_scale(ctypes.byref(pairs), torch.cuda.current_stream().cuda_stream)
    if code != 0:
        text = library.lt_cuda_error(code).decode()
        raise BuildError(
            f"a kernel fails on {values.device}: {text} (code {code}). Is the driver older than nvcc's CUDA?"
        )
    torch.cuda.synchronize()


# ---- loading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """The implementation of operations on a kind of device (``"cpu"``, ``"cuda"``).

    Attributes:
        available: whether native kernels run; otherwise the torch references do.
        path: the library.
        why: the origin of the library, or the reason why there is none.
        isa: ``"amx"``, ``"avx512"``, ``"avx2"``, ``"neon"``, ``"portable"``, ``"cuda"``; empty if not available.
        seconds: the time of compiling in this process; None if nothing was compiled.
        log: the file with the compiler's output, if compiling failed.
    """

    kind: str
    available: bool
    path: Path | None
    why: str
    isa: str = ""
    seconds: float | None = None
    log: Path | None = None


def cache_dir() -> Path:
    """``LT_ZERO_CACHE``, else ``lt_zero`` in ``XDG_CACHE_HOME`` or ``~/.cache``. It need not exist."""
    if chosen := os.environ.get("LT_ZERO_CACHE", "").strip():
        return Path(os.path.expanduser(chosen)).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # a user without a home directory
        return Path(tempfile.gettempdir()) / f"lt_zero-{os.geteuid()}"
    return Path(base) / "lt_zero"


def trusted(cache: Path) -> Path:
    """``cache``, unless other users could have put a library there: then a private folder, with a warning.

    The default folder was made by lt_zero, which closes it to the group: under the umask 002 of many systems, earlier
    versions left it open.

    Raises:
        OSError: no private folder can be created.
    """
    try:
        with OwnFolder(cache, close=not os.environ.get("LT_ZERO_CACHE", "").strip()):
            return cache
    except UntrustedError as error:
        private = _private(cache)
        remedy = "set LT_ZERO_CACHE to a folder that only you can write to"
        text = "nothing is loaded from the cache of kernels: %s; kernels are compiled into %s; %s"
        log.log(_level(), text, error, private, remedy)
        return private
    except OSError:
        return cache  # it does not exist, or nothing in it can be read


def writable(cache: Path) -> Path:
    """``cache`` if it is writable, else a private folder of this user in the temporary directory, with a warning.

    Raises:
        OSError: neither can be created.
    """
    try:
        _try_to_write(cache)
        return cache
    except OSError as error:
        private = _private()
        log.log(_level(), "the cache %s is not writable (%s); kernels are compiled into %s", cache, error, private)
        return private


def _private(cache: Path | None = None) -> Path:
    """A folder that this user's processes share, in ``cache`` or else in the temporary directory; else a process's own.

    In ``cache``, a volume or a team's folder, it outlives a container, and all nodes have it.
    """
    temporary = Path(tempfile.gettempdir())
    for around in (cache, temporary) if cache is not None else (temporary,):
        shared = around / f"lt_zero-{os.geteuid()}"
        with contextlib.suppress(OSError):  # another user may have taken the name
            shared.mkdir(mode=0o700, exist_ok=True)
            # In ``cache``, others might rename what was looked at by its name.
            if _try_to_write(shared) or around == temporary:
                return shared
    own, process = tempfile.mkdtemp(prefix="lt_zero-"), os.getpid()
    atexit.register(lambda: shutil.rmtree(own, ignore_errors=True) if os.getpid() == process else None)
    return Path(own)


def _try_to_write(path: Path) -> bool:
    """Try to write to a folder. True if it stays open while it is used, so that its name does not matter any more."""
    with OwnFolder(path, create=True) as folder, tempfile.TemporaryFile(dir=folder.inside):
        return folder.inside != folder.path


def _level() -> int:
    return logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO


def _unwanted(kind: str, force: bool) -> str:
    """The reason why native kernels are disabled; empty if they are not."""
    if not switched("LT_ZERO_NATIVE", True):
        return f"LT_ZERO_NATIVE={os.environ['LT_ZERO_NATIVE'].strip()}"
    if kind == "cuda" and not force:
        if torch.version.cuda is None:
            return "torch is built without CUDA"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
    return ""


class Loader:
    """Builds and loads the libraries of one folder of sources, each once per process.

    Args:
        csrc: the folder with ``lt_zero.h``, ``cpu`` and ``cuda``.
    """

    def __init__(self, csrc: Path = CSRC) -> None:
        self._csrc = csrc
        self._shipped = csrc / SHIPPED
        self._known: dict[str, tuple[ctypes.CDLL | None, Status]] = {}
        self._cache: Path | None = None  # chosen, and warned about, once
        self._renew_lock()
        # Another thread may hold the lock during a fork.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def get(self, kind: str, force: bool = False) -> ctypes.CDLL | None:
        """The library, or None if the references run. ``force``: build it even without a device."""
        known = self._known.get(kind)
        if known is None or (force and known[0] is None):
            problem = ""
            with self._lock:
                known = self._known.get(kind)
                if known is None or (force and known[0] is None):
                    known, problem = self._load(kind, force)
                    self._known[kind] = known
            # Warn outside the lock: a filter may turn the warning into an error.
            if problem:
                _warn(problem)
        return known[0]

    def status(self, kind: str) -> Status:
        """The implementation that runs, and why; loads or builds the library first."""
        self.get(kind)
        return self._known[kind][1]

    def _load(self, kind: str, force: bool) -> tuple[tuple[ctypes.CDLL | None, Status], str]:
        """The library with its status, and a warning or ""."""
        if why := _unwanted(kind, force):
            return (None, Status(kind, False, None, why)), ""
        try:
            built, library = self._obtain(kind)
        # Whatever is wrong with a library, training goes on with the references.
        except (BuildError, OSError, AttributeError) as error:
            status = Status(kind, False, None, str(error), log=getattr(error, "log", None))
            return (None, status), _explain(status)
        isa = os.environ.get("LT_ZERO_ISA", "").strip().lower()
        if kind == "cpu" and isa and library.lt_cpu_use_isa(isa.encode()) != 0:
            status = Status(kind, False, None, f"LT_ZERO_ISA={isa} is no instruction set of this CPU's.")
            return (None, status), _explain(status)
        why = "from the cache" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
        if built.path.parent == self._shipped:
            why = "shipped with the package"
        isa = library.lt_cpu_isa().decode() if kind == "cpu" else "cuda"
        return (library, Status(kind, True, built.path, why, isa, built.seconds)), ""

    def _obtain(self, kind: str) -> tuple[Built, ctypes.CDLL]:
        """A library that can be used: that of the package, else of the cache, else a new one."""
        recipes = self._recipes(kind)
        for recipe in recipes:
            # A library of the same sources is as good whichever compiler made it.
            if path := cached(dataclasses.replace(recipe, compiler=None), self._shipped):
                try:
                    return Built(path), _ready(load(path, kind), kind)
                # The system, or the driver, is older than those of the release: this machine's compiler may fit it.
                except (BuildError, AttributeError) as error:
                    log.info("%s", error)
        built, library = self._of_machine(kind, recipes)
        return built, _ready(library, kind)

    def _of_machine(self, kind: str, recipes: list[Recipe]) -> tuple[Built, ctypes.CDLL]:
        """A library of the cache, which is built if it is not there."""
        reject = None
        if self._cache is None:
            self._cache = trusted(cache_dir())
        cache = self._cache
        for recipe in recipes:
            if path := cached(recipe, cache):
                try:
                    return Built(path), load(path, kind)
                except BuildError as error:  # built on another system, newer or sharing the cache: rebuilt once
                    log.info("%s", error)
                    reject = path
        try:
            folder = writable(cache)
            _announce(recipes[-1], folder)
            built = build(recipes[-1], folder, reject=reject)
            return built, load(built.path, kind)
        except BuildError:
            # The compiler is broken, but another one may have built the kernels, as in a container image.
            if reject is None and (path := cached(dataclasses.replace(recipes[-1], compiler=None), cache)):
                return Built(path), load(path, kind)
            raise

    def _recipes(self, kind: str) -> list[Recipe]:
        """The recipes of usable libraries; the last one is built if none is cached."""
        recipes = [recipe_of(kind, self._csrc)]  # on CUDA for all devices, by `lt-zero ops build --cuda`
        if kind == "cuda" and torch.cuda.is_available():
            present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
            if min(present) < (8, 0):
                major, minor = min(present)
                raise BuildError(f"a device has compute capability {major}.{minor}; {_TOO_OLD}.")
            recipes.append(recipe_of(kind, self._csrc, [f"sm_{major}{minor}" for major, minor in present]))
        return recipes


def _announce(recipe: Recipe, folder: Path) -> None:
    """Say on local rank 0 what the first operation waits for, if there is a compiler.

    The references cannot run meanwhile: their norms are sums in another order, whose last bits differ.
    """
    if recipe.compiler is None or local_rank() != 0:
        return
    takes = {"cpu": "half a minute on two idle cores", "cuda": "some minutes"}[recipe.kind]
    say(
        f"lt_zero compiles its {recipe.kind} kernels, once for this machine, into {printable(str(folder))}. This takes "
        f"{takes}, for which the first step waits; `lt-zero ops build` does it beforehand.",
        stderr=True,
    )


def _explain(status: Status) -> str:
    return (
        f"lt_zero's native {status.kind} kernels are not available; torch's operations run instead, with equal "
        f"results, but slower.\n  Reason: {status.why}\n  Remedy: {remedy(status)} LT_ZERO_NATIVE=0 selects torch's "
        "operations without this warning." + (f"\n  Output of the compiler: {status.log}" if status.log else "")
    )


def remedy(status: Status) -> str:
    """The remedy for missing native kernels, in a sentence."""
    if status.why.startswith("LT_ZERO_NATIVE="):
        return "unset LT_ZERO_NATIVE."
    if status.why.startswith("LT_ZERO_ISA="):
        return "unset LT_ZERO_ISA, or set it to amx, avx512, avx2, neon or portable, whichever this CPU has."
    if _TOO_OLD in status.why:
        return "none on this device: they are built for the A100's generation (Ampere, sm_80) and later ones."
    toolkit = "the CUDA toolkit (or pip's nvidia-cuda-nvcc, nvidia-cuda-runtime and nvidia-cuda-cccl)"
    variable, compiler = ("CXX", "a C++ compiler") if status.kind == "cpu" else ("NVCC", toolkit)
    return (
        f"install {compiler} or set {variable} to one; set LT_ZERO_CACHE to a folder that is writable and not mounted "
        "noexec; or run `lt-zero ops build` beforehand."
    )


def _warn(problem: str) -> None:
    if _level() == logging.WARNING:
        warn(problem)
    else:
        log.info("%s", problem)


_loader = Loader()


def cpu() -> ctypes.CDLL | None:
    """The CPU kernels, built on first use; None if the references run. Thread-safe."""
    return _loader.get("cpu")


def cuda(force: bool = False) -> ctypes.CDLL | None:
    """The CUDA kernels, built on first use; None if the references run. Thread-safe.

    Args:
        force: build them even if torch sees no device.
    """
    return _loader.get("cuda", force)


def status(kind: str) -> Status:
    """The implementation of operations on ``"cpu"`` or ``"cuda"``, and why it runs.

    Raises:
        ValueError: ``kind`` is neither.
    """
    if kind not in ("cpu", "cuda"):
        raise ValueError(f'kind is {kind!r}; it must be "cpu" or "cuda".')
    return _loader.status(kind)


def missing(kind: str) -> str:
    """A message on missing native kernels for ``kind`` ("cpu", "cuda", ...), with reason and remedy; "" if none is.

    Loads or builds the library, without the warning that the references run.
    """
    if kind not in ("cpu", "cuda"):
        return f"There are kernels for cpu and cuda, none for {kind}."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = status(kind)
    if found.available:
        return ""
    output = f" Output of the compiler: {found.log}." if found.log else ""
    return f"No {kind} kernel for {', '.join(names(kind))}: {found.why.rstrip('.')}.{output} Remedy: {remedy(found)}"
