"""The plan of script.py, the points of its run, and the faults that happen there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

STOP_S = 4.0  # that a process is stopped


@dataclass
class Plan:
    """What a run is to do.

    Attributes:
        folder: of the run: its checkpoint ``last``, its export ``weights.safetensors``.
        logs: the folder of what it prints.
        face: "trainer", "fabric" or "loop".
        zero: the ``zero_optimization`` block; ``more``: other keys.
        until: the last step; the script begins after that of its checkpoint, if there is one.
        mesh: what ranks share beside data, see script_nets.py; ``ranks``: how many there are.
        point, fault: where it ends, and how; ``rank``: that of the fault, -1: all ranks.
        tries: runs in this process that the fault ends, before one without.
    """

    folder: str
    logs: str
    face: str
    zero: dict[str, Any]
    more: dict[str, Any]
    until: int
    mesh: str = ""
    ranks: int = 2
    point: str = ""
    fault: str = ""
    rank: int = 0
    tries: int = 0
    value: str = ""  # of the fault

    @property
    def last(self) -> str:
        return f"{self.folder}/last"

    @property
    def alone(self) -> str:
        """What one rank saves by itself."""
        return f"{self.folder}/alone"


PLAN = Plan(**json.loads(sys.argv[1]))
PHASE = ""  # save, load, export: files are written or read
CALLS: dict[str, Callable[[], object]] = {}  # of the face, each of which needs all ranks


# ---- faults ----------------------------------------------------------------------------------------------------------


def rank_of() -> int:
    given = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return dist.get_rank() if dist.is_initialized() else int(given)


def at(point: str) -> None:
    """A point of the run: its fault happens here."""
    if point != PLAN.point or PLAN.rank not in (rank_of(), -1) or not PLAN.fault:
        return
    fault, PLAN.fault = PLAN.fault, ""
    told = {"point": point, "pid": os.getpid(), "time": time.time()}
    part = Path(PLAN.logs, f"fault.{os.getpid()}")  # all ranks may write it
    part.write_text(json.dumps(told), encoding="utf-8")
    part.rename(f"{PLAN.logs}/fault.json")
    FAULTS[fault]()


def _stop() -> None:
    """Stop this process for some seconds; a shell wakes it."""
    subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(kind: type[BaseException], *arguments: Any) -> Callable[[], None]:
    def fault() -> None:
        raise kind(*arguments)

    return fault


def _signal(number: int) -> Callable[[], None]:
    def fault() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # a handler runs

    return fault


def _alone(name: str) -> Callable[[], None]:
    """A call that needs all ranks, on this one only."""

    def fault() -> None:
        CALLS[name]()

    return fault


def _shim() -> None:
    """From here on the operations of ``Plan.value`` fail, see shim.c."""
    os.environ["FAULT"] = PLAN.value


def _memory() -> None:
    """From here on this process gets no more memory than some MB."""
    from tests.faults.memory import limit_address_space

    limit_address_space(int(PLAN.value))


def _killed_by_kernel() -> None:
    """Take memory in a group of a few MB, until the kernel ends this process."""
    Path(PLAN.value, "cgroup.procs").write_text(str(os.getpid()))
    taken = [bytearray(1 << 20) for _ in range(4096)]
    raise RuntimeError(f"took {len(taken)} MB in a group that has less")


def _full_disk() -> None:
    """Fill the file system of the run's folder."""
    with open(f"{PLAN.folder}/hog", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _deleted() -> None:
    """Remove what a save has written, as another program might."""
    for path in Path(PLAN.folder).glob(".last.tmp-*"):
        shutil.rmtree(path)


def _closed() -> None:
    """Let nobody make, rename or remove a file in the run's folder, not even root."""
    subprocess.run(["chattr", "+i", PLAN.folder], check=True)


FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGINT": _signal(signal.SIGINT),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGSTOP": _stop,
    "os._exit(3)": lambda: os._exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(1)": lambda: sys.exit(1),
    "sys.exit(0)": lambda: sys.exit(0),
    "ValueError": _raise(ValueError, "broken on purpose"),
    "MemoryError": _raise(MemoryError, "broken on purpose"),
    "KeyboardInterrupt": _raise(KeyboardInterrupt),
    "OSError": _raise(OSError, errno.EIO, "broken on purpose"),
    **{f"{name} alone": _alone(name) for name in ("save", "export", "barrier", "broadcast", "callback")},
    "shim": _shim,
    "address space": _memory,
    "kernel": _killed_by_kernel,
    "full disk": _full_disk,
    "deleted folder": _deleted,
    "closed folder": _closed,
}


class phase:
    """Context of an operation on files, within which calls of the system are points."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        global PHASE
        if self.name != "load":
            at(f"before {self.name}")
        PHASE = self.name

    def __exit__(self, *rest: Any) -> None:
        global PHASE
        PHASE = ""


def watch_files() -> None:
    """Make the calls by which files are written and read points of the run."""
    real_open, real_write, real_read, real_sync = os.open, os.pwritev, os.preadv, os.fsync
    real_rename, real_replace = os.rename, os.replace
    sealed = False

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        nonlocal sealed
        if PHASE == "save" and flags & os.O_CREAT and os.path.basename(os.fspath(path)) == "manifest.json":
            at("manifest")
            sealed = True
        return real_open(path, flags, *rest, **named)

    def written(*args: Any) -> int:
        if PHASE in ("save", "export"):
            at(f"middle of {PHASE}")
        return real_write(*args)

    def read(*args: Any) -> int:
        if PHASE == "load":
            at("middle of load")
        return real_read(*args)

    def synced(fd: int) -> None:
        nonlocal sealed
        if PHASE == "export":
            at("middle of export")
        if sealed and os.path.isdir(f"/proc/self/fd/{fd}"):
            sealed = False
            at("before rename")
        real_sync(fd)

    def renamed(*args: Any, **named: Any) -> None:
        if PHASE == "save":
            at("after rename")  # of what was exchanged for the old checkpoint
        real_rename(*args, **named)

    def replaced(*args: Any, **named: Any) -> None:
        if PHASE == "export":
            at("rename of export")
        real_replace(*args, **named)

    os.open, os.pwritev, os.preadv, os.fsync = opened, written, read, synced
    os.rename, os.replace = renamed, replaced
