"""Available memory, and the error if it is not enough."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import psutil
import torch
from rich.table import Table

from lt_zero.common import accelerator
from lt_zero.common.console import Console
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.units import format_bytes
from lt_zero.common.variables import switched

_NO_LIMIT = 1 << 62  # cgroup version 1 writes a number of this order for "no limit"


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


@dataclass(frozen=True)
class Available:
    """Bytes that can still be allocated, and the source of the limit."""

    nbytes: int
    source: str


def host_memory(root: Path = Path("/")) -> Available:
    """The host memory that this process can still allocate.

    The kernel's estimate ``MemAvailable``, or less if a control group of this process or one around it has a lower
    limit: a container or batch job is killed at its own limit (exit code -9). File pages that the kernel would drop do
    not count as used. ``root`` is the folder that has ``proc``.
    """
    machine = Available(int(psutil.virtual_memory().available), "MemAvailable of this machine")
    return min([machine, *cgroup_limits(root)], key=lambda limit: limit.nbytes)


def cgroup_limits(root: Path = Path("/")) -> list[Available]:
    """The memory left in each control group (version 1 or 2) of this process that has a limit."""
    found = []
    for mount, folder, version in _memory_groups(root):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        while True:
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _NO_LIMIT:
                reclaimable = _stat(folder / "memory.stat", names[2])
                free = max(0, limit - max(0, used - reclaimable))
                where = f"/{folder.relative_to(mount)}" if folder != mount else "/"
                found.append(Available(free, f"the limit {format_bytes(limit)} of control group {where}"))
            if folder == mount:
                break
            folder = folder.parent
    return found


def _memory_groups(root: Path) -> Iterator[tuple[Path, Path, int]]:
    """(mount point, this process's group below it, version) of each hierarchy with a memory controller."""
    own: dict[int, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            own[1] = path
        elif number == "0" and not controllers:
            own[2] = path
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(kind[0], 0)
        if version not in own or (version == 1 and "memory" not in kind[2].split(",")):
            continue
        mount = root / fields[4].lstrip("/")
        # The mount shows the hierarchy from group fields[3] on, which is "/" unless a container sees only a part.
        inside = own[version].removeprefix(fields[3]) if fields[3] != "/" else own[version]
        folder = mount / inside.lstrip("/")
        yield mount, folder if ".." not in folder.parts and folder.is_dir() else mount, version


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = " ".join(_lines(path)).split()
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None  # "max": no limit


def _stat(path: Path, key: str) -> int:
    values = dict(line.split(maxsplit=1) for line in _lines(path) if " " in line)
    return int(values.get(key, "0"))


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
