"""Tables whose cells are never cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rich.console
from rich.measure import Measurement
from rich.table import Table

from lt_zero.common.console import RunConsole
from lt_zero.common.units import format_bytes

_LEAST = 24  # columns of text that may be broken, such as names of modules


def show(table: Table, console: rich.console.Console | None = None) -> Table:
    """Print ``table`` with all its characters, and return it.

    rich shortens numbers and names to the width of the window, which is 80 columns in a pipe. Here only columns with
    ``overflow="fold"`` give way, by a second line. A table that is wider still keeps its width: the terminal breaks its
    lines, a notebook scrolls, a file holds them whole.
    """
    console = console or RunConsole()
    wide = console.options.update(max_width=10_000)
    for column in table.columns:
        column.no_wrap = column.overflow != "fold"
    natural = Measurement.get(console, wide, table).maximum
    if natural > console.width:
        folds = [column for column in table.columns if not column.no_wrap]
        saved = 0
        for column in folds:
            cells = [Measurement.get(console, wide, cell).maximum for cell in (column.header, *column.cells)]
            saved += max(0, max(cells) - _LEAST)
        table.width = max(console.width, natural - saved)
    console.print(table, crop=False)
    return table


def show_values(rows: Sequence[tuple[str, Any, str]]) -> None:
    """Print values of a configuration, one on each line, never cut to the width: their keys, they, where from."""
    width = max((len(key) for key, _, _ in rows), default=0)
    lines = [f"  {key.ljust(width)}  {value}  ({source})" for key, value, source in rows]
    if lines:
        RunConsole().print("\n".join(["Configuration:", *lines]), markup=False, highlight=False, soft_wrap=True)


def bytes_cell(nbytes: float, digits: int = 2) -> str:
    """Bytes as the text of a cell, "-" for none."""
    return format_bytes(nbytes, digits) if nbytes else "-"
