"""The command ``lt-zero plot``: plots the metrics that Lightning's ``CSVLogger`` has written."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME = "metrics.csv"
_STEP = "step"
Columns = dict[str, tuple[list[float], list[float]]]  # by name: the steps in which a value was logged, and the values


class PlotError(ValueError):
    """There is nothing to plot, or it cannot be plotted. Names the file and the remedy."""


class LoggedRun(NamedTuple):
    """One file of metrics."""

    name: str  # as the user wrote the path
    path: Path
    rows: int
    columns: Columns


class _Panel(NamedTuple):
    """One of the stacked plots, with the patterns of its columns.

    Columns of ``others`` are drawn if there are none of ``ours``; those of ``points`` are always drawn, as points.
    """

    label: str
    ours: str
    others: str = "(?!)"
    points: str = "(?!)"
    log: bool = False

    def kind(self, name: str) -> str | None:
        """The pattern that the column matches, if any."""
        return next((kind for kind in ("ours", "others", "points") if re.fullmatch(getattr(self, kind), name)), None)

    def drawn(self, run: LoggedRun) -> dict[str, bool]:
        """The columns of a run that are drawn, and whether as points."""
        kinds = {name: self.kind(name) for name in sorted(run.columns)}
        lines = "ours" if "ours" in kinds.values() else "others"
        return {name: kind == "points" for name, kind in kinds.items() if kind in (lines, "points")}


_PANELS = (
    _Panel("loss", r"zero/loss", r"train[_/]?loss.*|loss(_step|_epoch)?", r"val(id|idation)?[_/]?loss.*"),
    _Panel("learning rate", r"zero/(optimizer_\d+/)?lr(_\d+)?", r"lr-.*|lr"),
    _Panel("gradient norm", r"zero/(optimizer_\d+/)?grad_norm", r"grad_norm"),
    _Panel("loss scale", r"zero/loss_scale", r"loss_scale", log=True),
    _Panel("samples/s", r"zero/samples_per_s"),
    _Panel("TFLOP/s per device", r"zero/tflops"),
    _Panel("memory, GB", r"zero/memory_gb"),
)


# ---- reading -------------------------------------------------------------------------------------------------------


def find_metrics(path: str | os.PathLike[str]) -> Path:
    """The file of metrics at or below ``path``: the newest version of the run that was written to last.

    Raises:
        PlotError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise PlotError(f"{path} does not exist. Name the folder of a run, or its {_NAME}.")
    if (path / _NAME).is_file():
        return path / _NAME
    found = [file for file in path.rglob(_NAME) if file.is_file()]
    if not found:
        raise PlotError(
            f"No {_NAME} in {path} or below. Set csv_monitor.enabled=true, or use Lightning's CSVLogger, to write one."
        )
    newest = max(found, key=lambda file: file.stat().st_mtime)

    def version(file: Path) -> tuple[int, float]:
        number = re.fullmatch(r"version_(\d+)", file.parent.name)
        return int(number[1]) if number else -1, file.stat().st_mtime

    return max((file for file in found if file.parent.parent == newest.parent.parent), key=version)


def read_run(run: str | os.PathLike[str]) -> LoggedRun:
    """The metrics of a run, a folder or a file. An incomplete last line (of a running training) is left out.

    Raises:
        PlotError: there is no such file, it is empty, or a line is malformed; names the line.
    """
    path = find_metrics(run)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = file.read().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise PlotError(f"{path} cannot be read: {error}.") from error
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        del lines[-1]
    reader = csv.reader(lines, strict=True)
    columns: Columns = {}
    try:
        header = next(reader, None)
        if not header:
            raise PlotError(f"{path} is empty: nothing was logged yet.")
        if _STEP not in header:
            raise PlotError(f"{path}, line 1: there is no column {_STEP!r}. Name a file of Lightning's CSVLogger.")
        rows = 0
        for row in reader:
            _add(columns, header, row, f"{path}, line {reader.line_num}")
            rows += 1
    except csv.Error as error:
        raise PlotError(f"{path}, line {reader.line_num}: {error}.") from error
    return LoggedRun(str(run), path, rows, columns)


def _add(columns: Columns, header: list[str], row: list[str], where: str) -> None:
    if row and len(row) != len(header):
        raise PlotError(f"{where}: {len(row)} values for {len(header)} columns. Repair the line or remove it.")
    numbers = {}
    for name, cell in zip(header, row, strict=False):
        if name == _STEP or (cell and any(panel.kind(name) for panel in _PANELS)):
            try:
                numbers[name] = float(cell)
            except ValueError:
                problem = f"{where}, column {name!r}: {cell!r} is not a number. Repair the line or remove it."
                raise PlotError(problem) from None
    for name in numbers.keys() - {_STEP}:
        steps, values = columns.setdefault(name, ([], []))
        steps.append(numbers[_STEP])
        values.append(numbers[name])


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw(runs: Sequence[LoggedRun]) -> Figure:
    """Stacked plots over the same steps, with a color for each run and a line style for each column.

    Raises:
        PlotError: a run has nothing to plot, or matplotlib is missing.
    """
    for run in runs:
        if run.rows == 0:
            raise PlotError(f"{run.path} has no row yet: nothing was logged.")
        if not run.columns:
            raise PlotError(
                f"{run.path} has nothing to plot: no zero/*, train_loss, loss, val_loss, lr-* or grad_norm. Set "
                "csv_monitor.enabled=true to log zero/loss and others."
            )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"Plotting needs matplotlib ({error}). Run: pip install 'lt-zero[plot]'") from error
    panels = [panel for panel in _PANELS if any(panel.drawn(run) for run in runs)]
    figure = Figure(figsize=(8, 0.8 + 1.7 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    labels = [os.path.basename(os.path.normpath(run.name)) for run in runs]
    if len(set(labels)) < len(labels):
        labels = [run.name for run in runs]
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        _fill(axes, panel, runs, labels)
    grid[-1, 0].set_xlabel(_STEP)
    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontsize="medium", parse_math=False)
    return figure


def _fill(axes: Any, panel: _Panel, runs: Sequence[LoggedRun], run_labels: Sequence[str]) -> None:
    drawn = [panel.drawn(run) for run in runs]
    names = {name for columns in drawn for name in columns}
    lines = sorted({name for columns in drawn for name, points in columns.items() if not points})
    styles = {name: ("-", "--", ":", "-.")[number % 4] for number, name in enumerate(lines)}
    several, handles = len(runs) > 1, list[Any]()
    for number, (run, columns, run_label) in enumerate(zip(runs, drawn, run_labels, strict=True)):
        for order, (name, points) in enumerate(columns.items()):
            steps, values = run.columns[name]
            label = " ".join([run_label] * several + [name] * (len(names) > 1 or not several))
            style = {"linestyle": "", "marker": "o", "markersize": 4} if points else {"linestyle": styles[name]}
            # A single value makes no line, so it gets a marker. Values that are not finite leave a gap.
            marker = {"marker": "."} if not points and len(values) == 1 else {}
            finite = [value if math.isfinite(value) else math.nan for value in values]
            color = f"C{(number if several else order) % 10}"
            handles += axes.plot(steps, finite, color=color, label=label, linewidth=1.2, **style, **marker)
    axes.set_ylabel(panel.label)
    axes.grid(True, alpha=0.3)
    if panel.log:
        axes.set_yscale("log", base=2)
    # Pass the labels: matplotlib leaves out those that start with "_".
    labels = [handle.get_label() for handle in handles]
    for text in axes.legend(handles=handles, labels=labels, fontsize="x-small", loc="best").get_texts():
        text.set_parse_math(False)  # names may contain dollar signs


def plot(runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> Path:
    """Plot runs over each other into a PNG file, which is overwritten if it exists.

    Raises:
        PlotError: there is nothing to plot, or the file cannot be written.
    """
    figure = draw([read_run(run) for run in runs])
    path = Path(output)
    if path.suffix.lower() != ".png":
        raise PlotError(f"--output {path}: the format is PNG. Write a name such as {path.with_suffix('.png')}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise PlotError(f"--output {path} cannot be written: {error.strerror or error}.") from error
    return path


def plot_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help=f"Folder of a run, or its {_NAME}; several are plotted together."),
    ],
    output: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("plot.png"),
) -> None:
    """Plot loss, learning rate, gradient norm, loss scale, throughput and memory over the steps of a run."""
    try:
        written = plot(runs, output)
        files = [find_metrics(run) for run in runs]
    except PlotError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), markup=False)
        raise typer.Exit(1) from None
    console = Console(soft_wrap=True, highlight=False)
    for file in files:
        console.print(f"Read {file}", markup=False)
    console.print(f"Wrote {written}", markup=False)
