"""The code of docs/experts.md: over two ranks it trains as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.support.docs_tools import names_of_script
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.pool import Pool


def _losses(ranks: int, rank: int = 0) -> list[float]:
    """Losses of all data, the mean over ranks."""
    torch.manual_seed(3)
    found = names_of_script("test_experts_page")
    losses = list[float]()

    class Model(found["Model"]):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach().clone())))

    model = Model()
    rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(rows[rank::ranks], batch_size=8 // ranks)  # type: ignore[arg-type]
    how = {"strategy": "auto" if ranks == 1 else found["trainer"].strategy, "devices": ranks, "max_epochs": 2}
    L.Trainer(**{**QUIET, **how, "use_distributed_sampler": False}).fit(model, loader)
    return losses


def _over_ranks() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in torchrun_env().items():
            patch.setenv(name, value)
        return _losses(2, dist.get_rank())


def test_the_page_trains_as_one_process(pool: Pool) -> None:
    want = _losses(1)
    assert want[3] < want[0], "of the same rows"
    for losses in pool.run(2, _over_ranks):
        assert losses == pytest.approx(want, rel=1e-5)
