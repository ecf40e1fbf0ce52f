"""``examples/tensor_parallel.py`` trains, resumes without tensor ranks, and exports."""

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
    command = [sys.executable, str(ROOT / "examples/tensor_parallel.py"), "--folder", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_trains_goes_on_without_tensor_ranks_and_exports(tmp_path: Path) -> None:
    first = _run(tmp_path, "--steps", "20")
    second = _run(tmp_path, "--resume", "--ranks", "3", "--tensor", "1", "--steps", "30")
    losses = [float(loss) for text in (first, second) for loss in re.findall(r"loss ([\d.]+) after", text)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 4, "the loss of guessing is 5.5"
    assert "Tensor parallelism" in first, "the plan is printed"
    assert load_file(tmp_path / "weights.safetensors")["blocks.0.attention.q.weight"].shape == (96, 96)
