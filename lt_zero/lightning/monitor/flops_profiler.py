"""``flops_profiler``: a table of the operations of one micro-batch per module, with the times of the next one.

Counting slows a micro-batch down by a factor of several, so the next one is timed.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lt_zero.comm.communicator import Comm
from lt_zero.common.module_hooks import Hook
from lt_zero.config.blocks import FlopsProfiler
from lt_zero.lightning.monitor.flops import ROOT, Counted, FlopCount

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

    @contextmanager
    def forward(self, root: nn.Module, step: int, device: torch.device, manual: bool) -> Iterator[None]:
        """Context of a training step after ``step`` optimizer steps; ``manual``: backward runs inside."""
        if not self._shown:
            self._steps = step
            if not self._requested and step >= self._block.profile_step:
                self._requested = True
                self._count.request()
        if self._shown or not self._requested:
            yield
        elif self._count.requested:  # counts this micro-batch, or the next one
            self._profile = Profile.of(root, step)
            yield
        else:
            self._times = _Stopwatch(device)
            modules = {m: name for name, m in root.named_modules() if name} if self._count.counted is not None else {}
            with self._times.measure("forward"), self._times.measure_modules(modules):
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
        count, profile, file = self._count, self._profile, self._block.output_file
        if self._rank != 0:
            return
        if profile is not None and (count.counted is not None or count.problem is not None):
            profile.counted, profile.problem, profile.rows = count.counted, count.problem, count.rows
            profile.times = self._times.read() if self._times is not None and clean else None
            if file is None:
                write(profile, self._block, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH))
                return
            with open(file, "w", encoding="utf-8") as stream:
                write(profile, self._block, Console(file=stream, width=_WIDTH, color_system=None, highlight=False))
        elif clean:
            warnings.warn(
                f"flops_profiler counted nothing: flops_profiler.profile_step={self._block.profile_step}, and the last "
                f"micro-batch came after {self._steps} optimizer steps (a fit's first one is never counted). Lower "
                "profile_step, or train longer.",
                stacklevel=2,
            )


class Times(NamedTuple):
    """Seconds of a micro-batch.

    Attributes:
        modules: of forwards, by module name, including submodules; "" is the training step.
        forward: of the training step.
        backward: None with manual optimization, where the training step includes it.
    """

    modules: dict[str, float]
    forward: float
    backward: float | None


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
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._intervals:
            if self._device is not None:
                end.synchronize()
            seconds[name] += end - start if self._device is None else start.elapsed_time(end) / 1e3
        modules = {name[1:]: value for name, value in seconds.items() if name.startswith(".")}
        return Times(modules | {ROOT: seconds["forward"]}, seconds["forward"], seconds.get("backward"))


# ---- the table -----------------------------------------------------------------------------------------------------


class Module(NamedTuple):
    """A module's class and parameters; a shared parameter counts in each module, and once in their parent."""

    name: str
    kind: str
    parameters: int

    @property
    def level(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


@dataclass
class Profile:
    """The profile of a micro-batch.

    Attributes:
        step: number of optimizer steps before it.
        modules: all modules with their full parameters, sharded or not; the trained module first.
    """

    step: int
    modules: list[Module]
    counted: Counted | None = None
    problem: str | None = None
    rows: int | None = None
    times: Times | None = None

    @classmethod
    def of(cls, root: nn.Module, step: int) -> Profile:
        sizes = ((name, m, sum(p.numel() for p in m.parameters())) for name, m in root.named_modules())
        return cls(step, [Module(name, type(module).__name__, size) for name, module, size in sizes])


def write(profile: Profile, block: FlopsProfiler, console: Console) -> None:
    """Print a profile: totals, the heaviest module classes per level, a row per module, notes."""
    for line in _totals(profile, block):
        console.print(line, markup=False, soft_wrap=True)
    modules = [m for m in profile.modules if block.module_depth == -1 or m.level <= block.module_depth]
    console.print(_aggregate(profile, modules, block.top_modules))
    if block.detailed:
        console.print(_details(profile, modules))
    for note in _notes(profile, block):
        console.print(f"* {note}", markup=False, soft_wrap=True)


def _totals(profile: Profile, block: FlopsProfiler) -> Iterator[str]:
    rows = f", {profile.rows} rows" if profile.rows is not None else ""
    root, times = profile.modules[0], profile.times
    yield f"flops_profiler: a micro-batch of {root.kind} on rank 0 after {profile.step} optimizer steps{rows}"
    yield f"  parameters: {root.parameters:,}"
    if profile.counted is not None:
        total = profile.counted.total
        yield f"  forward: {si(total.forward)}FLOP"
        yield f"  backward: {si(total.backward)}FLOP"
        recomputed = total.recomputed or round(block.recompute_fwd_factor * total.forward)
        if recomputed:
            yield f"  recomputed in backward: {si(recomputed)}FLOP{'' if total.recomputed else ' (assumed)'}"
        yield f"  forward and backward: {total.model:,} FLOP, {total.model + recomputed:,} with recomputation"
    if times is not None:
        if times.backward is None:
            yield f"  training step of the next micro-batch, with backward and optimizer steps: {_ms(times.forward)}"
        else:
            yield f"  next micro-batch: forward {_ms(times.forward)}, backward {_ms(times.backward)}"
        seconds = times.forward + (times.backward or 0.0)
        if profile.counted is not None and seconds > 0:
            yield f"  {profile.counted.total.model / seconds / 1e12:.4g} TFLOP/s without recomputation"


def _aggregate(profile: Profile, modules: list[Module], top: int) -> Table:
    """The heaviest module classes of each level by parameters, operations and time."""
    table = Table(title=f"Top {top} classes of modules per level", title_justify="left")
    for title in ("level", "parameters", "FLOP, forward and backward", "forward time"):
        table.add_column(title, overflow="fold")
    flops = (profile.counted or Counted()).by_module()
    seconds = profile.times.modules if profile.times is not None else {}
    columns: tuple[tuple[Callable[[Module], float], Callable[[float], str]], ...] = (
        (lambda module: module.parameters, "{:,}".format),
        (lambda module: flops[module.name].model, si),
        (lambda module: seconds.get(module.name, 0.0), _ms),
    )
    for level in sorted({module.level for module in modules}):
        cells = []
        for value, show in columns:
            sums: dict[str, float] = defaultdict(int)
            for module in modules:
                if module.level == level:
                    sums[module.kind] += value(module)
            heaviest = sorted((pair for pair in sums.items() if pair[1]), key=lambda pair: -pair[1])[:top]
            cells.append(", ".join(f"{kind} {show(number)}".rstrip() for kind, number in heaviest))
        table.add_row(str(level), *cells)
    return table


def _details(profile: Profile, modules: list[Module]) -> Table:
    table = Table(title="Modules", title_justify="left")
    counted, times = profile.counted, profile.times
    columns = ["parameters"]
    if counted is not None:
        columns += ["forward", "backward", *["recomputed"] * (counted.total.recomputed > 0), "share"]
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold")
    for column in [*columns, *["forward time"] * (times is not None)]:
        table.add_column(column, justify="right", no_wrap=True)
    by_module = (counted or Counted()).by_module()
    for module in modules:
        flops, cells = by_module[module.name], {"parameters": f"{module.parameters:,}"}
        cells |= {kind: si(getattr(flops, kind)) for kind in ("forward", "backward", "recomputed")}
        cells["share"] = f"{flops.model / by_module[ROOT].model:.1%}" if by_module[ROOT].model else ""
        row = [cells[column] for column in columns]
        if times is not None:
            row.append(_ms(times.modules[module.name]) if module.name in times.modules else "")
        table.add_row(module.name or "(training step)", module.kind, *row)
    return table


def _notes(profile: Profile, block: FlopsProfiler) -> Iterator[str]:
    if profile.problem is not None:
        yield f"not counted: {profile.problem}"
    if profile.counted is not None:
        yield "a multiply-add is two operations; only matrix products, convolutions and attention are counted"
        if block.recompute_fwd_factor and profile.counted.total.recomputed:
            yield "recomputation was measured, so flops_profiler.recompute_fwd_factor is not used"
        if profile.times is None:
            yield "no times: no micro-batch followed the counted one"


def si(value: float) -> str:
    """Format a number with an SI prefix and at most four digits.

    >>> si(1536), si(12), si(0)
    ('1.536 k', '12 ', '0 ')
    """
    for exponent, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.4g} {prefix}"
    return f"{value:.4g} "


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
