"""The code of docs/sequence-ranks.md: over two ranks it trains as on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.docs_tools import losses_of_page
from tests.support.lightning_tools import torchrun_env
from tests.support.pool import Pool
from tests.support.sequences import whole


def cut_here(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.stack(rows)
    return whole({"input_ids": tokens, "labels": tokens})


def cut_there(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}


def _losses(alone: bool) -> list[float]:
    drawn = torch.randint(0, 256, (8, 10), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(drawn, batch_size=2, collate_fn=cut_here if alone else cut_there)  # type: ignore[arg-type]
    return losses_of_page("test_sequence_page", loader, alone)


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
