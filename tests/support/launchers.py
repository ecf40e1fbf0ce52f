"""Starts scripts as launchers do: their environments, and the ranks of an emulated SLURM job."""

from __future__ import annotations

import os
import subprocess
import sys

from lt_zero.common.ports import free_port
from tests.support.paths import ROOT

_LAUNCHERS = ("SLURM", "MASTER", "LOCAL_RANK", "WORLD", "TORCHELASTIC")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a process that no launcher has started."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def slurm_job(arguments: list[str], **extra: str) -> list[subprocess.Popen[str]]:
    """A Python script with its arguments, as two tasks of job 1; ``extra``: variables of both."""
    port = str(free_port())
    processes = []
    for rank in range(2):
        numbers = {"SLURM_NTASKS": 2, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_JOB_ID": 1}
        numbers["SLURM_NTASKS_PER_NODE"] = 2
        env = environment(**{k: str(v) for k, v in numbers.items()}, MASTER_PORT=port, MASTER_ADDR="127.0.0.1")
        env |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", **extra}
        processes.append(subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, text=True))
    return processes
