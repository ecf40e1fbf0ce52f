"""A model with attention, cut layers and a mixture of experts, on any mesh, and the same on one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import lt_zero
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.world import World
from lt_zero.config.precision import dtype_policy
from lt_zero.engine.engine import Engine
from lt_zero.parallel import LayerSpec, Pipeline, sequence_attention, token_mean
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.parallel.pipeline import position
from lt_zero.parallel.sequence.ranks import current, use
from lt_zero.step.loss_scale import LossScaleController
from tests.support.mixtures import NUMBER, WIDTH, FeedForwards, MixtureBlock
from tests.support.parallel_nets import CPU, Feed
from tests.support.parity import OPTIMIZERS, RELEASE, config_of

ROWS, LENGTH, MICRO = 4, 6, 2  # of a data rank's batch; pieces of it in a pipeline


class Attend(nn.Module):
    """Causal attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attend = sequence_attention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (6, 3)).transpose(1, 2).chunk(3, 1)
        result: Tensor = x + self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return result


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return token_mean((out - target).square().mean(-1))


class Blended(nn.Module):
    """``dense``: as one process without experts over ranks. ``number`` of experts."""

    def __init__(self, dense: bool = False, number: int = NUMBER) -> None:
        super().__init__()
        torch.manual_seed(0)
        feed, mixture = LayerSpec(Feed, WIDTH, 8), LayerSpec(MixtureBlock)
        layers = [LayerSpec(Attend), feed, mixture, LayerSpec(Attend), feed, mixture, LayerSpec(nn.Linear, WIDTH, 3)]
        self.pipe = Pipeline(layers, loss_fn=loss_of)
        for block in self.mixtures():
            block.dense = dense
            if number != NUMBER:
                block.router, block.experts = nn.Linear(WIDTH, number), FeedForwards(number)

    def mixtures(self) -> list[MixtureBlock]:
        return [module for module in self.modules() if isinstance(module, MixtureBlock)]

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.pipe(x, target)
        return loss


def batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    """What a data rank sees."""
    drawn = torch.randn(ROWS, LENGTH, WIDTH + 3, generator=torch.Generator().manual_seed(10 * step + data))
    return drawn[..., :WIDTH].double(), drawn[..., WIDTH:].double()


class Blend(NamedTuple):
    """A model on this rank of a mesh, and its engine."""

    model: Blended
    engine: Engine
    optimizer: Optimizer
    sharded: lt_zero.ShardedOptimizer
    mesh: ParallelMesh | None  # None: all ranks are data ranks
    gate: LossScaleController

    def begin(self) -> float:
        self.gate.before_backward([self.sharded])
        return self.gate.scale

    def backward(self, step: int) -> Tensor:
        """The gradients of a batch; returns the loss, which sequence and pipeline ranks have of the whole batch."""
        data, parts, part = self.engine.world.rank, 1, 0
        if self.mesh is not None:
            data, parts, part = self.mesh.data_rank, self.mesh.sizes.sequence, self.mesh.sequence_rank
        self.optimizer.zero_grad()
        with self.engine.forward_scope():
            loss: Tensor = self.model(*(each.chunk(parts, 1)[part] for each in batch(step, data)))
        loss.backward()
        return loss.detach()

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def over(self) -> None:
        use(None)


def start(sizes: ParallelSizes, stage: int, optimizer: str = "adamw", number: int = NUMBER, **keys: Any) -> Blend:
    """A run in fp64 on a mesh. End it with ``over``."""
    block = {"stages": sizes.pipeline, "num_microbatches": MICRO}
    config = config_of(stage, RELEASE if stage == 3 else {}, pipeline=block, **keys)
    world = World.join(CPU)
    everyone, given = ShardGroup.of_all(world), dict[str, Any]()
    mesh = ParallelMesh(sizes, world) if not sizes.is_plain else None
    with position.at(position.Position(mesh.pipeline_rank if mesh else 0, sizes.pipeline, config.pipeline)):
        model = Blended(number=number).double()
    use(mesh.sequence if mesh is not None else None)
    if mesh is not None:
        for feed in (module for module in model.modules() if isinstance(module, Feed) and sizes.tensor > 1):
            parallelize_module(feed, mesh.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh.cut(model, config)
        given = mesh.arguments(model, everyone, config)
    policy = dtype_policy(config, "64-true")
    engine = lt_zero.shard(model, config, CPU, policy, **{"group": everyone, **given})
    made = OPTIMIZERS[optimizer](model.parameters())
    run = Blend(model, engine, made, lt_zero.ShardedOptimizer(engine, made), mesh, LossScaleController(engine.policy))
    if mesh is not None:
        mesh.watch(engine)
        mesh.connect(engine, config, run.begin, lambda: 1.0)
    return run


class OneProcess:
    """The same without ranks, where each expert sees all tokens."""

    def __init__(self, data: int, optimizer: str = "adamw") -> None:
        before = current()
        use(None)
        self.data, self.model = data, Blended(dense=True).double()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        use(before)

    def backward(self, step: int) -> Tensor:
        """Gradients and mean loss of what all data ranks see."""
        before, total = current(), torch.zeros((), dtype=torch.float64)
        use(None)
        self.optimizer.zero_grad()
        for rank in range(self.data):
            loss = self.model(*batch(step, rank)) / self.data
            loss.backward()
            total += loss.detach()
        use(before)
        return total
