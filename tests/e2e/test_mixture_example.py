"""``examples/mixture.py``: trains with experts over ranks as without, resumes without, exports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.paths import ROOT

MODELS = ["own", *(["mixtral"] if find_spec("transformers") else [])]


def _run(folder: Path, *arguments: str) -> tuple[float, float]:
    """The loss, and the perplexity."""
    command = [sys.executable, str(ROOT / "examples/mixture.py"), "--folder", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    ((loss, perplexity),) = re.findall(r"loss ([\d.]+) after \d+ steps, perplexity ([\d.]+)", done.stdout)
    return float(loss), float(perplexity)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_it_trains_as_without_expert_ranks_and_goes_on_without(tmp_path: Path, model: str) -> None:
    few = "--model", model, "--steps", "12"
    found, wanted = _run(tmp_path / "two", *few), _run(tmp_path / "one", *few, "--experts", "1")
    assert found == pytest.approx(wanted, rel=1e-3)
    whole = {name: value.shape for name, value in load_file(tmp_path / "two/weights.safetensors").items()}
    more = "--model", model, "--resume", "--experts", "1", "--ranks", "3", "--steps", "24"
    assert _run(tmp_path / "two", *more)[1] < found[1]
    assert {name: value.shape for name, value in load_file(tmp_path / "two/weights.safetensors").items()} == whole
    assert any(shape[:1] == (8,) and len(shape) == 3 for shape in whole.values()), "stacks of all experts"
