"""Power cuts: the disk as it may be found after each operation of a save and an export, from a recorded order.

Note [What a cut leaves]
    Names (created, renamed, removed) become durable in their order, as the journals of ext4, XFS and Btrfs keep it: at
    least up to the last fsync of anything, at most all. The bytes of a file are durable once it was synced; those after
    that may be there, or be zeros.
"""

from __future__ import annotations

import copy
import hashlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.faults import runs
from tests.faults.case import Case, Outcome
from tests.faults.runs import Setting

SETTINGS = [
    Setting("trainer", 3),
    Setting("trainer", 0, full=True),
    Setting("fabric", 2),
    Setting("fabric", 1, full=True),
    Setting("loop", 3),
    Setting("loop", 0),
]
KEPT = (
    "last",
    ".last.",
    "latest",
    ".latest",
    "weights.safetensors",
    ".weights.safetensors",
)  # names in the run's folder


class Step(NamedTuple):
    """An operation of the record; paths are relative to the run's folder."""

    what: str
    path: str
    other: str
    offset: int
    data: bytes


@dataclass
class File:
    """The bytes of a file: as they were written, and as they were at its last sync."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def lost(self) -> bytes:
        """As a cut leaves it that loses what was not synced: its size is known, its bytes are not."""
        return self.durable[: len(self.now)].ljust(len(self.now), b"\0")


def cases(seed: int) -> list[Case]:
    return [
        Case("power cuts", f"save and export, {setting.name}", partial(_case, setting, seed)) for setting in SETTINGS
    ]


def _case(setting: Setting, seed: int, folder: Path) -> Outcome:
    before = folder / "before"
    before.mkdir()
    wanted = runs.reference(folder.parent, setting)
    wanted.give(before)
    run_folder, log = folder / "run", folder / "record"
    run_folder.mkdir()
    wanted.give(run_folder)
    done = runs.run(run_folder, setting, runs.UNTIL, FAULT_RECORD=str(log), FAULT_MATCH=f"{run_folder}/")
    if any(done.codes) or not log.exists():
        return Outcome(False, "the recorded run failed", done.evidence())
    marks = [_mark(place / "last") for place in (before, run_folder)], [_bytes(p) for p in (before, run_folder)]
    found: set[str] = set()
    states = 0
    for number, files in enumerate(
        states_of(list(steps_of(log.read_bytes(), run_folder)), before, random.Random(seed))
    ):
        place = folder / f"cut-{number}"
        _write(place, files)
        try:
            what = _read(place, *marks)
        except Exception as error:
            listing = "\n".join(f"{name}: {len(data)} bytes" for name, data in sorted(files.items()))
            return Outcome(False, f"neither old nor new: {type(error).__name__}", f"state {number}: {error}\n{listing}")
        shutil.rmtree(place)
        found.add(what)
        states += 1
    if found != {"old", "new"} or states < (8 if setting.full else 20):
        return Outcome(False, f"{states} states had {sorted(found)}", done.evidence())
    return Outcome(True, "in every state the whole old or the whole new one")


def steps_of(record: bytes, folder: Path) -> Iterator[Step]:
    """The operations on checkpoint and export."""
    at = 0
    while at < len(record):
        end = record.index(b"\n", at)
        what, path, other, offset, length = record[at:end].decode().split("\t")
        at = end + 1 + int(length)
        relative = path.removeprefix(f"{folder}/").removesuffix("/")
        if path == str(folder) or relative.startswith(KEPT):
            yield Step(
                what,
                "" if path == str(folder) else relative,
                other.removeprefix(f"{folder}/"),
                int(offset),
                record[end + 1 : at],
            )


def states_of(steps: list[Step], before: Path, chance: random.Random) -> Iterator[dict[str, bytes]]:
    """The different states that cuts can leave: a file's name in the folder -> its bytes; a folder's -> none."""
    seen: set[str] = set()
    for cut in range(len(steps) + 1):
        synced = max((number + 1 for number in range(cut) if steps[number].what == "sync"), default=0)
        for names in {cut, synced, chance.randint(synced, cut)}:
            for loses in (False, True):
                files = _after(steps[:cut], names, before, loses)
                digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    yield files


def _after(steps: list[Step], names: int, before: Path, loses: bool) -> dict[str, bytes]:
    """What a cut after ``steps`` leaves, of whose changes of names the first ``names`` are durable."""
    every: dict[str, File | None] = {}
    for path in before.rglob("*"):
        data = path.read_bytes() if path.is_file() else None
        every[str(path.relative_to(before))] = None if data is None else File(bytearray(data), data)
    durable = copy.copy(every)
    for number, step in enumerate(steps):
        _apply(step, every)
        if number < names:
            durable = copy.copy(every)  # the same files under the names of now
    return {name: b"<folder>" if f is None else (f.lost() if loses else bytes(f.now)) for name, f in durable.items()}


def _apply(step: Step, files: dict[str, File | None]) -> None:
    if step.what == "mkdir":
        files[step.path] = None
    elif step.what == "create":
        files[step.path] = File()
    elif step.what == "remove":
        files.pop(step.path, None)
    elif step.what in ("rename", "exchange"):
        one, two = (_below(files, path) for path in (step.path, step.other))
        files |= {step.other + rest: value for rest, value in one.items()}
        files |= {step.path + rest: value for rest, value in two.items() if step.what == "exchange"}
    elif step.what == "sync" and step.path in files:
        if (synced := files[step.path]) is not None:  # otherwise it is a folder
            synced.durable = bytes(synced.now)
    elif step.what == "sync" and step.data:  # a stream of C++ has made and written it
        files[step.path] = File(bytearray(step.data), step.data)
    elif (file := files.get(step.path)) is not None:
        if step.what == "truncate":
            file.now = file.now[: step.offset].ljust(step.offset, b"\0")
        else:
            file.now = file.now.ljust(step.offset, b"\0")
            file.now[step.offset : step.offset + len(step.data)] = step.data


def _below(files: dict[str, File | None], path: str) -> dict[str, File | None]:
    """Take out a path and all below it: the rest of each path -> what it is."""
    names = [name for name in files if name == path or name.startswith(f"{path}/")]
    return {name.removeprefix(path): files.pop(name) for name in names}


def _write(place: Path, files: dict[str, bytes]) -> None:
    place.mkdir()
    for name, data in sorted(files.items()):
        if data == b"<folder>":
            (place / name).mkdir(parents=True, exist_ok=True)
        else:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)


def _read(place: Path, marks: list[str], exports: list[bytes]) -> str:
    """Whether the checkpoint that is found, and the export, are the old or the new ones. Raises if they are neither."""
    from lt_zero.checkpoint.native import directory

    what = ["old", "new"][marks.index(_mark(place / "last"))]
    exports.index(_bytes(place))
    if (latest := place / "latest").exists():
        assert latest.read_text(encoding="utf-8") == "last", "latest"
    directory.remove_leftovers(place)  # as the next save does
    assert ["old", "new"][marks.index(_mark(place / "last"))] == what, "the next save removed it"
    return what


def _bytes(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


def _mark(path: Path) -> str:
    """A checksum of a checkpoint's tensors, every byte of its files checked."""
    import torch

    from lt_zero.checkpoint.native.archive import Archive
    from lt_zero.checkpoint.native.directory import find

    found = Path(find(path))
    if found.is_file():
        return hashlib.sha256(found.read_bytes()).hexdigest()
    archive = Archive(str(found))
    try:
        archive.verify()
        weights = [archive.read(name) for name in sorted(archive.weights)]
        values = torch.cat([value.flatten().float() for value in weights]).numpy().tobytes()
        return hashlib.sha256(values + str(archive.meta["global_step"]).encode()).hexdigest()
    finally:
        archive.close()
