"""Faults of one rank of a mesh: each kind of rank at each point of a run, by a kill, a stop, an error or an exit."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.processes import dealt, judge
from tests.faults.runs import Setting

COUNT = 100
SETTINGS = [
    Setting("trainer", 3, mesh="tensor", ranks=4),
    Setting("fabric", 1, mesh="tensor"),
    Setting("loop", 2, mesh="tensor"),
    Setting("trainer", 1, mesh="pipeline", ranks=3),
    Setting("fabric", 0, mesh="pipeline", ranks=3),
    Setting("trainer", 2, mesh="pipeline", ranks=4),
    Setting("trainer", 2, mesh="expert", ranks=4),
    Setting("fabric", 3, mesh="expert"),
    Setting("loop", 1, mesh="expert"),
    Setting("trainer", 3, mesh="sequence"),
    Setting("loop", 2, mesh="sequence", ranks=4),
    Setting("trainer", 3, mesh="MiCS", ranks=4),
    Setting("loop", 2, mesh="MiCS", ranks=4),
    Setting("fabric", 3, mesh="hpZ", ranks=4),
]
POINTS = ["set-up", "middle of load", "first forward", "forward", "reduction", "backward", "clip", "step"]
POINTS += ["validation", "before save", "middle of save", "before export", "teardown"]
FAULTS = ["SIGKILL", "SIGSTOP", "ValueError", "sys.exit(1)"]
IN_THREADS = ["middle of load", "middle of save"]  # where a thread of the package calls the system


def cases(seed: int) -> list[Case]:
    """So many of all combinations that each rank of each mesh fails several times, and at each point."""
    chance = random.Random(seed)
    made, ranks = list[Case](), list[tuple[Setting, int]]()
    for point, fault in dealt(chance, COUNT, POINTS, FAULTS):
        if not ranks:
            ranks = [(setting, rank) for setting in SETTINGS for rank in range(setting.ranks)]
            chance.shuffle(ranks)
        setting, rank = ranks.pop()
        if point in IN_THREADS and fault == "sys.exit(1)":
            fault = "SIGKILL"
        name = f"{fault}, {point}, {setting.kind_of(rank)}, {setting.name}"
        made.append(Case(f"meshes: {setting.mesh}", name, partial(_case, setting, point, fault, rank)))
    return made


def _case(setting: Setting, point: str, fault: str, rank: int, folder: Path) -> Outcome:
    found = partial(judge, launcher="variables", fault=fault, rank=rank)
    return runs.disturb(folder, setting, found, point=point, fault=fault, rank=rank)
