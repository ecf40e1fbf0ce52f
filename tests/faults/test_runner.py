"""The campaign finds what it looks for: cases that fail, raise, hang, die or leave a process; files without a sync."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults import runner, tree
from tests.faults.case import Case, Outcome
from tests.faults.powercut import Step, states_of
from tests.faults.runner import Runner, table


def _well(folder: Path) -> Outcome:
    assert not list(folder.iterdir())
    return Outcome(True, "well")


def _fails(folder: Path) -> Outcome:
    return Outcome(False, "lost a checkpoint", "the last line")


def _raises(folder: Path) -> Outcome:
    raise ValueError("nobody expects this")


def _dies(folder: Path) -> Outcome:
    os._exit(3)


def _hangs(folder: Path) -> Outcome:
    (folder / "rank.log").write_text("waits for ever\n")
    subprocess.Popen(["sleep", "1234"], start_new_session=True).wait()
    return Outcome(True, "came back")


def _leaves(folder: Path) -> Outcome:
    subprocess.Popen(["sh", "-c", "sleep 1235 & exit"]).wait()
    return Outcome(True, "well")


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.2)
    cases = [
        Case("good", "well", _well),
        Case("good", "alone", _well, alone=True),
        *(Case("bad", case.__name__, case) for case in (_fails, _raises, _dies, _leaves)),
    ]
    told: list[str] = []
    results = Runner(tmp_path, beside=6, tell=told.append).run(cases)
    cases.append(Case("bad", "hangs", _hangs))
    late = SimpleNamespace(
        sleep=time.sleep, monotonic=lambda: time.monotonic() + 1e6 * any(tmp_path.glob("*/rank.log"))
    )
    monkeypatch.setattr(runner, "time", late)  # no limit passes before it hangs, however busy the machine is
    results += Runner(tmp_path, tell=told.append).run(cases[-1:])
    assert [result.outcome.ok for result in results] == [True, True, *[False] * 5]
    words = [result.outcome.what for result in results]
    assert words[:3] == ["well", "well", "lost a checkpoint"]
    assert words[3:5] == ["the case raised", "the case's process ended with 3"]
    assert words[5:] == ["processes were left over", "hang: not over after 150 s"]
    assert "nobody expects this" in results[3].outcome.evidence
    assert "sleep 1235" in results[5].outcome.evidence
    assert "waits for ever" in results[6].outcome.evidence
    text = table(results)
    assert "| good | 2 | 0 | well: 2 |" in text
    assert "| bad | 5 | 5 |" in text
    assert "the last line" in text
    assert len(told) == len(cases)
    assert not list(tmp_path.iterdir())
    commands = [tree.command_of(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    assert not [command for command in commands if command.startswith("sleep 123")]


@pytest.mark.parametrize("syncs", [True, False])
def test_what_a_cut_of_the_power_leaves(tmp_path: Path, syncs: bool) -> None:
    """A file that is replaced without a sync is found empty of its bytes after some cut, and a synced one never."""
    (tmp_path / "last").write_bytes(b"old")
    steps = [Step("create", "new", "", 0, b""), Step("write", "new", "", 0, b"NEW")]
    steps += [Step("sync", "new", "", 0, b"NEW")] * syncs + [Step("rename", "new", "last", 0, b"")]
    found = {files["last"] for files in states_of(steps, tmp_path, random.Random(1))}
    assert found == {b"old", b"NEW"} | (set() if syncs else {b"\0\0\0"})
