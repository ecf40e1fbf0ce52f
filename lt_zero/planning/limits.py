"""Available memory, and the error if it is not enough."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import StringIO
from pathlib import Path

import torch
from rich.table import Table

from lt_zero.common import accelerator
from lt_zero.common.console import Console
from lt_zero.common.host_memory import Available, host_memory
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.variables import switched


class NotEnoughMemory(MemoryError):
    """A machine has less memory than the run needs; raised before anything is allocated.

    Attributes:
        need: bytes by kind.
        have: bytes.
    """

    def __init__(self, message: str, need: Mapping[str, int], have: int) -> None:
        super().__init__(message)
        self.need, self.have = dict(need), have

    def __reduce__(self) -> tuple[type[NotEnoughMemory], tuple[str, dict[str, int], int]]:
        return type(self), (str(self), self.need, self.have)  # errors of workers are sent to the launcher


def peak_rss() -> int:
    """The peak resident memory (bytes) of this process; without /proc it may be that of the parent before a fork."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if (peak := next((line for line in lines if line.startswith("VmHWM:")), None)) is not None:
            return int(peak.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_memory(device: torch.device) -> Available | None:
    """The memory that can still be allocated on an accelerator; None for a CPU, or where it cannot be asked."""
    if not accelerator.is_accelerator(device) or not accelerator.is_available():
        return None
    if not accelerator.tells_memory(device):
        return None
    free, _ = accelerator.free_and_total(device)
    unused = accelerator.reserved(device) - accelerator.allocated(device)
    return Available(free + unused, f"free memory of {accelerator.name(device)}")


def check_host_memory(
    need: Mapping[str, int], have: Available | None = None, *, ranks: int = 1, remedy: str = ""
) -> None:
    """Check that a node has the memory that its ranks need.

    Args:
        need: bytes by kind, of all ``ranks`` together.
        have: available memory; default: ``host_memory()``.
        ranks: ranks of the node, for the message.
        remedy: a sentence.

    Raises:
        NotEnoughMemory: the need is larger; with a table of the kinds.
    """
    have = have or host_memory()
    if sum(need.values()) > have.nbytes:
        raise NotEnoughMemory(
            shortage(need, have, f"The host memory of a node with {ranks} rank(s)", remedy), need, have.nbytes
        )


def shortage(need: Mapping[str, int], have: Available, what: str, remedy: str) -> str:
    """The error message: the memory that is too small, a table of needs, the available memory, the remedy."""
    total = sum(need.values())
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for kind, nbytes in need.items():
        table.add_row(kind, bytes_cell(nbytes))
    table.add_row("together", bytes_cell(total))
    table.add_row(f"available ({have.source})", bytes_cell(have.nbytes))
    table.add_row("missing", bytes_cell(total - have.nbytes))
    text = StringIO()
    show(table, Console(file=text, color_system=None))
    return f"{what} does not suffice; nothing was allocated yet.\n{text.getvalue()}{remedy}".rstrip()


def checks_wanted() -> bool:
    """True if memory is checked before it is allocated; ``LT_ZERO_MEMORY_CHECK=0`` turns it off."""
    return switched("LT_ZERO_MEMORY_CHECK", True)
