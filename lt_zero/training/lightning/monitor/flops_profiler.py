"""``flops_profiler``: a table of the operations of one micro-batch per module, with the times of the next one.

Counting slows a micro-batch down by a factor of several, so the next one is timed.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn

from lt_zero.common import accelerator
from lt_zero.common.console import Console, RunConsole
from lt_zero.common.module_hooks import Hook, hookable_modules
from lt_zero.common.output import Lenient
from lt_zero.common.tables import show
from lt_zero.common.users_code import warn
from lt_zero.config.blocks import FlopsProfiler
from lt_zero.core.comm.world import World
from lt_zero.training.lightning.monitor.flops import ROOT, Counted, FlopCount, Flops

_WIDTH = 160  # columns of files and pipes
_WHAT_IS_COUNTED = "a multiply-add is two operations; only matrix products, convolutions and attention are counted"


class _ProfiledModule(NamedTuple):
    name: str
    kind: str  # its class
    parameters: int  # full ones, sharded or not; a shared parameter counts once in a common parent
    level: int  # 0 is the trained module


class Profiler:
    """Counts one micro-batch, times the next one and shows both. Costs nothing before and after."""

    def __init__(self, block: FlopsProfiler, count: FlopCount) -> None:
        self._block, self._count = block, count
        self._shown = True

    def start(self, world: World) -> None:
        """A fit begins. Collective.

        Raises:
            OSError: rank 0 cannot write to ``output_file``.
        """
        self._shown, self._requested, self._steps = False, False, 0
        self._modules: list[_ProfiledModule] = []  # of the counted micro-batch, after ``_steps_before`` optimizer steps
        self._steps_before = 0
        self._times: _Stopwatch | None = None
        self._rank = world.rank
        name = self._block.output_file
        with world.agree("opening flops_profiler.output_file", OSError):
            if name is not None and self._rank == 0:
                try:
                    Path(name).absolute().parent.mkdir(parents=True, exist_ok=True)
                    open(name, "a", encoding="utf-8").close()
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
            self._steps_before = step
            self._modules = [
                _ProfiledModule(
                    name, type(m).__name__, sum(p.numel() for p in m.parameters()), name.count(".") + bool(name)
                )
                for name, m in root.named_modules()
            ]
            yield
        else:
            self._times = _Stopwatch(device)
            counted = self._count.counted is not None
            modules = {m: name for name, m in hookable_modules(root) if name} if counted else {}
            with self._times.measure("forward"), self._times.measure_modules(modules):
                yield
            if manual:
                self.show()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward."""
        if self._times is None or self._shown or not self._times.forward_done:
            yield
            return
        with self._times.measure("backward"):
            yield
        self.show()

    def show(self, clean: bool = True) -> None:
        """Print or write the profile on rank 0. Not ``clean``: after an error, times may be incomplete."""
        shown, self._shown = self._shown, True
        if shown or self._rank != 0:
            return
        count, file = self._count, self._block.output_file
        if self._modules and (count.counted is not None or count.problem is not None):
            times = self._times.read() if self._times is not None and clean else None
            if file is None:
                self._write(RunConsole(highlight=False, width=None if Lenient(sys.stdout).isatty() else _WIDTH), times)
                return
            try:
                with open(file, "w", encoding="utf-8") as stream:
                    self._write(Console(file=stream, width=_WIDTH, color_system=None, highlight=False), times)
            except OSError as error:
                warn(f"flops_profiler.output_file={file!r} cannot be written ({error.strerror or error}).")
        elif clean:
            warn(
                f"flops_profiler counted nothing: flops_profiler.profile_step={self._block.profile_step}, and the last "
                f"micro-batch came after {self._steps} optimizer steps (a fit's first one is never counted). Lower "
                "profile_step, or train longer.",
            )

    # ---- the table ---------------------------------------------------------------------------------------------------

    def _write(self, console: Console, times: dict[str, float] | None) -> None:
        """Print totals, the heaviest module classes per level, a row per module, notes.

        ``times``: of the micro-batch after the counted one, see ``_Stopwatch.read``.
        """
        block, count = self._block, self._count
        flops = (count.counted or Counted()).by_module()
        for line in self._totals(times):
            console.print(line, markup=False, soft_wrap=True)
        modules = [m for m in self._modules if block.module_depth == -1 or m.level <= block.module_depth]
        show(self._aggregate(modules, flops, times or {}), console)
        if block.detailed:
            show(self._details(modules, flops, times), console)
        notes = [f"not counted: {count.problem}"] if count.problem is not None else []
        if count.counted is not None:
            notes.append(_WHAT_IS_COUNTED)
            if block.recompute_fwd_factor and flops[ROOT].recomputed:
                notes.append("recomputation was measured, so flops_profiler.recompute_fwd_factor is not used")
            if times is None:
                notes.append("no times: no micro-batch followed the counted one")
        for note in notes:
            console.print(f"* {note}", markup=False, soft_wrap=True)

    def _totals(self, times: dict[str, float] | None) -> Iterator[str]:
        root, counted = self._modules[0], self._count.counted
        rows = f", {self._count.rows} rows" if self._count.rows is not None else ""
        yield f"flops_profiler: a micro-batch of {root.kind} on rank 0 after {self._steps_before} optimizer steps{rows}"
        yield f"  parameters: {root.parameters:,}"
        if counted is not None:
            total = counted.total
            yield f"  forward: {si(total.forward)}FLOP"
            yield f"  backward: {si(total.backward)}FLOP"
            recomputed = total.recomputed or round(self._block.recompute_fwd_factor * total.forward)
            if recomputed:
                yield f"  recomputed in backward: {si(recomputed)}FLOP{'' if total.recomputed else ' (assumed)'}"
            yield f"  forward and backward: {total.model:,} FLOP, {total.model + recomputed:,} with recomputation"
        if times is not None:
            forward, backward = times["forward"], times.get("backward")
            if backward is None:
                yield f"  training step of the next micro-batch, with backward and optimizer steps: {_ms(forward)}"
            else:
                yield f"  next micro-batch: forward {_ms(forward)}, backward {_ms(backward)}"
            seconds = forward + (backward or 0.0)
            if counted is not None and seconds > 0:
                yield f"  {counted.total.model / seconds / 1e12:.4g} TFLOP/s without recomputation"

    def _aggregate(
        self, modules: list[_ProfiledModule], flops: defaultdict[str, Flops], times: dict[str, float]
    ) -> Table:
        """The heaviest module classes of each level by parameters, operations and time."""
        table = Table(title=f"Top {self._block.top_modules} classes of modules per level", title_justify="left")
        for title in ("level", "parameters", "FLOP, forward and backward", "forward time"):
            table.add_column(title, overflow="fold")
        columns: tuple[tuple[Callable[[_ProfiledModule], float], Callable[[float], str]], ...] = (
            (lambda module: module.parameters, "{:,}".format),
            (lambda module: flops[module.name].model, si),
            (lambda module: times.get(f".{module.name}", 0.0), _ms),
        )
        for level in sorted({module.level for module in modules}):
            cells = []
            for value, shown in columns:
                sums: dict[str, float] = defaultdict(int)
                for module in modules:
                    if module.level == level:
                        sums[module.kind] += value(module)
                heaviest = sorted((pair for pair in sums.items() if pair[1]), key=lambda pair: -pair[1])
                top = heaviest[: self._block.top_modules]
                cells.append(", ".join(f"{kind} {shown(number)}".rstrip() for kind, number in top))
            table.add_row(str(level), *cells)
        return table

    def _details(
        self, modules: list[_ProfiledModule], by_module: defaultdict[str, Flops], times: dict[str, float] | None
    ) -> Table:
        table = Table(title="Modules", title_justify="left")
        total = by_module[ROOT]
        columns = ["parameters"]
        if self._count.counted is not None:
            columns += ["forward", "backward", *["recomputed"] * (total.recomputed > 0), "share"]
        columns += ["forward time"] * (times is not None)
        table.add_column("module", overflow="fold")
        table.add_column("class", overflow="fold")
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for module in modules:
            flops, seconds = by_module[module.name], (times or {}).get(f".{module.name}")
            cells = {
                "parameters": f"{module.parameters:,}",
                **{kind: si(getattr(flops, kind)) for kind in ("forward", "backward", "recomputed")},
                "share": f"{flops.model / total.model:.1%}" if total.model else "",
                "forward time": _ms(seconds) if seconds is not None else "",
            }
            table.add_row(module.name or "(training step)", module.kind, *[cells[column] for column in columns])
        return table


class _Stopwatch:
    """Times one micro-batch, on a GPU by events that only ``read`` waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if accelerator.has_streams(device) else None
        self._intervals: list[tuple[str, Any, Any]] = []  # name, start, end
        self._starts: list[Any] = []  # of running modules, innermost last
        self.forward_done = False

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = accelerator.event(self._device, timing=True)
        event.record(accelerator.current_stream(self._device))
        return event

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._intervals.append((name, start, self._now()))
        self.forward_done = True

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

    def read(self) -> dict[str, float]:
        """Seconds of "forward", of "backward" if it ran outside of it, and of module forwards by "." and their name.

        Synchronizes with the GPU.
        """
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._intervals:
            if self._device is not None:
                end.synchronize()
            seconds[name] += end - start if self._device is None else start.elapsed_time(end) / 1e3
        return {f".{ROOT}": seconds["forward"], **seconds}


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
