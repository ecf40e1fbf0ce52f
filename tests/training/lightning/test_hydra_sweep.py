"""``lt_zero.sweep``: each job of a Hydra sweep runs in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lt_zero import sweep

# Without torch, which would take most of the time: sweep.py is loaded by its path.
SCRIPT = f"""
import importlib.util, json, os, sys
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

spec = importlib.util.spec_from_file_location("sweep", {str(Path(sweep.__file__))!r})
sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)

def note(name, what):
    with open(name, "a") as file:
        file.write(json.dumps(what) + "\\n")

@sweep.own_process
def job(config):
    run = HydraConfig.get()
    values = OmegaConf.to_container(config, resolve=True)
    note("jobs", [values, os.getpid(), run.runtime.output_dir, sys.argv[1:], sorted(os.environ)])
    if config.number == 7:
        raise ValueError("this one fails")
    return config.number / 2

@hydra.main(version_base="1.3", config_path="conf", config_name="main")
def main(config):
    result = job(config)
    note("results", [os.getpid(), result])
    return result

main()
"""
MAIN = """
defaults: [_self_, {kind: one}]
number: 1
value: plain
job: ${hydra:job.num}
hydra: {sweep: {dir: "all of it", subdir: "job ${hydra.job.num}"}}
"""


def write_script(folder: Path) -> None:
    (folder / "conf/kind").mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "conf/main.yaml").write_text(MAIN)
    for name in ("one", "two"):
        (folder / f"conf/kind/{name}.yaml").write_text(f"name: {name}\n")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)


def notes(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_jobs_run_alone_and_return_and_one_that_fails_is_told(tmp_path: Path) -> None:
    write_script(tmp_path)
    value = r"value='a b, \'c\' = [d] é'"  # would be torn apart if it were not passed on as it came
    done = run(
        tmp_path, "-m", "number=6,7,8", "kind=two", value, "+new.key=1", "hydra.job.name=mine", HYDRA_FULL_ERROR="1"
    )
    assert done.returncode != 0
    assert re.search(r"Job 1 of the sweep \(.*number=7.*\) ended with exit code 1", done.stderr), done.stderr
    assert "this one fails" in done.stderr
    jobs, results = notes(tmp_path, "jobs"), notes(tmp_path, "results")
    assert len({process for _, process, *_ in jobs}) == 3
    for number, (config, process, folder, arguments, environment) in enumerate(jobs):
        assert config == {
            "number": 6 + number,
            "value": "a b, 'c' = [d] é",
            "kind": {"name": "two"},
            "new": {"key": 1},
            "job": number,
        }
        assert folder == str(tmp_path / f"all of it/job {number}")
        assert not {"-m", "--multirun"} & set(arguments)  # Lightning starts the other ranks with these
        assert "LT_ZERO_JOB_RESULT" not in environment
        assert "hydra.job.name=mine" in arguments
        assert ([process, 3.0 + number / 2] in results) == (number != 1)
    sweeper = {process for process, _ in results} - {process for _, process, *_ in jobs}
    assert [result for process, result in results if process in sweeper] == [3.0, 4.0]
    assert len(sweeper) == 1


@pytest.mark.slow
def test_other_folders_are_passed_on(tmp_path: Path) -> None:
    write_script(tmp_path)
    (tmp_path / "extra/kind").mkdir(parents=True)
    (tmp_path / "extra/kind/three.yaml").write_text("name: three\n")
    (tmp_path / "conf/other.yaml").write_text(MAIN.replace("number: 1", "number: 5"))
    done = run(tmp_path, "-m", "--config-dir", "extra", "-cn", "other", "kind=three")
    assert done.returncode == 0, done.stderr
    ((config, *_),) = notes(tmp_path, "jobs")
    assert (config["kind"]["name"], config["number"]) == ("three", 5)


def test_without_a_sweep_nothing_is_started(tmp_path: Path) -> None:
    write_script(tmp_path)
    assert run(tmp_path, "number=4", "job=0", TORCHELASTIC_RUN_ID="x").returncode == 0
    ((_, process, *_),) = notes(tmp_path, "jobs")
    assert notes(tmp_path, "results") == [[process, 2.0]]
    refused = run(tmp_path, "-m", "number=1,2", TORCHELASTIC_RUN_ID="x")
    assert refused.returncode != 0
    assert "torchrun cannot run a sweep" in refused.stderr


@pytest.mark.parametrize(
    "text", ["a b", "=,[c]{d}", r"a\b", r"a\\b", r"a\\", 'a"b', r"a\"b", "a${b}", r"a\${b}", r"\\${b}"]
)
def test_folders_with_odd_names(text: str) -> None:
    override = OverridesParser.create().parse_override(f"key={sweep._quoted(text)}")
    assert OmegaConf.create({"key": override.value()}).key == text
