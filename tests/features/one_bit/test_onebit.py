"""1-bit optimizers on several ranks: against the algorithm in plain torch, and together with other features."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.comm.costs import Costs
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.exchange.error_feedback import FeedbackExchange
from lt_zero.features.one_bit.feature import MOMENTA
from lt_zero.optim import OneBitAdam, build_optimizer
from tests.support.features import skip_without
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.nodes import NodePool
from tests.support.onebit import oracle
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

SIZES = [(70, 40), (50,), (33, 17)]
PARAMS: dict[str, Any] = {"lr": 1e-2, "freeze_step": 20, "weight_decay": 0.3}
INTERVALS = {"var_freeze_step": 40, "var_update_scaler": 8, "local_step_scaler": 20, "local_step_clipper": 8}
PARAMS_OF: dict[str, dict[str, Any]] = {
    "OneBitAdam": PARAMS,
    "OneBitLamb": PARAMS,
    "ZeroOneAdam": {"lr": 1e-3, "weight_decay": 0.3, **INTERVALS},
}


class Weights(nn.Module):
    """A loss that is linear in the weights: the gradients of a step are known in advance."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(size, generator=random) for size in SIZES])

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum(((w * g).sum() for w, g in zip(self.weights, grads, strict=False)), torch.zeros(()))


def _grads(step: int, rank: int) -> list[Tensor]:
    """A gradient that the ranks share, and noise, of other magnitude in one parameter; one row never has any."""
    common = torch.Generator().manual_seed(step // 10)
    noise = torch.Generator().manual_seed(1000 * step + rank)
    found = [torch.randn(s, generator=common) + 0.5 * torch.randn(s, generator=noise) for s in SIZES]
    found[0][3] = 0
    found[1] *= 8
    return found


def _config(stage: int, params: dict[str, Any], type_: str = "OneBitAdam", **keys: Any) -> ZeroConfig:
    return config_of(stage, optimizer={"type": type_, "params": params}, **keys)


def _flat(bucket: Bucket, values: list[Tensor]) -> Tensor:
    flat = torch.zeros(bucket.layout.numel)
    for span, value in zip(bucket.layout.spans, values, strict=True):
        flat[span.lo : span.hi] = value.flatten()
    return flat


def _against_oracle(type_: str, stage: int, steps: int, micro: int, clip: float) -> list[float]:
    """Every 20 steps, the share of weights that are not the oracle's within 1e-5, then 0.05 of their largest change.

    Where rounding decides about a sign, an element differs for as long as it takes to correct that; under LAMB it may
    change the factor of all elements of the parameter.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Weights()
    start = [w.detach().clone() for w in model.weights]
    params = PARAMS_OF[type_]
    engine = lt_zero.shard(model, _config(stage, params, type_))
    optimizer = build_optimizer(type_, params, model.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    (bucket,) = engine.buckets
    assert [span.name for span in bucket.layout.spans] == [f"weights.{i}" for i in range(len(SIZES))]
    real = _flat(bucket, [torch.ones(size) for size in SIZES]) > 0
    spans = [(span.lo, span.hi) for span in bucket.layout.spans]
    want = oracle(type_, _flat(bucket, start), world, spans, clip=clip, **params)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            with engine.no_sync() if number + 1 < micro else nullcontext():
                model([g / micro for g in _grads(step + 1000 * number, rank)]).backward()
        if clip:
            sharded.grads.clip_norm(clip)
        optimizer.step()
        every = [
            _flat(bucket, [sum(parts, torch.zeros(())) / micro for parts in zip(*micros, strict=True)])
            for micros in ([_grads(step + 1000 * n, r) for n in range(micro)] for r in range(world))
        ]
        want.step(every)
        if step % 20 == 19:
            if type_ == "ZeroOneAdam":  # its ranks differ between exchanges
                flat, weights = _flat(bucket, [w.detach() for w in model.weights]), want.each[rank]
            else:
                got, weights = full_values(engine), want.weights
                flat = _flat(bucket, [got[f"weights.{i}"] for i in range(len(SIZES))])
            moved = (weights - _flat(bucket, start)).abs().max()
            limit = (1e-5 if step < 60 else 5e-2) * moved
            found.append(float(((flat - weights).abs() > limit)[real].double().mean()))
    return found


RUNS = [(2, 0, 1, 20.0), (2, 1, 2, 20.0), (4, 0, 2, 0.0), (4, 1, 1, 0.0)]  # ranks, stage, micro-batches, clipping


@pytest.mark.parametrize(
    ("type_", "ranks", "stage", "micro", "clip"),
    only_rows(
        [("OneBitAdam", *RUNS[1]), ("OneBitLamb", *RUNS[1]), ("ZeroOneAdam", *RUNS[0])],
        [(name, *run) for name in ("OneBitAdam", "OneBitLamb") for run in RUNS]
        + [("ZeroOneAdam", ranks, 0, *rest) for ranks, _, *rest in RUNS],
    ),
)
def test_follows_the_algorithm(pool: Pool, type_: str, ranks: int, stage: int, micro: int, clip: float) -> None:
    for found in pool.run(ranks, _against_oracle, type_, stage, 100, micro, clip):
        assert max(found[:3]) == 0.0, found  # 40 compressed steps
        assert max(found) < 0.01, found


@pytest.mark.nodes
@pytest.mark.slow
@pytest.mark.parametrize(("type_", "stage"), [("OneBitAdam", 1), ("OneBitLamb", 0), ("ZeroOneAdam", 0)])
def test_follows_the_algorithm_on_two_nodes(node_pool: NodePool, type_: str, stage: int) -> None:
    for found in node_pool.run(_against_oracle, type_, stage, 200, 1, 20.0):
        assert max(found[:3]) == 0.0, found
        assert max(found) < 0.01, found


def _train(stage: int, type_: str, steps: int) -> tuple[list[float], dict[str, Any], int, int]:
    """Losses, weights, and the bytes that this rank sent in a dense and in a compressed exchange."""
    torch.manual_seed(0)
    model = Net()
    params = {"lr": 1e-2, **({"freeze_step": 8} if type_.startswith("OneBit") else {})}
    engine = lt_zero.shard(model, config_of(stage, optimizer={"type": type_, "params": params}))
    optimizer = build_optimizer(type_, params, model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = next_token_loss(model, step % 4, 0, dist.get_rank())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    costs = engine.exchange.sums.compressor.costs if isinstance(engine.exchange, FeedbackExchange) else Costs()
    return losses, {name: value.numpy() for name, value in full_values(engine).items()}, costs.dense, costs.sent


@pytest.mark.parametrize(
    ("stage", "shared", "plain"), only_rows([(1, "0", "Lamb")], [(0, "1", "Adam"), (1, "0", "Lamb")])
)
def test_trains_and_ranks_stay_equal(pool: Pool, stage: int, shared: str, plain: str) -> None:
    env = {"LT_ZERO_SHARED_MEMORY": shared}
    want = pool.run(2, _train, stage, plain, 24, env=env)[0][0]
    (first, weights, dense, sent), (_, others, *_) = pool.run(2, _train, stage, f"OneBit{plain}", 24, env=env)
    for name, value in weights.items():
        np.testing.assert_array_equal(others[name], value, err_msg=name)
    assert first[-1] < want[0] - 0.7 * (want[0] - want[-1])
    assert 0 < sent < 0.1 * dense  # buckets of some hundred elements have more scales than large ones


def test_sends_a_32nd_of_fp32() -> None:
    large = 8 << 20
    assert 1 / 32 < MOMENTA.nbytes(large) / (4 * large) < 1.05 / 32


# ---- steps that are skipped ----------------------------------------------------------------------------------------


def _skipped(type_: str, stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    params = {
        "lr": 1e-5,
        "var_freeze_step" if type_ == "ZeroOneAdam" else "freeze_step": 1,
    }  # one step: a rough variance
    config = _config(stage, params, type_, dtype=torch.float16, fp16={"initial_scale_power": 8, "hysteresis": 1})
    policy = dtype_policy(config, resolve_mode(config, "16-true", "cpu"))
    engine = lt_zero.shard(model, config, policy=policy)
    optimizer = build_optimizer(type_, params, model.parameters())
    sharded, controller = lt_zero.ShardedOptimizer(engine, optimizer), LossScaleController(policy)

    def step(number: int, factor: float) -> bool:
        optimizer.zero_grad()
        loss = next_token_loss(model, number, 0, dist.get_rank()).float()
        controller.before_backward([sharded])
        (loss * controller.scale * (factor if dist.get_rank() == 1 else 1.0)).backward()
        controller.examine(sharded)
        if taken := controller.proceeds(sharded):
            controller.unscale(sharded)
            optimizer.step()
        controller.conclude(sharded, 0)
        return taken

    def states() -> list[Tensor]:
        every = [f for f in engine.exchange.of_bucket.values() if f.residuals is not None]
        found = [t / f.scale for f in every for t in (f.residuals or ())[:2] if t is not None]
        momenta = [state["exp_avg"] for state in optimizer.state.values()]
        return [t.clone() for t in (*found, *momenta)]

    assert step(0, 1.0)
    assert step(1, 1.0)
    before = states()
    assert any(bool(t.any()) for t in before)
    for number in (2, 3):
        assert not step(number, 1e9)
        for now, then in zip(states(), before, strict=True):
            assert torch.equal(now, then)
    assert step(4, 1.0)  # another loss scale
    largest = max(float(t.abs().max()) for t in states())
    assert largest < 4 * max(float(t.abs().max()) for t in before)


@pytest.mark.parametrize(
    ("type_", "stage"),
    only_rows([("OneBitAdam", 1), ("ZeroOneAdam", 0)], [("OneBitAdam", 0), ("OneBitAdam", 1), ("ZeroOneAdam", 0)]),
)
def test_skipped_steps_leave_momenta_alone(pool: Pool, type_: str, stage: int) -> None:
    pool.run(2, _skipped, type_, stage)


# ---- ranks that step apart -----------------------------------------------------------------------------------------


def _apart() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    params = {"lr": 1e-2, "var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    model = Weights()
    start = [w.detach().clone() for w in model.weights]
    engine = lt_zero.shard(model, _config(0, params, "ZeroOneAdam"))
    optimizer = build_optimizer("ZeroOneAdam", params, model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    (bucket,) = engine.buckets
    want = oracle("ZeroOneAdam", _flat(bucket, start), world, [(s.lo, s.hi) for s in bucket.layout.spans], **params)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(_grads(number, rank)).backward()
        optimizer.step()
        want.step([_flat(bucket, _grads(number, r)) for r in range(world)])
        expect(want.each[rank])

    def expect(weights: Tensor) -> None:
        got = _flat(bucket, [w.detach() for w in model.weights])
        torch.testing.assert_close(got, weights, rtol=1e-5, atol=1e-6)

    for number in range(6):
        step(number)
    assert optimizer.pending  # type: ignore[attr-defined]
    assert not torch.equal(want.each[0], want.each[1])
    values = full_values(engine)  # ends the interval
    want.exchange()
    expect(want.each[0])
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
    with torch.no_grad():  # an edit between intervals stays
        model.weights[1] += 1.0
    want.exchanged += _flat(bucket, [torch.full(size, float(n == 1)) for n, size in enumerate(SIZES)])
    want.each = [want.exchanged.clone() for _ in range(world)]
    for number in range(6, 9):
        step(number)
    assert not torch.equal(full_values(engine)["weights.1"], values["weights.1"])


def test_an_interval_ends_before_weights_leave_the_engine(pool: Pool) -> None:
    pool.run(2, _apart)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero_optimization": {"stage": 2}}, ["stage 2", "stage to 0 or 1"]),
        ({"optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"stage": 1}}, ["stage to 0", "use OneBitAdam"]),
        ({"gradient_compression": {"algorithm": "2bit"}}, ["gradient_compression.algorithm='2bit'", "Remove it"]),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer.device"]),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], words: list[str]) -> None:
    skip_without(keys)
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.of({"optimizer": {"type": "OnebitAdam", "params": {"freeze_step": 5}}, **keys})
    for word in words:
        assert word in str(caught.value)


def _unprepared() -> str:
    model = Net()
    engine = lt_zero.shard(model, config_of(0))
    with pytest.raises(TypeError) as caught:
        lt_zero.ShardedOptimizer(engine, OneBitAdam(model.parameters()))
    return str(caught.value)


def test_ranks_have_to_be_prepared(pool: Pool) -> None:
    for told in pool.run(2, _unprepared):
        assert "optimizer.type: OneBitAdam" in told


def _not_cleared() -> str:
    model = Net()
    params = {"freeze_step": 1}
    engine = lt_zero.shard(model, _config(0, params))
    optimizer = build_optimizer("OneBitAdam", params, model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
    next_token_loss(model, 2, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_momenta_are_not_added_to_those_of_the_last_step(pool: Pool) -> None:
    for told in pool.run(2, _not_cleared):
        assert "zero_grad" in told


# ---- parameters that a step does not use -----------------------------------------------------------------------------


def _partly_used(type_: str, stage: int) -> dict[str, Any]:
    model, params = Weights(), {"lr": 1e-2, "freeze_step": 3}
    engine = lt_zero.shard(model, _config(stage, params, type_))
    optimizer = build_optimizer(type_, params, model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        model(_grads(step, dist.get_rank())[: 2 if step in (4, 5) else 3]).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in full_values(engine).items()}


def test_unused_parameters_keep_their_momentum_at_both_stages(pool: Pool) -> None:
    want, found = (pool.run(2, _partly_used, "OneBitAdam", stage)[0] for stage in (0, 1))
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def _rests_until_the_freeze(stage: int) -> None:
    model, params = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]), {"lr": 1e-2, "freeze_step": 2}
    engine = lt_zero.shard(model, _config(stage, params))
    optimizer = build_optimizer("OneBitAdam", params, model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((2, 5), step + dist.get_rank() + 1.0)
        (model[0](x) if step == 1 else model[0](x) + model[1](x)).square().mean().backward()
        before = full_values(engine)["1.weight"]
        optimizer.step()
        assert torch.equal(full_values(engine)["1.weight"], before) is (step == 1)


def test_a_layer_may_rest_in_the_last_step_before_the_freeze(pool: Pool) -> None:
    pool.run(2, _rests_until_the_freeze, 1)
