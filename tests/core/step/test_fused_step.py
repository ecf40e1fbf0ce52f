"""The user's Adam through the kernel: same weights, torch's state, factors that wait for the kernel."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import kernels as ops
from lt_zero.optim import Lamb, Lion
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import STAGES, TORCH_FUSES, config_of, full_values
from tests.support.pool import Pool


def train(
    stage: int,
    fused: bool,
    optimizer: str = "AdamW",
    steps: int = 4,
    clip: float = 0.5,
    dtype: Any = None,
    **keywords: Any,
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, dtype=dtype, fused_step=fused))
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]
    opt = getattr(torch.optim, optimizer)(groups, lr=1e-2, **keywords)
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    assert (sharded.fused is not None) == fused
    for step in range(steps):
        opt.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        sharded.grads.clip_norm(clip)
        for group in opt.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        opt.step()
    for parameter, state in opt.state.items():
        assert isinstance(parameter, nn.Parameter)
        assert state["step"].item() == steps
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    return full_values(engine)


def _compare(stage: int, optimizer: str, keywords: dict[str, Any]) -> None:
    ours, torchs = (train(stage, fused, optimizer, **keywords) for fused in (True, False))
    for name, value in ours.items():
        torch.testing.assert_close(value, torchs[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("stage", "optimizer"), only_rows([(1, "Adam"), (3, "AdamW")], itertools.product(STAGES, ["Adam", "AdamW"]))
)
def test_weights_are_those_of_torch(pool: Pool, stage: int, optimizer: str) -> None:
    pool.run(2, _compare, stage, optimizer, {})


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_maximize(pool: Pool, stage: int) -> None:
    pool.run(3, _compare, stage, "AdamW", {"maximize": True})


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "lion": (Lion, {"lr": 1e-2, "betas": (0.8, 0.9), "maximize": True}),
    "lamb": (Lamb, {"lr": 1e-2, "betas": (0.8, 0.9), "max_coeff": 3.0}),
}


def _other_run(make: Any, keywords: dict[str, Any], stage: int, dtype: Any, fused: bool) -> tuple[Any, Any]:
    """Three steps with groups, clipping, a reload or lost states; the second step is the first to use one parameter."""
    torch.manual_seed(0)
    model = Net()
    model.extra = nn.Parameter(torch.ones(23))  # type: ignore[assignment]
    engine = lt_zero.shard(model, config_of(stage, dtype=dtype, fused_step=fused))
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]
    opt = make(groups, **keywords)
    made_at_once = bool(opt.state)  # Adagrad before torch 2.13, which then cannot do without
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    assert (sharded.fused is not None) == fused
    for step in range(3):
        opt.zero_grad()
        loss = next_token_loss(model, step, 0, dist.get_rank())
        (loss + (model.extra.float() ** 2).sum() if step > 0 else loss).backward()
        sharded.grads.clip_norm(0.5)
        opt.step()
        if step == 1 and dtype is None:  # torch casts states to the dtype of the parameters
            opt.load_state_dict(opt.state_dict())  # other tensors, same values
        elif step == 1 and stage == 3 and not made_at_once:
            opt.state.clear()  # as new
    states = {n: opt.state.get(p, {}) for n, p in model.named_parameters()}
    return full_values(engine), {n: {k: v.clone() for k, v in s.items()} for n, s in states.items()}


def _other(kind: str) -> None:
    for stage, dtype in ((0, None), (2, torch.bfloat16), (3, torch.float16)):
        (ours, mine), (torchs, wanted) = (_other_run(*OTHERS[kind], stage, dtype, fused) for fused in (True, False))
        for name, value in ours.items():
            if TORCH_FUSES and kind not in ("adagrad", "lamb"):
                assert torch.equal(value, torchs[name]), (stage, name)
            torch.testing.assert_close(value, torchs[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        # The state is torch's; a parameter without elements on this rank has none.
        for name, state in wanted.items():
            assert set(mine[name]) == set(state), (stage, name)
            for key, value in state.items():
                torch.testing.assert_close(mine[name][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", only(["adagrad", "nesterov"], OTHERS))
def test_other_optimizers_take_torchs_steps(pool: Pool, kind: str) -> None:
    """To the last bit, but for Adagrad and LAMB, as torch's square root is not correctly rounded."""
    pool.run(2, _other, kind)


def _calls(stage: int, dtype: Any) -> None:
    """One kernel call for all parameters, one for their norm, and the accumulators wait for it unscaled."""
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, dtype=dtype))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = lt_zero.ShardedOptimizer(engine, opt)
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    with mock.patch.object(ops, "norm_squared", side_effect=ops.norm_squared) as norms:
        raw = sharded.grads.norm()
    assert norms.call_count == 1
    sharded.grads.carry(4.0)  # a second factor: the products are shared, too
    sharded.grads.clip_norm(0.1)
    assert any(bucket.grads.stored()[1] is not None for bucket in engine.buckets)
    calls, original = [], ops.adam_step

    def counted(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(sum(p.numel() for p in params))
        original(params, *args, **kwargs)

    ops.adam_step = counted  # type: ignore[assignment]
    try:
        opt.step()
    finally:
        ops.adam_step = original  # type: ignore[assignment]
    dtypes = {(bucket.dtype, bucket.grads.dtype) for bucket in engine.buckets}
    assert len(calls) <= len(dtypes)
    assert sum(calls) >= sum(piece.numel for bucket in engine.buckets for piece in bucket.pieces)
    # Somebody who reads the gradients afterwards finds them clipped.
    assert raw > 0.2
    torch.testing.assert_close(sharded.grads.norm(), torch.tensor(0.1), rtol=1e-3, atol=0)
    assert any(bucket.grads.stored()[1] is not None for bucket in engine.buckets)
    sharded.grads.clip_value(1.0)  # writes
    assert all(bucket.grads.stored()[1] is None for bucket in engine.buckets if bucket.pieces)
    torch.testing.assert_close(sharded.grads.norm(), torch.tensor(0.1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", only([torch.bfloat16], [None, torch.bfloat16]), ids=str)
def test_one_call_takes_the_deferred_factor(pool: Pool, dtype: Any) -> None:
    pool.run(2, _calls, 2, dtype)
    pool.run(3, _calls, 3, dtype)


def _read_before_step() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(2))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.Adam(model.parameters()))
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    sharded.grads.clip_norm(0.1)
    squares = [p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(torch.stack(squares).sum().sqrt(), torch.tensor(0.1), rtol=1e-3, atol=0)


def test_gradients_read_before_the_step_are_clipped(pool: Pool) -> None:
    pool.run(2, _read_before_step)


def _persistent(dtype: torch.dtype) -> None:
    """Stage 3 with parameters that stay whole beside such that are released."""
    for clip in (0.1, 1e9):
        torch.manual_seed(0)
        results = []
        for fused in (True, False):
            torch.manual_seed(0)
            model = Net()
            zero = {"stage3_param_persistence_threshold": 40}
            engine = lt_zero.shard(model, config_of(3, zero, dtype=dtype, fused_step=fused))
            assert {bucket.sharding.params for bucket in engine.buckets} == {True, False}
            opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
            sharded = lt_zero.ShardedOptimizer(engine, opt)
            for step in range(3):
                opt.zero_grad()
                next_token_loss(model, step, 0, dist.get_rank()).backward()
                sharded.grads.clip_norm(clip)
                opt.step()
            results.append(full_values(engine))
        for name, value in results[0].items():
            torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", only([torch.bfloat16], [torch.bfloat16, torch.float16]), ids=str)
def test_persistent_parameters_beside_released_ones(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(2, _persistent, dtype)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.a if which == 0 else self.b)(x).square().sum()


def _steps_of(optimizer: torch.optim.Optimizer) -> set[float]:
    """What the states of all ranks have counted; a rank alone may own no element of a parameter."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {state["step"].item() for state in optimizer.state.values()})
    return set().union(*ranks)


def _counts(stage: int) -> None:
    """A parameter without a gradient neither moves nor counts a step; saved state goes on elsewhere."""
    torch.manual_seed(0)
    model, other = Two(), Two()
    other.load_state_dict(model.state_dict())
    engine = lt_zero.shard(model, config_of(stage))
    opt, expected = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))
    lt_zero.ShardedOptimizer(engine, opt)
    x = torch.randn(4, 5)
    for step, which in enumerate([0, 1, 1, 0, 1]):
        for each, o in ((model, opt), (other, expected)):
            o.zero_grad()
            each(x, which).backward()
            o.step()
        if step == 2:
            opt.load_state_dict(opt.state_dict())  # other tensors, same values
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(other.named_parameters())[name].detach(), rtol=1e-5, atol=1e-7)
    assert _steps_of(opt) == {2.0, 3.0}
    opt.state.clear()
    opt.zero_grad()
    model(x, 0).backward()
    opt.step()
    assert _steps_of(opt) == {1.0}


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_steps_are_counted_per_parameter(pool: Pool, stage: int) -> None:
    pool.run(2, _counts, stage)


class Mine(torch.optim.AdamW):
    """A subclass may compute something else."""


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda params: torch.optim.AdamW(params), True),
        (lambda params: torch.optim.AdamW(params, fused=True), True),
        (lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)), True),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), False),
        (lambda params: torch.optim.Adagrad(params, eps=0), False),
        (lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1), momentum=0.9), True),
        (lambda params: Lamb(params), True),
        (lambda params: Lamb(params, eps_inside_sqrt=True), False),
        (lambda params: torch.optim.NAdam(params), False),
        (lambda params: Mine(params), False),
    ],
)
def test_only_what_a_kernel_computes_is_replaced(make: Any, fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 3)
    engine = lt_zero.shard(model, config_of(0))
    opt = make(model.parameters())
    lt_zero.ShardedOptimizer(engine, opt)
    before = model.weight.detach().clone()
    with caplog.at_level(logging.INFO, "lt_zero"):
        model(torch.ones(3)).sum().backward()
        opt.step()
    assert ("fused_step=false" in caplog.text) == fused
    assert ("is stepped by its own step" in caplog.text) != fused
    assert not torch.equal(before, model.weight)


def test_torch_steps_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_zero.kernels.library.cpu", lambda: None)
    monkeypatch.setattr("lt_zero.kernels.dispatch._loaded", {})
    model = nn.Linear(3, 3)
    reference = nn.Linear(3, 3)
    reference.load_state_dict(model.state_dict())
    engine = lt_zero.shard(model, config_of(0))
    for each, o in [(m, torch.optim.AdamW(m.parameters())) for m in (model, reference)]:
        if each is model:
            lt_zero.ShardedOptimizer(engine, o)
        each(torch.ones(3)).sum().backward()
        o.step()
    assert torch.equal(model.weight, reference.weight)


def _options_per_step() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    assert sharded.fused is not None
    steps = []
    kernel = sharded.fused._kernel

    def options(group: dict[str, Any], step: float) -> dict[str, Any]:
        steps.append(step)
        return kernel.options(group, step)

    sharded.fused._kernel = dataclasses.replace(kernel, options=options)
    for step in range(2):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
    assert len(list(model.parameters())) > len(engine.buckets)
    assert steps == [1.0] * len(engine.buckets) + [2.0] * len(engine.buckets)


def test_options_are_computed_once_per_range_and_step_number(pool: Pool) -> None:
    """Not per parameter: that took a microsecond for each, in every step."""
    pool.run(1, _options_per_step)
