"""A run that torchrun or SLURM restarts goes on from its last checkpoint, to the same weights bit for bit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lt_zero.common.ports import free_port
from tests.support.launchers import environment, slurm_job
from tests.support.paths import SUPPORT

SCRIPT = str(SUPPORT / "restart_script.py")
RENDEZVOUS = {"static": [f"--master-port={free_port()}"], "c10d": ["--standalone"]}


def _weights(output: str) -> str:
    """The checksum of the weights of both ranks at the end."""
    ends = [json.loads(text) for text in re.findall(r"RESULT (\{.*?\})", output)]
    assert sorted((end["rank"], end["step"]) for end in ends) == [(0, 20), (1, 20)], output
    assert len({end["sum"] for end in ends}) == 1
    return str(ends[0]["sum"])


def _began(folder: Path) -> list[int]:
    """The step at which each life began."""
    return [int(line) for line in (folder / "began.txt").read_text(encoding="utf-8").split()]


def _torchrun(folder: Path, stage: int, lives: dict[str, Any], rendezvous: str = "c10d") -> str:
    folder.mkdir()
    options = ["--nproc-per-node=2", "--max-restarts=2", *RENDEZVOUS[rendezvous]]
    command = [sys.executable, "-m", "torch.distributed.run", *options, SCRIPT, str(folder), str(stage)]
    done = subprocess.run(
        [*command, json.dumps(lives)], env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return _weights(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "rendezvous"), [(3, "c10d"), (0, "static")])
def test_torchrun_restarts(tmp_path: Path, stage: int, rendezvous: str) -> None:
    """The first life ends by a kill, the second by an error, on which a checkpoint is tried to be saved."""
    lives = {"0": ["kill", 7], "1": ["raise", 13]}
    restarted = _torchrun(tmp_path / "restarted", stage, lives, rendezvous)
    assert _began(tmp_path / "restarted") == [0, 6, 12]
    assert restarted == _torchrun(tmp_path / "whole", stage, {})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_requeues(tmp_path: Path) -> None:
    """The first life is requeued by SLURM's signal, the second one killed after it has saved checkpoints of its own."""
    folder, programs = tmp_path / "requeued", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {folder}/scontrol\n', encoding="utf-8")
    (programs / "scontrol").chmod(0o755)
    lives = json.dumps({"0": ["wait", 5], "1": ["kill", 18]})
    path = f"{programs}:{environment()['PATH']}"

    def start(life: int) -> list[subprocess.Popen[str]]:
        return slurm_job([SCRIPT, str(folder), "3", lives], PATH=path, SLURM_RESTART_COUNT=str(life))

    def wait_for(name: str) -> None:
        deadline = time.monotonic() + 90
        while not (folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.05)

    first = start(0)
    wait_for("waits")
    first[1].send_signal(signal.SIGUSR1)
    wait_for("scontrol")
    for rank in first:
        rank.kill()  # as SLURM does when the job is requeued
        rank.communicate()
    assert (folder / "scontrol").read_text(encoding="utf-8") == "requeue 1\n"
    for rank in start(1):
        rank.communicate(timeout=240)
        assert rank.returncode != 0
    requeued = _weights("".join(rank.communicate(timeout=240)[0] for rank in start(2)))
    begun, saved, later = _began(folder)
    assert (begun, later) == (0, 18)
    assert 5 <= saved < 18
    assert (folder / "hpc_ckpt_1.ckpt").is_dir()
    assert requeued == _torchrun(tmp_path / "whole", 3, {})
