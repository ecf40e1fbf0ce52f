"""Disks that fail, fill up or lose their folder while a run saves, exports, loads or offloads."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.runs import Run, Setting

SHIM = "LT_ZERO_FAULTS_SHIM"  # the variable with the preloaded library's path, or with why there is none
SHARDED = [Setting("trainer", 3), Setting("fabric", 2), Setting("loop", 3), Setting("trainer", 1)]
WHOLE = [Setting("trainer", 0, full=True), Setting("fabric", 1, full=True)]
NVME = [
    Setting("trainer", 3, nvme=("offload_optimizer", "offload_param")),
    Setting("loop", 2, nvme=("offload_optimizer",)),
]
SHORT = 0  # in place of an errno


class Failure(NamedTuple):
    """Calls of the system that fail from a point of a run on: see shim.c.

    Attributes:
        rank: None: of either.
        where: a part of the paths.
    """

    group: str
    point: str
    operation: str
    nth: int
    code: int
    persists: bool
    where: str
    rank: int | None
    settings: list[Setting]


def _saves() -> Iterator[Failure]:
    tmp = "/.last.tmp"
    for code in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
        yield Failure("failing save", "before save", "write", 1, code, True, tmp, None, SHARDED)
    yield Failure("failing save", "before save", "write", 2, errno.EIO, False, tmp, 0, SHARDED)
    yield Failure("failing save", "before save", "write", 1, errno.EINTR, False, tmp, None, SHARDED)
    yield Failure("failing save", "before save", "write", 1, SHORT, False, tmp, None, SHARDED)
    yield Failure("failing save", "before save", "write", 1, SHORT, True, tmp, None, SHARDED)
    for code in (errno.EROFS, errno.EMFILE, errno.ENOSPC):
        yield Failure("failing save", "before save", "open", 1, code, True, tmp, None, SHARDED)
    yield Failure("failing save", "manifest", "open", 1, errno.EIO, False, "manifest.json", 0, SHARDED)
    for nth in (1, 2, 3):
        yield Failure("failing save", "before save", "fsync", nth, errno.EIO, False, tmp, 0, SHARDED)
    yield Failure("failing save", "before save", "fsync", 1, errno.ENOSPC, True, tmp, 1, SHARDED)
    yield Failure("failing save", "before save", "rename", 1, errno.EIO, True, tmp, 0, SHARDED)
    yield Failure("failing save", "before save", "rename", 1, errno.EACCES, False, tmp, 0, SHARDED)
    for code in (errno.EROFS, errno.ENOSPC):
        yield Failure("failing save", "before save", "mkdir", 1, code, True, tmp, 0, SHARDED)
    for operation in ("fsync", "rename"):  # torch.save opens and writes by functions of C++ that the shim does not see
        yield Failure("failing save", "before save", operation, 1, errno.EIO, True, "/.last", 0, WHOLE)


def _others() -> Iterator[Failure]:
    every, export = SHARDED + WHOLE, "weights.safetensors"
    for operation, code in (
        ("write", errno.ENOSPC),
        ("write", errno.EIO),
        ("open", errno.EACCES),
        ("fsync", errno.EIO),
    ):
        yield Failure("failing export", "before export", operation, 1, code, True, export, 0, every)
    yield Failure("failing export", "before export", "rename", 1, errno.EIO, True, export, 0, every)
    yield Failure("failing export", "before export", "write", 1, SHORT, True, export, 0, every)
    for operation, code, nth in (("write", errno.EIO, 1), ("write", errno.ENOSPC, 3), ("read", errno.EIO, 2)):
        yield Failure("failing offload", "forward", operation, nth, code, True, "/nvme/", None, NVME)
    yield Failure("failing offload", "forward", "write", 1, SHORT, False, "/nvme/", None, NVME)
    yield Failure("failing offload", "forward", "read", 1, SHORT, False, "/nvme/", None, NVME)
    yield Failure("failing offload", "set-up", "open", 1, errno.ENOSPC, True, "/nvme/", None, NVME)
    for operation, code in (("read", errno.EIO), ("open", errno.EACCES), ("open", errno.EIO), ("read", SHORT)):
        yield Failure("failing load", "set-up", operation, 2, code, True, "/last/", None, SHARDED)
    yield Failure("failing load", "set-up", "read", 1, errno.EIO, True, "/last", None, WHOLE)


def cases(seed: int) -> list[Case]:
    """Failures of calls, and file systems that are really full or closed to writing."""
    chance = random.Random(seed)
    made = []
    for failure in [*_saves(), *_others()]:
        setting = chance.choice(failure.settings)
        rank = failure.rank if failure.rank is not None else chance.randrange(setting.ranks)
        often = "from then on" if failure.persists else "once"
        what = f"{failure.operation} {failure.nth} of {failure.where} {_word(failure.code)} {often}"
        name = f"{what}, {failure.point}, rank {rank}, {setting.name}"
        made.append(Case(failure.group, name, partial(_fails, failure, setting, rank)))
    for kind in ("tmpfs", "ext4"):
        for point, rank in (("before save", 0), ("middle of save", 1), ("before export", 0)):
            setting = chance.choice(SHARDED + WHOLE[:1] if point != "middle of save" else SHARDED)
            case = partial(_full, kind, setting, point, rank)
            made.append(Case("full disk", f"{kind}, {point}, rank {rank}, {setting.name}", case))
    for fault, point in (
        ("deleted folder", "middle of save"),
        ("deleted folder", "manifest"),
        ("closed folder", "before save"),
    ):
        setting = chance.choice(SHARDED)
        made.append(
            Case("folders", f"{fault}, {point}, rank 0, {setting.name}", partial(_folder, fault, setting, point))
        )
    return made


def _word(code: int) -> str:
    return errno.errorcode[code] if code else "short"


def _fails(failure: Failure, setting: Setting, rank: int, folder: Path) -> Outcome:
    if not os.path.exists(os.environ.get(SHIM, "")):
        return Outcome(True, f"skipped: {os.environ.get(SHIM) or 'the library is not preloaded'}")
    value = f"{failure.operation} {failure.nth} {failure.code} {int(failure.persists)} {failure.where}"
    found = partial(judge, codes=[failure.code], where=failure.where)
    return runs.disturb(folder, setting, found, point=failure.point, fault="shim", rank=rank, value=value)


def judge(done: Run, codes: list[int], where: str) -> tuple[str, str]:
    """What has come of a run whose disk fails with one of ``codes`` (0 and EINTR: a call that is to be repeated)."""
    finished = None not in done.sums()
    if {SHORT, errno.EINTR} & set(codes):
        return "repeated, and went on", "" if finished else "a short or interrupted call ended the run"
    if finished:
        return "", "the error was swallowed"
    part = where.strip("/").removeprefix(".").split(".")[0]
    for rank, log in enumerate(done.logs):
        end = "\n".join(log.splitlines()[-12:])
        if not any(os.strerror(code) in end or errno.errorcode[code] in end for code in codes):
            return "", f"rank {rank} does not tell why: {done.last_line(rank)[:200]!r}"
        if part not in end:
            return "", f"rank {rank} does not name the file: {done.last_line(rank)[:200]!r}"
    return "an error with file and reason on all ranks", ""


# ---- real file systems -----------------------------------------------------------------------------------------------


def _full(kind: str, setting: Setting, point: str, rank: int, folder: Path) -> Outcome:
    place = folder / "disk"
    with _mounted(kind, place, folder) as problem:
        if problem:
            return Outcome(True, f"skipped: {problem}")
        found = partial(judge_full, export=point == "before export")
        repair = (place / "run" / "hog").unlink
        (place / "run").mkdir()
        fault = {"point": point, "fault": "full disk", "rank": rank}
        return runs.disturb(folder, setting, found, repair=repair, disk=place / "run", **fault)


def judge_full(done: Run, export: bool) -> tuple[str, str]:
    """As ``judge``; a disk that is found to be full before anything is written is told in words of its own."""
    if all("are free" in log or "has 0 bytes left" in log for log in done.logs) and None in done.sums():
        return "an error with file and reason on all ranks", ""
    return judge(done, [errno.ENOSPC], "weights" if export else "last")


@contextmanager
def _mounted(kind: str, place: Path, folder: Path, size_mb: int = 24) -> Iterator[str]:
    """A small file system at a place; yields why there is none."""
    place.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(place)]]
    if kind == "ext4":
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(size_mb << 20)
        commands = [["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(place)]]
    for command in commands:
        if shutil.which(command[0]) is None:
            yield f"there is no {command[0]}"
            return
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{kind} cannot be mounted here"
            return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _folder(fault: str, setting: Setting, point: str, folder: Path) -> Outcome:
    place = folder / "run"
    place.mkdir()
    repair: Callable[[], object] = lambda: None  # noqa: E731
    if fault == "closed folder":
        if subprocess.run(["chattr", "+i", str(place)], capture_output=True, check=False).returncode:
            return Outcome(True, "skipped: chattr +i does not work here")
        subprocess.run(["chattr", "-i", str(place)], check=True)
        repair = partial(subprocess.run, ["chattr", "-i", str(place)], check=True)
    codes = [errno.EPERM, errno.EACCES] if fault == "closed folder" else [errno.ENOENT]
    found = partial(judge, codes=codes, where="last")
    return runs.disturb(folder, setting, found, repair=repair, disk=place, point=point, fault=fault)
