"""Dropout on slices and on whole tensors of tensor-parallel ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lt_zero
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import Face
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.parallel.random import LocalRandom
from lt_zero.training.session import Session
from tests.support.features import needs
from tests.support.matrix import only, only_rows
from tests.support.parallel_nets import CPU
from tests.support.parity import RELEASE, config_of
from tests.support.pool import Pool

WIDTH, HIDDEN = 8, 128


class Block(nn.Module):
    """Dropout on slices (``inside``) and on what all ranks have (``outside``); masks are kept as they are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks: list[tuple[Tensor, Tensor]] = []
        self.drawn: list[Tensor] = []  # inside, also in a recomputation, which ends before the forward does

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(torch.sigmoid(self.up(x)))  # not zero but by dropout
        self.drawn.append(hidden.detach() != 0)
        out = self.outside(self.down(hidden))
        self.masks.append((hidden.detach() != 0, out.detach() != 0))
        result: Tensor = x + out
        return result


def plan(local: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {**found, "inside": LocalRandom()} if local else found


def run(stage: int | None, local: bool = True, recomputes: bool = False, steps: int = 2) -> nn.Sequential:
    """A model after backward passes; ``stage``: None: without an engine."""
    torch.manual_seed(0)
    model, world = nn.Sequential(Block(), Block()), World.join(CPU)
    mesh = ParallelMesh(ParallelSizes(1, dist.get_world_size()), world)
    for block in model:
        parallelize_module(block, mesh.tensor, plan(local))
    if stage is not None:
        group = ShardGroup.of_all(world)
        keys: dict[str, Any] = {"activation_checkpointing": {"mode": "full"}} if recomputes else {}
        config = config_of(stage, RELEASE if stage == 3 else {}, **keys)
        engine = lt_zero.shard(model, config, CPU, group=group, **mesh.arguments(model, group, config))
        lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(steps):
        model(torch.ones(64, WIDTH)).square().mean().backward()
    return model


def masks_of(model: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    return [pair for block in model if isinstance(block, Block) for pair in block.masks]


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten().float(), other.flatten().float()]))[0, 1])


def _masks(stage: int | None, local: bool) -> Any:
    return masks_of(run(stage, local))


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(2, 1)], itertools.product([2, 4], [None, 1, 3])))
def test_slices_get_masks_of_their_own_and_whole_tensors_one(pool: Pool, ranks: int, stage: int | None) -> None:
    found = pool.run(ranks, _masks, stage, True)
    for number, (first, *others) in enumerate(zip(*found, strict=True)):
        assert 0.45 < first[0].float().mean() < 0.55
        for inside, outside in others:
            assert torch.equal(outside, first[1])
            assert abs(correlation(inside, first[0])) < 0.08, (number, correlation(inside, first[0]))
    inside = [pair[0] for pair in found[0]]  # nor do calls repeat them
    assert all(abs(correlation(inside[0], other)) < 0.08 for other in inside[1:])


@pytest.mark.slow
def test_without_the_style_slices_get_one_mask(pool: Pool) -> None:
    """What the style is for."""
    first, second = pool.run(2, _masks, None, False)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(first, second, strict=True))


def _resumed(stage: int) -> None:
    """From the state of the default generator, which checkpoints have, masks repeat."""
    model = run(stage)
    state = torch.get_rng_state()
    for _ in range(2):
        model(torch.ones(64, WIDTH)).square().mean().backward()
    torch.set_rng_state(state)
    for _ in range(2):
        model(torch.ones(64, WIDTH)).square().mean().backward()
    for block in model:
        assert isinstance(block, Block)
        third, fourth, again, last = block.masks[2:]
        assert all(map(torch.equal, third, again))
        assert all(map(torch.equal, fourth, last))
        assert not torch.equal(third[0], fourth[0])


@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_masks_repeat_after_a_resume(pool: Pool, stage: int) -> None:
    pool.run(2, _resumed, stage)


def _recomputed(stage: int) -> None:
    plain, recomputing = run(stage, recomputes=False), run(stage, recomputes=True)
    state = torch.get_rng_state()
    for one, other in zip(plain, recomputing, strict=True):
        assert isinstance(one, Block)
        assert isinstance(other, Block)
        assert len(one.drawn) == 2
        assert len(other.drawn) == 4
        for number, mask in enumerate(one.drawn):
            assert torch.equal(mask, other.drawn[2 * number])
            assert torch.equal(mask, other.drawn[2 * number + 1])
    for parameter, same in zip(plain.parameters(), recomputing.parameters(), strict=True):
        mine, theirs = lt_zero.full_grad(parameter), lt_zero.full_grad(same)
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)
    run(stage, recomputes=False)
    assert torch.equal(state, torch.get_rng_state())


@needs("activation_checkpointing")
@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_recomputation_repeats_masks(pool: Pool, stage: int) -> None:
    pool.run(2, _recomputed, stage)


def _dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = parallelize_module(nn.Dropout(0.5), mesh, LocalRandom())
    torch.manual_seed(3)
    ones = DTensor.from_local(torch.ones(64, 64), mesh, [Shard(0)])
    mask = module(ones).full_tensor() != 0
    assert abs(correlation(mask[:64], mask[64:])) < 0.08
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="LocalRandom got a tensor that is replicated.*Remove the style"):
        module(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
    module.eval()
    module(ones)
    assert torch.equal(before, torch.get_rng_state())


def test_dtensors(pool: Pool) -> None:
    pool.run(2, _dtensors)


def _unseeded() -> list[float]:
    """With a seed of its own, as processes have without ``seed_everything``."""
    torch.manual_seed(dist.get_rank())
    config = {"tensor_parallel": {"autotp_size": 2}}
    Session(Face.LOOP).join(ZeroConfig.of(config), CPU)
    return torch.rand(3).tolist()


def test_ranks_of_the_same_data_draw_the_same_numbers(pool: Pool) -> None:
    drawn = pool.run(4, _unseeded)
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert drawn[0] != drawn[2]
