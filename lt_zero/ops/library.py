"""Loads the native kernels as ctypes libraries, built on first use, with the declarations of csrc/lt_zero.h.

If they are unavailable, ``cpu()`` and ``cuda()`` return None and the torch references run, with bitwise equal results
and one warning per process. ``LT_ZERO_NATIVE=0`` selects the references without a warning; ``LT_ZERO_ISA=avx2`` selects
the instruction set of the CPU kernels, which is the best one of the machine otherwise.
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
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lt_zero.common.users_code import warn
from lt_zero.common.variables import switched
from lt_zero.ops.compiler import CSRC, BuildError, Built, Recipe, build, cached, load, recipe_of
from lt_zero.ops.own_folder import OwnFolder, UntrustedError

log = logging.getLogger("lt_zero")

# ---- csrc/lt_zero.h ------------------------------------------------------------------------------------------------

_SIZES, _POINTERS = POINTER(c_int64), POINTER(c_void_p)


def _doubles(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_double) for name in names]


class LtTensors(ctypes.Structure):
    """``lt_tensors``. Keeps the assigned arrays alive, but not the memory that their pointers refer to."""

    _fields_ = [
        ("count", c_int64),
        ("numel", _SIZES),
        *[(name, _POINTERS) for name in ("param", "grad", "state1", "state2", "out")],
        *[(name, c_int32) for name in ("grad_dtype", "state_dtype", "out_dtype", "maximize")],
        *[(name, c_void_p) for name in ("scale", "clip", "found_inf")],
    ]


class LtAdam(ctypes.Structure):
    """``lt_adam``."""

    _fields_ = [*_doubles("lr", "beta1", "beta2", "eps", "weight_decay", "step"), ("decoupled", c_int32)]


class LtLion(ctypes.Structure):
    """``lt_lion``."""

    _fields_ = _doubles("lr", "beta1", "beta2", "weight_decay")


class LtAdagrad(ctypes.Structure):
    """``lt_adagrad``."""

    _fields_ = _doubles("lr", "eps", "weight_decay")


class LtSgd(ctypes.Structure):
    """``lt_sgd``."""

    _fields_ = [
        *_doubles("lr", "momentum", "dampening", "weight_decay"),
        ("nesterov", c_int32),
        ("first", c_int32),
    ]


class LtLamb(ctypes.Structure):
    """``lt_lamb``."""

    _fields_ = _doubles("beta1", "beta2", "eps", "weight_decay")


class LtMixed(ctypes.Structure):
    """``lt_mixed``."""

    _fields_ = [("count", c_int64), ("numel", _SIZES), ("data", _POINTERS), ("dtype", POINTER(c_int32))]


class LtPairs(ctypes.Structure):
    """``lt_pairs``."""

    _fields_ = [
        ("count", c_int64),
        ("numel", _SIZES),
        ("dst", _POINTERS),
        ("src", _POINTERS),
        ("dst_dtype", c_int32),
        ("src_dtype", c_int32),
        ("factor", c_double),
        ("scale", c_void_p),
    ]


class LtBlocks(ctypes.Structure):
    """``lt_blocks``."""

    _fields_ = [("numel", c_int64), ("block", c_int64), ("bits", c_int32), ("dtype", c_int32)]


class LtRows(ctypes.Structure):
    """``lt_rows``."""

    _fields_ = [("data", c_void_p), *[(name, c_int64) for name in ("batch", "head", "row")]]


class LtLists(ctypes.Structure):
    """``lt_lists``."""

    _fields_ = [("begin", c_void_p), ("index", c_void_p)]


class LtAttention(ctypes.Structure):
    """``lt_attention``."""

    _fields_ = [
        *[(name, c_int64) for name in ("batch", "heads", "kv_heads", "length", "dim", "block", "layouts")],
        *[(name, LtLists) for name in ("rows", "columns")],
        *[(name, LtRows) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")],
        *[(name, c_void_p) for name in ("lse", "key_bias")],
        *_doubles("scale", "dropout"),
        ("seed", c_uint64),
        *[(name, c_int32) for name in ("dtype", "causal")],
    ]


# Arguments of each operation; a last one follows: the number of threads on the CPU, the stream on CUDA.
OPERATIONS: dict[str, list[Any]] = {
    "adam_step": [POINTER(LtTensors), POINTER(LtAdam)],
    "lion_step": [POINTER(LtTensors), POINTER(LtLion)],
    "adagrad_step": [POINTER(LtTensors), POINTER(LtAdagrad)],
    "sgd_step": [POINTER(LtTensors), POINTER(LtSgd)],
    "lamb_update": [POINTER(LtTensors), POINTER(LtLamb), c_void_p],
    "lamb_apply": [POINTER(LtTensors), POINTER(LtLamb), c_void_p],
    "norm_squared": [POINTER(LtMixed), c_void_p],
    "accumulate": [POINTER(LtPairs)],
    "cast_scale": [POINTER(LtPairs)],
    "encode_blocks": [POINTER(LtBlocks), c_void_p, c_void_p, c_void_p],
    "decode_blocks": [POINTER(LtBlocks), c_int64, _POINTERS, c_double, c_void_p],
    "select_topk": [c_void_p, c_int64, c_int64, c_void_p],
}
# Of the CPU only: results and arguments. What takes a number of threads has it last.
CPU_OPERATIONS: dict[str, tuple[Any, list[Any]]] = {
    "attention_forward": (c_int, [POINTER(LtAttention), c_int]),
    "attention_backward": (c_int, [POINTER(LtAttention), c_int]),
    "huffman_encode": (c_int, [c_void_p, c_int64, c_void_p, POINTER(c_int64)]),
    "huffman_size": (c_int64, [c_void_p, c_int64]),
    "huffman_decode": (c_int, [c_void_p, c_int64, c_void_p, c_int64]),
}
# Names of the same in ``lt_zero.ops`` and the documentation, where they differ.
_PUBLIC = {
    "encode_blocks": "quantize",
    "decode_blocks": "dequantize_sum",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "huffman_size": "huffman_decode",
}
_WITH_SCRATCH = ("lamb_update", "norm_squared", "select_topk")  # take scratch memory on CUDA


def names(kind: str) -> list[str]:
    """The operations that have a kernel for ``"cpu"`` or ``"cuda"``, as users know them."""
    native = [*OPERATIONS, *(CPU_OPERATIONS if kind == "cpu" else ())]
    return list(dict.fromkeys(_PUBLIC.get(name, name) for name in native))


def declare(library: ctypes.CDLL, kind: str) -> ctypes.CDLL:
    """Set the argument and result types of all functions of a library, and return it.

    Raises:
        AttributeError: a function is missing.
    """
    functions: dict[str, tuple[Any, list[Any]]] = {"abi": (c_int, []), "error": (c_char_p, [c_int])}
    if kind == "cpu":
        functions |= {"isa": (c_char_p, []), "pool": (c_char_p, []), "use_isa": (c_int, [c_char_p])}
        functions |= CPU_OPERATIONS
    else:
        functions |= {"scratch": (c_int64, [c_int64, _SIZES]), "topk_scratch": (c_int64, [c_int64])}
    for name, arguments in OPERATIONS.items():
        scratch = [c_void_p] if kind == "cuda" and name in _WITH_SCRATCH else []
        functions[name] = (c_int, [*arguments, *scratch, c_int if kind == "cpu" else c_void_p])
    for name, (result, arguments) in functions.items():
        function = getattr(library, f"lt_{kind}_{name}")
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


def try_kernel(library: ctypes.CDLL) -> None:
    """Run a CUDA kernel on the current device: with a driver that is too old, libraries load and kernels fail.

    Raises:
        BuildError: it fails.
    """
    values = torch.zeros(2, device=torch.device("cuda", torch.cuda.current_device()))
    one, (dst, src) = (c_int64 * 1)(1), ((c_void_p * 1)(value.data_ptr()) for value in values)
    pairs = LtPairs(count=1, numel=one, dst=dst, src=src, dst_dtype=0, src_dtype=0, factor=1.0, scale=None)
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
            declare(library, kind)
            if kind == "cuda" and torch.cuda.is_available():
                try_kernel(library)
        except (BuildError, OSError, AttributeError) as error:
            status = Status(kind, False, None, str(error), log=getattr(error, "log", None))
            return (None, status), _explain(status)
        isa = os.environ.get("LT_ZERO_ISA", "").strip().lower()
        if kind == "cpu" and isa and library.lt_cpu_use_isa(isa.encode()) != 0:
            status = Status(kind, False, None, f"LT_ZERO_ISA={isa} is no instruction set of this CPU's.")
            return (None, status), _explain(status)
        why = "from the cache" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
        isa = library.lt_cpu_isa().decode() if kind == "cpu" else "cuda"
        return (library, Status(kind, True, built.path, why, isa, built.seconds)), ""

    def _obtain(self, kind: str) -> tuple[Built, ctypes.CDLL]:
        reject = None
        if self._cache is None:
            self._cache = trusted(cache_dir())
        cache = self._cache
        recipes = self._recipes(kind)
        for recipe in recipes:
            if path := cached(recipe, cache):
                try:
                    return Built(path), load(path, kind)
                except BuildError as error:  # built on another system that shares the cache: rebuilt once
                    log.info("%s", error)
                    reject = path
        try:
            built = build(recipes[-1], writable(cache), reject=reject)
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
                raise BuildError(f"a device has compute capability {min(present)}; the kernels need (8, 0) or more.")
            recipes.append(recipe_of(kind, self._csrc, [f"sm_{major}{minor}" for major, minor in present]))
        return recipes


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
    variable, compiler = ("CXX", "a C++ compiler") if status.kind == "cpu" else ("NVCC", "the CUDA toolkit")
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
