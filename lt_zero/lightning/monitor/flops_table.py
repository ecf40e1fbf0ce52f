"""What ``flops_profiler`` shows: totals, the heaviest classes of modules per level, a row for each module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from torch import nn

from lt_zero.config.blocks.profiling import FlopsProfiler
from lt_zero.lightning.monitor.flops import ROOT, Counted, Flops


class Times(NamedTuple):
    """Seconds of a micro-batch.

    Attributes:
        modules: of forwards, by name, with all that is in a module; "" is the training step.
        forward: of the training step.
        backward: None with manual optimization, where the training step does everything.
    """

    modules: dict[str, float]
    forward: float
    backward: float | None


class Module(NamedTuple):
    """A module's class and parameters; a parameter that modules share is counted in each, and once in their parent."""

    name: str
    kind: str
    parameters: int

    @property
    def level(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


@dataclass
class Profile:
    """What is known of a micro-batch.

    Attributes:
        step: optimizer steps that were taken before it.
        kind: class of the module that is trained.
        modules: all of them, the root first.
    """

    step: int
    kind: str
    modules: list[Module]
    counted: Counted | None = None
    problem: str | None = None
    rows: int | None = None
    times: Times | None = None


def parameters_of(root: nn.Module) -> list[Module]:
    """All modules with the elements of their whole parameters, sharded or not."""
    return [
        Module(name, type(module).__name__, sum(p.numel() for p in module.parameters()))
        for name, module in root.named_modules()
    ]


def write(profile: Profile, block: FlopsProfiler, console: Console) -> None:
    """Print a profile."""
    for line in _totals(profile, block):
        console.print(line, markup=False, soft_wrap=True)
    modules = [m for m in profile.modules if block.module_depth == -1 or m.level <= block.module_depth]
    inside = _inside(profile)
    console.print(_aggregate(profile, modules, inside, block.top_modules))
    if block.detailed:
        console.print(_details(profile, modules, inside))
    for note in _notes(profile, block):
        console.print(f"* {note}", markup=False, soft_wrap=True)


def _inside(profile: Profile) -> dict[str, Flops]:
    """Of each module, with what is in it."""
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
        yield f"  forward: {in_words(total.forward)}FLOP"
        yield f"  backward: {in_words(total.backward)}FLOP"
        again = total.recomputed or round(block.recompute_fwd_factor * total.forward)
        if again:
            yield f"  recomputed in backward: {in_words(again)}FLOP{'' if total.recomputed else ' (assumed)'}"
        yield f"  forward and backward: {total.model:,} FLOP, {total.model + again:,} with recomputation"
    if times is not None:
        if times.backward is None:
            yield f"  training step of the next micro-batch, backward and optimizer steps inside: {_ms(times.forward)}"
        else:
            yield f"  next micro-batch: forward {_ms(times.forward)}, backward {_ms(times.backward)}"
        seconds = times.forward + (times.backward or 0.0)
        if profile.counted is not None and seconds > 0:
            yield f"  {profile.counted.total.model / seconds / 1e12:.4g} TFLOP/s without recomputation"


def _aggregate(profile: Profile, modules: list[Module], inside: dict[str, Flops], top: int) -> Table:
    """Per level, classes of modules in the order of their parameters, operations and times."""
    table = Table(title=f"Top {top} classes of modules per level", title_justify="left")
    for column in ("level", "parameters", "FLOP, forward and backward", "forward time"):
        table.add_column(column, overflow="fold")
    seconds = profile.times.modules if profile.times is not None else {}
    for level in sorted({module.level for module in modules}):
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for module in modules:
            if module.level == level:
                for place, value in enumerate(
                    (module.parameters, inside[module.name].model, seconds.get(module.name, 0.0))
                ):
                    sums[module.kind][place] += value
        cells = []
        for place, show in enumerate((_count, in_words, _ms)):
            best = sorted(((v[place], kind) for kind, v in sums.items() if v[place]), key=lambda pair: -pair[0])[:top]
            cells.append(", ".join(f"{kind} {show(value)}".rstrip() for value, kind in best))
        table.add_row(str(level), *cells)
    return table


def _details(profile: Profile, modules: list[Module], inside: dict[str, Flops]) -> Table:
    table = Table(title="Modules", title_justify="left")
    counted, times = profile.counted, profile.times
    again = counted is not None and counted.total.recomputed > 0
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    columns = ["forward", "backward", *(["recomputed"] if again else []), "share"] if counted is not None else []
    for column in [*columns, *(["forward time"] if times is not None else [])]:
        table.add_column(column, justify="right", no_wrap=True)
    whole = counted.total.model if counted is not None else 0
    for module in modules:
        flops = inside[module.name]
        cells = [in_words(flops.forward), in_words(flops.backward)] + ([in_words(flops.recomputed)] if again else [])
        cells.append(f"{flops.model / whole:.1%}" if whole else "")
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
        yield "a multiplication and an addition are two; only products of matrices, convolutions and attention count"
        if block.recompute_fwd_factor and profile.counted.total.recomputed:
            yield "recomputation was seen, so flops_profiler.recompute_fwd_factor is not used"
        if profile.times is None:
            yield "no times: no micro-batch came after the one that was counted"


def in_words(value: float) -> str:
    """With a prefix of a thousand, four digits at most.

    >>> in_words(1536), in_words(12), in_words(0)
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


__all__ = ["ROOT", "Module", "Profile", "Times", "in_words", "parameters_of", "write"]
