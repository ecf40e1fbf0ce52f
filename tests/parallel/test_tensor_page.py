"""The code of docs/tensor-parallelism.md: over two tensor ranks it trains as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.docs_tools import names_of_script
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.pool import Pool


def _losses(alone: bool) -> list[float]:
    found = names_of_script("test_tensor_page")
    losses = list[float]()

    class Model(found["Model"]):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    torch.manual_seed(3)
    model = Model()
    rows = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    how = {"strategy": "auto" if alone else found["trainer"].strategy, "devices": 1 if alone else 2, "max_epochs": 2}
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    L.Trainer(**{**QUIET, **how, "use_distributed_sampler": False}).fit(model, loader)
    return losses


def _over_ranks() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in torchrun_env().items():
            patch.setenv(name, value)
        return _losses(alone=False)


def test_the_page_trains_as_one_process(pool: Pool) -> None:
    want = _losses(alone=True)
    assert want[-1] < want[0]
    for losses in pool.run(2, _over_ranks):
        assert losses == pytest.approx(want, rel=1e-5)
