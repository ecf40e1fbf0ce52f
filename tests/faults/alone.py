"""Calls that need all ranks, on one rank only, at points of a run: an error on every rank that names the call."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.processes import dealt
from tests.faults.runs import Run, Setting

COUNT = 36
SETTINGS = [
    Setting("trainer", 3),
    Setting("trainer", 1, mesh="pipeline", ranks=3),
    Setting("trainer", 2, mesh="tensor"),
    Setting("trainer", 0, full=True),
    Setting("fabric", 2),
    Setting("fabric", 3, mesh="expert"),
    Setting("loop", 1),
    Setting("loop", 2, mesh="MiCS", ranks=4),
]
POINTS = ["ready", "forward", "backward", "clip", "step", "validation", "before save", "before export", "after"]
CALLS = ["save alone", "export alone", "barrier alone", "broadcast alone"]
_ENDLESS = re.compile(
    r"\band not on rank \d|none of these waits can end|Both need all ranks|has ended or left|ended without an error"
    r"|came to the end without an error|[Rr]ank \d+ ended with"
)


def cases(seed: int) -> list[Case]:
    """So many of all combinations that each call is made several times at each point of a run, and after it."""
    chance = random.Random(seed)
    made, settings = list[Case](), list[Setting]()
    for point, call in dealt(chance, COUNT, POINTS, CALLS):
        if not settings:
            settings = chance.sample(SETTINGS, len(SETTINGS))
        setting = settings.pop()
        rank = chance.randrange(setting.ranks)
        name = f"{call}, {point}, {setting.kind_of(rank)}, {setting.name}"
        made.append(Case("calls on one rank", name, partial(_case, setting, point, call, rank)))
    callback = Setting("trainer", chance.randrange(4))
    for rank in range(callback.ranks):
        name = f"ModelCheckpoint, {callback.kind_of(rank)}, {callback.name}"
        made.append(Case("calls on one rank", name, partial(_case, callback, "callbacks", "callback alone", rank)))
    return made


def _case(setting: Setting, point: str, call: str, rank: int, folder: Path) -> Outcome:
    return runs.disturb(folder, setting, judge, point=point, fault=call, rank=rank)


def judge(done: Run) -> tuple[str, str]:
    """In words what has come of a run, or what is wrong with it."""
    if not any(done.codes) and None not in done.sums():
        return "", "the call on one rank was no error"
    for rank, code in enumerate(done.codes):
        line = done.last_line(rank)
        # Where a call of all ranks met that of one rank, the others are through before it makes its own second one.
        if (code or done.sums()[rank] is None) and not _ENDLESS.search(line):
            return "", f"the last line of rank {rank} does not tell who waits for whom: {line[:300]!r}"
    return "an error on every rank", ""
