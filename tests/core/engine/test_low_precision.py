"""16-bit weights in forward, fp32 masters: errors against fp64, sums on the wire, accumulators, skipped steps."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import lt_zero
from lt_zero import ZeroConfig
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.lightning.model_report import dtype_table, has_one_dtype, memory_report
from lt_zero.training.lightning.precision import sharded_of
from tests.support.constant_module import Constant
from tests.support.lightning_tools import GPT, sharded_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.models import Net, tokens
from tests.support.parity import OPTIMIZERS, STAGES, config_of, full_grads, full_values
from tests.support.pool import Pool
from tests.support.simulated import one_of

LOW = [torch.float16, torch.bfloat16]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = tokens(step, 0, rank)
    logits = model(batch)
    # Computed in fp32 as autocast would, in fp64 by the reference.
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), batch.roll(-1, 1).flatten()
    )


def plain_run(model: nn.Module, dtype: torch.dtype, optimizer: str, world: int, steps: int) -> dict[str, Tensor]:
    """Plain PyTorch in one process: a low copy computes, the gradients of the "ranks" are averaged into a master."""
    master = copy.deepcopy(model).to(torch.promote_types(dtype, torch.float32))
    opt = OPTIMIZERS[optimizer](master.parameters())
    for step in range(steps):
        opt.zero_grad()
        for rank in range(world):
            low = copy.deepcopy(master).to(dtype)
            loss_of(low, step, rank).backward()
            for mine, theirs in zip(master.parameters(), low.parameters(), strict=True):
                if theirs.grad is not None:
                    part = theirs.grad.to(mine.dtype) / world
                    mine.grad = part if mine.grad is None else mine.grad + part
        opt.step()
    return {name: p.detach() for name, p in master.named_parameters()}


def _errors(dtype: torch.dtype, stage: int, optimizer: str, steps: int = 4) -> None:
    torch.manual_seed(0)
    model, world = Net(), dist.get_world_size()
    exact = plain_run(copy.deepcopy(model).double(), torch.float64, optimizer, world, steps)
    plain = plain_run(model, dtype, optimizer, world, steps)
    engine = lt_zero.shard(model, config_of(stage, dtype=dtype))
    opt = OPTIMIZERS[optimizer](model.parameters())
    lt_zero.ShardedOptimizer(engine, opt)
    for step in range(steps):
        opt.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        opt.step()
    for name, got in full_values(engine).items():
        assert got.dtype == torch.float32
        mine, theirs = (got - exact[name]).abs().max(), (plain[name] - exact[name]).abs().max()
        assert mine <= 2 * theirs + 1e-7, f"{name}: error {mine:g}, plain PyTorch {theirs:g}"


@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer"),
    only_rows([(1, LOW[0], "adamw"), (3, LOW[1], "sgd")], itertools.product(STAGES, LOW, ["sgd", "adamw"])),
    ids=str,
)
def test_error_is_that_of_plain_pytorch(pool: Pool, stage: int, dtype: torch.dtype, optimizer: str) -> None:
    pool.run(3 if stage == 3 else 2, _errors, dtype, stage, optimizer)


# ---- on the wire ---------------------------------------------------------------------------------------------------


Reduction = tuple[int, torch.dtype | None, dict[str, Any], dict[str, Any]]  # stage, dtype, keys, zero


def _reduced(grads: list[float], cases: list[Reduction]) -> list[list[float]]:
    """The reduced gradient of a weight whose gradients on the ranks are ``grads``, for each case."""
    rows = []
    for stage, dtype, keys, zero in cases:
        model = Constant()
        engine = lt_zero.shard(model, config_of(stage, zero, dtype, **keys))
        model(torch.full((13,), grads[dist.get_rank()])).backward()
        rows.append(full_grads(engine)["weight"].tolist())
    return rows


@pytest.mark.parametrize(("stage", "shared"), only_rows([(3, "1")], itertools.product(STAGES, ["0", "1"])))
def test_sums_do_not_overflow_in_fp16(pool: Pool, stage: int, shared: str) -> None:
    grads = [30000.0, 30000.0, 60000.0]
    every_keys: list[dict[str, Any]] = [{}, {"communication_data_type": "fp16"}, {"prescale_gradients": True}]
    cases: list[Reduction] = [
        (stage, torch.float16, keys, zero) for keys in every_keys for zero in ({}, {"reduce_scatter": False})
    ]
    rows = pool.run(3, _reduced, grads, cases, env={"LT_ZERO_SHARED_MEMORY": shared})[0]
    for row, case in zip(rows, cases, strict=True):
        # 60000 / 3 has no exact fp16 neighbour problem: all values are multiples of 32
        assert row == pytest.approx([40000.0] * 13, rel=2**-10), case


@pytest.mark.parametrize("shared", only(["0"], ["0", "1"]))
def test_bf16_gradients_are_summed_exactly(pool: Pool, shared: str) -> None:
    grads = [256.0, 1.0, 1.0]  # bf16 would lose the ones: 256 + 1 = 256
    cases: list[Reduction] = [(stage, torch.bfloat16, {}, {}) for stage in (1, 2, 3)]
    rows = pool.run(3, _reduced, grads, cases, env={"LT_ZERO_SHARED_MEMORY": shared})[0]
    for row, (stage, *_) in zip(rows, cases, strict=True):
        assert row == pytest.approx([86.0] * 13, rel=1e-6), stage


@pytest.mark.parametrize("stage", only([2], STAGES))
def test_reduction_keys(pool: Pool, stage: int) -> None:
    grads = [1.0, 2.0, 6.0]
    wanted: list[tuple[dict[str, Any], float]] = [
        ({"gradient_allreduce_op": "sum"}, 9.0),
        ({"gradient_allreduce_op": "sum", "prescale_gradients": True}, 9.0),
        ({"gradient_predivide_factor": 2.0}, 3.0),
        ({"communication_data_type": "bf16"}, 3.0),
        ({"communication_data_type": "fp32"}, 3.0),
    ]
    cases: list[Reduction] = [(stage, None if stage % 2 else torch.bfloat16, keys, {}) for keys, _ in wanted]
    rows = pool.run(3, _reduced, grads, cases)[0]
    for row, (keys, want) in zip(rows, wanted, strict=True):
        rounded = "prescale_gradients" in keys and stage == 2  # a third of a gradient, in bf16 on the wire
        assert row == pytest.approx([want] * 13, rel=2**-8 if rounded else 1e-6), keys


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_communication_dtype_is_what_is_sent(pool: Pool, stage: int) -> None:
    case: Reduction = (stage, None, {"communication_data_type": "bf16"}, {})
    (row,) = pool.run(2, _reduced, [1.0 + 2.0**-12] * 2, [case])[0]
    assert row == [1.0] * 13, "2**-12 does not fit into bf16 beside 1"


def test_predivision_is_by_the_world_where_the_wire_adds() -> None:
    with one_of(8, torch.device("cpu")) as group:
        assert group.factors(torch.float16) == (1 / 8, 1.0)
        assert group.factors(torch.bfloat16) == (1.0, 1 / 8)
        group.sums_gradients = True
        assert group.factors(torch.float16) == (1.0, 1.0)


# ---- accumulators and master weights -------------------------------------------------------------------------------


MICRO = 64  # micro-batches, so that a bf16 accumulator loses what it adds


def _many(stage: int, keys: dict[str, Any], sync: bool) -> float:
    """The largest error of the accumulated gradient."""
    model = Constant(7)
    engine = lt_zero.shard(model, config_of(stage, {}, torch.bfloat16, **keys))
    generator = torch.Generator().manual_seed(dist.get_rank())
    exact = torch.zeros(7, dtype=torch.float64)
    for micro in range(MICRO):
        grad = (torch.rand(7, generator=generator) * 1e-3).to(torch.bfloat16)
        exact += grad.double()
        engine.reducer.sync = sync or micro == MICRO - 1
        model(grad.float()).backward()
    dist.all_reduce(exact)
    got = full_grads(engine)["weight"]
    return float((got.double() - exact / dist.get_world_size()).abs().max())


def _fine_and_rough(stage: int, sync: bool) -> tuple[float, float]:
    return _many(stage, {}, sync), _many(stage, {"data_types": {"grad_accum_dtype": "bf16"}}, sync)


@pytest.mark.parametrize(("stage", "sync"), only_rows([(3, False)], itertools.product(STAGES, [True, False])))
def test_accumulation_is_in_fp32(pool: Pool, stage: int, sync: bool) -> None:
    fine, rough = pool.run(2, _fine_and_rough, stage, sync)[0]
    assert fine < 1e-6
    assert rough > 1e-5, "a bf16 accumulator loses more: the key has an effect"


def _masters(stage: int, keys: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model).to(dtype)
    engine = lt_zero.shard(model, config_of(stage, {}, dtype, **keys))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    twin = {n: p.detach().float().requires_grad_() for n, p in reference.named_parameters()}
    exact = torch.optim.AdamW(twin.values(), lr=1e-2)
    for step in range(3):
        opt.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        grads = full_grads(engine)
        for name, parameter in twin.items():  # fp32 update of 16-bit weights, rounded once
            parameter.grad = grads[name].float()
        opt.step()
        exact.step()
        for parameter in twin.values():
            parameter.data.copy_(parameter.to(dtype))
    values = full_values(engine)
    worst = max(float((values[n].float() - twin[n]).abs().max()) for n in twin)
    dtypes = {v.dtype for state in opt.state.values() for v in state.values() if v.dim() > 0}
    return worst, {v.dtype for v in values.values()}, dtypes, memory_report(engine, [sharded])


@pytest.mark.parametrize("stage", only([3], STAGES))
@pytest.mark.parametrize("dtype", only([torch.bfloat16], LOW))
def test_low_master_weights(pool: Pool, stage: int, dtype: torch.dtype) -> None:
    full = pool.run(2, _masters, stage, {}, torch.bfloat16)[0][3]
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    keys: dict[str, Any] = {name: {f"{name}_master_weights_and_grads": True}}
    worst, masters, moments, memory = pool.run(2, _masters, stage, keys, dtype)[0]
    assert worst == 0.0
    assert masters == {dtype}
    assert moments == {torch.float32}
    assert memory["gradients"][0] == full["gradients"][0] // 2
    assert memory["optimizer"][0] == full["optimizer"][0]
    assert memory["weights"][0] < full["weights"][0]


@pytest.mark.parametrize("stage", only([2], STAGES))
def test_low_moments(pool: Pool, stage: int) -> None:
    full = pool.run(2, _masters, stage, {}, torch.bfloat16)[0][3]
    keys = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    _, masters, moments, memory = pool.run(2, _masters, stage, keys, torch.bfloat16)[0]
    assert masters == moments == {torch.bfloat16}
    assert memory["optimizer"][0] == full["optimizer"][0] // 2


def _low_accumulators(stage: int) -> None:
    """Accumulators in bf16 under fp32 masters: the step sees them in fp32."""
    model = Constant(7)
    engine = lt_zero.shard(model, config_of(stage, {}, torch.bfloat16, data_types={"grad_accum_dtype": "bf16"}))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    lt_zero.ShardedOptimizer(engine, opt)
    model(torch.full((7,), 3.0)).backward()
    opt.step()
    assert full_values(engine)["weight"].tolist() == [-3.0] * 7


@pytest.mark.parametrize("stage", only([2], STAGES))
def test_low_accumulators_step(pool: Pool, stage: int) -> None:
    pool.run(2, _low_accumulators, stage)


# ---- overflow ------------------------------------------------------------------------------------------------------


def gated_run(keys: dict[str, Any], dtype: torch.dtype, stage: int, count: int, bad: set[int], drop: bool) -> Any:
    """``count`` steps; at steps ``bad`` rank 1's loss overflows, or with ``drop`` these steps are left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    config = config_of(stage, {}, dtype, on_min_scale="hold", **keys)
    engine = lt_zero.shard(model, config)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    gate = LossScaleController(engine.policy, config.on_min_scale)
    for step in range(count):
        if drop and step in bad:
            continue
        opt.zero_grad()
        gate.before_backward([sharded])
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
        loss = model(x.to(dtype)).float().square().mean() * gate.scale
        (loss * float("inf") if step in bad and dist.get_rank() == 1 else loss).backward()
        gate.examine(sharded)
        assert gate.skip == (step in bad)
        gate.unscale(sharded)
        if not gate.skip:
            opt.step()
        gate.conclude(sharded, 0)
    assert gate.skipped == (0 if drop else len(bad))
    steps = {int(state["step"]) for state in opt.state.values()}
    assert steps in ({count - len(bad)}, set())  # set(): this rank owns nothing
    return full_values(engine)


def _overflow(stage: int, dtype: torch.dtype) -> None:
    count = 30  # steps: more than a window of the loss scale
    bad = set(torch.randint(1, count, (count // 15,), generator=torch.Generator().manual_seed(stage)).tolist())
    block = {"initial_scale_power": 8, "loss_scale_window": 25, "hysteresis": 1}
    keys = {"fp16": block} if dtype == torch.float16 else {}
    with_overflow = gated_run(keys, dtype, stage, count, bad, drop=False)
    without = gated_run(keys, dtype, stage, count, bad, drop=True)
    for name, value in without.items():
        if dtype == torch.bfloat16:
            assert torch.equal(value, with_overflow[name]), name
        else:  # the scales differ, so other gradients fall below fp16's smallest numbers
            torch.testing.assert_close(with_overflow[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "stage"), only_rows([(torch.float16, 3)], itertools.product(LOW, STAGES)), ids=str)
def test_overflow_on_one_rank_changes_nothing(pool: Pool, stage: int, dtype: torch.dtype) -> None:
    pool.run(3 if stage == 3 else 2, _overflow, stage, dtype)


def _two_scales(stage: int) -> None:
    """Gradients that wait while the scale changes are worth what they were; stepping them raw is refused."""
    model = Constant(7)
    engine = lt_zero.shard(model, config_of(stage, {}, torch.float16))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    gate = LossScaleController(engine.policy)
    assert gate.scaler is not None
    for grad, scale in ((1.0, 1024.0), (2.0, 64.0), (4.0, 4096.0)):
        gate.scaler.scale = scale
        gate.before_backward([sharded])
        (model(torch.full((7,), grad)) * scale).backward()
    with pytest.raises(RuntimeError, match="still carry the loss scale 4096"):
        opt.step()
    gate.examine(sharded)
    gate.unscale(sharded)
    opt.step()
    assert full_values(engine)["weight"].tolist() == [-7.0] * 7


@pytest.mark.parametrize("stage", only([1, 3], STAGES))
def test_scale_changes_between_backwards(pool: Pool, stage: int) -> None:
    pool.run(2, _two_scales, stage)


def test_dtype_table() -> None:
    engine = lt_zero.shard(Net(), config_of(1, {}, torch.bfloat16, fp16_override_modules=["LayerNorm"]))
    out = io.StringIO()
    dtype_table(engine, Console(file=out, width=100))
    text = out.getvalue()
    assert "forward" in text
    assert "accum." in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "trained" in line]
    assert ["bf16", "bf16", "bf16", "fp32", "fp32", "fp32"] in [row[2:] for row in rows]
    assert ["fp32"] * 6 in [row[2:] for row in rows]
    assert not has_one_dtype(engine)
    for config, one in ((config_of(1, {}, None), True), (config_of(1, {}, torch.bfloat16), False)):
        assert has_one_dtype(lt_zero.shard(Net(), config)) == one


def test_policy_of_islands_and_doubles() -> None:
    policy = DtypePolicy(compute=torch.bfloat16, accumulate=torch.bfloat16, low_master=True)
    double, single = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    assert policy.dtype_of(double) == torch.float64
    assert policy.dtype_of(single, kept=True) == torch.float32
    assert policy.accumulate_of(torch.float32) == torch.float32
    assert policy.master_of(torch.bfloat16) == torch.bfloat16
    assert ZeroConfig.of({"bfloat16": {"enabled": True}}).bf16.enabled


class ByHand(GPT):
    """One step per batch in manual optimization, inside of Lightning's context for 16 bits."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]


def _by_hand() -> None:
    for stage, optimizer in ((1, "adamw"), (3, "sgd")):
        found = []
        for module in (GPT, ByHand):
            trainer = sharded_trainer(stage, precision="16-true", max_epochs=2)
            net = module(dist.get_world_size())
            net.optimizer = optimizer
            trainer.fit(net)
            found.append(weights(trainer))
            norm = sharded_of(trainer.optimizers[0]).grads.norm(1.0)
            assert norm.dtype == torch.float32
        for name, value in found[0].items():
            assert (found[1][name] == value).all(), (stage, name)


def test_manual_optimization_in_fp16(pool: Pool) -> None:
    """The default dtype is 16 bits while a step runs there: scales and norms are fp32 all the same."""
    pool.run(2, _by_hand)
