"""Accelerators that are not Lightning's own: their devices and names are taken as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import Accelerator
from torch import nn

from lt_zero import FabricZeroStrategy, ZeroStrategy
from lt_zero.common import accelerator
from tests.support.lightning_tools import GPT, assert_same, sharded_trainer, weights
from tests.support.pool import Pool


class Vendors(Accelerator):
    """The devices of a vendor, which a CPU stands for."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def teardown(self) -> None:
        """There is nothing to release."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"temperature": 40.0}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "vendors"


@contextmanager
def beside_a_gpu() -> Iterator[None]:
    """Context in which torch has a GPU, too, which is not used."""
    with (
        mock.patch.object(accelerator, "is_available", return_value=True),
        mock.patch.object(accelerator, "default_kind", return_value=torch.device("cuda")),
    ):
        yield


def _fit(chosen: Any) -> tuple[Any, str]:
    with beside_a_gpu():
        trainer = sharded_trainer(3, accelerator=chosen, precision="bf16-mixed", max_epochs=1)
    trainer.fit(GPT(dist.get_world_size(), "adamw"))
    return weights(trainer), trainer.precision_plugin.device_type  # type: ignore[attr-defined]


def test_a_trainer_on_it(pool: Pool) -> None:
    found, expected = pool.run(2, _fit, Vendors()), pool.run(2, _fit, "cpu")
    for (values, kind), (wanted, _) in zip(found, expected, strict=True):
        assert kind == "cpu"
        assert_same(values, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [ZeroStrategy, FabricZeroStrategy])
def test_devices_without_collectives_are_refused_before_ranks_connect(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "default_kind", lambda: torch.device("mps"))
    made = strategy(1, parallel_devices=[torch.device("mps", 0)] * 2, cluster_environment=LightningEnvironment())
    with pytest.raises(RuntimeError, match="'mps:0' with 2 ranks.*'gloo'"):
        (made.setup_distributed if strategy is ZeroStrategy else made._setup_distributed)()
    assert not dist.is_initialized()


@pytest.mark.parametrize("strategy", [ZeroStrategy, FabricZeroStrategy])
def test_a_device_without_an_index_gets_the_current_one(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "default_kind", lambda: torch.device("hpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    for given, known in (("hpu", "hpu:3"), ("cpu", "cpu"), ("xla", "xla")):
        made = strategy(1, parallel_devices=[torch.device(given)], cluster_environment=LightningEnvironment())
        assert made.root_device == torch.device(known)


def test_fabric_on_it() -> None:
    with beside_a_gpu():
        fabric = Fabric(accelerator=Vendors(), devices=1, strategy=FabricZeroStrategy(1), precision="bf16-mixed")
    fabric.launch()
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    module, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    out = module(torch.randn(3, 4))
    fabric.backward(out.square().mean())
    optimizer.step()
    assert fabric.strategy.precision.device_type == "cpu"
    with fabric.autocast():
        assert (layer(torch.ones(1, 4)).dtype, torch.is_autocast_enabled("cuda")) == (torch.bfloat16, False)
