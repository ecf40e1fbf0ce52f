"""Several runs in one process: some that a fault ends, whose errors the user catches, and one that has to be right."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from pathlib import Path

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.processes import dealt
from tests.faults.runs import END, Hang, Run, Setting

COUNT = 38
TRIES = 5  # failing runs before it
FIRST = 2  # of these runs that has all that later ones have: groups end with the next run
_MORE = 2  # descriptors or threads that may come or go by chance
_CLOSED = (
    r"cannot be reached: an error ended the last run in these processes.*[Rr]ank {rank}\b.*Start all processes again"
)
SETTINGS = [
    Setting("trainer", 3),
    Setting("trainer", 1),
    Setting("trainer", 3, nvme=("offload_optimizer", "offload_param")),
    Setting("trainer", 2, mesh="tensor"),
    Setting("trainer", 1, mesh="pipeline", ranks=3),
    Setting("trainer", 2, mesh="expert"),
    Setting("trainer", 3, mesh="sequence"),
    Setting("fabric", 3),
    Setting("fabric", 1, mesh="tensor"),
    Setting("fabric", 3, mesh="expert"),
    Setting("loop", 2),
    Setting("loop", 2, mesh="tensor"),
    Setting("loop", 3, mesh="sequence"),
]
POINTS = ["set-up", "first forward", "forward", "reduction", "backward", "clip", "step", "validation", "before save"]
POINTS += ["middle of save", "manifest", "before export", "middle of export"]
FAULTS = ["ValueError", "MemoryError", "KeyboardInterrupt", "sys.exit(1)"]
RANK_0 = ["manifest", "middle of export"]
OF_FILES = ["middle of save", *RANK_0]  # where a call of the system fails, mostly in a thread


def cases(seed: int) -> list[Case]:
    """So many of all combinations that each point, error and setting occurs several times; on one rank, or on all."""
    chance = random.Random(seed)
    made, settings = list[Case](), list[Setting]()
    for point, fault in dealt(chance, COUNT, POINTS, FAULTS):
        if not settings:
            settings = chance.sample(SETTINGS, len(SETTINGS))
        setting = settings.pop()
        if point in OF_FILES:
            fault = "OSError"
        rank = 0 if point in RANK_0 else chance.choice([-1, *range(setting.ranks)])
        if (setting.face != "trainer" or point == "before export") and point not in OF_FILES:
            rank = -1  # no other rank learns of an error in the user's own code that only one rank has caught
        where = "all ranks" if rank < 0 else setting.kind_of(rank)
        name = f"{fault}, {point}, {where}, {setting.name}"
        made.append(Case("several runs", name, partial(_case, setting, point, fault, rank)))
    return made


def _case(setting: Setting, point: str, fault: str, rank: int, folder: Path) -> Outcome:
    wanted = runs.reference(folder.parent, setting)
    wanted.give(folder)
    how = {"point": point, "fault": fault, "rank": rank, "tries": TRIES, "value": f"{wanted.folder}/base"}
    try:
        done = runs.run(folder, setting, END, **how)
    except Hang as hang:
        return Outcome(False, "hang", str(hang))
    what, problem = judge(done, wanted.end, fault, rank)
    return Outcome(not problem, problem or what, done.evidence() if problem else "")


def judge(done: Run, end: list[str], fault: str, rank: int) -> tuple[str, str]:
    """In words what has come of the runs, or what is wrong with them."""
    kinds = set[str]()
    for number, log in enumerate(done.logs):
        caught = re.findall(r"^CAUGHT (\w+): (.*)$", log, re.MULTILINE)
        if len(caught) < TRIES:
            return "", f"rank {number} caught {len(caught)} errors of {TRIES}"
        for kind, text in caught:
            kinds.add(kind)
            if rank >= 0 and number != rank and not re.search(rf"[Rr]ank {rank}\b", text):
                return "", f"an error on rank {number} does not name rank {rank}: {text[:200]}"
        kept = [json.loads(text) for text in re.findall(r"^KEPT (.*)$", log, re.MULTILINE)]
        for kind, (first, last) in zip(
            ("descriptors", "threads"), zip(kept[FIRST], kept[-1], strict=True), strict=True
        ):
            if last - first > _MORE:
                return "", f"{kind} grow on rank {number}: {kept}"
    if rank >= 0 and all(done.codes) and all(re.search(_CLOSED.format(rank=rank), log) for log in done.logs):
        return "an error told to start the processes again", ""  # the others waited for what only that can end
    if any(done.codes):
        return "", f"the last run fails: {done.codes}"
    if done.sums() != end:
        return "", f"the last run differs: wanted {end}, got {done.sums()}"
    return "the same bits after errors", ""
