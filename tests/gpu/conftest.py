"""Tests of a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import GPU

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a longer limit of the command line hold: ``make gpu LIMIT=...`` gives it on a machine with other work."""
    given = config.getoption("timeout", None)
    for item in items if given else ():
        own = item.get_closest_marker("timeout")
        if item.path.parent == _HERE and own is not None and own.args[0] < given:
            item.add_marker(pytest.mark.timeout(given), append=False)


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
