"""A model with attention, cut layers and a mixture of experts, on any mesh, and the same on one process."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import lt_zero
from lt_zero.config.precision import dtype_policy
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.parallel import LayerSpec, PartialGradient, Pipeline, sequence_attention, token_mean
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from lt_zero.parallel.pipeline import position
from lt_zero.parallel.sequence.ranks import current
from tests.support.joined import use
from tests.support.mixtures import WIDTH, MixtureBlock
from tests.support.parallel_nets import CPU, Adapter, Feed
from tests.support.parity import OPTIMIZERS, RELEASE, config_of

MODES = {"64-true": torch.float64, "32-true": torch.float32, "bf16-true": torch.bfloat16}
_T = TypeVar("_T", bound=nn.Module)
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
    """``dense``: as one process without experts over ranks. ``adapted``: only adapters and some norms are trained."""

    def __init__(self, dense: bool = False, adapted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        feed, mixture = LayerSpec(Feed, WIDTH, 8), LayerSpec(MixtureBlock)
        layers = [LayerSpec(Attend), feed, mixture, LayerSpec(Attend), feed, mixture, LayerSpec(nn.Linear, WIDTH, 3)]
        self.pipe = Pipeline(layers, loss_fn=loss_of)
        for block in self.of(MixtureBlock):
            block.dense = dense
        if adapted:
            self.requires_grad_(False)
            for feed in self.of(Feed):
                torch.manual_seed(1)
                feed.up = Adapter(feed.up)  # type: ignore[assignment]
            for block in (*self.of(Attend), *self.of(MixtureBlock)):
                block.norm.requires_grad_(True)

    def of(self, kind: type[_T]) -> list[_T]:
        """The blocks of a class."""
        return [module for module in self.modules() if isinstance(module, kind)]

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
    dtype: torch.dtype  # of inputs

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
            loss: Tensor = self.model(*(each.chunk(parts, 1)[part].to(self.dtype) for each in batch(step, data)))
        loss.backward()
        return loss.detach()

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def over(self) -> None:
        use(None)


def start(
    sizes: ParallelSizes,
    stage: int,
    optimizer: str = "adamw",
    mode: str = "64-true",
    adapted: bool = False,
    splits: bool = False,
    zero: dict[str, Any] | None = None,
    **keys: Any,
) -> Blend:
    """A run on a mesh. End it with ``over``.

    ``splits``: tensor ranks give experts different tokens. ``zero``, ``keys``: as for ``config_of``.
    """
    block = {"stages": sizes.pipeline, "num_microbatches": MICRO}
    config = config_of(stage, {**(RELEASE if stage == 3 else {}), **(zero or {})}, pipeline=block, **keys)
    world = World.join(CPU)
    everyone, given = ShardGroup.of_all(world), dict[str, Any]()
    mesh = ParallelMesh(sizes, world) if not sizes.is_plain else None
    with position.at(position.Position(mesh.pipeline_rank if mesh else 0, sizes.pipeline, config.pipeline)):
        model = Blended(adapted=adapted)
    dtype = MODES[mode]
    model = model.double() if dtype == torch.float64 else model
    use(mesh.sequence if mesh is not None else None)
    if mesh is not None:
        for feed in model.of(Feed) if sizes.tensor > 1 else ():
            trained = {name for name, parameter in feed.named_parameters() if parameter.requires_grad}
            up = {"up.base": ColwiseParallel(), "up.b": ColwiseParallel()} if adapted else {"up": ColwiseParallel()}
            parallelize_module(feed, mesh.tensor, {**up, "down": RowwiseParallel()})
            for name, parameter in feed.named_parameters():
                parameter.requires_grad_(name in trained)  # torch trains all
        for block in model.of(MixtureBlock) if splits else ():
            _split_tokens(block, mesh.tensor)
        mesh.cut(model, config)
        given = mesh.arguments(model, everyone, config)
    policy = dtype_policy(config, mode)
    engine = lt_zero.shard(model, config, CPU, policy, **{"group": everyone, **given})
    made = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
    sharded, gate = lt_zero.ShardedOptimizer(engine, made), LossScaleController(engine.policy)
    run = Blend(model, engine, made, sharded, mesh, gate, dtype)
    if mesh is not None:
        mesh.watch(engine)
        mesh.connect(engine, config, run.begin, lambda: 1.0)
    return run


def _split_tokens(block: MixtureBlock, mesh: DeviceMesh) -> None:
    """Let each tensor rank have a part of the tokens inside of ``block``, whose gradients are partial sums then."""
    whole, part = [Replicate()], [Shard(1)]

    def split(module: nn.Module, args: Any) -> Tensor:
        made: Tensor = (
            DTensor.from_local(args[0], mesh, whole, run_check=False).redistribute(placements=part).to_local()
        )
        return made

    def join(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        made: Tensor = DTensor.from_local(out, mesh, part, run_check=False).redistribute(placements=whole).to_local()
        return made

    block.register_forward_pre_hook(split)
    block.register_forward_hook(join)
    parallelize_module(block, mesh, PartialGradient())


class OneProcess:
    """The same without ranks, where each expert sees all tokens."""

    def __init__(self, data: int, optimizer: str = "adamw", adapted: bool = False) -> None:
        before = current()
        use(None)
        self.data, self.model = data, Blended(dense=True, adapted=adapted).double()
        self.optimizer = OPTIMIZERS[optimizer](p for p in self.model.parameters() if p.requires_grad)
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
