"""The code of docs/sequence-ranks.md: over two ranks it trains as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.docs_tools import names_of_script
from tests.support.lightning_tools import QUIET, torchrun_env
from tests.support.pool import Pool
from tests.support.sequences import whole


def cut_here(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.stack(rows)
    return whole({"input_ids": tokens, "labels": tokens})


def cut_there(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}


def _losses(alone: bool) -> list[float]:
    found = names_of_script("test_sequence_page")
    losses = list[float]()

    class Model(found["Model"]):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    torch.manual_seed(3)
    model = Model()
    drawn = torch.randint(0, 256, (8, 10), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(drawn, batch_size=2, collate_fn=cut_here if alone else cut_there)  # type: ignore[arg-type]
    how = {"strategy": "auto" if alone else found["trainer"].strategy, "devices": 1 if alone else 2, "max_epochs": 2}
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
