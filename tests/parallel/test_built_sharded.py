"""Modules that are sharded while they are built (stage 3), then cut over tensor ranks, train as one process does."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.core.engine import construction
from lt_zero.core.engine.guard import is_guarded
from lt_zero.parallel.mesh import ParallelMesh
from tests.support.lightning_tools import sharded_trainer, single_trainer, torchrun_env
from tests.support.llamas import Llama, rules
from tests.support.matrix import only, only_rows
from tests.support.parallel_module import BATCH, Module
from tests.support.parallel_nets import Net, all_weights, batch, parallelize
from tests.support.plans import tokens
from tests.support.pool import Pool

STEPS = 3
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "train_micro_batch_size_per_gpu": 3}
STAGE = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 15}}
KINDS = {"fused": {"fused": True, "head_norms": True}, "untied": {"tied": False, "head_norms": True}}


def trained(model: nn.Module, loss: Any, data: int) -> dict[str, Tensor]:
    """The weights of one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data):
            (loss(model, step, rank) / data).backward()
        optimizer.step()
    return dict(model.state_dict())


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in got.items():  # of tied parameters there is one
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5, msg=name)


def _losses(engine: Any, tensor: int) -> list[float]:
    found = []
    for step in range(STEPS):
        loss = engine(tokens(step, dist.get_rank() // tensor))
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


def _init(tensor: int, kind: str) -> None:
    data, seen = dist.get_world_size() // tensor, list[bool]()
    partition = rules(**{key: value for key, value in KINDS[kind].items() if key != "tied"})
    least = 0 if kind == "fused" else 15  # smaller ones, as norms, are not sharded while they are built
    zero = {"stage": 3, "stage3_param_persistence_threshold": least}
    config = {
        **SGD,
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": tensor, "partition_config": partition},
    }

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        made: Tensor = model(tokens(step, rank))
        return made

    arguments = ParallelMesh.arguments

    def watched(mesh: ParallelMesh, module: nn.Module, *given: Any) -> Any:
        large = [p for p in module.parameters() if p.numel() >= least]
        seen.extend(p.is_meta if isinstance(p, DTensor) else is_guarded(p) for p in large)
        return arguments(mesh, module, *given)

    with lt_zero.Init(config=config):
        model = Llama(**KINDS[kind])
    with mock.patch.object(ParallelMesh, "arguments", watched):
        engine, _, _, _ = lt_zero.initialize(model=model, config=config)
    assert seen
    assert all(seen), "no rank has values of a layer before the engine takes them over"
    losses, weights = _losses(engine, tensor), all_weights(engine.engine)
    close(weights, trained(Llama(**KINDS[kind]), loss, data))
    whole, _, _, _ = lt_zero.initialize(model=Llama(**KINDS[kind]), config=config)
    assert losses == _losses(whole, tensor)
    for name, value in all_weights(whole.engine).items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    ("world", "tensor", "kind"), only_rows([(3, 3, "untied")], [(4, 2, "fused"), (3, 3, "untied")])
)
def test_what_is_built_inside_of_init_is_cut_by_its_plan(pool: Pool, world: int, tensor: int, kind: str) -> None:
    pool.run(world, _init, tensor, kind)


def _refused() -> None:
    """A module without a plan is as it was after the error, and is trained without tensor ranks."""
    config: dict[str, Any] = {**SGD, **STAGE}
    with lt_zero.Init(config=config):
        model = Net()
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match="there is no plan for Net"):
        lt_zero.initialize(model=model, config={**config, "tensor_parallel": {"autotp_size": 2}})
    assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before
    engine, _, _, _ = lt_zero.initialize(model=model, config=config)
    close(all_weights(engine.engine), Net().state_dict())


def test_a_module_that_cannot_be_cut_is_unchanged(pool: Pool) -> None:
    pool.run(2, _refused)


class Builds(Module):
    """Makes its layers in ``configure_model``; ``plan``: the configuration has one, else it parallelizes them."""

    def __init__(self, plan: bool = False, data: int = 1) -> None:
        super().__init__(data=data)
        self.plan, self.sharded = plan, list[bool]()
        del self.blocks, self.head

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        made = Module()  # with the same random numbers
        self.blocks, self.head = made.blocks, made.head
        if self.device_mesh is not None:
            self.sharded = [is_guarded(block.up.weight) for block in self.blocks]
            if not self.plan:
                super().configure_model()


def _trains(plan: bool) -> tuple[list[float], list[bool]]:
    config = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": BATCH}
    if plan:
        specs = [{"patterns": [".*up.weight"]}, {"patterns": [".*down.weight"], "partition_type": "row"}]
        config["tensor_parallel"]["partition_config"] = {"layer_specs": specs}
    module = Builds(plan, data=dist.get_world_size() // 2)
    with mock.patch.object(construction, "_LARGE", 1):  # bytes that are sharded together
        sharded_trainer(3, STAGE["zero_optimization"], config, max_steps=3).fit(module)
    return module.losses, module.sharded


@pytest.mark.parametrize("plan", only([True], [False, True]))
def test_layers_of_a_trainer_are_sharded_while_they_are_built(pool: Pool, plan: bool) -> None:
    module = Module()
    single_trainer(max_steps=3).fit(module)
    for losses, sharded in pool.run(4, _trains, plan):
        assert losses == pytest.approx(module.losses, rel=1e-5)
        assert sharded == [True] * 3


def _fabric() -> None:
    os.environ.update(torchrun_env())
    strategy = FabricZeroStrategy(config=STAGE, tensor_parallel_size=2)
    fabric = L.Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        model = Net()
    assert is_guarded(model.head.weight)
    assert strategy.device_mesh is not None
    parallelize(model, strategy.device_mesh["tensor_parallel"], True)
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(module(batch(step, fabric.global_rank // 2)).square().mean())
        optimizer.step()

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        made: Tensor = model(batch(step, rank)).square().mean()
        return made

    close(all_weights(strategy.session.engines[0]), trained(Net(), loss, 2))


@pytest.mark.slow
def test_what_fabric_builds_is_parallelized_by_its_user(pool: Pool) -> None:
    pool.run(4, _fabric)
