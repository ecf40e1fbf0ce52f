"""TRL's trainers over ``lt_zero.as_deepspeed()``: at stages 2 and 3 they train as with DistributedDataParallel.

``make compat-peers`` runs this at the versions of ``constraints-peers.txt``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import trl_script
from tests.support.docs_tools import BLOCKS, ROOT
from tests.support.trl_script import STEPS, TRAINERS

Rows = dict[str, list[dict[str, float]]]

# An adapter is switched off for the reference: there is no reference model to synchronise.
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "full": ({"lora": False}, list(TRAINERS)),
    "lora": ({"lora": True, "checkpointing": True}, [name for name in TRAINERS if name != "grpo, synced"]),
}
KEYS = ("loss", "grad_norm", "kl", "reward", "rewards/margins")


def run(folder: Path, models: Path, stage: int | None, names: list[str], **options: Any) -> Rows:
    """The rows of all trainers on two ranks; without a ``stage`` those of DistributedDataParallel."""
    folder.mkdir()
    told = {"folder": str(folder), "models": str(models), "stage": stage, "trainers": names, **options}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CI": "true"}  # CI: TRL reports nothing
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, trl_script.__file__, json.dumps(told)], env=env, capture_output=True, text=True, timeout=1000
    )
    assert (folder / "rows").exists(), done.stdout + done.stderr
    found: Rows = json.loads((folder / "rows").read_text(encoding="utf-8"))
    errors = {name: rows for name, rows in found.items() if isinstance(rows, str)}
    assert not errors, (errors, done.stderr)
    assert list(found) == names, done.stderr
    return found


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_ddp(tmp_path: Path, name: str) -> None:
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    options, names = RUNS[name]
    models = tmp_path / "models"
    trl_script.write_models(models)
    trl_script.write_data(models)
    every = {stage: run(tmp_path / str(stage), models, stage, names, **options) for stage in (None, 2, 3)}
    for trainer in names:
        wanted = every[None][trainer]
        assert len(wanted) == STEPS
        assert wanted[0]["grad_norm"] > 0
        if TRAINERS[trainer][2].get("beta"):
            assert wanted[-1]["kl"] != 0  # beside a reference that was not trained
        for stage in (2, 3):
            rows = every[stage][trainer]
            assert len(rows) == STEPS
            for row, other in zip(rows, wanted, strict=True):
                logged = [key for key in KEYS if key in other]
                assert {"loss", "grad_norm"} <= set(logged)
                for key in logged:
                    assert row[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6), (trainer, stage, key)


ON_CPUS = """
import os
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
import lt_zero
lt_zero.as_deepspeed()
import accelerate, sys
accelerate.PartialState(backend="gloo")
from datasets import load_from_disk
dataset = load_from_disk(sys.argv[1] + "/prompt")
"""


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    trl_script.write_models(tmp_path)
    trl_script.write_data(tmp_path)
    (block,) = [
        block for block in BLOCKS if Path(block.page).name == "preference-tuning.md" and "run by" in block.marks
    ]
    small = (
        'GRPOConfig("out", use_cpu=True, report_to=[], max_steps=1, bf16=False, '
        'accelerator_config={"use_configured_state": True}, '
    )
    text = block.text.replace('GRPOConfig("out", ', small).replace("path/to/model", str(tmp_path / "lm"))
    text = text.replace("max_completion_length=256", "max_completion_length=4")
    script = tmp_path / "train.py"
    script.write_text(ON_CPUS + text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "true"}
    done = subprocess.run([*command, str(tmp_path)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert (tmp_path / "out" / "final" / "model.safetensors").exists(), done.stdout + done.stderr
