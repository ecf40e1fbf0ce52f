"""Runs cases, each in a process and a folder of its own, and counts what came of them."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import tree
from tests.faults.case import Case, Outcome

LIMIT_S = 150.0  # of a case that sets itself none; the longest takes half a minute on an idle machine
_PATIENCE_S = 5.0  # for the last processes of a case to end
_ENDED = 97  # exit code of a case's process that has written its outcome


@dataclass
class Result:
    """A case, its outcome, and the seconds that it took."""

    case: Case
    outcome: Outcome
    seconds: float


@dataclass
class _Running:
    number: int
    case: Case
    folder: Path
    pid: int
    began: float


@dataclass
class Runner:
    """Runs cases side by side.

    Attributes:
        folder: of the campaign; each case has one in it while it runs.
        beside: cases at a time.
        limit: seconds after which a case counts as a hang, and its processes are ended; more on a busy machine.
        tell: is called with a line for each case that has ended.
        keep: whether the folders of failed cases are kept.
    """

    folder: Path
    beside: int = 2
    limit: float = LIMIT_S
    tell: Callable[[str], object] = print
    keep: bool = False
    _running: list[_Running] = field(default_factory=list)
    _results: dict[int, Result] = field(default_factory=dict)

    def run(self, cases: Sequence[Case]) -> list[Result]:
        """The results, in the order of the cases; those that need the machine to themselves run last.

        Ctrl-C ends the cases that run, and returns what there is.
        """
        self._results.clear()
        try:
            self._run_all(cases)
        except KeyboardInterrupt:
            for running in self._running:
                tree.end_all(running.pid)
                tree.send(running.pid, signal.SIGKILL)
                os.waitpid(running.pid, 0)
        return [self._results[number] for number in sorted(self._results)]

    def _run_all(self, cases: Sequence[Case]) -> None:
        order = sorted(range(len(cases)), key=lambda number: cases[number].alone)
        while order or self._running:
            while order and self._may_start(cases[order[0]]):
                self._start(order[0], cases[order.pop(0)])
            for running in list(self._running):
                self._look(running, len(cases))
            time.sleep(0.01)

    def _may_start(self, case: Case) -> bool:
        alone = case.alone or any(running.case.alone for running in self._running)
        return len(self._running) < (1 if alone else self.beside)

    def _start(self, number: int, case: Case) -> None:
        folder = self.folder / f"case-{number:03d}"
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            _live(case, folder)
        self._running.append(_Running(number, case, folder, pid, time.monotonic()))

    def _look(self, running: _Running, count: int) -> None:
        seconds = time.monotonic() - running.began
        pid, status = os.waitpid(running.pid, os.WNOHANG)
        if pid:
            outcome = _outcome_of(running.folder, os.waitstatus_to_exitcode(status))
        elif seconds > self.limit * _busy():
            outcome = self._end(running)
        else:
            return
        self._running.remove(running)
        self._results[running.number] = Result(running.case, outcome, seconds)
        word = "ok    " if outcome.ok else "FAILED"
        name = f"{running.case.group}: {running.case.name}"
        self.tell(f"[{len(self._results)}/{count}] {word} {seconds:5.1f} s  {name}: {outcome.what}")
        if outcome.ok or not self.keep:
            shutil.rmtree(running.folder, ignore_errors=True)

    def _end(self, running: _Running) -> Outcome:
        """End the processes of a case that hangs; returns what they did at the end."""
        for pid in tree.descendants(running.pid):
            if tree.catches(pid, tree.DUMP):
                tree.send(pid, tree.DUMP)
        time.sleep(0.5)  # for the stacks to be written
        tree.end_all(running.pid)
        deadline = time.monotonic() + 5.0  # it may yet see that they are gone, and tell more
        while time.monotonic() < deadline and not (running.folder / "outcome").exists():
            time.sleep(0.05)
        tree.send(running.pid, signal.SIGKILL)
        os.waitpid(running.pid, 0)
        return Outcome(False, f"hang: not over after {self.limit:.0f} s", last_lines(running.folder))


def _busy() -> float:
    """By what the machine is slower than an idle one, for limits."""
    return min(6.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def _live(case: Case, folder: Path) -> None:
    """Run a case in this process, which it ends."""
    try:
        tree.adopt()
        os.setsid()
        os.chdir(folder)
        try:
            outcome = case.run(folder)
        except BaseException:
            outcome = Outcome(False, "the case raised", traceback.format_exc())
        if left := _left():
            told = "; ".join(f"{pid} {tree.command_of(pid)}" for pid in left)
            tree.end_all(os.getpid())
            outcome = Outcome(
                False, "processes were left over" if outcome.ok else outcome.what, f"{told}\n{outcome.evidence}"
            )
        (folder / "outcome.new").write_bytes(pickle.dumps(outcome))
        os.rename(folder / "outcome.new", folder / "outcome")
    finally:
        os._exit(_ENDED)


def _left() -> list[int]:
    """The descendants that do not end within some seconds."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := tree.descendants(os.getpid())) and time.monotonic() < deadline:
        tree.reap()
        time.sleep(0.02)
    return left


def _outcome_of(folder: Path, code: int) -> Outcome:
    try:
        found = pickle.loads((folder / "outcome").read_bytes())
        assert isinstance(found, Outcome)
        return found
    except (OSError, pickle.UnpicklingError, EOFError):
        return Outcome(False, f"the case's process ended with {code}", last_lines(folder))


def last_lines(folder: Path, lines: int = 60) -> str:
    """The ends of the outputs (``*.log``) in a case's folder."""
    parts = []
    for path in sorted(folder.glob("**/*.log")):
        text = path.read_text(encoding="utf-8", errors="replace").splitlines()
        parts.append(f"--- {path.name}\n" + "\n".join(text[-lines:]))
    return "\n".join(parts)


def table(results: Sequence[Result]) -> str:
    """The outcomes by group in Markdown, then the failures with their evidence."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.group, []).append(result)
    lines = ["| group | cases | failed | outcomes |", "| --- | ---: | ---: | --- |"]
    for group, found in groups.items():
        counts = Counter(result.outcome.what for result in found)
        told = "; ".join(f"{what}: {count}" for what, count in counts.most_common())
        lines.append(f"| {group} | {len(found)} | {_failed(found)} | {told.replace('|', '/')} |")
    lines.append(f"| **all** | {len(results)} | {_failed(results)} | |")
    for result in results:
        if not result.outcome.ok:
            lines += ["", f"## {result.case.group}: {result.case.name}", "", result.outcome.what, "", "```"]
            lines += [*result.outcome.evidence.splitlines()[-80:], "```"]
    return "\n".join(lines) + "\n"


def _failed(results: Sequence[Result]) -> int:
    return sum(not result.outcome.ok for result in results)
