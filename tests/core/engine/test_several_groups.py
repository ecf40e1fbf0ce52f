"""One engine, several groups: some parameters sharded over all ranks, others, different ones, over halves of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from tests.support.features import skip_without
from tests.support.matrix import only, only_rows
from tests.support.parity import OPTIMIZERS, RELEASE, config_of, full_values
from tests.support.pool import Pool
from tests.support.simulated import LateGroup, one_of

CPU = torch.device("cpu")
HALVES = [[0, 1], [2, 3]]  # each has some columns of ``Net.middle``; in each, ranks have different data
CUT = 3  # columns of the first half, of 5
LIMIT = 0.05  # of the gradients' norm


class SumOverHalves(torch.autograd.Function):
    """Adds up the partial outputs of both halves; the gradient of each is that of the sum."""

    @staticmethod
    def forward(context: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Net(nn.Module):
    """``half``: which columns of ``middle`` this rank has; None: all."""

    def __init__(self, half: int | None = None, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(7, 5), nn.Linear(5, 9, bias=False), nn.Linear(9, 3)
        self.columns, self.group = slice(0, 5), group
        if half is not None:
            self.columns = slice(0, CUT) if half == 0 else slice(CUT, 5)
            self.middle.weight = nn.Parameter(self.middle.weight.detach()[:, self.columns].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.first(x))[:, self.columns])
        if self.group is not None:
            hidden = SumOverHalves.apply(hidden, self.group)  # type: ignore[no-untyped-call]
        result: Tensor = self.last(torch.tanh(hidden))
        return result


def loss_of(model: nn.Module, step: int, data: int) -> Tensor:
    drawn = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + data))
    result: Tensor = model(drawn).square().mean()
    return result


def groups_of(world: World) -> Callable[[str, nn.Parameter], ShardGroup]:
    """The gradient of ``first`` is a sum over halves of which each rank has one, that of ``last`` is on both."""
    names = {
        "first": ShardGroup(world, [range(4)], divisor=2),
        "middle": ShardGroup(world, HALVES, divisor=2),
        "last": ShardGroup(world, [range(4)], divisor=4),
    }
    return lambda name, parameter: names[name.split(".")[0]]


def _train(stage: int, optimizer: str, zero: dict[str, Any], path: str) -> dict[str, Tensor]:
    """Compare weights, and the norm before clipping, with one process; return its weights. Save a checkpoint."""
    rank, steps = dist.get_rank(), 4
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # same data
    half = rank // 2
    model, reference = Net(half, pairs[rank % 2]), Net()
    world = World.join(CPU)
    part = ParamSpec("middle.weight", (9, 5), Box((0, model.columns.start), (9, model.middle.weight.shape[1])))
    groups = {"group_of": groups_of(world), "group": ShardGroup.of_all(world)}
    engine = lt_zero.shard(model, config_of(stage, zero), specs=[part], **groups)
    middle = next(bucket for bucket in engine.buckets if "middle" in bucket.layout.spans[0].name)
    assert (list(middle.group.ranks), middle.group.rank) == (HALVES[half], rank % 2)
    made, expected = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, made)
    for step in range(steps):
        made.zero_grad()
        expected.zero_grad()
        loss_of(model, step, rank % 2).backward()
        for data in range(2):
            (loss_of(reference, step, data) / 2).backward()
        if step == 2:
            want = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
            assert float(sharded.grads.norm(float("inf"))) == pytest.approx(want, rel=1e-5)
        want = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), LIMIT))
        assert want > LIMIT, "the gradients are clipped"
        assert float(sharded.grads.clip_norm(LIMIT)) == pytest.approx(want, rel=1e-5)
        made.step()
        expected.step()
    values = full_values(engine)
    for name, parameter in reference.named_parameters():
        whole = parameter.detach()
        mine = whole[:, model.columns] if name.startswith("middle") else whole
        torch.testing.assert_close(values[name], mine, rtol=1e-5, atol=1e-6)
    content = {"state_dict": weight_fragments(engine), "optimizer_states": [optimizer_fragments(sharded)]}
    saved = bundle(content, [parameter_names(made, engine)], world, {}, {})
    write(saved, make_directory(world, path), world, world.saving_group(background=False))
    return reference.state_dict()


@pytest.mark.parametrize(
    ("stage", "optimizer", "shared"),
    only_rows([(1, "sgd", "1"), (3, "adamw", "0")], itertools.product([1, 2, 3], ["sgd", "adamw"], ["1", "0"])),
)
def test_equals_one_process(pool: Pool, tmp_path: Path, stage: int, optimizer: str, shared: str) -> None:
    """With windows and with sockets. The checkpoint has the whole matrix."""
    given = (stage, optimizer, RELEASE if stage == 3 else {}, str(tmp_path / "saved"))
    expected = pool.run(4, _train, *given, env={"LT_ZERO_SHARED_MEMORY": shared})[0]
    lt_zero.export(tmp_path / "saved", tmp_path / "weights.safetensors", dtype=torch.float32)
    torch.testing.assert_close(load_file(tmp_path / "weights.safetensors"), expected, rtol=1e-5, atol=1e-6)


class SumBackward(torch.autograd.Function):
    """The gradient of an input that both halves use is the sum of theirs."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=context.group)
        return total, None


class Block(nn.Module):
    """A layer that all ranks have, and two of which each half has other units."""

    def __init__(self, units: slice, group: Any) -> None:
        super().__init__()
        self.all, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 9), nn.Linear(9, 4, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach()[units].clone())
        self.up.bias = nn.Parameter(self.up.bias.detach()[units].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach()[:, units].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.all(x))
        if self.group is not None:
            hidden = SumBackward.apply(hidden, self.group)  # type: ignore[no-untyped-call]
        part = self.down(torch.tanh(self.up(hidden)))
        if self.group is not None:
            part = SumOverHalves.apply(part, self.group)  # type: ignore[no-untyped-call]
        result: Tensor = x + part
        return result


def _uneven(units: slice = slice(0, 9), group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 4), *(Block(units, group) for _ in range(4)), nn.Linear(4, 3))


def _specs(model: nn.Module, units: slice) -> list[ParamSpec]:
    found = []
    for name, parameter in model.named_parameters():
        axis = int(".down." in name)
        if ".up." in name or axis:
            shape = tuple(9 if i == axis else size for i, size in enumerate(parameter.shape))
            offsets = tuple(units.start if i == axis else 0 for i in range(len(shape)))
            found.append(ParamSpec(name, shape, Box(offsets, tuple(parameter.shape))))
    return found


@dataclass(frozen=True)
class Uneven:
    stage: int
    zero: dict[str, Any]


UNEVEN = {  # each bound lies between what the halves have
    "buckets": Uneven(1, {"reduce_bucket_size": 20, "allgather_bucket_size": 20}),
    "small": Uneven(3, {"stage3_param_persistence_threshold": 20}),
    "small together": Uneven(3, {"stage3_param_persistence_threshold": 40, "stage3_model_persistence_threshold": 100}),
    "kept": Uneven(3, {"stage3_max_reuse_distance": 600}),
    "live": Uneven(3, {"stage3_max_live_parameters": 400}),
    "offloaded": Uneven(2, {"reduce_bucket_size": 20, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "owned": Uneven(2, {"shard_along": "parameter"}),
}


def _train_uneven(uneven: Uneven) -> None:
    """The first half has 6 of 9 units, the other 3: whatever depends on sizes has to be the same on all ranks."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # same data
    units, pair = (slice(0, 6), slice(6, 9))[rank // 2], pairs[rank % 2]
    model, reference = _uneven(units, pair), _uneven()
    world = World.join(CPU)
    every, halves = ShardGroup.of_all(world), ShardGroup(world, HALVES, divisor=2)
    specs = _specs(model, units)
    cut = {spec.name for spec in specs}
    engine = lt_zero.shard(
        model,
        config_of(uneven.stage, uneven.zero),
        group=every,
        specs=specs,
        group_of=lambda name, parameter: halves if name in cut else every,
    )
    made, expected = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](reference.parameters())
    lt_zero.ShardedOptimizer(engine, made)
    for step in range(3):
        made.zero_grad()
        expected.zero_grad()
        loss_of(model, step, rank % 2).backward()
        for data in range(2):
            (loss_of(reference, step, data) / 2).backward()
        made.step()
        expected.step()
    values, boxes = full_values(engine), {spec.name: spec.local_box for spec in specs}
    for name, parameter in reference.named_parameters():
        mine = boxes[name].of(parameter.detach()) if name in boxes else parameter.detach()
        torch.testing.assert_close(values[name], mine, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", only(["buckets", "live", "owned"], UNEVEN))
def test_halves_of_different_sizes(pool: Pool, kind: str) -> None:
    pool.run(4, _train_uneven, UNEVEN[kind], env={"LT_ZERO_SHARED_MEMORY": "0"})


# ---- one group for each half, and nothing that all ranks have -----------------------------------------------------


def _norm_over_halves(stage: int) -> None:
    """Of a matrix of which each half has three rows."""
    rank, half = dist.get_rank(), dist.get_rank() // 2
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(whole.detach()[3 * half : 3 * half + 3].clone())
    part = ParamSpec("weight", (6, 4), Box((3 * half, 0), (3, 4)))
    group = ShardGroup(World.join(CPU), HALVES, divisor=2)
    engine = lt_zero.shard(model, config_of(stage), group=group, specs=[part])
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    model(data[rank % 2]).square().sum().backward()
    torch.stack([(x @ whole.t()).square().sum() / 2 for x in data]).sum().backward()
    assert whole.grad is not None
    for order in (2.0, 1.0, float("inf")):
        want = float(torch.linalg.vector_norm(whole.grad, order))
        assert float(sharded.grads.norm(order)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("stage", only([1], [0, 1]))
def test_the_norm_is_over_all_ranks(pool: Pool, stage: int) -> None:
    pool.run(4, _norm_over_halves, stage)


def _whole_tensors(stage: int) -> None:
    """Optimizers that need whole tensors are refused for parts; for others they are as they were."""
    half = dist.get_rank() // 2
    model, world = Net(half), World.join(CPU)
    part = ParamSpec("middle.weight", (9, 5), Box((0, model.columns.start), (9, model.middle.weight.shape[1])))
    zero = {"shard_along": "parameter"} if stage else {}
    engine = lt_zero.shard(
        model, config_of(stage, zero), specs=[part], group=ShardGroup.of_all(world), group_of=groups_of(world)
    )
    for make in (torch.optim.Adafactor, torch.optim.Muon):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        with pytest.raises(
            TypeError, match=f"{make.__name__} computes its update from whole matrices.*'middle.weight'"
        ):
            lt_zero.ShardedOptimizer(engine, make(matrices, lr=0.1))
        lt_zero.ShardedOptimizer(engine, make([p for p in matrices if p is not model.middle.weight], lr=0.1))


@pytest.mark.parametrize("stage", only([1], [0, 1]))
def test_optimizers_that_need_whole_tensors(pool: Pool, stage: int) -> None:
    pool.run(4, _whole_tensors, stage)


def _other_groups() -> str:
    """Rank 3 says that all ranks have what the others say is in halves."""
    world = World.join(CPU)
    every, halves = ShardGroup.of_all(world), ShardGroup(world, HALVES, divisor=2)
    with pytest.raises(RuntimeError) as caught:
        lt_zero.shard(chain(), config_of(1), group=every, group_of=lambda *_: every if world.rank == 3 else halves)
    return str(caught.value)


def test_ranks_that_have_other_groups_are_named_on_all(pool: Pool) -> None:
    for text in pool.run(4, _other_groups):
        assert "the group of parameter '0.weight'" in text
        assert "rank 3" in text


def _diverged() -> str:
    """Rank 3 gathers another bucket than rank 2 in their group; that of ranks 0 and 1 is right."""
    world = World.join(CPU)
    halves = ShardGroup(world, HALVES, divisor=2)
    with pytest.raises(RuntimeError) as caught:
        _gather(halves, ["a", "b", "a", "b" if world.rank < 3 else "c"])
    return str(caught.value)


def _gather(group: ShardGroup, names: list[str]) -> None:
    for name in names:
        group.all_gather(torch.zeros(4), name).wait()
    group.world.host_gather(None, "the end")


def test_ranks_of_one_group_that_diverge_are_named_on_all(pool: Pool) -> None:
    for text in pool.run(4, _diverged, env={"LT_ZERO_SHARED_MEMORY": "0"}):
        assert "The all-gather of 'b' was begun on rank 2" in text
        assert "rank 3, which waits in the all-gather of 'c'" in text


# ---- simulated groups ------------------------------------------------------------------------------------------------


def chain(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def every_other(groups: list[ShardGroup]) -> Callable[[str, nn.Parameter], ShardGroup]:
    return lambda name, parameter: groups[int(name.split(".")[0]) % 2]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_collectives_of_two_groups_may_read_and_write_at_any_time(stage: int, early: bool) -> None:
    """Both simulate two ranks; one divides by four, as if its tensors were used for other data, too."""
    groups = [LateGroup(CPU, early)]
    groups.append(LateGroup(CPU, early, groups[0].world, divisor=4))
    model, reference = chain(), chain()
    engine = lt_zero.shard(
        model, config_of(stage, RELEASE if stage == 3 else {}), CPU, group=groups[0], group_of=every_other(groups)
    )
    for _ in range(2):
        x = torch.ones(3, 12)
        model(x).square().mean().backward()
        reference(x).square().mean().backward()
    engine.finish_reductions()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for bucket in engine.buckets:
        own, (first, last) = bucket.grads.read(), bucket.shard_range
        for span in bucket.layout.spans:
            lo, hi, want = max(span.lo, first), min(span.hi, last), wanted[span.name]
            assert want is not None
            if lo < hi:
                whole = want.reshape(-1)[lo - span.lo : hi - span.lo]
                torch.testing.assert_close(own[lo - first : hi - first], whole * 2 / bucket.group.divisor)


def of_many(world: int) -> tuple[Engine, list[ShardGroup]]:
    with one_of(world, CPU) as group:
        pairs = ShardGroup(group.world, [[rank, rank + 1] for rank in range(0, world, 2)], divisor=2)
        engine = lt_zero.shard(chain(48), config_of(3), CPU, group=group, group_of=every_other([group, pairs]))
        optimizer = torch.optim.SGD(engine.root.parameters(), lr=0.1)
        lt_zero.ShardedOptimizer(engine, optimizer)
        engine.root(torch.ones(2, 48)).square().mean().backward()
        optimizer.step()
        return engine, [group, pairs]


def test_one_of_many_ranks_shards_over_two_of_them() -> None:
    engine, (everyone, pairs) = of_many(512)
    for bucket in engine.buckets:
        shards = {everyone: 512, pairs: 2}[bucket.group]
        assert bucket.compute.shard.numel() * shards == bucket.layout.numel
    # Of each kind of collectives, this rank is in one process group per set of ranks.
    assert len(everyone.world.process_groups) == 4
    assert len({id(group) for group in everyone.world.process_groups}) == 4


@pytest.mark.parametrize(
    "block",
    [{"gradient_compression": {"algorithm": "1bit"}}, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}],
)
def test_what_is_done_in_one_group_only_is_refused(block: dict[str, Any]) -> None:
    skip_without(block)
    groups = [LateGroup(CPU)]
    groups.append(LateGroup(CPU, world=groups[0].world))
    with pytest.raises(ConfigError, match=f"{next(iter(block))}.* 2 groups. Remove the key"):
        lt_zero.shard(chain(), config_of(1, **block), CPU, group=groups[0], group_of=every_other(groups))
    with one_of(4, CPU) as group:
        halves = ShardGroup(group.world, HALVES, divisor=2)
        with pytest.raises(ConfigError, match=f"{next(iter(block))}.* 2 groups. Remove the key"):
            lt_zero.shard(chain(), config_of(1, **block), CPU, group=halves)


@pytest.mark.parametrize("parts", [[[0, 1], [1, 2]], [[1, 0], [2, 3]], [[0, 1]]])
def test_parts_divide_the_ranks(parts: list[list[int]]) -> None:
    with one_of(4, CPU) as group, pytest.raises(ValueError, match="each of the 4 ranks has to be in one part"):
        ShardGroup(group.world, parts, divisor=2)
