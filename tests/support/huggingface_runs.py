"""Starts several runs of ``huggingface_script.py`` in the same processes, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lt_zero
from tests.support import huggingface_script

Rows = dict[str, list[dict[str, float]]]


def run_all(folder: Path, ranks: int, runs: dict[str, dict[str, Any]]) -> Rows:
    """The rows of all runs on so many ranks."""
    for name in ("transformers", "accelerate", "peft"):
        pytest.importorskip(name)
    folder.mkdir(parents=True)
    stage = next(iter(runs.values()))["stage"]
    told = json.dumps({"folder": str(folder), "stage": stage, "runs": runs})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    env = {**os.environ, "PYTHONPATH": str(Path(lt_zero.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, huggingface_script.__file__, told], env=env, capture_output=True, text=True, timeout=900
    )
    rows = {name: folder / name / "rows" for name in runs}
    assert all(path.exists() for path in rows.values()), done.stdout + done.stderr
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in rows.items()}


def weights_of(folder: Path) -> Any:
    """The weights at the end of a run, on the CPU."""
    import torch
    from safetensors.torch import load_file

    if (folder / "weights.pt").exists():
        return torch.load(folder / "weights.pt")
    [file] = (folder / "final").glob("*model.safetensors")
    return load_file(file)


def assert_same_weights(folder: Path, other: Path) -> None:
    """Compare the weights at the ends of two runs."""
    import torch

    found, wanted = weights_of(folder), weights_of(other)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
