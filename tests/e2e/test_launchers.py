"""The same script under every launcher gives the same ranks and weights; an error on one rank ends all of them."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_zero.common.ports import free_port
from tests.support.launchers import environment, slurm_job
from tests.support.paths import SUPPORT

SCRIPT = str(SUPPORT / "launch_script.py")


def _results(output: str) -> list[dict[str, Any]]:
    found = re.findall(r"RESULT (\{.*?\})", output)  # two processes may share a line
    return sorted((json.loads(text) for text in found), key=lambda r: r["rank"])


def _run(command: list[str], env: dict[str, str]) -> str:
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, env=env, stdin=nothing, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _as_script(output: str, env: dict[str, str]) -> None:
    """Run the script as ``python launch_script.py popen`` does."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [SCRIPT, "popen"]
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):  # also of the rank that it starts
        os.dup2(file, number)
    runpy.run_path(SCRIPT, run_name="__main__")
    os._exit(0)  # a process that ran backward with gloo may abort in its destructors


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The weights' sum after training with the subprocess launcher.

    Rank 0 is forked from the process that has imported what takes seconds. It starts the other one with Python.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    output = tmp_path_factory.mktemp("script") / "output"
    first = context.Process(target=_as_script, args=(str(output), environment()))
    first.start()
    first.join(240)
    text = output.read_text(encoding="utf-8")
    assert first.exitcode == 0, text
    results = _results(text)
    assert [r["rank"] for r in results] == [0, 1]
    assert {r["world"] for r in results} == {2}
    assert not any(r["mpi"] for r in results)
    return float(results[0]["sum"])


def test_the_script_starts_the_other_rank(expected: float) -> None:
    """No launcher at all, ``python train.py``; the fast one of these tests."""
    assert expected > 0


@pytest.mark.slow
def test_torchrun(expected: float) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    results = _results(_run([*command, SCRIPT, "popen"], environment()))
    assert [(r["rank"], r["sum"]) for r in results] == [(0, expected), (1, expected)]


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "fork", "name"])
def test_multiprocessing(expected: float, start_method: str) -> None:
    """The parent process ends up with the whole trained model."""
    results = _results(_run([sys.executable, SCRIPT, start_method], environment()))
    assert [r["sum"] for r in results] == [expected]


@pytest.mark.slow
def test_multiprocessing_with_tensor_ranks() -> None:
    """The parent process ends up with whole tensors, of the values that the ranks have."""
    of_ranks = _results(_run([sys.executable, SCRIPT, "popen", "--tensor"], environment()))
    assert len({r["sum"] for r in of_ranks}) == 1
    for start_method in ("spawn", "fork"):
        results = _results(_run([sys.executable, SCRIPT, start_method, "--tensor"], environment()))
        assert [r["sum"] for r in results] == [of_ranks[0]["sum"]]


@pytest.mark.slow
def test_a_notebook_goes_on_in_the_parent_process(tmp_path: Path) -> None:
    """It has the weights. The engine is gone, and the errors tell where to export and save; what was saved resumes."""
    # Several threads per rank: a rank that believes in those of its parent waits for them.
    with_threads = {**environment(), "OMP_NUM_THREADS": "3"}
    output = _run([sys.executable, "-i", str(SUPPORT / "notebook_script.py"), str(tmp_path)], with_threads)
    found = json.loads(output.rpartition("RESULT ")[2].splitlines()[0])
    assert found["same"]
    assert found["both"], "the ranks do not train alone with the engine and the process group of an earlier run"
    assert found["steps"] == [3, 1]
    assert len(found["told"]) == 4
    for text in found["told"]:
        assert "This process is no rank" in text
        assert "`trainer.strategy.export(path)`" in text
    assert "the optimizer states ended with them" in found["told"][-1]
    assert found["resumed"], "bit for bit"
    assert found["files"] == ["last.ckpt", "weights.ckpt", "weights.pt"]


@pytest.mark.slow
def test_nothing_complains_when_rank_0_of_a_fabric_script_ends_first() -> None:
    """It serves the store, which a thread of every rank looks at."""
    command = [sys.executable, str(SUPPORT / "fabric_script.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 1 ends" in done.stdout
    assert "TCPStore" not in done.stderr


@pytest.mark.slow
def test_slurm(expected: float) -> None:
    results = _results("".join(p.communicate(timeout=240)[0] for p in slurm_job([SCRIPT, "popen"])))
    assert [(r["rank"], r["sum"]) for r in results] == [(0, expected), (1, expected)]


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_an_error_on_one_rank_ends_all(start_method: str) -> None:
    """And is told without the frames of Lightning between the script's and the cause."""
    command = [sys.executable, SCRIPT, start_method, "--fail=1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "ValueError: broken on purpose" in done.stderr
    assert "Rank 1 ended with ValueError: broken on purpose" in done.stderr
    _, _, of_rank = done.stderr.partition("Process 1 terminated")
    assert of_rank.count("  File ") <= 4
