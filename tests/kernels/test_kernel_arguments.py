"""What a reviewer found in the kernels and in Adam's fused step: hooks, memory, dtypes, norms, operators' manners."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero import kernels as ops
from lt_zero.kernels import compiler as build
from lt_zero.kernels import library
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import STAGES, config_of, full_values
from tests.support.pool import Pool


def _sharded(stage: int, model: nn.Module, optimizer: Any = None, **config: Any) -> Any:
    engine = lt_zero.shard(model, config_of(stage, **config))
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return engine, optimizer, lt_zero.ShardedOptimizer(engine, optimizer)


# ---- who steps -----------------------------------------------------------------------------------------------------


def _clamp(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            with torch.no_grad():
                p.clamp_(-0.01, 0.01)


def _no_rate(optimizer: Any, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


def _hooked(stage: int, which: str, fused: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if which == "after":
        optimizer.register_step_post_hook(_clamp)
    engine, _, _ = _sharded(stage, model, optimizer, fused_step=fused)
    if which == "before":
        optimizer.register_step_pre_hook(_no_rate)
    for step in range(2):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
    return full_values(engine)


def _hooks(stage: int, which: str) -> None:
    ours, theirs = (_hooked(stage, which, fused) for fused in (True, False))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    if which == "after":
        assert max(value.abs().max().item() for value in ours.values()) <= 0.01 + 1e-8


@pytest.mark.parametrize(
    ("stage", "which"), only_rows([(1, "before"), (3, "after")], itertools.product(STAGES, ["before", "after"]))
)
def test_hooks_around_the_step_work(pool: Pool, stage: int, which: str) -> None:
    pool.run(2, _hooks, stage, which)


def _grad_scaler(stage: int) -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if wrap:
            _sharded(stage, model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 8)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


def test_a_scaler_that_hands_its_scale_to_the_step(pool: Pool) -> None:
    pool.run(1, _grad_scaler, 0)


class Named(torch.optim.AdamW):
    """A subclass that computes something else under torch's name."""

    __module__ = torch.optim.AdamW.__module__

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign(), alpha=group["lr"])


def _subclass() -> None:
    Named.__name__ = "AdamW"
    optimizer = Named(nn.Linear(3, 3).parameters(), lr=0.1)
    model = nn.Linear(3, 3)
    optimizer = Named(model.parameters(), lr=0.1)
    assert _sharded(1, model, optimizer)[2].fused is None
    again = torch.optim.AdamW(nn.Linear(3, 3).parameters())
    engine = lt_zero.shard(nn.Linear(3, 3), config_of(1))
    assert all(lt_zero.ShardedOptimizer(engine, again).fused is not None for _ in range(2))


def test_only_torchs_own_classes_are_taken(pool: Pool) -> None:
    pool.run(1, _subclass)


# ---- state ---------------------------------------------------------------------------------------------------------


def _unused(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"frozen": nn.Linear(64, 64), "used": nn.Linear(8, 8), "idle": nn.Linear(32, 32)})
    model["frozen"].requires_grad_(False)
    _, optimizer, _ = _sharded(stage, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for turn in range(3):
        optimizer.zero_grad()
        x = model["used"](torch.ones(2, 8))
        loss = x.sum() if turn < 2 else x.sum() + model["idle"](torch.ones(2, 32)).sum()
        loss.backward()
        before = {id(p): s["exp_avg"].clone() for p, s in optimizer.state.items() if p is model["used"].weight}
        optimizer.step()
        held = sum(s["exp_avg"].numel() for s in optimizer.state.values())
        assert held <= (72 if turn < 2 else 72 + 1056)
        assert not any(p is q for p in optimizer.state for q in model["frozen"].parameters())
        for p, state in optimizer.state.items():
            if id(p) in before:  # the row was laid out anew when `idle` came in
                assert state["step"].item() == turn + 1
                assert not torch.equal(state["exp_avg"], before[id(p)])


@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_parameters_that_were_never_used_cost_no_moments(pool: Pool, stage: int) -> None:
    pool.run(2, _unused, stage)


def _default_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    _, optimizer, _ = _sharded(1, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.set_default_dtype(dtype)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.float32)).sum().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for state in optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert state["step"].item() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_nobodys_business(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(1, _default_dtype, dtype)


def _wrong_state() -> None:
    model = nn.Linear(4, 4)
    _, optimizer, _ = _sharded(0, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.state[model.weight] = {"step": 1.0, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=r"'exp_avg' .* has shape \(1,\), \(4, 4\) is needed"):
        optimizer.step()


def test_state_of_a_wrong_shape_is_refused(pool: Pool) -> None:
    pool.run(1, _wrong_state)


def _no_eps() -> None:
    model = nn.Linear(3, 3)
    engine, optimizer, _ = _sharded(1, model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.0))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(bucket.compute.flat.isfinite().all() for bucket in engine.buckets)


def test_without_eps_gaps_stay_zero(pool: Pool) -> None:
    pool.run(1, _no_eps)


# ---- norms ---------------------------------------------------------------------------------------------------------


def _looked_at(stage: int, how: str) -> None:
    torch.manual_seed(0)
    model = Net()
    engine, _, sharded = _sharded(stage, model)
    (next_token_loss(model, 0, 0, dist.get_rank()) * 1000.0).backward()
    with engine.unused_parameters.user_access():
        before = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
        sharded.grads.clip_norm(0.01) if how == "norm" else sharded.grads.clip_value(0.01)
        if dist.get_rank() == 1:  # one rank alone may ask
            after = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
            total = torch.stack(list(after.values())).norm()
            assert all(after[n] < before[n] for n in after)
    if dist.get_rank() == 1:
        expected = sharded.grads.norm()
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)
    else:
        sharded.grads.norm()


@pytest.mark.parametrize(
    ("stage", "how"), only_rows([(1, "value"), (3, "norm")], itertools.product(STAGES, ["norm", "value"]))
)
def test_norms_that_were_asked_for_follow_clipping(pool: Pool, stage: int, how: str) -> None:
    pool.run(2, _looked_at, stage, how)


class WithComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(2, 2)
        self.turn = nn.Parameter(torch.full((3,), 1 + 1j))

    def forward(self) -> Tensor:
        return self.real(torch.ones(1, 2)).sum() + (self.turn * (3 + 4j)).imag.sum()


def _complex(stage: int) -> None:
    model = WithComplex()
    _, _, sharded = _sharded(stage, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model().backward()
    want = torch.cat([torch.ones(4), torch.ones(2), torch.full((3,), 5.0)]).norm()
    torch.testing.assert_close(sharded.grads.norm(), want)


def test_norms_of_complex_gradients(pool: Pool) -> None:
    for stage in (0, 1):
        pool.run(1, _complex, stage)


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nothing = nn.Linear(3, 3), nn.Parameter(torch.empty(0, 4))

    def forward(self) -> Tensor:
        return self.layer(torch.ones(1, 3)).sum() + self.nothing.sum()


def _empty(stage: int) -> None:
    torch.manual_seed(0)
    model = WithEmpty()
    plain = copy.deepcopy(model)
    engine, optimizer, _ = _sharded(stage, model)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for each, its in ((model, optimizer), (plain, expected)):
        each().backward()
        its.zero_grad(set_to_none=False)
        assert each.nothing.grad is not None
        assert each.nothing.grad.shape == (0, 4)
        each().backward()
        its.step()
    values = full_values(engine)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), msg=lambda text, name=name: f"{name}: {text}")


def test_a_parameter_without_elements(pool: Pool) -> None:
    for stage in (0, 1, 3):
        pool.run(1, _empty, stage)


# ---- operators -----------------------------------------------------------------------------------------------------

NUMBERS: dict[str, float] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}


def test_tensors_on_several_devices_are_refused() -> None:
    here, nowhere = torch.ones(3), torch.ones(3, device="meta")
    with pytest.raises(ValueError, match="one device is needed"):
        ops.adam_step([here], [nowhere], [torch.zeros(3)], [torch.zeros(3)], step=1, **NUMBERS)
    with pytest.raises(ValueError, match="one device is needed"):
        ops.norm_squared([here, nowhere])
    with pytest.raises(ValueError, match="one device is needed"):
        ops.lamb_apply([here], [here], [here], torch.ones(1, device="meta"), eps=0.1, weight_decay=0.0)
    with pytest.raises(ValueError, match="step is 0"):
        ops.adam_step([here], [here.clone()], [torch.zeros(3)], [torch.zeros(3)], step=0, **NUMBERS)


def test_writing_is_noticed_by_autograd() -> None:
    x = torch.ones(3, requires_grad=True)
    factor = torch.full((3,), 2.0)
    y = (x * factor).sum()
    ops.cast_scale([factor], [torch.ones(3)], factor=200.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with pytest.raises(RuntimeError, match="no_grad"):
        ops.cast_scale([x], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="no_grad"):
        ops.norm_squared([x])
    with torch.no_grad():
        assert ops.norm_squared([x]).item() == 3.0


def test_an_option_by_its_position() -> None:
    """Operators take it, although their references do not."""
    total = torch.ones(4)
    accumulate: Any = ops.accumulate
    accumulate([total], [torch.ones(4)], 0.5)
    assert total.tolist() == [1.5] * 4


def test_the_reference_takes_what_the_kernel_takes() -> None:
    for apply in (ops.lamb_apply, ops.lamb_apply_reference):
        weight = torch.ones(2, 3)
        apply([weight], [torch.ones(6)], [torch.ones(6)], torch.full((1,), 0.5), eps=0.0, weight_decay=0.0)
        assert torch.equal(weight, torch.full((2, 3), 0.5))


# ---- building ------------------------------------------------------------------------------------------------------


def test_arguments_of_the_compiler_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    keys = []
    for command in ("g++", "g++ -m32", "g++ -Ofast"):
        monkeypatch.setenv("CXX", command)
        compiler = build.find_compiler("cpu")
        keys.append(build.recipe_of("cpu").key(compiler))
    assert len(set(keys)) == 3


def test_a_broken_compiler_does_not_hide_a_prebuilt_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    whole = library.Loader()
    if whole.get("cpu") is None:
        pytest.skip("nothing can be compiled here")
    built = whole.status("cpu").path
    assert built is not None
    shutil.copy(built, tmp_path / built.name)
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken && exit 0\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("LT_ZERO_CACHE", str(tmp_path))
    loader = library.Loader()
    assert loader.get("cpu") is not None
    assert loader.status("cpu").path == tmp_path / built.name


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LT_ZERO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert "~" not in str(library.cache_dir())
    assert library.cache_dir().is_absolute()
