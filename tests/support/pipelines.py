"""Models for pipelines, engines of them on a mesh, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.optim import Optimizer

import lt_zero
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_parameters
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.parallel import LayerSpec, Pipeline, TiedLayerSpec
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.parallel.pipeline import position
from tests.support.parity import OPTIMIZERS, RELEASE, config_of

CPU = torch.device("cpu")
VOCABULARY = 14
WIDTH = 6
LENGTH = 5


class Block(nn.Module):
    def __init__(self, hidden: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return result


def head(embed: nn.Embedding, x: Tensor) -> Tensor:
    weight: Any = embed.weight
    if not isinstance(weight, DTensor):
        return x @ weight.T
    whole: Tensor = (DTensor.from_local(x, weight.device_mesh, [Replicate()]) @ weight.T).full_tensor()
    return whole


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def specs(tied: bool = True, depth: int = 5, dropout: float = 0.0) -> list[Any]:
    """Blocks of different sizes between an embedding and a head, which may be one tensor."""
    blocks = [LayerSpec(Block, 6 + 2 * number, dropout) for number in range(depth)]
    if not tied:
        return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    embed = ("embed", nn.Embedding, VOCABULARY, WIDTH)
    return [TiedLayerSpec(*embed), *blocks, nn.LayerNorm(WIDTH), TiedLayerSpec(*embed, forward_fn=head)]


class Model(nn.Module):
    """A pipeline, and a parameter beside it."""

    def __init__(self, layers: Callable[[], list[Any]] = specs) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pipe = Pipeline(layers(), loss_fn=mean_loss)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.pipe(x, y) + 0.1 * self.scale.square().sum()
        return result


def batch(step: int, data: int, rows: int = 8, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + data))
    drawn = drawn.to(device)
    return drawn[:, :-1], drawn[:, 1:]


class Ranks(NamedTuple):
    """A mesh."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 2

    @property
    def all(self) -> int:
        return self.data * self.tensor * self.pipeline


def tensor_parallel(model: Model, mesh: ParallelMesh) -> None:
    """Cut the blocks of this rank over tensor ranks, and an embedding along its vocabulary."""
    if "embed" in model.pipe.tied:
        parallelize_module(model.pipe.tied["embed"], mesh.tensor, RowwiseParallel(input_layouts=Replicate()))
    for block in model.pipe.layers.values():
        if isinstance(block, Block):
            parallelize_module(block, mesh.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Run(NamedTuple):
    """A model in stages on this rank."""

    model: Model
    engine: Engine
    optimizer: Optimizer
    sharded: lt_zero.ShardedOptimizer
    mesh: ParallelMesh | None  # None: all ranks are data ranks
    gate: LossScaleController

    @property
    def data_rank(self) -> int:
        return self.mesh.data_rank if self.mesh is not None else self.engine.world.rank

    def begin(self) -> float:
        """Before backwards; returns the loss scale."""
        self.gate.before_backward([self.sharded])
        return self.gate.scale

    def backward(self, number: int, rows: int = 8, clears: bool = False) -> Tensor:
        """Forward and backward; returns the loss. ``clears``: what was accumulated before is dropped."""
        with self.engine.forward_scope():
            loss = self.model.loss(*batch(number, self.data_rank, rows, self.engine.device))
        if clears:
            self.optimizer.zero_grad()
        loss.backward()
        return loss

    def step(self, number: int, rows: int = 8, limit: float | None = None) -> tuple[Tensor, Tensor | None]:
        """A step; returns the loss, and the norm before clipping."""
        loss = self.backward(number, rows, clears=True)
        norm = self.sharded.grads.clip_norm(limit) if limit is not None else None
        self.optimizer.step()
        return loss.detach(), norm


def start(
    ranks: Ranks,
    stage: int,
    optimizer: str = "adamw",
    layers: Callable[[], list[Any]] = specs,
    pipeline: dict[str, Any] | None = None,
    prepare: Callable[[Model, Any], Any] | None = None,
    policy: Callable[[ZeroConfig], DtypePolicy] | None = None,
    zero: dict[str, Any] | None = None,
    make: Callable[[], Model] | None = None,
    device: torch.device = CPU,
    **keys: Any,
) -> Run:
    """A model in stages, of ``layers``, or as ``make`` returns it.

    ``zero``, ``keys``: as for ``config_of``. ``prepare`` the model, which gets the mesh, before it is sharded; default:
    it is cut over tensor ranks.
    """
    block = {"stages": ranks.pipeline, "num_microbatches": 4, **(pipeline or {})}
    config = config_of(stage, {**(RELEASE if stage == 3 else {}), **(zero or {})}, pipeline=block, **keys)
    config = config if isinstance(config, ZeroConfig) else ZeroConfig.of(config)
    world = World.join(device)
    everyone, given = ShardGroup.of_all(world), dict[str, Any]()
    mesh = ParallelMesh(ParallelSizes(*ranks), world) if ranks.data < ranks.all else None
    with position.at(position.Position(mesh.pipeline_rank if mesh else 0, ranks.pipeline, config.pipeline)):
        model = make() if make is not None else Model(layers)
    if prepare is not None:
        prepare(model, mesh)
    elif mesh is not None and ranks.tensor > 1:
        tensor_parallel(model, mesh)
    if mesh is not None:
        given = mesh.arguments(model, everyone, config)
    how = policy(config) if policy is not None else None
    engine = lt_zero.shard(model, config, device, how, **{"group": everyone, **given})
    made = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
    run = Run(model, engine, made, lt_zero.ShardedOptimizer(engine, made), mesh, LossScaleController(engine.policy))
    if mesh is not None:
        mesh.connect(engine, config, run.begin, lambda: 1.0)
    return run


def reference_step(
    model: Model, optimizer: Optimizer, step: int, data: int, rows: int = 8, limit: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """One step of one process; returns the mean loss, and the norm before clipping."""
    optimizer.zero_grad()
    losses = []
    for rank in range(data):
        losses.append(model.loss(*batch(step, rank, rows, model.scale.device)))
        (losses[-1] / data).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit) if limit is not None else None
    optimizer.step()
    return torch.stack(losses).mean().detach(), norm


def all_weights(engine: Engine) -> dict[str, Tensor]:
    """The master weights of all stages. Collective."""
    mine = {name: engine.parts.join(p, value.clone()) for name, p, value in full_parameters(engine)}
    found: dict[str, Tensor] = {}
    for theirs in engine.world.host_gather(mine, "weights"):
        for name, value in theirs.items():
            assert name not in found or torch.equal(found[name], value), f"ranks differ: {name}"
            found[name] = value
    return found


def rank() -> int:
    return dist.get_rank()
