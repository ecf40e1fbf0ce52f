"""Trains models that a plan cuts over tensor ranks, and compares them with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.parallel.local import is_cut, spec_of
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.parallel.plan import PlanRow, parallelize, planned_parts
from tests.support.llamas import VOCABULARY
from tests.support.parity import OPTIMIZERS as OF_PARITY
from tests.support.parity import RELEASE, config_of, full_values

CPU = torch.device("cpu")
STEPS = 4
# With its usual eps AdamW divides the rounding of gradients near 0 by itself: 6e-5 for one element of a model here.
OPTIMIZERS = {**OF_PARITY, "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, eps=1e-5)}

Cut = Callable[[nn.Module, DeviceMesh, ZeroConfig], Any]
Loss = Callable[[nn.Module, Tensor], Tensor]


def config(ranks: int, partition: dict[str, Any] | None = None, stage: int = 0, **keys: Any) -> ZeroConfig:
    block = {"autotp_size": ranks, **({} if partition is None else {"partition_config": partition}), **keys}
    return config_of(stage, RELEASE if stage == 3 else {}, tensor_parallel=block)


def tokens(step: int, data: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(10 * step + data))


def call(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def train(
    model: nn.Module, settings: ZeroConfig, optimizer: str = "sgd", cut: Cut = parallelize, loss: Loss = call
) -> float:
    """The largest difference of a weight from one process; gradient norms are compared at each step."""
    world = World.join(CPU)
    mesh = ParallelMesh(ParallelSizes.of(settings, world.size), world)
    reference = copy.deepcopy(model)
    cut(model, mesh.tensor, settings)
    group = ShardGroup.of_all(world)
    engine = lt_zero.shard(model, settings, CPU, group=group, **(given := mesh.arguments(model, group, settings)))
    made, expected = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, made)
    for step in range(STEPS):
        made.zero_grad()
        expected.zero_grad()
        loss(model, tokens(step, mesh.data_rank)).backward()
        for part in range(mesh.sizes.data):
            (loss(reference, tokens(step, part)) / mesh.sizes.data).backward()
        want = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        assert want > 0.05
        assert float(sharded.grads.clip_norm(0.05)) == pytest.approx(want, rel=1e-5)
        made.step()
        expected.step()
    values, whole, far = full_values(engine), dict(reference.named_parameters()), 0.0
    for spec in given["specs"]:
        want_part = spec.local_box.of(whole[spec.name].detach())
        far = max(far, float((values.pop(spec.name) - want_part).abs().max()))
    return max([far, *(float((value - whole[name].detach()).abs().max()) for name, value in values.items())])


def cut_over_all(model: nn.Module, settings: ZeroConfig) -> list[PlanRow]:
    ranks = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tensor",))
    return parallelize(model, ranks, settings)


def plans_as_it_cuts(model: nn.Module, settings: ZeroConfig) -> None:
    """Check that the parts that are planned of ``model`` are those that the first rank gets when it is cut."""
    planned = planned_parts(model, dist.get_world_size(), settings)
    cut_over_all(model, settings)
    made = [spec_of(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor) and is_cut(p)]
    assert planned
    assert {spec.name: (spec.global_shape, spec.shape) for spec in planned} == {
        spec.name: (spec.global_shape, spec.shape) for spec in made
    }
    if dist.get_rank() == 0:
        assert set(planned) == set(made)
    assert planned_parts(model, dist.get_world_size(), settings) == made, "of a model that is cut"


def rule(pattern: str, kind: str = "column", **keys: Any) -> dict[str, Any]:
    return {"patterns": [pattern], "partition_type": kind, **keys}
