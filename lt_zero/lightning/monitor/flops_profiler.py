"""``flops_profiler``: a table of the operations of one micro-batch per module, with the times of the next one.

Counting slows a micro-batch down by a factor of several, so the next one is timed.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lt_zero.comm.communicator import Comm
from lt_zero.common.module_hooks import Hook
from lt_zero.config.blocks import FlopsProfiler
from lt_zero.lightning.monitor.flops import ROOT, FlopCount
from lt_zero.lightning.monitor.flops_table import Profile, Times, parameters_of, write

_WIDTH = 160  # columns of files and pipes


class Profiler:
    """Counts one micro-batch, times the next one and shows both. Costs nothing before and after.

    Args:
        block: the configuration.
        count: counts the operations.
    """

    def __init__(self, block: FlopsProfiler, count: FlopCount) -> None:
        self._block, self._count = block, count
        self._shown = True

    def start(self, comm: Comm) -> None:
        """A fit begins. Collective.

        Raises:
            OSError: rank 0 cannot write to ``output_file``.
        """
        self._shown, self._requested, self._steps = False, False, 0
        self._profile: Profile | None = None
        self._times: _Stopwatch | None = None
        self._rank = comm.rank
        name = self._block.output_file
        with comm.agree("opening flops_profiler.output_file", OSError):
            if name is not None and self._rank == 0:
                try:
                    Path(name).absolute().parent.mkdir(parents=True, exist_ok=True)
                    with open(name, "a", encoding="utf-8"):
                        pass
                except OSError as error:
                    raise OSError(
                        f"flops_profiler.output_file={name!r} cannot be written ({error.strerror}: {error.filename}). "
                        "Name a file in a writable folder, or leave it out to print to stdout."
                    ) from error

    def forward(self, root: nn.Module, step: int, device: torch.device, manual: bool) -> AbstractContextManager[object]:
        """Context of a training step.

        Args:
            root: the trained module.
            step: number of completed optimizer steps.
            device: the compute device.
            manual: backward runs inside (manual optimization).
        """
        if self._shown:
            return nullcontext()
        self._steps = step
        if not self._requested and step >= self._block.profile_step:
            self._requested = True
            self._count.request()
        if not self._requested:
            return nullcontext()
        if self._count.requested:  # counts this micro-batch, or the next one
            self._profile = Profile(step, type(root).__name__, parameters_of(root))
            return nullcontext()
        return self._timed(root, device, manual)

    @contextmanager
    def _timed(self, root: nn.Module, device: torch.device, manual: bool) -> Iterator[None]:
        self._times = _Stopwatch(device)
        hooks = {m: name for name, m in root.named_modules() if name} if self._count.counted is not None else {}
        with self._times.measure("forward"), self._times.measure_modules(hooks):
            yield
        if manual:
            self.show()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward."""
        if self._times is None or self._shown or not self._times.has("forward"):
            yield
            return
        with self._times.measure("backward"):
            yield
        self.show()

    def show(self, clean: bool = True) -> None:
        """Print or write the profile on rank 0.

        Args:
            clean: False after an error: times may be incomplete, and a missing profile is not worth a warning.
        """
        if self._shown:
            return
        self._shown = True
        if self._rank != 0:
            return
        count, profile = self._count, self._profile
        if profile is None or (count.counted is None and count.problem is None):
            if not clean:
                return
            warnings.warn(
                f"flops_profiler counted nothing: flops_profiler.profile_step={self._block.profile_step}, and the last "
                f"micro-batch came after {self._steps} optimizer steps (a fit's first one is never counted). Lower "
                "profile_step, or train longer.",
                stacklevel=2,
            )
            return
        profile.counted, profile.problem, profile.rows = count.counted, count.problem, count.rows
        profile.times = self._times.read() if self._times is not None and clean else None
        if self._block.output_file is None:
            width = None if sys.stdout.isatty() else _WIDTH
            write(profile, self._block, Console(highlight=False, width=width))
            return
        with open(self._block.output_file, "w", encoding="utf-8") as file:
            write(profile, self._block, Console(file=file, width=_WIDTH, color_system=None, highlight=False))


class _Stopwatch:
    """Times one micro-batch, on a GPU by events that only ``read`` waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._intervals: list[tuple[str, Any, Any]] = []  # name, start, end
        self._starts: list[Any] = []  # of running modules, innermost last

    def has(self, name: str) -> bool:
        return any(measured == name for measured, _, _ in self._intervals)

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._intervals.append((name, start, self._now()))

    @contextmanager
    def measure_modules(self, names: dict[nn.Module, str]) -> Iterator[None]:
        """Measure the forwards of modules until the context ends, which excludes recomputation in backward."""
        with ExitStack() as hooks:
            for module, name in names.items():
                hooks.callback(module.register_forward_pre_hook(Hook(self._enter), prepend=True).remove)
                leave = Hook(partial(self._leave, name))
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._starts.append(self._now())

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._starts:
            self._intervals.append((f".{name}", self._starts.pop(), self._now()))

    def read(self) -> Times:
        """The times; synchronizes with the GPU."""
        modules: dict[str, float] = {}
        totals = {"forward": 0.0, "backward": 0.0}
        for name, start, end in self._intervals:
            if self._device is not None:
                end.synchronize()
                seconds = start.elapsed_time(end) / 1e3
            else:
                seconds = end - start
            if name in totals:
                totals[name] += seconds
            else:
                modules[name[1:]] = modules.get(name[1:], 0.0) + seconds
        modules[ROOT] = totals["forward"]
        return Times(modules, totals["forward"], totals["backward"] if self.has("backward") else None)
