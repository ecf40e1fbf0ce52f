"""Processes of a case: how one is started without importing everything again, its descendants, and their ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUBREAPER = 36  # of prctl
DUMP = signal.SIGUSR2  # a script of a case writes the stacks of its threads (``dump_on_signal``)


def adopt() -> None:
    """Make this process the parent of all its descendants whose parents end."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The living processes below one; zombies are not living."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _state(int(entry))) is not None:
            children.setdefault(found[1], []).append(int(entry))
    below, todo = list[int](), [root]
    while todo:
        for child in children.get(todo.pop(), []):
            todo.append(child)
            below.append(child)
    return [pid for pid in below if (found := _state(pid)) is not None and found[0] != "Z"]


def _state(pid: int) -> tuple[str, int] | None:
    """The state and the parent of a process; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def command_of(pid: int) -> str:
    """The command line of a process, for reports."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def end_all(root: int, patience: float = 10.0) -> list[int]:
    """Kill all processes below one, by their ids; returns those that were there."""
    deadline, ended = time.monotonic() + patience, list[int]()
    while (left := descendants(root)) and time.monotonic() < deadline:
        for pid in left:
            send(pid, signal.SIGKILL)
        ended += left
        time.sleep(0.02)
    return sorted(set(ended))


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap() -> dict[int, int]:
    """Take the ends of children that have ended: their statuses, as ``subprocess`` gives them."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def fork_script(
    script: str, arguments: Sequence[str], env: Mapping[str, str], output: Path, module: bool = False
) -> int:
    """Run a script in a process of its own, which has what this one has imported; returns its id.

    It leads a session, and ends as an interpreter does, except for the destructors of modules.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with open(os.devnull) as nothing, open(output, "ab", buffering=0) as file:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # of the runner
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        code = _run_as_main(script, arguments, module)
    finally:
        os._exit(code)


def _run_as_main(script: str, arguments: Sequence[str], module: bool) -> int:
    sys.argv = [script, *arguments]
    code = 0
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does at its end: threads, exit handlers
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
