"""The code of docs/tensor-parallelism.md: over two tensor ranks it trains as on one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.docs_tools import losses_of_page
from tests.support.lightning_tools import torchrun_env
from tests.support.pool import Pool


def _losses(alone: bool) -> list[float]:
    rows = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    return losses_of_page("test_tensor_page", DataLoader(rows, batch_size=8), alone)  # type: ignore[arg-type]


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
