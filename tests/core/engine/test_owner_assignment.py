"""Whole parameters on their ranks (shard_along=parameter): layouts, and training as in one process."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero import estimate
from lt_zero.common import accelerator
from lt_zero.common.boxes import ParamSpec
from lt_zero.config.options import engine_options
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.layout import ALIGN, Owners, aligned, join, plan_bucket, share_out, split_by_size
from lt_zero.core.engine.partition import plan_engine
from lt_zero.core.engine.storage_plan import HOST
from lt_zero.optim import Lamb, Muon, muon_groups
from lt_zero.planning.check import measured
from lt_zero.planning.forecast import GRADS, MASTER, MOMENTS, REDUCE, WEIGHTS
from tests.support.features import skip_without
from tests.support.matrix import only, only_rows
from tests.support.models import Block, next_token_loss, tokens
from tests.support.parity import Case, check, config_of, full_values
from tests.support.pool import Pool

ALONG = {"shard_along": "parameter"}
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=10)
numels = st.lists(st.integers(0, 200), min_size=1, max_size=14)


# ---- layouts -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 5), st.data())
def test_each_parameter_has_one_owner(parameters: list[tuple[int, ...]], world: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, world - 1), min_size=len(parameters), max_size=len(parameters)))
    layout = plan_bucket([ParamSpec.whole(str(i), tuple(s)) for i, s in enumerate(parameters)], world, owners)
    assert [(span.name, span.shape) for span in layout.spans] == [(str(i), s) for i, s in enumerate(parameters)]
    seen = torch.zeros(layout.numel)
    for rank in range(world):
        pieces = layout.pieces(*layout.shard(rank))
        assert [p.offset for p in pieces] == sorted(p.offset for p in pieces)
        for piece in pieces:
            span = layout.spans[piece.index]
            assert owners[piece.index] == rank
            assert (piece.lo, piece.hi) == (0, math.prod(span.shape))
            assert piece.offset % ALIGN == 0
            assert span.lo == layout.shard(rank)[0] + piece.offset
            seen[span.lo : span.hi] += 1
    for lo, hi in layout.gaps:
        seen[lo:hi] += 1
    assert torch.equal(seen, torch.ones(layout.numel))
    everyone = layout.pieces(0, layout.numel)
    assert [p.offset for p in everyone] == sorted(p.offset for p in everyone)
    assert {p.index for p in everyone} == {i for i, s in enumerate(parameters) if math.prod(s)}


@settings(max_examples=40, deadline=None)
@given(numels, st.integers(1, 6))
def test_shares_are_about_equal(sizes: list[int], world: int) -> None:
    _, shares = share_out(sizes, world)
    assert sum(shares) == sum(map(aligned, sizes))
    assert max(shares) - min(shares) <= max(map(aligned, sizes)), "the last one went to the emptiest"


def test_many_ranks_take_no_time() -> None:
    numels, start = [100] * 4000, time.process_time()
    join(numels, split_by_size(numels, 4000), 10**9, 3000)
    assert time.process_time() - start < 5, "a search for the emptiest share is 100 times slower"


@settings(max_examples=40, deadline=None)
@given(st.lists(numels, min_size=1, max_size=6), st.integers(2, 4))
def test_the_work_is_even_over_buckets(buckets: list[list[int]], world: int) -> None:
    owners, loads = Owners(world), [0] * world
    for sizes in buckets:
        frozen = owners.of([1000], trains=False)
        assert len(frozen) == 1
        for numel, rank in zip(sizes, owners.of(sizes, trains=True), strict=True):
            loads[rank] += aligned(numel)
        assert max(loads) - min(loads) <= max(aligned(n) for known in buckets for n in known)


@settings(max_examples=40, deadline=None)
@given(numels, st.integers(1, 5), st.integers(20, 400), st.integers(1, 60))
def test_joining_keeps_all_and_wastes_no_more(sizes: list[int], world: int, limit: int, unit: int) -> None:
    groups = split_by_size(sizes, unit)
    joined = join(sizes, groups, limit, world)
    assert [i for group in joined for i in group] == list(range(len(sizes)))
    starts = {group[0] for group in groups}
    assert all(group[0] in starts for group in joined), "units are not cut"
    whole = [sum(sizes[i] for i in group) for group in joined]
    assert all(numel <= max([limit, *(sum(sizes[i] for i in g) for g in groups)]) for numel in whole)


@pytest.mark.parametrize(("stage", "most"), [(2, (0.01, 0.01, 0.02)), (3, (0.25, 0.42, 1.76))])
def test_padding_of_the_demo_is_what_the_documentation_says(stage: int, most: tuple[float, ...]) -> None:
    from examples.gpt import GPT

    with torch.device("meta"):
        model = GPT(depth=24)
    config = lt_zero.ZeroConfig.of({"zero_optimization": {"stage": stage, **ALONG}})
    for world, limit in zip((2, 4, 8), most, strict=True):
        plan = plan_engine(model, engine_options(config, dtype_policy(config, "32-true")), world)
        have = sum(p.numel() for p in model.parameters())
        held = sum(bucket.layout(world).numel for bucket in plan.buckets)
        assert plan.padding(world) == pytest.approx(held / have - 1)
        assert limit - 0.02 < plan.padding(world) <= limit


# ---- training ------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Odd matrices, one taller than wide and its transpose, a frozen one, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tall = nn.Parameter(torch.randn(13, 10) * 0.2)
        self.wide = nn.Parameter(torch.randn(10, 13) * 0.2)
        self.fixed = nn.Linear(10, 10)
        self.fixed.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(10, 11)
        self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        x = x + F.linear(F.linear(x, self.tall), self.wide) * self.scale
        return self.head(self.fixed(x))


def _rates(**more: Any) -> dict[str, Any]:
    return {"ns_method": "standard", "muon_lr": 0.01, "adam_lr": 0.005, "weight_decay": 0.1, **more}


def _torchs(model: nn.Module) -> list[Optimizer]:
    matrices, rest = muon_groups(model)
    adam = {"lr": 0.005, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    return [
        torch.optim.Muon(matrices["params"], lr=0.01, weight_decay=0.1),
        torch.optim.AdamW(rest["params"], **adam),
    ]


def _reference(world: int, steps: int) -> nn.Module:
    """One process; gradients are summed in the order of the ranks, so that even bf16 rounds alike."""
    torch.manual_seed(0)
    model = Odd()
    optimizers = _torchs(model)
    for step in range(steps):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank in range(world):
            model.zero_grad()
            next_token_loss(model, step, 0, rank).backward()
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad
        for p, total in sums.items():
            p.grad = total * (1 / world)
        for optimizer in optimizers:
            optimizer.step()
    return model


def _muon(steps: int, users: bool, fused: bool = False) -> None:
    """``users``: torch's two optimizers, as in manual optimization, in place of ours.

    ``fused``: our kernel steps AdamW, whose last bit is torch's or not as the CPU has FMA.
    """
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if fused else {"rtol": 0, "atol": 0}
    world, rank = dist.get_world_size(), dist.get_rank()
    want = dict(_reference(world, steps).named_parameters())
    for stage in range(4):
        torch.manual_seed(0)
        model = Odd()
        engine = lt_zero.shard(model, config_of(stage, ALONG, fused_step=fused))
        optimizers = _torchs(model) if users else [Muon(muon_groups(model), **_rates())]
        for optimizer in optimizers:
            lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            next_token_loss(model, step, 0, rank).backward()
            for optimizer in optimizers:
                optimizer.step()
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, want[name], **tolerance, msg=f"stage {stage}: {name}")
        for bucket in engine.buckets if stage else []:
            assert all(p.numel == math.prod(bucket.layout.spans[p.index].shape) for p in bucket.pieces)


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along")
@pytest.mark.parametrize("world", only([3], [1, 2, 3]))
def test_muon_is_torchs(pool: Pool, world: int) -> None:
    pool.run(world, _muon, 50 if world == 2 else 5, False)


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along")
@pytest.mark.parametrize("fused", only([False], [False, True]))
def test_two_optimizers_of_the_user(pool: Pool, fused: bool) -> None:
    pool.run(2, _muon, 1 if fused else 3, True, fused)  # Muon's iteration in bf16 makes much of a last bit


def _elementwise(world_steps: int) -> None:
    for stage, name, threshold in ((1, "sgd", 0), (2, "adamw", 50), (3, "sgd", 50), (3, "adamw", 0)):
        zero = {**ALONG, "stage3_param_persistence_threshold": threshold, "reduce_bucket_size": 400}
        check(Case(Odd, next_token_loss, stage, name, steps=world_steps, micro=2, zero=zero))


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along")
@pytest.mark.parametrize("world", only([3], [2, 3]))
def test_elementwise_optimizers_do_the_same(pool: Pool, world: int) -> None:
    pool.run(world, _elementwise, 2)


def _adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _lamb(model: nn.Module) -> Optimizer:
    return Lamb([p for p in model.parameters() if p.requires_grad], lr=0.01)


WHOLE: dict[str, Callable[[nn.Module], Optimizer]] = {  # need whole matrices
    "adafactor": _adafactor,
    "lamb": _lamb,
    "muon": lambda model: Muon(muon_groups(model), **_rates()),
}


def _states_at(place: tuple[int, str], name: str, folder: str) -> None:
    """States on the device, in host memory apart from it, or in files."""
    stage, device = place
    along = ALONG if stage else {}  # at stage 0 every rank has whole parameters
    zero: dict[str, Any] = {**along, "offload_optimizer": {"device": device, "nvme_path": folder}}
    accelerator._apart = device == "cpu"
    try:
        case = Case(Odd, next_token_loss, stage, WHOLE[name], zero=zero, rtol=1e-3, atol=1e-3)
        check(case).offload_manager.close()
    finally:
        accelerator._apart = False


PLACES = [(2, "none"), (1, "cpu"), (3, "nvme"), (0, "nvme")]


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along", "ignore:These keys do nothing")
@pytest.mark.parametrize(
    ("place", "name"),
    only_rows(
        [((1, "cpu"), "lamb"), ((3, "nvme"), "muon"), ((2, "none"), "adafactor")], itertools.product(PLACES, WHOLE)
    ),
)
def test_offloaded_states(pool: Pool, tmp_path: Any, place: tuple[int, str], name: str) -> None:
    if place[1] != "none":
        skip_without("offload")
    pool.run(2, _states_at, place, name, str(tmp_path))


LOW: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {}),
    (torch.float16, {}),
    (torch.bfloat16, {"bf16": {"bf16_master_weights_and_grads": True}}),
]


def _low(dtype: torch.dtype, keys: dict[str, Any]) -> None:
    """Ranks sum in the same order at all stages, so stage 0 rounds alike."""
    results: list[dict[str, Tensor]] = []
    for stage in (0, 1, 3):
        torch.manual_seed(0)
        model = Odd()
        engine = lt_zero.shard(model, config_of(stage, ALONG, dtype, **keys))
        optimizer = Muon(muon_groups(model), **_rates())
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            batch = tokens(step, 0, dist.get_rank())
            F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten()).backward()
            optimizer.step()
        results.append(full_values(engine))
        assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(other[name], value), name


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along", "ignore:These keys do nothing")
@pytest.mark.parametrize(("dtype", "keys"), only_rows([LOW[2]], LOW))
def test_low_precision(pool: Pool, dtype: torch.dtype, keys: dict[str, Any]) -> None:
    pool.run(2, _low, dtype, keys)


def _values() -> None:
    """Values come in from the meta device and from a state dict, and go out again, whatever the order of spans."""
    found = []
    for stage, keys in ((1, {}), (2, ALONG), (3, ALONG)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(11, 10), *(Block() for _ in range(4)), nn.Linear(10, 11))
        torch.manual_seed(5)
        engine = lt_zero.shard(model, config_of(stage, keys, torch.bfloat16), torch.device("cpu"))
        if stage == 2:
            assert any("to" in bucket.name for bucket in engine.buckets), "units are joined"
        found.append(full_values(engine))
        other = {name: torch.full_like(value, i) for i, (name, value) in enumerate(found[0].items())}
        model.load_state_dict(other)
        for name, value in full_values(engine).items():
            assert torch.equal(value, other[name]), (stage, name)
        bias = model[2].norm.bias
        with lt_zero.gathered(bias, write=True):
            bias.detach().fill_(dist.get_rank() + 7.0)
        assert torch.equal(full_values(engine)["2.norm.bias"], torch.full((10,), 7.0))
    for values in found[1:]:
        assert all(torch.equal(values[name], value) for name, value in found[0].items())


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along")
def test_values_come_in_and_go_out(pool: Pool) -> None:
    pool.run(3, _values)


# ---- memory --------------------------------------------------------------------------------------------------------

KINDS = (WEIGHTS, MASTER, GRADS, MOMENTS, REDUCE)


def _memory(stage: int) -> dict[str, tuple[int, int]]:
    """Bytes that this rank has, and what was forecast."""
    config = config_of(stage, {**ALONG, "stage3_param_persistence_threshold": 500})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 96), *(Block(96) for _ in range(3)), nn.Linear(96, 11))
    optimizer = Muon(muon_groups(model))
    cast = estimate(model, config, dist.get_world_size(), device="cpu", optimizer=optimizer)
    engine = lt_zero.shard(model, config)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(4):  # as many buffers of the reducer are made
        model(tokens(step, 0, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    have, want = measured(engine, [sharded]), cast.kinds(HOST)
    return {kind: (have.get(kind, 0), want.get(kind, 0)) for kind in KINDS}


@pytest.mark.filterwarnings("ignore:zero_optimization.shard_along")
@pytest.mark.parametrize("stage", only([3], [1, 2, 3]))
def test_padding_is_in_the_forecast(pool: Pool, stage: int) -> None:
    ranks = pool.run(3, _memory, stage)
    for kind in KINDS:
        have, want = max(rank[kind][0] for rank in ranks), ranks[0][kind][1]
        slack = 0.25 if kind == MOMENTS else 0.05  # Muon keeps one state for matrices, two for the rest: a mean
        assert abs(have - want) <= slack * max(have, want) + 256, (kind, have, want)


def _told(limit: int) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = nn.Sequential(
            nn.Linear(10, 40, bias=False), nn.Linear(40, 10, bias=False), *(Block() for _ in range(8))
        )
        lt_zero.shard(model, config_of(2, {**ALONG, "reduce_bucket_size": limit}))
    told = [w for w in seen if "larger than the parameters" in str(w.message)]
    assert all(w.filename == __file__ for w in told), "warnings point at the user's line"
    return [str(w.message) for w in told]


def test_much_padding_is_told_once_with_the_remedy(pool: Pool) -> None:
    first, second = pool.run(2, _told, 400)
    assert len(first) == 1
    assert "Raise zero_optimization.reduce_bucket_size=400" in first[0]
    assert not second, "rank 0 says it"
    assert pool.run(2, _told, 100_000) == [[], []]
