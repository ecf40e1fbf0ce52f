"""The command ``lt-zero logs``: what one run has recorded, in tables and a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lt_zero.common.console import Console
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.units import format_bytes
from lt_zero.training.lightning.monitor.plot import is_drawn, plot_read
from lt_zero.training.lightning.monitor.reading import NAME, STEP_MS, LoggedRun, LogsError, read_run
from lt_zero.training.run_file import NAME as FACTS

_SLOWEST = 3  # steps that are named
_TITLES = {
    "zero/loss": "loss",
    "zero/lr": "learning rate",
    "zero/grad_norm": "gradient norm",
    "zero/loss_scale": "loss scale",
    "zero/samples_per_s": "samples/s",
    "zero/tflops": "TFLOP/s per device",
    "zero/memory_gb": "memory, GB",
    "zero/gradient_noise_scale": "gradient noise scale",
}
# Columns of metrics that have lines of their own.
_APART = re.compile(r"time/.*|zero/(skipped_steps|step_ms|late_rank|lateness_ms)")


class Course(NamedTuple):
    """Values of one metric in a run; those that are not finite are only counted.

    Attributes:
        least, largest: with the step.
        broken: how many are infinite or NaN.
    """

    first: float
    last: float
    least: tuple[float, float]
    largest: tuple[float, float]
    broken: int


class StepTimes(NamedTuple):
    """Times of steps, in milliseconds.

    Attributes:
        slowest: with the step, the longest first.
    """

    number: int
    median: float
    slowest: Sequence[tuple[float, float]]


class CollectiveTraffic(NamedTuple):
    """One kind of collective, per step.

    Attributes:
        nbytes: of its buffers. sent: by this rank to others.
        ms, waited_ms: from launch to end, and the part in which nothing else was done.
    """

    operation: str
    calls: float
    nbytes: float
    sent: float
    ms: float
    waited_ms: float


def course(run: LoggedRun, name: str) -> Course | None:
    """The values of a metric; None if none is finite."""
    steps, values = run.columns[name]
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not finite:
        return None
    return Course(finite[0][0], finite[-1][0], min(finite), max(finite), len(values) - len(finite))


def times(run: LoggedRun) -> StepTimes | None:
    """The times of steps; None if the run did not write them."""
    if STEP_MS not in run.columns:
        return None
    steps, values = run.columns[STEP_MS]
    longest = sorted(zip(values, steps, strict=True), reverse=True)[:_SLOWEST]
    return StepTimes(len(values), median(values), longest)


def peaks(run: LoggedRun) -> dict[str, tuple[float, str, float]]:
    """The most bytes that ``memory_breakdown`` saw of each place, with the moment and the step."""
    found: dict[str, tuple[float, str, float]] = {}
    for fact in _facts(run, "memory", "moments", "at"):
        for moment, places in fact["moments"].items():
            for place, nbytes in places.items():
                if place not in found or nbytes > found[place][0]:
                    found[place] = nbytes, moment, fact["at"]
    return found


def traffic(run: LoggedRun) -> list[CollectiveTraffic]:
    """The collectives of the last run in the folder, by bytes sent."""
    every = list(_facts(run, "collectives", "records", "steps"))
    sums: dict[str, list[float]] = {}
    for record in every[-1]["records"] if every else ():
        row = sums.setdefault(record["operation"], [0.0] * 5)
        calls = record["calls"]
        for number, value in enumerate((calls, record["nbytes"] * calls, record["sent"], record["seconds"] * 1e3)):
            row[number] += value
        row[4] += record["waited"] * 1e3
    steps = max(1, every[-1]["steps"]) if every else 1
    rows = [CollectiveTraffic(name, *(value / steps for value in row)) for name, row in sums.items()]
    return sorted(rows, key=lambda row: -row.sent)


def _facts(run: LoggedRun, kind: str, *fields: str) -> Iterator[dict[str, Any]]:
    for fact in run.facts:
        if fact["kind"] == kind:
            if lacks := [name for name in fields if name not in fact]:
                raise LogsError(f"{FACTS} beside {run.path}: a line {kind!r} lacks {lacks[0]!r}. Remove the line.")
            yield fact


# ---- what is shown ---------------------------------------------------------------------------------------------------


def heading(run: LoggedRun) -> str:
    """The lines above the tables: the files, the run, and where it was resumed."""
    starts = list(_facts(run, "start", "at"))
    about = starts[-1] if starts else {}
    parts = [f"{about['ranks']} rank{'s' * (about['ranks'] != 1)}"] if "ranks" in about else []
    parts += [f"{key} {about[key]}" for key in ("stage", "mode") if key in about]
    steps = [step for reached, _ in run.columns.values() for step in reached]
    if steps:
        parts.append(f"{run.unit} {min(steps):,.0f} to {max(steps):,.0f}")
    lines = [f"{run.path}: {', '.join(parts)}"]
    if resumed := [fact["at"] for fact in starts if fact["at"] > 0]:
        lines.append(f"Resumed at {run.unit} {', '.join(f'{at:,.0f}' for at in resumed)}.")
    if run.earlier:
        lines.append(f"With what it was resumed from: {', '.join(map(str, run.earlier))}.")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else f"{value:.5g}"


def _table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="left" if number == 0 else "right", overflow="fold" if number == 0 else "ellipsis"
        )
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _metrics(run: LoggedRun) -> Table | None:
    names = [name for name in run.columns if not _APART.fullmatch(name)]
    order = list(_TITLES)
    names.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    rows = []
    for name in names:
        if (found := course(run, name)) is None:
            rows.append([_TITLES.get(name, name), "not finite", "", "", ""])
            continue
        ends = [f"{_number(value)} ({step:,.0f})" for value, step in (found.least, found.largest)]
        broken = str(found.broken) if found.broken else ""
        rows.append([_TITLES.get(name, name), _number(found.first), _number(found.last), *ends, broken])
    columns = ["metric", "first", "last", f"least ({run.unit})", f"largest ({run.unit})", "not finite"]
    if not any(len(row) == 6 and row[5] for row in rows):
        columns, rows = columns[:5], [row[:5] for row in rows]
    return _table("Metrics", columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows]) if rows else None


def _lines(run: LoggedRun) -> Iterator[str]:
    """Lines of single facts."""
    skipped = run.columns.get("zero/skipped_steps")
    if skipped is not None and math.isfinite(skipped[1][-1]):
        yield f"Skipped steps: {_number(skipped[1][-1])}."
    if (found := times(run)) is not None:
        slowest = ", ".join(f"{ms:,.1f} ms at {run.unit} {step:,.0f}" for ms, step in found.slowest)
        yield f"Time of a step, {found.number:,} steps: median {found.median:,.1f} ms. Slowest: {slowest}."
    parts = {name: median(values) for name, (_, values) in run.columns.items() if name.startswith("time/")}
    if parts:
        longest = sorted(parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name.removeprefix('time/').removesuffix('_ms')} {ms:,.1f}" for name, ms in longest)
        yield f"Parts of a step, medians in ms: {shown}."
    late_ranks = run.columns.get("zero/late_rank", ([], []))[1]
    ranks = [int(rank) for rank in late_ranks if math.isfinite(rank)]
    if ranks and "zero/lateness_ms" in run.columns:
        late = max(set(ranks), key=ranks.count)
        share = ranks.count(late) / len(ranks)
        wait = median(run.columns["zero/lateness_ms"][1])
        yield f"Late rank: {late} in {share:.0%} of the lines; others wait {wait:,.1f} ms per step (median)."


def _memory(run: LoggedRun) -> Table | None:
    rows = [[place, format_bytes(b), moment, f"{at:,.0f}"] for place, (b, moment, at) in peaks(run).items()]
    return (
        _table("Memory, most that memory_breakdown saw", ["place", "peak", "moment", run.unit], rows) if rows else None
    )


def _collectives(run: LoggedRun) -> Table | None:
    found = traffic(run)
    columns = ["operation", "calls", "buffers", "sent", "ms", "waited ms"]
    rows = []
    for each in found:
        sizes = [bytes_cell(nbytes) for nbytes in (each.nbytes, each.sent)]
        rows.append([each.operation, f"{each.calls:,.1f}", *sizes, f"{each.ms:,.2f}", f"{each.waited_ms:,.2f}"])
    if not rows:
        return None
    sums = [sum(float(each[number]) for each in found) for number in range(1, 6)]
    rows.append(["all", f"{sums[0]:,.1f}", *map(format_bytes, sums[1:3]), f"{sums[3]:,.2f}", f"{sums[4]:,.2f}"])
    return _table("Collectives of rank 0, per step", columns, rows)


def print_logs(run: LoggedRun, console: Console) -> None:
    """Print all of a run.

    Raises:
        LogsError: nothing was recorded yet, or a line is damaged.
    """
    made: list[Callable[[LoggedRun], Table | None]] = [_metrics, _memory, _collectives]
    try:
        metrics, memory, collectives = (make(run) for make in made)
        lines, head = list(_lines(run)), heading(run)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, LogsError):
            raise
        text = f"{FACTS} beside {run.path} is damaged ({type(error).__name__}: {error})"
        raise LogsError(f"{text}. Remove the line, or the file: metrics are shown without it.") from error
    if metrics is None and not lines and memory is None and collectives is None:
        raise LogsError(f"{run.path} has no value yet: wait for the first step that is logged, or name another run.")
    console.print(head, markup=False)
    if metrics is not None:
        show(metrics, console)
    for line in lines:
        console.print(line, markup=False)
    for table in (memory, collectives):
        if table is not None:
            show(table, console)


def logs_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help=f"Folder of a run, or its {NAME}.")],
    output: Annotated[Path | None, typer.Option(help="A PNG file for the metrics over steps.")] = None,
) -> None:
    """Print what a run has recorded: metrics, times of steps, memory and collectives. With --output also plot it.

    Reads csv_monitor's and tensorboard's files of a Trainer or a loop, and lt_zero.jsonl beside them.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        run = read_run(folder, lambda name: is_drawn(name) or name.startswith(("zero/", "time/")))
        print_logs(run, console)
        if output is not None:
            console.print(f"Wrote {plot_read([run], output)}", markup=False)
    except LogsError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
