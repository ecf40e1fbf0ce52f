"""Parameters that are DTensors, in an engine: tensor parallelism against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import lt_zero
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.parallel.local import LocalParts, localize
from tests.support.matrix import only, only_rows
from tests.support.parallel_nets import Net, batch, parallelize
from tests.support.parity import OPTIMIZERS, RELEASE, STAGES, config_of, full_values
from tests.support.pool import Pool

CPU = torch.device("cpu")
STEPS = 4


def families(world: World, tensor: int) -> Callable[[str, nn.Parameter], ShardGroup]:
    ranks = range(world.size)
    sharded = ShardGroup(world, [ranks[i::tensor] for i in range(tensor)], divisor=world.size // tensor)
    everyone = ShardGroup.of_all(world)

    def group_of(name: str, parameter: nn.Parameter) -> ShardGroup:
        cut = isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements)
        return sharded if cut else everyone

    return group_of


def _compare_reads(what: str, grad: Any, whole: Any) -> None:
    """What is read of a gradient is of all elements, whichever ranks have them."""
    for order in (0.0, float("inf"), 0.5, 2.0):
        for norm in (lambda g, o: g.norm(o), lambda g, o: torch._foreach_norm([g], o)[0]):
            assert float(norm(grad, order)) == pytest.approx(float(norm(whole, order)), rel=1e-4), (what, order)
    if not isinstance(grad, DTensor):
        return  # tests/core/engine/test_gradient_edits.py
    reads: list[Callable[[Any], Any]] = [
        lambda g: g.sum().item(),
        lambda g: g.mean(),
        lambda g: g.abs().max(),
        lambda g: g.min(),
        lambda g: (g * 2).flatten().sum(0).sum(),
        lambda g: g.norm(1, dim=0).sum(),
        lambda g: g.max(0)[0].sum(),
        lambda g: (g != 0).sum(),
        lambda g: g[0].sum(),
        lambda g: (g > 10).any(),
        lambda g: g.std(),
        lambda g: torch.tensor(g.tolist()).sum(),
        lambda g: torch.linalg.vector_norm(g, 1, keepdim=True),
    ]
    for number, read in enumerate(reads):
        assert float(read(grad)) == pytest.approx(float(read(whole)), rel=1e-4, abs=1e-6), (what, number)


def _train(stage: int, optimizer: str, tensor: int, sequence: bool) -> float:
    """The largest difference of a weight from one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    data = size // tensor
    mesh = DeviceMesh("cpu", torch.arange(size).view(data, tensor), mesh_dim_names=("data", "tensor"))["tensor"]
    model, reference = parallelize(Net(), mesh, sequence), Net()
    specs = localize(model, [mesh])
    world = World.join(CPU)
    given: dict[str, Any] = {
        "specs": specs,
        "group_of": families(world, tensor),
        "parts": LocalParts(),
    }
    zero = RELEASE if stage == 3 else {}
    engine = lt_zero.shard(model, config_of(stage, zero), CPU, group=ShardGroup.of_all(world), **given)
    made, expected = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, made)
    for step in range(STEPS):
        made.zero_grad()
        expected.zero_grad()
        model(batch(step, rank // tensor)).square().mean().backward()
        for part in range(data):
            (reference(batch(step, part)).square().mean() / data).backward()
        if step == 0:
            engine.finish_reductions()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                _compare_reads(f"{name}, stage {stage}", p.grad, q.grad)
        want = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        assert want > 0.05
        assert float(sharded.grads.clip_norm(0.05)) == pytest.approx(want, rel=1e-5)
        made.step()
        expected.step()
    values, whole, far = full_values(engine), dict(reference.named_parameters()), 0.0
    for spec in specs:
        mine = spec.local_box.of(whole[spec.name].detach())
        far = max(far, float((values.pop(spec.name) - mine).abs().max()))
    return max([far, *(float((value - whole[n]).abs().max()) for n, value in values.items())])


@pytest.mark.parametrize(
    ("stage", "sequence"), only_rows([(0, True), (3, False)], itertools.product(STAGES, [False, True]))
)
def test_two_tensor_ranks_train_as_one_process(pool: Pool, stage: int, sequence: bool) -> None:
    assert max(pool.run(2, _train, stage, "adamw", 2, sequence)) < 2e-6


@pytest.mark.parametrize("stage", only([1], STAGES))
def test_tensor_and_data_ranks_train_as_one_process(pool: Pool, stage: int) -> None:
    assert max(pool.run(4, _train, stage, "sgd", 2, True)) < 1e-6
