"""The demo's GPT learns alike in every precision (slow: fp16 matrix products take seconds on a CPU)."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DEMO = ROOT / "examples/train_gpt.py"
SMALL = ("model=tiny", "data.batch_size=4", "data.validations=1", "trainer.max_steps=300")


def validation_loss(precision: str, folder: Path) -> float:
    command = [sys.executable, str(DEMO), *SMALL, f"trainer.precision={precision}", f"out={folder}"]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row.get("val_loss")][-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_precisions_converge_alike(tmp_path: Path) -> None:
    precisions = ("32-true", "16-true", "bf16-true", "bf16-mixed")
    losses = {precision: validation_loss(precision, tmp_path / precision) for precision in precisions}
    assert max(losses.values()) < math.log(256) * 0.6, losses  # it did learn
    assert max(losses.values()) < 1.02 * min(losses.values()), losses
