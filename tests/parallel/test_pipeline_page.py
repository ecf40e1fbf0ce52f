"""The code of docs/pipelines.md: in two stages it trains as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.docs_tools import names_of_script
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.pool import Pool


def _losses(strategy: Any, devices: int) -> tuple[list[float], float, torch.Tensor]:
    """The losses of two epochs, that of validation, and predictions; ``strategy`` None: that of the page."""
    found = names_of_script("test_pipeline_page")
    losses = list[float]()

    class Model(found["Model"]):  # type: ignore[name-defined, misc]
        def configure_model(self) -> None:
            torch.manual_seed(3)
            super().configure_model()

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    drawn = torch.randint(0, 256, (20, 9), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(drawn, batch_size=8)  # type: ignore[arg-type]
    chosen = found["trainer"].strategy if strategy is None else strategy
    how = {"strategy": chosen, "devices": devices, "max_epochs": 2, "use_distributed_sampler": False}  # that shuffles
    trainer, model = L.Trainer(**{**QUIET, **how}), Model()
    trainer.fit(model, loader, loader)
    validated = float(trainer.callback_metrics["val_loss"])
    predicted = trainer.predict(model, loader)
    assert predicted is not None
    return losses, validated, torch.cat(list(predicted))  # type: ignore[arg-type]


def _in_stages() -> tuple[list[float], float, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in torchrun_env().items():
            patch.setenv(name, value)
        return _losses(None, 2)


def test_the_page_trains_as_one_process(pool: Pool) -> None:
    want = _losses("auto", 1)
    assert want[0][-1] < want[0][0]
    for losses, validated, predicted in pool.run(2, _in_stages):
        assert losses == pytest.approx(want[0], rel=1e-5)
        assert validated == pytest.approx(want[1], rel=1e-5)
        torch.testing.assert_close(predicted, want[2], rtol=1e-3, atol=2e-3)  # of 30; AdamW enlarges what sums round
