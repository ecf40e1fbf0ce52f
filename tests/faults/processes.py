"""Faults of processes: signals, exits and exceptions at every point of a run, on each rank and face."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.runs import Run, Setting

COUNT = 90
SETTINGS = [
    Setting("trainer", 3),
    Setting("trainer", 1),
    Setting("trainer", 0, full=True),
    Setting("trainer", 3, nvme=("offload_optimizer", "offload_param")),
    Setting("fabric", 2),
    Setting("fabric", 3, cpu=True),
    Setting("fabric", 0),
    Setting("loop", 3),
    Setting("loop", 1),
    Setting("loop", 2, nvme=("offload_optimizer",)),
]
EVERYWHERE = [
    "set-up",
    "middle of load",
    "first forward",
    "forward",
    "backward",
    "clip",
    "step",
    "validation",
    "before save",
    "middle of save",
    "before export",
    "teardown",
    "exit",
]
RANK_0 = ["manifest", "before rename", "after rename", "middle of export", "rename of export"]
SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGSTOP"]
FAULTS = [*SIGNALS, "os._exit(3)", "os._exit(0)", "sys.exit(1)", "sys.exit(0)", "ValueError", "MemoryError"]
FAULTS += ["KeyboardInterrupt"]
IN_THREADS = ["middle of load", "middle of save"]  # where a thread of the package calls the system
OF_MAIN = ["sys.exit(1)", "sys.exit(0)", "KeyboardInterrupt"]  # what only the main thread gets
SUCCESSES = [
    "sys.exit(0)",
    "os._exit(0)",
]  # before there is a group, launcher and ranks take it for the end of the work
OF_FOLDERS = ["middle of save", "manifest", "before rename", "after rename"]  # torch writes a checkpoint in one file
_GROUPS = {"SIGKILL": "kills", "SIGSTOP": "stops", "SIGTERM": "signals", "SIGINT": "signals", "SIGSEGV": "signals"}


def cases(seed: int) -> list[Case]:
    """So many of all combinations that each point, fault, rank, face and launcher occurs several times."""
    chance = random.Random(seed)
    made, seen = list[Case](), set[str]()
    settings = list[Setting]()
    for point, fault in dealt(chance, COUNT, [*EVERYWHERE, *RANK_0, "start"], FAULTS):
        if (point in IN_THREADS and fault in OF_MAIN) or (point == "start" and fault in SUCCESSES):
            fault = "SIGKILL"
        if not settings:
            settings = chance.sample(SETTINGS, len(SETTINGS))
        setting = settings.pop()
        if setting.full and point in OF_FOLDERS:
            setting = SETTINGS[0]
        rank = 0 if point in RANK_0 else chance.randrange(setting.ranks)
        launcher = _launcher(setting, point, chance)
        name = f"{fault}, {point}, rank {rank}, {setting.name}, {launcher}"
        if name in seen:
            continue
        seen.add(name)
        made.append(
            Case(_GROUPS.get(fault, "exits and errors"), name, partial(_case, setting, launcher, point, fault, rank))
        )
    return made


def dealt(chance: random.Random, count: int, points: list[str], faults: list[str]) -> list[tuple[str, str]]:
    """Points and faults: each fault with each point is as likely as any other, and each point comes as often."""
    deck = list[tuple[str, str]]()
    while len(deck) < count:
        shuffled = faults * (len(points) // len(faults) + 1)
        chance.shuffle(shuffled)
        deck += list(zip(points, shuffled, strict=False))
    return deck[:count]


def _launcher(setting: Setting, point: str, chance: random.Random) -> str:
    """A real launcher for some: each starts one or two interpreters, which takes most of a case's time."""
    real = "torchrun" if setting.face == "loop" or chance.random() < 0.2 else "lightning"
    return real if point == "start" or chance.random() < (0.15 if real == "torchrun" else 0.4) else "variables"


def _case(setting: Setting, launcher: str, point: str, fault: str, rank: int, folder: Path) -> Outcome:
    found = partial(judge, launcher=launcher, fault=fault, rank=rank)
    return runs.disturb(folder, setting, found, launcher, point=point, fault=fault, rank=rank)


def judge(done: Run, launcher: str, fault: str, rank: int) -> tuple[str, str]:
    """In words what has come of a run, or what is wrong with it."""
    sums = done.sums()
    if done.setting.alike and None not in sums and len(set(sums)) > 1:
        return "", "ranks have different weights"
    if fault == "SIGSTOP":
        fine = None not in sums and not any(done.codes)
        return "went on", "" if fine else "a stopped rank ended the run"
    told = list[str]()
    for other in range(len(sums)):
        if other != rank:
            what, problem = _told_by(done, other, launcher, fault, rank)
            if problem:
                return "", problem
            told.append(what)
    return ", ".join(dict.fromkeys(told)), ""


def _told_by(done: Run, other: int, launcher: str, fault: str, rank: int) -> tuple[str, str]:
    """What another rank than that of the fault has come to, or what is wrong with it."""
    if done.sums()[other] is not None:
        return "the other rank finished", ""
    if fault == "SIGTERM" and not any(done.codes) and "SIGTERM: all ranks stop" in "".join(done.logs):
        return "all ranks stopped after the batch", ""
    if launcher == "lightning" and rank == 0 and "attempting graceful shutdown" in done.logs[0]:
        return "Ctrl-C on rank 0, whose launcher ended the other rank", ""
    line = done.last_line(other)
    if not line and launcher == "lightning" and rank == 0:
        return "the other rank was not started yet", ""
    cause = "broken on purpose" if fault in ("ValueError", "MemoryError") else ""
    if re.search(r"Child process .* terminated with code", line) and f"[rank: {rank}]" in line:
        return "the launcher names the rank", ""
    if re.search(rf"[Rr]ank(?: |s (?:\d+, )*){rank}\b", line) and cause in line:
        return "the last line names rank and cause", ""
    if launcher == "torchrun" and re.search(rf"rank\s*: {rank} ", done.launcher):
        return "the launcher names the rank", ""
    return "", f"the last line of rank {other} does not name rank {rank}: {line[:200]!r}"
