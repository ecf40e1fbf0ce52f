"""What becomes of a run: its processes, its failures in one line each; how the script is started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from lt_zero.common.errors import ConfigError
from lt_zero.planning.estimate import Setting
from lt_zero.planning.search import Outcome
from lt_zero.planning.search_space import Candidate
from lt_zero.planning.trial import Order
from lt_zero.planning.tune_cli import Runs, Templates, _command, tune_command


def ran(
    folder: Path, code: str, *, ranks: int | None = None, timeout: float = 60.0, limit: int | None = None
) -> Outcome:
    order = Order(warmup=1, steps=2, limit=limit)
    runs = Runs([sys.executable, "-c", code], folder, order, Templates("--size {}", None), ranks, timeout)
    return runs(["a.b=1", "c='x y'"], Candidate(Setting(1), 3, 2), True)


REPORT = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["LT_ZERO_TRIAL"])
order = json.loads((folder / "order.json").read_text())
assert order == {"warmup": 1, "steps": 2, "limit": None, "nvme": None, "plans": True}, order
assert os.environ["LT_ZERO_OVERRIDES"] == "a.b=1 'c='\\"'\\"'x y'\\"'\\"''", os.environ["LT_ZERO_OVERRIDES"]
assert sys.argv[1:] == ["--size", "3"]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
(folder / f"rank-{os.environ.get('RANK')}").write_text(" ".join(os.environ.get(name, "-") for name in names))
(folder / "report.json").write_text(json.dumps({"seconds": [1.0, 2.0], "running": 3, "peak": 4, "batch": 5}))
"""


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_report(tmp_path: Path, ranks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LT_ZERO_OVERRIDES"):
        monkeypatch.delenv(name, raising=False)
    found = ran(tmp_path, REPORT, ranks=ranks)
    assert found == Outcome((1.0, 2.0), 3, 4, 5), found.output
    written = {path.name: path.read_text() for path in tmp_path.glob("0/rank-*")}
    alone = {"rank-None": "- - - - -"}
    assert written == (alone if ranks is None else {"rank-0": "0 0 2 2 0", "rank-1": "1 1 2 2 0"})


@pytest.mark.parametrize(
    ("code", "problem", "too_large"),
    [
        ("print('hello')", "The script ended without training with ZeroStrategy", False),
        ("print('hello'); {}['x']", "KeyError: 'x'", False),
        ("raise SystemExit(3)", "the script ended with exit code 3", False),
        ("import os; os.kill(os.getpid(), 9)", "the script ended with exit code -9", True),
        ("raise MemoryError('all is taken')", "MemoryError: all is taken", True),
    ],
)
def test_failures(tmp_path: Path, code: str, problem: str, too_large: bool) -> None:
    found = ran(tmp_path, code)
    assert found.problem.startswith(problem)
    assert found.too_large is too_large
    assert found.seconds == ()
    assert "hello" in found.output or "hello" not in code


SLEEPS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(os.environ["LT_ZERO_TRIAL"], "child").write_text(str(child.pid))
time.sleep(60)
"""


def test_a_run_without_end_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "0/child"
    started = SimpleNamespace(  # the time passes once the script has started a child, however long that takes
        monotonic=lambda: 9.0 if told.exists() and told.read_text() else 0.0, sleep=time.sleep
    )
    monkeypatch.setattr("lt_zero.planning.tune_cli.time", started)
    found = ran(tmp_path, SLEEPS, timeout=1.5)
    assert found.problem == "no end after 1.5 s (--timeout)"
    child = int(told.read_text())
    deadline = time.monotonic() + 40
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_end_with_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.planning.tune_cli._GRACE", 0.3)
    code = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no')\ntime.sleep(60)"
    begun = time.monotonic()
    assert ran(tmp_path, code, ranks=2).problem == "ValueError: no"
    assert time.monotonic() - begun < 55, "it waited for the other rank"


@pytest.mark.skipif(not os.path.exists("/proc"), reason="peaks are read from /proc")
def test_a_process_above_the_limit_is_ended(tmp_path: Path) -> None:
    found = ran(tmp_path, "import time; kept = bytearray(b'x' * 200_000_000); time.sleep(60)", limit=100_000_000)
    assert found.problem.startswith("out of memory: ")
    assert found.too_large


def test_a_command_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for script, given, config, said in (
        ("none.py", [], None, "There is no script 'none.py'"),
        ("train.py", [], Path("ds.json"), "train.py has its own configuration"),
        ("no.module:make", [], None, "Name a script, or a function as pkg.mod:function"),
        ("tests.support.models:nothing", [], None, "has no attribute 'nothing'"),
        ("tests.support.models:Net", ["x"], None, "a function takes no arguments here"),
    ):
        with pytest.raises(ConfigError, match=said):
            _command(script, given, config, None)
    assert _command("train.py", ["--epochs", "1"], None, 2) == ([sys.executable, "train.py", "--epochs", "1"], None)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "zero.yaml", "has not written it"), (tmp_path / "a/b.yaml", "there is no folder")):
        (tmp_path / "zero.yaml").write_text("zero_optimization: {stage: 2}")
        done = CliRunner().invoke(tune_command, ["--output", str(path), "train.py"])
        assert done.exit_code == 1
        assert said in done.stderr
    (tmp_path / "zero.yaml").write_text("# Written by lt-zero tune: 1.0 s per step")
    done = CliRunner().invoke(tune_command, ["--output", str(tmp_path / "zero.yaml"), "train.py"])
    assert "There is no script 'train.py'" in done.stderr
