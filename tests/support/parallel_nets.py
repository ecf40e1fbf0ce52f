"""Models for tensor parallelism, engines of them, and all of their values, found without what tests check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

import lt_zero
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_parameters, gather_own
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from tests.support.parity import OPTIMIZERS, RELEASE, config_of

CPU = torch.device("cpu")


class Feed(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    def __init__(self, depth: int = 3, hidden: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Feed(hidden=hidden) for _ in range(depth)), nn.Linear(6, 4)

    def feeds(self) -> list[Feed]:
        return [layer for layer in self.layers if isinstance(layer, Feed)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


class Adapter(nn.Module):
    """A linear layer with an adapter of rank 2 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(x))
        return result


def adapted() -> Net:
    """Only adapters, and the last norm, are trained."""
    model = Net()
    model.requires_grad_(False)
    for layer in model.feeds():
        layer.up = Adapter(layer.up)  # type: ignore[assignment]
    model.feeds()[-1].norm.requires_grad_(True)
    return model


def frozen() -> Net:
    """One matrix, the bias of another and a whole layer are not trained."""
    model = Net()
    first, second, third = model.feeds()
    first.requires_grad_(False)
    second.down.weight.requires_grad_(False)
    third.up.bias.requires_grad_(False)
    return model


def parallelize(model: Net, mesh: DeviceMesh, sequence: bool = False) -> Net:
    """``sequence``: norms work on parts of the sequence, so that their gradients are partial sums."""
    plan = dict[str, Any]()
    along = Shard(1) if sequence else Replicate()
    if sequence:
        own: dict[str, Any] = {
            "input_layouts": Replicate(),
            "desired_input_layouts": Shard(1),
            "use_local_output": True,
        }
        plan["layers.0"] = PrepareModuleInput(**own)
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for number in range(len(model.layers)):
        up = f"layers.{number}.up"
        if isinstance(model.layers[number].up, Adapter):
            plan |= {f"{up}.base": ColwiseParallel(input_layouts=along), f"{up}.b": ColwiseParallel()}
            if sequence:
                plan[f"{up}.a"] = ColwiseParallel(input_layouts=along, output_layouts=Replicate())
        else:
            plan[up] = ColwiseParallel(input_layouts=along)
        plan[f"layers.{number}.down"] = RowwiseParallel(output_layouts=along)
        if sequence:
            plan[f"layers.{number}.norm"] = SequenceParallel()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    parallelize_module(model, mesh, plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)  # torch trains all
    return model


def batch(step: int, data: int) -> Tensor:
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(10 * step + data))


class Ranks(NamedTuple):
    """A mesh; the number of the data rank that sees the batch is that of the mesh."""

    data: int = 1
    tensor: int = 1

    @property
    def all(self) -> int:
        return self.data * self.tensor


class Run(NamedTuple):
    """An engine on this rank."""

    model: Net
    engine: Engine
    optimizer: Optimizer
    sharded: lt_zero.ShardedOptimizer
    ranks: Ranks

    @property
    def data_rank(self) -> int:
        return dist.get_rank() // self.ranks.tensor

    def backward(self, step: int, micro: int = 1) -> None:
        for number in range(micro):
            self.engine.reducer.sync = number == micro - 1
            (loss_of(self.model, step, self.data_rank, number) / micro).backward()

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()


def loss_of(model: nn.Module, step: int, data: int, micro: int = 0) -> Tensor:
    x = batch(step + 100 * micro, data)
    out: Tensor = model(x.to(model.head.weight.dtype))  # type: ignore[union-attr, arg-type]
    return out.to(x.dtype).square().mean()


def start(
    ranks: Ranks,
    stage: int,
    optimizer: str | Callable[[nn.Module], Optimizer] = "adamw",
    model: Callable[[], Net] = Net,
    sequence: bool = True,
    zero: dict[str, Any] | None = None,
    policy: Callable[[ZeroConfig], DtypePolicy] | None = None,
    prepare: Callable[[Net], Any] = lambda model: None,
    **keys: Any,
) -> Run:
    """An engine on a mesh. ``zero``, ``keys``: as for ``config_of``; ``prepare`` the model, when it is parallelized."""
    world, made = World.join(CPU), model()
    everyone, given = ShardGroup.of_all(world), dict[str, Any]()
    config = config_of(stage, {**(RELEASE if stage == 3 else {}), **(zero or {})}, **keys)
    if ranks.tensor > 1:
        mesh = ParallelMesh(ParallelSizes(*ranks), world)
        parallelize(made, mesh.tensor, sequence)
        given = mesh.arguments(made, everyone, config)
    prepare(made)
    how = policy(config) if policy is not None else None
    engine = lt_zero.shard(made, config, CPU, how, group=everyone, **given)
    trained = [p for p in made.parameters() if p.requires_grad]
    chosen = optimizer(made) if callable(optimizer) else OPTIMIZERS[optimizer](trained)
    return Run(made, engine, chosen, lt_zero.ShardedOptimizer(engine, chosen), ranks)


def reference_step(
    model: nn.Module, optimizer: Optimizer, step: int, data: int, micro: int = 1, limit: float | None = None
) -> Tensor | None:
    """One step of one process; returns the norm before clipping."""
    optimizer.zero_grad()
    for rank in range(data):
        for number in range(micro):
            (loss_of(model, step, rank, number) / (data * micro)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit) if limit is not None else None
    optimizer.step()
    return norm


# ---- all of a tensor, from what each rank's group has ----------------------------------------------------------------


def _joined(engine: Engine, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put together what all ranks have of tensors. Collective."""
    specs = {span.name: span.spec for bucket in engine.buckets for span in bucket.layout.spans}
    whole: dict[str, Tensor] = {}
    for told in engine.world.host_gather({name: (specs[name], value) for name, value in parts.items()}, "parts"):
        for name, (spec, value) in told.items():
            place = whole.setdefault(name, torch.full(spec.global_shape, torch.nan, dtype=value.dtype))
            before = spec.local_box.of(place)
            assert before.isnan().all() or torch.equal(before, value), f"ranks differ: {name}"
            before.copy_(value)
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def all_weights(engine: Engine) -> dict[str, Tensor]:
    """The master weights. Collective."""
    return _joined(engine, {name: value.clone() for name, _, value in full_parameters(engine)})


class Trains(Protocol):
    """A run of any parallel model."""

    @property
    def engine(self) -> Engine: ...

    @property
    def optimizer(self) -> Optimizer: ...


def all_states(run: Trains) -> dict[str, dict[str, Tensor]]:
    """The element-wise states of the optimizer, by key. Collective."""
    keys = {k for state in run.optimizer.state.values() for k, v in state.items() if v.dim() > 0}
    return {key: _states(run, key) for key in sorted(keys.union(*run.engine.world.host_gather(keys, "keys")))}


def _states(run: Trains, key: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for bucket in run.engine.buckets:
        rows = _rows(bucket, run.optimizer, key)
        flat = gather_own(bucket, rows)
        for index, span in enumerate(bucket.layout.spans):
            if bucket.params[index].requires_grad:
                found[span.name] = flat[span.lo : span.hi].view(span.shape).clone()
        bucket.put_away()
    return _joined(run.engine, found)


def _rows(bucket: Bucket, optimizer: Optimizer, key: str) -> Tensor:
    if (stored := bucket.states.by_key.get(key)) is not None:
        stored.read()
    lo, hi = bucket.shard_range
    rows = torch.zeros(hi - lo)
    for piece in bucket.pieces:
        state = optimizer.state.get(bucket.params[piece.index], {})
        if key in state:
            rows[piece.offset : piece.offset + piece.numel] = state[key].reshape(-1).float()
    return rows
