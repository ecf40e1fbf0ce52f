"""``deepspeed.utils`` and ``deepspeed.runtime.utils``: logging, loaders, seeds, versions, memory."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lt_zero.common.output import say
from lt_zero.core.comm.process_groups import rank_and_size
from lt_zero.deepspeed.accelerator import get_accelerator

Function = TypeVar("Function", bound=Callable[..., Any])
_LEVELS = ("debug", "info", "warning", "error", "critical")


def _make_logger() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.propagate = False
        made.setLevel(logging.WARNING)
    return made


logger = _make_logger()  # DeepSpeed's level, too


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the logger: "debug", "info", "warning", "error" or "critical".

    Raises:
        ValueError: it is another.
    """
    if log_level_str.lower() not in _LEVELS:
        raise ValueError(f"log_level_str={log_level_str!r} is none of {', '.join(_LEVELS)}.")
    (custom_logger or logger).setLevel(log_level_str.upper())


def _of_rank(message: str, ranks: Sequence[int] | None) -> str | None:
    """The message with its rank, if one of ``ranks`` ([-1]: all) is this one, or there is one process."""
    rank, size = rank_and_size()
    if size > 1 and not (ranks and (ranks[0] == -1 or rank in ranks)):
        return None
    return f"[Rank {rank}] {message}"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks ([-1]: all)."""
    if (text := _of_rank(message, ranks)) is not None:
        logger.log(level, text)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, list(ranks), level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """``log_dist``, unless it was logged before."""
    _log_once(message, tuple(ranks or ()), level)


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    """Log a warning, unless it was logged before."""
    logger.warning(message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a message on some ranks ([-1]: all)."""
    if (text := _of_rank(message, ranks)) is not None:
        say(text)


class RepeatingLoader:
    """An iterator that begins its loader anew at the end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def instrument_w_nvtx(func: Function) -> Function:
    """Give a function a range of its name in profiles."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(func.__qualname__):
            return func(*args, **kwargs)

    return ranged  # type: ignore[return-value]


class OnDevice:
    """Context in which tensors are made on a device ("meta" by default), in a dtype."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype = dtype if enabled else None
        self._device: Any = torch.device(device) if enabled else nullcontext()
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._device.__exit__(*error)
        torch.set_default_dtype(self._before)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """True if torch is of ``min_version`` or later, and of ``max_version`` or before (major and minor number)."""

    def parsed(version: Any) -> tuple[int, ...]:
        return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in str(version).split("+")[0].split(".")[:2])

    own = parsed(torch.__version__)
    return (min_version is None or own >= parsed(min_version)) and (max_version is None or own <= parsed(max_version))


# ---- runtime ---------------------------------------------------------------------------------------------------------


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy if it is imported, and torch."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of rank 0 after ``message``, in GiB; nothing unless ``force``."""
    if not force or rank_and_size()[0] != 0:
        return
    gc.collect()
    device, gib = get_accelerator(), 1024**3
    parts = {
        "allocated": device.memory_allocated(),
        "peak allocated": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "peak of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "host in use": device_total() - os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
    }
    say(message + ": " + ", ".join(f"{name} {value / gib:.2f} GiB" for name, value in parts.items()))
    device.reset_peak_memory_stats()


def device_total() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def empty_cache() -> None:
    """Free the memory that torch keeps for later."""
    get_accelerator().empty_cache()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``: norms of an engine's gradients are those of all ranks. Collective."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)


def noop_decorator(func: Function) -> Function:
    """The function as it is."""
    return func


noop_context = nullcontext


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` parts of about as many items; the first parts have one more."""
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]
