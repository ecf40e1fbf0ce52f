"""The command ``lt-zero plot``: plots the metrics that the loggers of runs have written to files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lt_zero.common.console import Console
from lt_zero.training.lightning.monitor.reading import NAME, STEP_MS, LoggedRun, LogsError, find_metrics, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    _Panel("time of a step, ms", STEP_MS, r"time/total_ms"),
    _Panel("samples/s", r"zero/samples_per_s"),
    _Panel("TFLOP/s per device", r"zero/tflops"),
    _Panel("memory, GB", r"zero/memory_gb"),
)


def is_drawn(column: str) -> bool:
    """True if a column of metrics has a place in the picture."""
    return any(panel.kind(column) for panel in _PANELS)


def read_drawn(run: str | os.PathLike[str]) -> LoggedRun:
    """The metrics of a run that are drawn. Errors are those of ``read_run``."""
    return read_run(run, is_drawn)


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw(runs: Sequence[LoggedRun]) -> Figure:
    """Stacked plots over the same steps, with a color for each run and a line style for each column.

    Raises:
        LogsError: a run has nothing to plot, or matplotlib is missing.
    """
    for run in runs:
        if run.rows == 0:
            raise LogsError(f"{run.path} has no row yet: nothing was logged.")
        if not run.columns:
            raise LogsError(
                f"{run.path} has nothing to plot: no zero/*, train_loss, loss, val_loss, lr-* or grad_norm. Set "
                "csv_monitor.enabled=true to log zero/loss and others."
            )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LogsError(f"Plotting needs matplotlib ({error}). Run: pip install 'lt-zero[plot]'") from error
    panels = [panel for panel in _PANELS if any(panel.drawn(run) for run in runs)]
    figure = Figure(figsize=(8, 0.8 + 1.7 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    labels = [os.path.basename(os.path.normpath(run.name)) for run in runs]
    if len(set(labels)) < len(labels):
        labels = [run.name for run in runs]
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        _fill(axes, panel, runs, labels)
    grid[-1, 0].set_xlabel(", ".join(dict.fromkeys(run.unit for run in runs)))
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
        LogsError: there is nothing to plot, or the file cannot be written.
    """
    return plot_read([read_drawn(run) for run in runs], output)


def plot_read(runs: Sequence[LoggedRun], output: str | os.PathLike[str]) -> Path:
    """``plot`` of runs that were read."""
    figure = draw(runs)
    path = Path(output)
    if path.suffix.lower() != ".png":
        raise LogsError(f"--output {path}: the format is PNG. Write a name such as {path.with_suffix('.png')}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise LogsError(f"--output {path} cannot be written: {error.strerror or error}.") from error
    return path


def plot_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help=f"Folder of a run, or its {NAME}; several are plotted together."),
    ],
    output: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("plot.png"),
) -> None:
    """Plot loss, learning rate, gradient norm, loss scale, throughput and memory over the steps of a run."""
    try:
        written = plot(runs, output)
        files = [find_metrics(run) for run in runs]
    except LogsError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), markup=False)
        raise typer.Exit(1) from None
    console = Console(soft_wrap=True, highlight=False)
    for file in files:
        console.print(f"Read {file}", markup=False)
    console.print(f"Wrote {written}", markup=False)
