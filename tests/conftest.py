from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo worker processes, shared by all tests."""
    workers = Pool()
    yield workers
    workers.close()
