"""The documented lines in a real Jupyter kernel; skipped where nbclient and ipykernel are not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import environment
from tests.support.paths import ROOT

CELLS = [
    f"import sys; sys.path.insert(0, {str(ROOT)!r})",
    "import lightning as L, torch, lt_zero\nfrom lightning.pytorch.demos.boring_classes import BoringModel",
    """def fit(strategy, devices):
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_steps=3, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model)
    return trainer.global_step""",
    "model = BoringModel(); fit(lt_zero.ZeroStrategy(3), 1)",
    "model = BoringModel(); fit('zero_3', 2)",
    "model = BoringModel(); fit('zero_1_notebook', 2)",
    # Lightning's own ranks: its Trainer does not learn how many steps they took.
    "before = model.layer.weight.clone(); fit('ddp_notebook', 2); int(not torch.equal(before, model.layer.weight)) * 3",
]


@pytest.mark.slow
def test_a_kernel_trains_with_one_device_and_with_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def result(cell: Any) -> list[str]:
        return [out.data["text/plain"] for out in cell.outputs if out.output_type == "execute_result"]

    assert [result(cell) for cell in notebook.cells[3:]] == [["3"]] * 4
