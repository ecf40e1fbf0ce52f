"""Runs of one rank, and tasks that only the cluster environment counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

import lt_zero
from lt_zero.training.lightning import fabric, strategy


class _Counts(LightningEnvironment):
    """An environment of one's own, whose tasks no variable tells. ``devices`` and ``num_nodes`` do not change it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def world_size(self) -> int:
        return self.size


class _JoinedError(Exception):
    """Lightning makes the group of all tasks."""


class _AloneError(Exception):
    """This task makes a group of its own."""


@pytest.mark.parametrize(("size", "ending"), [(1, _AloneError), (2, _JoinedError)])
@pytest.mark.parametrize("module", [strategy, fabric], ids=["trainer", "fabric"])
def test_tasks_that_the_environment_counts_join(
    module: Any, size: int, ending: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = lt_zero.ZeroStrategy if module is strategy else lt_zero.FabricZeroStrategy
    face = kind(stage=2, parallel_devices=[torch.device("cpu")], cluster_environment=_Counts(size))

    def alone(*_: Any) -> None:
        raise _AloneError

    def joined(*_: Any) -> None:
        raise _JoinedError

    monkeypatch.setattr(module, "init_alone", alone)
    monkeypatch.setattr(module, "begin_restarted", joined)
    with pytest.raises(ending):
        (face.setup_distributed if module is strategy else face._setup_distributed)()
