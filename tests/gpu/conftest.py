"""Tests of a machine with a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu import GPU


@pytest.fixture
def device() -> torch.device:
    if GPU.type == "cpu":
        return GPU
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For what the CPU cannot stand in for."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device
