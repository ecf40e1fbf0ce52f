"""``examples/pipeline_gpt.py``: trains on a mesh of stages and data ranks, resumes on another, exports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.paths import ROOT


def _run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples/pipeline_gpt.py"), "--folder", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_trains_goes_on_without_stages_and_exports(tmp_path: Path) -> None:
    first = _run(tmp_path, "--steps", "20")
    whole = load_file(tmp_path / "weights.safetensors")
    second = _run(tmp_path, "--resume", "--ranks", "3", "--stages", "1", "--steps", "30")
    losses = [float(loss) for text in (first, second) for loss in re.findall(r"loss ([\d.]+) after", text)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 4, "the loss of guessing is 5.5"
    assert {name: value.shape for name, value in load_file(tmp_path / "weights.safetensors").items()} == {
        name: value.shape for name, value in whole.items()
    }
    assert {f"pipe.layers.{number}.q.weight" for number in range(2, 6)} < set(whole)
    assert whole["pipe.tied.embed.weight"].shape == (256, 96)


PERPLEXITY = re.compile(r"perplexity ([\d.]+)")


@pytest.mark.slow
def test_three_dimensions_reach_the_perplexity_of_data_ranks_alone(tmp_path: Path) -> None:
    """With the same batches; then the run goes on with other stages, tensor ranks and data ranks."""
    meshes = {"three": ("--ranks", "8", "--tensor", "2"), "plain": ("--ranks", "2", "--stages", "1")}
    found = {}
    for name, mesh in meshes.items():
        found[name] = float(PERPLEXITY.findall(_run(tmp_path / name, *mesh, "--steps", "60"))[-1])
    assert found["three"] == pytest.approx(found["plain"], rel=1e-3)
    shapes = [
        {name: value.shape for name, value in load_file(tmp_path / mesh / "weights.safetensors").items()}
        for mesh in meshes
    ]
    assert shapes[0] == shapes[1]
    later = _run(tmp_path / "three", "--resume", "--ranks", "3", "--stages", "3", "--steps", "80")
    assert float(PERPLEXITY.findall(later)[-1]) < found["three"]
