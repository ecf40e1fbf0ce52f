"""Memory that runs out in one rank: allocations fail, or the kernel ends its process."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.processes import judge
from tests.faults.runs import Run, Setting

SETTINGS = [Setting("trainer", 3), Setting("fabric", 2), Setting("loop", 3), Setting("trainer", 1), Setting("loop", 0)]
LIMITED = ["set-up", "forward", "step", "before save", "before export"]
KILLED = ["set-up", "backward", "middle of save", "before export"]
_ROOTS = [  # of version 1 and 2: the folder of groups, and the file of a limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
]


def cases(seed: int) -> list[Case]:
    chance = random.Random(seed)
    made = []
    for number, point in enumerate(LIMITED):
        # With none at all a new thread may fail before it says that it runs, and `Thread.start` waits for that.
        setting = SETTINGS[number % len(SETTINGS)]
        rank = chance.randrange(setting.ranks)
        more = chance.choice([4, 16])
        name = f"address space of now and {more} MB, {point}, rank {rank}, {setting.name}"
        made.append(Case("memory", name, partial(_limited, setting, point, rank, more)))
    for number, point in enumerate(KILLED):
        setting = SETTINGS[number % len(SETTINGS)]
        rank = chance.randrange(setting.ranks)
        name = f"killed by the kernel, {point}, rank {rank}, {setting.name}"
        made.append(Case("memory", name, partial(_killed, setting, point, rank)))
    return made


def limit_address_space(more: int) -> None:
    """Let this process take no more than some MB from now on."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    size = re.search(r"VmSize:\s+(\d+) kB", status)
    assert size is not None
    limit = int(size[1]) * 1024 + (more << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limited(setting: Setting, point: str, rank: int, more: int, folder: Path) -> Outcome:
    found = partial(_judge_limited, rank=rank)
    return runs.disturb(folder, setting, found, point=point, fault="address space", rank=rank, value=str(more))


def _judge_limited(done: Run, rank: int) -> tuple[str, str]:
    if None not in done.sums():
        return "nothing more was needed", ""
    return judge(done, "variables", "address space", rank)


def _killed(setting: Setting, point: str, rank: int, folder: Path) -> Outcome:
    found = partial(judge, launcher="variables", fault="kernel", rank=rank)
    with _group() as (group, problem):
        if problem:
            return Outcome(True, f"skipped: {problem}")
        return runs.disturb(folder, setting, found, point=point, fault="kernel", rank=rank, value=str(group))


@contextmanager
def _group(limit_mb: int = 64) -> Iterator[tuple[Path | None, str]]:
    """A group of processes with little memory; or why there is none."""
    for root, limit in _ROOTS:
        group = root / f"lt-zero-faults-{os.getpid()}"
        if not (root / limit).exists() and not (root / "cgroup.subtree_control").exists():
            continue
        try:
            group.mkdir()
        except OSError as error:
            yield None, f"no group of processes can be made in {root} ({error.strerror})"
            return
        try:
            (group / limit).write_text(str(limit_mb << 20), encoding="utf-8")
            with contextlib.suppress(OSError):  # there is no swap
                (group / "memory.swap.max").write_text("0", encoding="utf-8")
            yield group, ""
        except OSError as error:
            yield None, f"{group / limit} cannot be set ({error.strerror})"
        finally:
            group.rmdir()
        return
    yield None, "there are no memory cgroups"
