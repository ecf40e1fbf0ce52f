"""Tensor-parallel ranks in Fabric and a loop, and errors that all faces have."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.core.engine.full_values import full_parameters
from tests.support.features import skip_without
from tests.support.lightning_tools import quick, sharded_trainer, torchrun_env
from tests.support.matrix import only, only_rows
from tests.support.parallel_module import Module
from tests.support.parallel_nets import Net, batch, parallelize
from tests.support.pool import Pool

STEPS = 3


def reference(data: int) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(data):
            (model(batch(step, part)).square().mean() / data).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def differences(engine: Any, data: int) -> float:
    """The largest of this rank's weights from one process."""
    want, far = reference(data), 0.0
    specs = {span.name: span.spec for bucket in engine.buckets for span in bucket.layout.spans}
    for name, _, value in full_parameters(engine):
        far = max(far, float((value - specs[name].local_box.of(want[name])).abs().max()))
    return far


def _loop(stage: int) -> tuple[float, int]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": block, "tensor_parallel": {"autotp_size": 2}, "train_micro_batch_size_per_gpu": 3}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine, _, _, _ = lt_zero.initialize(model=parallelize(Net(), mesh["tensor"], True), config=config)
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank() // 2)).square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.train_batch_size() == 3 * size // 2
    return differences(engine.engine, size // 2), engine.global_samples


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_a_loop_trains_as_one_process(pool: Pool, stage: int) -> None:
    for far, samples in pool.run(4, _loop, stage):
        assert far < 1e-6
        assert samples == STEPS * 2 * 3


def _fabric(stage: int) -> tuple[float, float]:
    import os

    os.environ.update(torchrun_env())
    block = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    strategy = FabricZeroStrategy(config=block, tensor_parallel_size=2)
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    assert strategy.device_mesh is not None
    model = parallelize(Net(), strategy.device_mesh["tensor_parallel"], False)
    data = dist.get_world_size() // 2
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(module(batch(step, fabric.global_rank // 2)).square().mean())
        optimizer.step()
    seen = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4))
    rows = torch.cat([rows for (rows,) in seen])
    total = float(
        fabric.all_reduce(rows.sum(), group=strategy.device_mesh["data_parallel"].get_group(), reduce_op="sum")
    )
    return differences(strategy.session.engines[0], data), total


@pytest.mark.parametrize("stage", only([2], [2, 3]))
def test_fabric_trains_as_one_process_and_ranks_of_one_model_read_the_same_data(pool: Pool, stage: int) -> None:
    for far, total in pool.run(4, _fabric, stage):
        assert far < 1e-6
        assert total == 28, "each sample is read once by the data ranks"


class Shuffled(Module):
    """Draws samples with a seed of each rank's own."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(self.global_rank)
        return DataLoader(torch.randn(8, 6, generator=generator), batch_size=4)


def _other_batches() -> str:
    with quick():
        trainer = sharded_trainer(1, config={"tensor_parallel": {"autotp_size": 2}}, use_distributed_sampler=False)
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(Shuffled())
    return str(caught.value)


def test_other_batches_on_ranks_of_one_model_are_an_error_on_all(pool: Pool) -> None:
    for text in pool.run(2, _other_batches):
        assert "Ranks 0 and 1" in text
        assert "tensor 0 of their first batches (float32 (4, 6)) has different values" in text


TENSOR = {"tensor_parallel": {"autotp_size": 3}}


def _sizes(keys: dict[str, Any]) -> str:
    with quick(), pytest.raises(ConfigError) as caught:
        sharded_trainer(1, config=keys, max_steps=1).fit(Module())
    return str(caught.value)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2 does not divide the 3 ranks"),
    (TENSOR, "parameter 'blocks.0.up.weight' of shape (10, 6) is placed as S(0)"),
    ({**TENSOR, "gradient_compression": {"algorithm": "1bit"}}, "gradient_compression.algorithm needs the same"),
    ({**TENSOR, "optimizer": {"type": "OneBitAdam"}}, "optimizer.type needs the same"),
    ({"data_parallel_size": 2}, "data_parallel_size=2, but 3 ranks"),
]


@pytest.mark.parametrize(("keys", "text"), only_rows(UNFIT[:3], UNFIT))
def test_sizes_that_do_not_fit_are_named(pool: Pool, keys: dict[str, Any], text: str) -> None:
    skip_without(keys)
    assert all(text in found for found in pool.run(3, _sizes, keys))
