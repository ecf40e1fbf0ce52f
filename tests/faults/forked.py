"""Ranks that are forked from a case's process, which has imported torch: one starts in a tenth of a second.

They end as ordinary processes do: an uncaught error is printed, exit handlers run, the exit status is seen.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simulated_nodes import enter

_PR_SET_PDEATHSIG = 1
_STACKS = signal.SIGUSR2


class Rank:
    """A process that ``start`` has started; what it prints is in the file ``log``."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        try:
            return int(self.log.with_suffix(".rc").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def kill(self) -> None:
        """End it; what its threads were doing is in its log then."""
        if self.poll() is not None:
            return
        for pid in _below(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, _STACKS)
        time.sleep(0.3)  # for them to be written
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """The processes below one that write their stacks on ``_STACKS``."""
    found, todo = list[int](), [pid]
    while todo:
        with suppress(OSError):
            one = todo.pop()
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
            caught = Path(f"/proc/{one}/status").read_text().partition("SigCgt:")[2].split()[0]
            found += [one] if int(caught, 16) >> _STACKS - 1 & 1 else []
    return found


def start(
    call: str, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path, node: int | None = None
) -> Rank:
    """Call ``module:function`` with ``arguments`` in a new process. ``node``: holder of a simulated node to be in."""
    parent = os.getpid()
    watcher = os.fork()
    if watcher:
        return Rank(watcher, log)
    try:
        _die_with(parent)
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(output, number)
        this = os.getpid()
        rank = os.fork()
        if rank == 0:
            _die_with(this)
            if node is not None:
                enter(node)
            os.environ.update(environment, TMPDIR=str(log.parent))  # tracebacks of ranks go with the case's folder
            tempfile.tempdir = None
            _be(call, arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        log.with_suffix(".part").write_text(str(code))
        log.with_suffix(".part").rename(log.with_suffix(".rc"))
    finally:
        os._exit(0)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _be(call: str, arguments: Mapping[str, Any]) -> None:
    """Call the function, and end this process as the interpreter would."""
    code = 1
    try:
        atexit._clear()
        faulthandler.register(_STACKS)
        sys.argv = [call]
        module, name = call.split(":")
        getattr(importlib.import_module(module), name)(**arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``condition`` holds, at most so long; returns whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
