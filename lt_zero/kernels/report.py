"""Reports which implementation of each operation runs on this machine, and why."""

from __future__ import annotations

import torch
from rich.table import Table

from lt_zero.common.console import Console, RunConsole
from lt_zero.common.tables import show
from lt_zero.kernels import library
from lt_zero.kernels.library import Status


def implementation(status: Status) -> str:
    """``native`` with the instruction set (``native avx512``), or ``torch reference``."""
    return f"native {status.isa}" if status.available else "torch reference"


def operations_table(console: Console | None = None) -> Table:
    """Print and return the implementation of each operation on CPU and CUDA; then the reason, library and threads.

    Builds libraries that are missing.
    """
    console = console or RunConsole()
    kinds = [library.status("cpu"), library.status("cuda")]
    table = Table(title="lt_zero operations")
    for column in ("operation", *(status.kind for status in kinds)):
        table.add_column(column)
    for operation in library.names("cpu"):
        table.add_row(operation, *(implementation(s) if operation in library.names(s.kind) else "-" for s in kinds))
    show(table, console)
    for status in kinds:
        lines = {"why": status.why, "library": status.path, "threads": _threads(status)}
        text = [f"{status.kind}: {implementation(status)}", *(f"  {k:8}{v}" for k, v in lines.items() if v)]
        console.print("\n".join(text), soft_wrap=True, markup=False, highlight=False)
    return table


def _threads(status: Status) -> str:
    if status.kind == "cuda":
        return ""
    lib = library.cpu()
    pool = "torch's" if lib is None else {"openmp": "OpenMP's, as torch's"}.get(lib.lt_cpu_pool().decode(), "own")
    return f"{torch.get_num_threads()} ({pool})"
