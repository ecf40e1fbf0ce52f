"""The output of ``flops_profiler``: totals, the heaviest module classes per level, a row per module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from torch import nn

from lt_zero.config.blocks import FlopsProfiler
from lt_zero.lightning.monitor.flops import ROOT, Counted, Flops


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
        kind: class of the trained module.
        modules: all modules, the root first.
    """

    step: int
    kind: str
    modules: list[Module]
    counted: Counted | None = None
    problem: str | None = None
    rows: int | None = None
    times: Times | None = None


def parameters_of(root: nn.Module) -> list[Module]:
    """All modules with the sizes of their full parameters, sharded or not."""
    return [
        Module(name, type(module).__name__, sum(p.numel() for p in module.parameters()))
        for name, module in root.named_modules()
    ]


def write(profile: Profile, block: FlopsProfiler, console: Console) -> None:
    """Print a profile."""
    for line in _totals(profile, block):
        console.print(line, markup=False, soft_wrap=True)
    modules = [m for m in profile.modules if block.module_depth == -1 or m.level <= block.module_depth]
    cumulative = _cumulative(profile)
    console.print(_aggregate(profile, modules, cumulative, block.top_modules))
    if block.detailed:
        console.print(_details(profile, modules, cumulative))
    for note in _notes(profile, block):
        console.print(f"* {note}", markup=False, soft_wrap=True)


def _cumulative(profile: Profile) -> dict[str, Flops]:
    """The operations of each module, including its submodules."""
    found: dict[str, Flops] = defaultdict(Flops)
    for name, flops in (profile.counted or Counted()).own.items():
        parts = name.split(".") if name else []
        for end in range(len(parts) + 1):
            found[".".join(parts[:end])].add(flops)
    return found


def _totals(profile: Profile, block: FlopsProfiler) -> Iterator[str]:
    rows = f", {profile.rows} rows" if profile.rows is not None else ""
    yield f"flops_profiler: a micro-batch of {profile.kind} on rank 0 after {profile.step} optimizer steps{rows}"
    yield f"  parameters: {profile.modules[0].parameters:,}"
    times = profile.times
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


def _aggregate(profile: Profile, modules: list[Module], cumulative: dict[str, Flops], top: int) -> Table:
    """The heaviest module classes of each level by parameters, operations and time."""
    table = Table(title=f"Top {top} classes of modules per level", title_justify="left")
    for title in ("level", "parameters", "FLOP, forward and backward", "forward time"):
        table.add_column(title, overflow="fold")
    seconds = profile.times.modules if profile.times is not None else {}
    for level in sorted({module.level for module in modules}):
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for module in modules:
            if module.level == level:
                values = (module.parameters, cumulative[module.name].model, seconds.get(module.name, 0.0))
                for column, value in enumerate(values):
                    sums[module.kind][column] += value
        cells = []
        for column, show in enumerate((_count, si, _ms)):
            pairs = ((v[column], kind) for kind, v in sums.items() if v[column])
            best = sorted(pairs, key=lambda pair: -pair[0])[:top]
            cells.append(", ".join(f"{kind} {show(value)}".rstrip() for value, kind in best))
        table.add_row(str(level), *cells)
    return table


def _details(profile: Profile, modules: list[Module], cumulative: dict[str, Flops]) -> Table:
    table = Table(title="Modules", title_justify="left")
    counted, times = profile.counted, profile.times
    recomputes = counted is not None and counted.total.recomputed > 0
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    columns = ["forward", "backward", *(["recomputed"] if recomputes else []), "share"] if counted is not None else []
    for column in [*columns, *(["forward time"] if times is not None else [])]:
        table.add_column(column, justify="right", no_wrap=True)
    total = counted.total.model if counted is not None else 0
    for module in modules:
        flops = cumulative[module.name]
        cells = [si(flops.forward), si(flops.backward)] + ([si(flops.recomputed)] if recomputes else [])
        cells.append(f"{flops.model / total:.1%}" if total else "")
        if counted is None:
            cells = []
        if times is not None:
            cells.append(_ms(times.modules[module.name]) if module.name in times.modules else "")
        table.add_row(module.name or "(training step)", module.kind, f"{module.parameters:,}", *cells)
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


def _count(value: float) -> str:
    return f"{int(value):,}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


__all__ = ["ROOT", "Module", "Profile", "Times", "si", "parameters_of", "write"]
