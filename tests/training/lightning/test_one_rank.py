"""Runs of one rank, and tasks that only the cluster environment counts."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

import lt_zero
from lt_zero.training.lightning import sharded_strategy


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
@pytest.mark.parametrize(
    ("kind", "set_up"),
    [(lt_zero.ZeroStrategy, "setup_distributed"), (lt_zero.FabricZeroStrategy, "_setup_distributed")],
    ids=["trainer", "fabric"],
)
def test_tasks_that_the_environment_counts_join(
    kind: Any, set_up: str, size: int, ending: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = kind(stage=2, parallel_devices=[torch.device("cpu")], cluster_environment=_Counts(size))

    def alone(*_: Any) -> None:
        raise _AloneError

    def joined(*_: Any) -> None:
        raise _JoinedError

    monkeypatch.setattr(sharded_strategy, "init_alone", alone)
    monkeypatch.setattr(sharded_strategy, "begin_restarted", joined)
    with pytest.raises(ending):
        getattr(strategy, set_up)()


class _PlacedElsewhere:
    """Tells the device and the samples of a rank, as the strategy of Ray does, beside which a subclass has ours."""

    root_device = torch.device("cpu", 3)
    distributed_sampler_kwargs: ClassVar[dict[str, int]] = {"num_replicas": 5, "rank": 2}


@pytest.mark.parametrize("kind", [lt_zero.ZeroStrategy, lt_zero.FabricZeroStrategy])
def test_another_base_of_a_subclass_tells_the_place_of_a_rank(kind: Any) -> None:
    lightnings = next(base for base in kind.__mro__ if base.__name__ == "DDPStrategy")
    placed = type("_Placed", (_PlacedElsewhere, lightnings), {})
    strategy = type("_Both", (kind, placed), {})(stage=2, parallel_devices=[torch.device("cpu")])
    assert strategy.root_device == torch.device("cpu", 3)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 5, "rank": 2}
