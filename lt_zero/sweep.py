"""Hydra sweeps (``-m``) over training with several ranks: each job runs in processes of its own.

Hydra runs the jobs one after another in one process, and Lightning starts the other ranks of the first job by running
the script again with the same arguments. So every rank would run the whole sweep in the process group of the first
job: a later job could not change the number of ranks, a job that fails on one rank would leave the others waiting, and
a sweeper that optimizes would see different results on each rank.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import DictConfig, OmegaConf

Task = Callable[[DictConfig], Any]

_RESULT = "LT_ZERO_JOB_RESULT"  # path of the file for the task's result
_SWEEP_OVERRIDES = ("hydra.mode=", "hydra.run.dir=", "hydra.sweep.", "hydra.job.num=", "hydra.job.id=")


def own_process(task: Task) -> Task:
    """Decorator below ``@hydra.main`` that runs each job of a sweep as a run of its own; single runs are unchanged.

    A job's process gets the job's overrides from Hydra, writes to the job's folder, and starts its ranks as a run
    without ``-m`` does. Its result (numbers, or any JSON value) is passed to the sweeper.

    ::

        @hydra.main(version_base="1.3", config_path="conf", config_name="train")
        @own_process
        def main(config: DictConfig) -> float: ...

    Raises:
        RuntimeError: a job failed, or the sweep was started by torchrun, whose store serves one run only.
    """

    @functools.wraps(task)  # Hydra finds the script's folder through __wrapped__
    def run(config: DictConfig) -> Any:
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            return _run_job()
        result_file = os.environ.pop(_RESULT, None)  # other ranks inherit the environment and must not write it
        result = task(config)
        if result_file is not None:
            Path(result_file).write_text(json.dumps(result), encoding="utf-8")
        return result

    return run


def _run_job() -> Any:
    job = HydraConfig.get()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "torchrun cannot run a sweep (-m): its rendezvous serves one run only. Run the script with python, or each "
            "job on its own."
        )
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder, "result.json")
        environment = {**os.environ, _RESULT: str(result_file)}
        code = subprocess.run(list(_command(job)), env=environment, cwd=get_original_cwd()).returncode
        if code:
            raise RuntimeError(
                f"Job {job.job.num} of the sweep ({job.job.override_dirname or 'no overrides'}) ended with exit code "
                f"{code}; its error is above."
            )
        return json.loads(result_file.read_text(encoding="utf-8")) if result_file.exists() else None


def _command(job: Any) -> Iterator[str]:
    """The command that runs the script with one job's overrides instead of the sweep's."""
    specification = sys.modules["__main__"].__spec__
    yield sys.executable
    yield from (to_absolute_path(sys.argv[0]),) if specification is None else ("-m", specification.name)
    options = {"main": "--config-path", "command-line": "--config-dir"}
    for source in job.runtime.config_sources:
        if source.provider in options and source.path:
            path = f"pkg://{source.path}" if source.schema == "pkg" else source.path
            yield from (options[source.provider], path)
    if job.job.config_name is not None:
        yield from ("--config-name", job.job.config_name)
    yield from job.overrides.task
    yield from (override for override in job.overrides.hydra if not override.startswith(_SWEEP_OVERRIDES))
    yield "hydra.mode=RUN"
    yield f"hydra.run.dir={_quoted(job.runtime.output_dir)}"
    for key in ("num", "id"):  # the configuration may refer to them
        if not OmegaConf.is_missing(job.job, key):
            yield f"hydra.job.{key}={job.job[key]}"


def _quoted(text: str) -> str:
    """``text`` as a quoted value in Hydra's grammar."""
    doubled = re.sub(r'(\\+)(?="|\$\{|$)', r"\1\1", text)  # elsewhere a backslash needs no escape
    escaped = doubled.replace('"', '\\"').replace("${", "\\${")
    return f'"{escaped}"'
