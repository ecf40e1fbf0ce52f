"""The memory that a process can still allocate on its host: of the machine, and of the control groups around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lt_zero.common.units import format_bytes

_NO_LIMIT = 1 << 62  # cgroup version 1 writes a number of this order for "no limit"


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
