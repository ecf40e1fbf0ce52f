"""bf16 master weights whose steps are rounded at random: exact in the mean, and the same bits wherever they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lt_zero
from lt_zero.common import accelerator
from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.kernels import rounding
from lt_zero.optim import Lamb, Lion, Muon, muon_groups
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from tests.support.constant_module import Constant
from tests.support.features import needs, skip_without
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import blocks
from tests.support.parallel_nets import all_weights
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool

LOW = {"enabled": True, "bf16_master_weights_and_grads": True}
RANDOM: dict[str, Any] = {"bf16": {**LOW, "stochastic_rounding": True}}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-3),
    "lion": lambda model: Lion(model.parameters(), lr=1e-3),
    "lamb": lambda model: Lamb(model.parameters(), lr=1e-3),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "muon": lambda model: Muon(muon_groups(model), muon_lr=1e-3, adam_lr=1e-3),
}
STEPS = 3


def trained(kind: str, stage: int, zero: dict[str, Any] | None = None, seed: int = 0, **keys: Any) -> dict[str, Tensor]:
    """The weights; all ranks see the same data, so that gradients are the same for any number of them."""
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))  # that of rank 0 counts
    engine = lt_zero.shard(model, config_of(stage, zero, **{**RANDOM, **keys}))
    optimizer = OPTIMIZERS[kind](model)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, 0).backward()
        optimizer.step()
    values = {name: value.clone() for name, value in full_values(engine).items()}
    engine.offload_manager.close()
    return values


def differ(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    """The names of weights that are not equal."""
    assert some.keys() == others.keys()
    return [name for name, value in some.items() if not torch.equal(value, others[name])]


# ---- progress --------------------------------------------------------------------------------------------------------


def _moved(make: Callable[[Iterable[Any]], Any], low: dict[str, Any], steps: int) -> Tensor:
    """How far 1s have moved in ``steps`` with gradients of 1."""
    model = Constant(20_001)
    nn.init.ones_(model.weight)
    torch.manual_seed(5)
    engine = lt_zero.shard(model, config_of(2, bf16=low))
    optimizer = make(model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(20_001)).backward()
        optimizer.step()
    return full_values(engine)["weight"].double() - 1


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_steps_below_half_a_unit_make_their_progress_in_the_mean(kind: str) -> None:
    """In bf16 the number below 1 is 1 - 2^-8: to the nearest, steps of 1e-4 are lost."""
    options = {"lr": 1e-4, **({"weight_decay": 0.0} if kind == "AdamW" else {})}
    steps, unit = 30, 2.0**-8
    assert not _moved(lambda params: getattr(torch.optim, kind)(params, **options), LOW, steps).any()
    moved = _moved(lambda params: getattr(torch.optim, kind)(params, **options), RANDOM["bf16"], steps)
    # A step moves an element by a unit with probability lr / unit; below 1 - unit units have the same size.
    share = 1e-4 / unit
    error = math.sqrt(steps * share * (1 - share) / moved.numel()) * unit
    assert abs(moved.mean() + steps * 1e-4) < 4 * error + 1e-7
    assert abs(moved.var() / (steps * share * (1 - share) * unit**2) - 1) < 0.1


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", only(["sgd", "muon"], OPTIMIZERS))
def test_the_same_bits_at_every_stage(kind: str) -> None:
    along: dict[str, Any] = {"shard_along": "parameter"} if kind == "muon" else {}
    want = trained(kind, 0)
    assert {value.dtype for value in want.values()} == {torch.bfloat16}
    for stage, zero, keys in (
        (1, {"reduce_bucket_size": 700}, {"fused_step": False}),
        (2, {"shard_along": "parameter"}, {}),
        (3, {}, {"fused_step": False}),
    ):
        assert not differ(trained(kind, stage, {**zero, **along}, **keys), want), stage
    if kind == "sgd":
        assert differ(trained(kind, 0, seed=1), want)
        assert differ(trained(kind, 0, bf16=LOW), want)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "adagrad", "lion", "lamb"])
@pytest.mark.parametrize("at_random", [True, False])
def test_a_kernel_steps_them_without_copies(kind: str, at_random: bool) -> None:
    """In fp32 the optimizer itself needs copies of weights and gradients, and a pass that rounds."""
    model = Net()
    engine = lt_zero.shard(model, config_of(2, **(RANDOM if at_random else {"bf16": LOW})))
    optimizer = OPTIMIZERS[kind](model)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    next_token_loss(model, 0, 0, 0).backward()
    refused = AssertionError("a copy, or a pass of its own")
    with (
        mock.patch.object(lt_zero.ShardedOptimizer, "_step_staged", side_effect=refused),
        mock.patch.object(rounding, "round_stochastic", side_effect=refused),
    ):
        optimizer.step()
    assert sharded.kernel_buckets(engine.buckets) == set(engine.buckets)
    found = {key: value for state in optimizer.state.values() for key, value in state.items()}
    assert ("rounding_seed" in found) == at_random
    assert ("rounding_step" in found) == (at_random and "step" not in found)


@pytest.mark.parametrize("low_states", [True, False])
def test_lamb_steps_with_moments_that_are_not_rounded_before(low_states: bool) -> None:
    """Its second pass would read moments that the first has rounded to bf16; its own step rounds them at the end."""
    keys = {"bf16": {**RANDOM["bf16"], "bf16_optimizer_states": low_states}}
    model = Net()
    engine = lt_zero.shard(model, config_of(2, **keys))
    sharded = lt_zero.ShardedOptimizer(engine, OPTIMIZERS["lamb"](model))
    assert sharded.kernel_buckets(engine.buckets) == (set() if low_states else set(engine.buckets))


def _others(stage: int, kind: str, path: str) -> list[dict[str, Tensor]]:
    """In memory, in host memory apart from the device's, in files."""
    found = [trained(kind, stage)]
    if path:
        with mock.patch.object(accelerator, "_apart", True):
            found.append(trained(kind, stage, {"offload_optimizer": {"device": "cpu"}}))
        found.append(trained(kind, stage, blocks(path, stage == 3)))
    return found


@pytest.mark.parametrize(
    ("world", "stage", "kind"),
    only_rows([(3, 3, "momentum"), (2, 1, "adamw")], itertools.product([2, 3], STAGES, ["momentum", "adamw"])),
)
def test_the_same_bits_on_all_ranks_and_in_all_places(
    pool: Pool, tmp_path: Path, world: int, stage: int, kind: str
) -> None:
    path = str(tmp_path) if stage > 0 else ""
    if path:
        skip_without("offload")
    want = trained(kind, 0)
    for of_rank in pool.run(world, _others, stage, kind, path):
        for number, got in enumerate(of_rank):
            assert not differ(got, want), number


def _columns(spec: ParamSpec | None, part: Any) -> Tensor:
    module = Constant(1)
    values = torch.linspace(-1, 1, 7 * 300).view(7, 300)
    module.weight = nn.Parameter(values[part].contiguous())
    torch.manual_seed(3)
    engine = lt_zero.shard(module, config_of(1, **RANDOM), specs=[spec] if spec else [])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    lt_zero.ShardedOptimizer(engine, optimizer)
    module(torch.full((7, 300), 1.0)[part]).backward()
    optimizer.step()
    found: Tensor = module.weight.detach().clone()
    return found


def test_a_part_of_a_tensor_is_rounded_as_in_the_whole() -> None:
    whole = _columns(None, ...)
    for box in (Box((0, 100), (7, 50)), Box((2, 0), (4, 300)), Box((1, 7), (5, 130))):
        rows, columns = (slice(low, low + size) for low, size in zip(*box, strict=True))
        got = _columns(ParamSpec("weight", (7, 300), box), (rows, columns))
        assert torch.equal(got, whole[rows, columns])


class Pair(nn.Module):
    """Two matrices whose gradients do not depend on any weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.up(x).float().sum() + self.down(y).float().sum()


def _tensor_ranks(sizes: tuple[int, int], stage: int) -> dict[str, Tensor]:
    world = World.join(torch.device("cpu"))
    model = Pair()
    given = dict[str, Any]()
    everyone, config = ShardGroup.of_all(world), config_of(stage, **RANDOM)
    if sizes[1] > 1:
        mesh = ParallelMesh(ParallelSizes(*sizes), world)
        plan: dict[str, Any] = {
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh.tensor, plan)
        given = mesh.arguments(model, everyone, config)
    engine = lt_zero.shard(model, config, torch.device("cpu"), group=everyone, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        model(*(torch.randn(3, size, generator=draw).bfloat16() for size in (6, 10))).backward()
        optimizer.step()
    return all_weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_bits_on_tensor_ranks(pool: Pool, stage: int) -> None:
    want = pool.run(1, _tensor_ranks, (1, 1), 0)[0]
    for sizes in ((1, 2), (2, 2)):
        assert not differ(pool.run(sizes[0] * sizes[1], _tensor_ranks, sizes, stage)[0], want), sizes


# ---- resumed ---------------------------------------------------------------------------------------------------------


def _resumed(stage: int, kind: str, folder: str, first: int, last: int) -> dict[str, Tensor]:
    """The weights after steps ``first`` to ``last``, which begin with the checkpoint in ``folder``, or end with it."""
    params = {"lr": 0.01, **({"momentum": 0.9} if kind == "SGD" else {})}
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(first)
    config = {"zero_optimization": block, "optimizer": {"type": kind, "params": params}, **RANDOM}
    engine = lt_zero.initialize(model=model, config={**config, "train_micro_batch_size_per_gpu": 3})[0]
    if first:
        engine.load_checkpoint(folder)
    for step in range(first, last):
        engine.backward(next_token_loss(engine, step, 0, 0))
        engine.step()
    if not first:
        engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in full_values(engine.engine).items()}


@pytest.mark.parametrize("kind", only(["SGD"], ["SGD", "AdamW", "Lion"]))
def test_goes_on_with_the_same_bits_on_other_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    """SGD and Lion count no steps by themselves, and the seed is that of the first process."""
    want = pool.run(1, _resumed, 0, kind, str(tmp_path / "whole"), 0, 4)[0]
    pool.run(2, _resumed, 2, kind, str(tmp_path / "part"), 0, 2)
    assert not differ(pool.run(3, _resumed, 3, kind, str(tmp_path / "part"), 2, 4)[0], want)


# ---- with other features ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": {**RANDOM["bf16"], "bf16_optimizer_states": True}},
        {"optimizer_states": {"dtype": "int8"}},
        {"fp16_override_modules": ["LayerNorm"]},
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_with_other_dtypes(keys: dict[str, Any]) -> None:
    """The step is computed in fp32, and what stays in fp32 is not rounded."""
    with mock.patch("lt_zero.kernels.moments.SMALLEST", 300):
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config_of(3, **{**RANDOM, **keys}))
        assert all(bucket.storage.step == torch.float32 for bucket in engine.buckets)
        want = trained("adamw", 0, **keys)
        assert not differ(trained("adamw", 3, **keys), want)
        kept = {name for name, value in want.items() if value.dtype == torch.float32}
        assert kept == {name for name in want if "norm" in name and "fp16_override_modules" in keys}
    low = {**keys.get("bf16", {}), **LOW, "stochastic_rounding": False}
    assert differ(trained("adamw", 0, **{**keys, "bf16": low}), want)


@needs("one_bit")
def test_optimizers_whose_ranks_exchange_updates_are_refused() -> None:
    from lt_zero.optim import OneBitAdam

    model = Net()
    engine = lt_zero.shard(model, config_of(0, **RANDOM))
    with pytest.raises(ConfigError, match="OneBitAdam") as caught:
        lt_zero.ShardedOptimizer(engine, OneBitAdam(model.parameters(), lr=1e-3))
    assert caught.value.problems[0].key == "bf16.stochastic_rounding"
