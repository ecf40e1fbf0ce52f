"""Fabric with pipelines: against one process."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_zero import FabricZeroStrategy
from lt_zero.core.engine.full_values import full_parameters
from lt_zero.parallel import Pipeline
from lt_zero.parallel.pipeline.position import Position
from tests.support.lightning_tools import torchrun_env
from tests.support.matrix import only, only_rows
from tests.support.pipelines import batch, mean_loss, specs
from tests.support.pool import Pool

GAS = 3


class Net(nn.Module):
    def __init__(self, position: Position | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pipe = Pipeline(specs(), loss_fn=mean_loss, position=position)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.pipe(x, y)


def _fabric(stage: int, stages: int, precision: Any) -> L.Fabric:
    os.environ.update(torchrun_env())
    block = {"num_microbatches": 2}
    config = {"pipeline": block, "zero_optimization": {"stage3_param_persistence_threshold": 0}}
    strategy = FabricZeroStrategy(stage=stage, config=config, pipeline_parallel_size=stages)
    return L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)


def _train(stage: int, stages: int, precision: Any) -> None:
    """Gradients of three batches are accumulated, and clipped."""
    rough = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 0.1, "atol": 5e-3}
    fabric = _fabric(stage, stages, precision)
    fabric.launch()
    made = Net()
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
    plain = Net(Position())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    data = fabric.strategy.distributed_sampler_kwargs
    made.pipe.loss_weight = 1 / GAS
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(GAS):
            with fabric.no_backward_sync(model, enabled=micro < GAS - 1):
                loss = model(*batch(GAS * step + micro, data["rank"]))
                fabric.backward(loss / GAS)
            wanted = [plain(*batch(GAS * step + micro, rank)) for rank in range(data["num_replicas"])]
            (torch.stack(wanted).mean() / GAS).backward()
            torch.testing.assert_close(loss, wanted[data["rank"]], check_dtype=False, **rough)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(plain.parameters(), 0.5), **rough)
        optimizer.step()
        reference.step()
    weights = dict(plain.named_parameters())
    for name, _, value in full_parameters(model._forward_module.engine):
        torch.testing.assert_close(value, weights[name].detach(), **rough)
    fabric.strategy.teardown()


@pytest.mark.parametrize(
    ("stage", "precision"),
    only_rows([(3, "32-true")], [(1, "32-true"), (3, "32-true"), (2, "bf16-mixed"), (0, "16-mixed")]),
)
def test_a_script_trains_as_one_process(pool: Pool, stage: int, precision: str) -> None:
    pool.run(2, _train, stage, 2, precision)


def _misused(precision: str) -> str:
    """The error of a loss whose factor the gradients do not know, also of a call around the model."""
    fabric = _fabric(1, 2, precision)
    fabric.launch()
    made = Net()
    model, _ = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as caught:
        fabric.backward((model if precision == "32-true" else model.pipe)(*batch(0, 0)) / 2)
    fabric.strategy.teardown()
    return str(caught.value)


@pytest.mark.parametrize("precision", only(["bf16-mixed"], ["32-true", "bf16-mixed"]))
def test_misuse_is_explained(pool: Pool, precision: str) -> None:
    for text in pool.run(2, _misused, precision):
        assert "multiplied by 0.5" in text
        assert "pipeline.loss_weight" in text
