"""Moments in bf16 or 8 bits beside fp32 master weights: a step is computed in fp32 and rounded once, anywhere."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.core.engine.optimizer_spec import is_known
from lt_zero.kernels.moments import CodedMoments
from lt_zero.optim import Lion
from lt_zero.planning.check import measured
from lt_zero.training.lightning.model_report import memory_report
from lt_zero.training.loop.access import full_state, local_state, set_full_state, set_local_state
from tests.support.checkpoint_tools import everything, resume
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import blocks, same
from tests.support.offload_runs import train as train_offloaded
from tests.support.parity import STAGES, TORCH_FUSES, config_of, full_values
from tests.support.pool import Pool

BF16: dict[str, Any] = {"optimizer_states": {"dtype": "bf16"}}
INT8: dict[str, Any] = {"optimizer_states": {"dtype": "int8"}}
# Of the small models here: 8 bits are for large parameters.
CODES = partial(mock.patch, "lt_zero.kernels.moments.SMALLEST", 300)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),  # without a kernel
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "lion": (Lion, {"lr": 1e-2, "betas": (0.8, 0.9)}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
}
STEPS = 5
PLACES = ["", "cpu", "nvme"]


def rounded_run(kind: str, world: int) -> dict[str, Tensor]:
    """One process without lt_zero, which rounds all states after each step."""
    torch.manual_seed(0)
    model, (make, options) = Net(), OPTIMIZERS[kind]
    optimizer = make(model.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            (next_token_loss(model, step, 0, rank) / world).backward()
        optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    value.copy_(value.bfloat16())
    return {name: p.detach() for name, p in model.named_parameters()}


def run(kind: str, stage: int, world: int = 1, **keys: Any) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """The weights after training, and the dtypes of moments."""
    torch.manual_seed(0)
    model, (make, options) = Net(), OPTIMIZERS[kind]
    engine = lt_zero.shard(model, config_of(stage, **{**BF16, **keys}))
    optimizer = make(model.parameters(), **options)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank() if world > 1 else 0).backward()
        optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
    return full_values(engine), {value.dtype for value in states}


@pytest.mark.parametrize("kind", only(["adamw", "amsgrad", "momentum"], OPTIMIZERS))
def test_rounds_once_in_each_step(kind: str) -> None:
    want = rounded_run(kind, 1)
    for stage, fused in ((0, True), (1, False), (3, True), (3, False)):
        got, dtypes = run(kind, stage, fused_step=fused)
        assert dtypes == {torch.bfloat16}, (stage, fused)
        for name, value in want.items():
            if TORCH_FUSES and kind in ("momentum", "lion"):
                assert torch.equal(got[name], value), (stage, fused, name)
            # Square roots of torch and of the kernel differ in the last bit; no rounding of a state then turned over.
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=2e-6)


def _ranks(kind: str, stage: int) -> None:
    world = dist.get_world_size()
    want, (got, dtypes) = rounded_run(kind, world), run(kind, stage, world)
    assert dtypes <= {torch.bfloat16}
    moved = OPTIMIZERS[kind][1]["lr"] * STEPS
    for name, value in want.items():
        # Sums of gradients in another order turn some roundings over: 2^-8 of a state.
        assert (got[name] - value).abs().max() < moved * 2**-7, name


@pytest.mark.parametrize(
    ("kind", "stage"), only_rows([("adamw", 3), ("rmsprop", 1)], itertools.product(["adamw", "rmsprop"], STAGES))
)
def test_on_several_ranks(pool: Pool, kind: str, stage: int) -> None:
    pool.run(3 if stage == 3 else 2, _ranks, kind, stage)


class Scaled(nn.Module):
    """A layer times a number that is trained, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * self.scale
        return scaled


def _of_a_number(make: Any, fused: bool, stage: int) -> dict[str, Any]:
    """The weights and states of a model with a 0D parameter after some steps."""
    torch.manual_seed(0)
    model = Scaled()
    engine = lt_zero.shard(model, config_of(stage, **BF16, fused_step=fused))
    optimizer = make(model.parameters())
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
    if make is not torch.optim.NAdam:
        assert (sharded.fused is not None) == fused
    numbers = {f"state {key}": value.clone() for key, value in optimizer.state[model.scale].items()}
    return full_values(engine) | numbers


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (partial(torch.optim.AdamW, lr=1e-2), ["exp_avg", "exp_avg_sq"]),
        (partial(torch.optim.SGD, lr=1e-2, momentum=0.9), ["momentum_buffer"]),
        (partial(torch.optim.Adagrad, lr=1e-2), ["sum"]),
    ],
    ids=["adamw", "sgd", "adagrad"],
)
def test_moments_of_a_number_are_narrow_with_and_without_a_kernel(make: Any, keys: list[str], stage: int) -> None:
    by_kernel, staged = (_of_a_number(make, fused, stage) for fused in (True, False))
    for found in (by_kernel, staged):
        assert {key: found[f"state {key}"].dtype for key in keys} == dict.fromkeys(keys, torch.bfloat16)
    assert by_kernel.keys() == staged.keys()
    for name, value in by_kernel.items():
        assert value.dtype == staged[name].dtype, name
        torch.testing.assert_close(staged[name], value, rtol=1e-5, atol=2e-6, msg=name)


def test_numbers_that_are_no_moments_stay_wide() -> None:
    found = _of_a_number(torch.optim.NAdam, True, 1)
    wide = {key for key, value in found.items() if key.startswith("state") and value.dtype == torch.float32}
    assert wide == {"state step", "state mu_product"}
    assert found["state exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("precision", only(["bf16"], ["bf16", "fp16"]))
def test_low_master_weights_step_in_fp32(precision: str) -> None:
    """With 16-bit masters ``bf16_optimizer_states`` steps in bf16, ``optimizer_states`` in fp32."""
    keys = {precision: {"enabled": True, f"{precision}_master_weights_and_grads": True}}
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    want = copy.deepcopy(model).to(torch.bfloat16 if precision == "bf16" else torch.float16)
    engine = lt_zero.shard(model, config_of(2, **BF16, **keys))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)
    m = {p: torch.zeros(p.shape) for p in want.parameters()}
    for step in range(1, 4):
        x = torch.randn(4, 5, dtype=next(want.parameters()).dtype)
        for net in (model, want):
            net.zero_grad()
            (net(x) ** 2).mean().backward()
        optimizer.step()
        torch_step(want, m, step)
    for (name, value), expected in zip(full_values(engine).items(), want.parameters(), strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=2**-7, atol=1e-6, msg=name)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def torch_step(model: nn.Module, states: dict[Any, Tensor], number: int) -> None:
    """A step of AdamW on fp32 copies, with rounded moments."""
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-2)
    for p, own in zip(model.parameters(), copies, strict=True):
        assert p.grad is not None
        own.grad = p.grad.float()
        if number > 1:
            m, v = states[p]
            optimizer.state[own] = {"step": torch.tensor(number - 1.0), "exp_avg": m, "exp_avg_sq": v}
    optimizer.step()
    for p, own in zip(model.parameters(), copies, strict=True):
        found = optimizer.state[own]
        states[p] = torch.stack([found["exp_avg"], found["exp_avg_sq"]]).bfloat16().float()
        p.data.copy_(own.detach())


# ---- in host memory and in files -----------------------------------------------------------------------------------


def _coded_away(path: str, stage: int, optimizer: str) -> None:
    with CODES():
        want, engine, _ = train_offloaded(stage, None, optimizer, keys=INT8)
        assert {b.storage.moments.name for b in engine.buckets} == {"int8", "float32"}
        got, engine, _ = train_offloaded(stage, path, optimizer, keys=INT8)
        same(got, want, stage)
        assert {s.dtype for b in engine.buckets for s in b.states.by_key.values()} == {torch.uint8, torch.float32}
        engine.offload_manager.close()
        with mock.patch.object(accelerator, "_apart", True):
            zero = {"offload_optimizer": {"device": "cpu"}}
            got, engine, _ = train_offloaded(stage, None, optimizer, keys=INT8, zero=zero)
        same(got, want, stage)


@needs("low_bit_states", "offload")
@pytest.mark.parametrize(
    ("stage", "optimizer"), only_rows([(3, "AdamW")], itertools.product([1, 3], ["AdamW", "SGD", "RMSprop"]))
)
def test_codes_move_where_they_are_offloaded(pool: Pool, tmp_path: Path, stage: int, optimizer: str) -> None:
    pool.run(2, _coded_away, str(tmp_path), stage, optimizer)


def _away(path: str, stage: int, optimizer: str) -> None:
    want = train_offloaded(stage, None, optimizer, keys=BF16)[0]
    nbytes = {}
    for keys in (BF16, {}):
        got, engine, _ = train_offloaded(stage, path, optimizer, keys=keys)
        if keys:
            same(got, want, stage)
        assert all(b.streamed for b in engine.buckets)
        assert {s.dtype for b in engine.buckets for s in b.states.by_key.values()} == {
            torch.bfloat16 if keys else torch.float32
        }
        nbytes[bool(keys)] = sum(
            b.compute.shard.numel() * s.dtype.itemsize for b in engine.buckets for s in b.states.by_key.values()
        )
        assert engine.offload_manager.streams
        engine.offload_manager.close()
    assert nbytes[True] * 2 == nbytes[False]
    with mock.patch.object(accelerator, "_apart", True):
        zero = {"offload_optimizer": {"device": "cpu"}}
        got, engine, _ = train_offloaded(stage, None, optimizer, keys=BF16, zero=zero)
    same(got, want, stage)
    assert all(b.offloaded for b in engine.buckets)


@needs("offload")
@pytest.mark.parametrize(
    ("stage", "optimizer"),
    only_rows([(3, "AdamW")], itertools.product([1, 3], ["AdamW", "SGD", "RMSprop"])),
)
def test_the_same_bits_where_they_are_offloaded(pool: Pool, tmp_path: Path, stage: int, optimizer: str) -> None:
    pool.run(2, _away, str(tmp_path), stage, optimizer)


# ---- saved and resumed ---------------------------------------------------------------------------------------------


def _save(stage: int, path: str, config: dict[str, Any]) -> None:
    with CODES():
        _save_states(stage, path, config)


def _save_states(stage: int, path: str, config: dict[str, Any]) -> None:
    trainer = sharded_trainer(stage, config={"checkpoint": {"format": "sharded"}, **config}, max_steps=3)
    trainer.fit(GPT(dist.get_world_size(), "adamw"))
    saved = everything(trainer)
    trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        torch.save({key: saved[key] for key in ("weights", "optimizers")}, f"{path}.want")


def _load(stage: int, path: str, config: dict[str, Any], zero: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if config == BF16 else torch.float32
    config = {"checkpoint": {"format": "sharded"}, **config}
    with CODES():
        restored, _ = resume(path, stage, GPT(dist.get_world_size(), "adamw"), steps=4, config=config, zero=zero)
    if dist.get_rank() > 0:
        return
    want = torch.load(f"{path}.want", weights_only=True)
    assert all(torch.equal(restored["weights"][key], value) for key, value in want["weights"].items())
    for number, state in want["optimizers"][0]["state"].items():
        for key, value in state.items():
            got = restored["optimizers"][0]["state"][number][key]
            expected = value.to(dtype) if value.dim() > 0 else value
            assert got.dtype == expected.dtype, (number, key)
            assert torch.equal(got, expected), (number, key)


# Of the run that saves and of the one that resumes: ranks, stage, moments.
RESUMED = [
    ((2, 1, BF16), (3, 3, BF16)),
    ((1, 0, BF16), (2, 2, BF16)),
    ((2, 3, {}), (2, 1, BF16)),
    ((2, 2, BF16), (1, 3, {})),
    ((2, 1, INT8), (3, 3, INT8)),
    ((1, 0, INT8), (2, 2, INT8)),
    ((2, 3, INT8), (2, 1, {})),
]


@pytest.mark.parametrize("files", only([False], [False, True]))
@pytest.mark.parametrize(("saving", "resuming"), only_rows([RESUMED[0], RESUMED[4]], RESUMED))
def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path, saving: Any, resuming: Any, files: bool) -> None:
    """Rounded once where the new run keeps bf16, and exactly where it keeps more."""
    skip_without(saving, resuming, "offload" if files else "")
    path = str(tmp_path / "a.ckpt")
    pool.run(saving[0], _save, saving[1], path, saving[2])
    zero = blocks(str(tmp_path), resuming[1] == 3) if files else {}
    pool.run(resuming[0], _load, resuming[1], path, resuming[2], zero)


# ---- in 8 bits -----------------------------------------------------------------------------------------------------


def _coded(stage: int, kind: str, fused: bool) -> dict[str, Tensor]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    with CODES():
        return run(kind, stage, world, fused_step=fused, **INT8)[0]


@needs("low_bit_states")
@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_codes_are_the_same_at_every_stage(kind: str) -> None:
    """Optimizers without a kernel for codes step decoded copies."""
    wide, want = run(kind, 0)[0], _coded(0, kind, True)
    moved = max(float((wide[name] - value).abs().max()) for name, value in want.items())
    assert 0 < moved < 0.25 * STEPS * OPTIMIZERS[kind][1]["lr"]
    for stage, fused in ((2, True), (3, True), (3, False)):
        got = _coded(stage, kind, fused)
        for name, value in want.items():
            if fused or kind != "adamw":
                assert torch.equal(got[name], value), (stage, name)
            else:  # square roots of torch differ in the last bit, so that some values are nearest to another code
                assert (got[name] - value).abs().max() < 0.1 * STEPS * 1e-2


@needs("low_bit_states")
@pytest.mark.parametrize(("stage", "world"), only_rows([(3, 2)], itertools.product([1, 2, 3], [2, 3])))
def test_codes_are_the_same_on_all_ranks(pool: Pool, stage: int, world: int) -> None:
    want = pool.run(world, _coded, 0, "adamw", True)[0]
    for got in pool.run(world, _coded, stage, "adamw", True):
        # A sum of gradients in another order may turn a code over.
        assert all((got[name] - value).abs().max() < 0.1 * STEPS * 1e-2 for name, value in want.items())
        equal = sum(torch.equal(got[name], value) for name, value in want.items())
        assert world > 2 or equal == len(want)


@needs("low_bit_states")
def test_embeddings_and_small_parameters_stay_wide() -> None:
    model = nn.Sequential(nn.Embedding(70, 70), nn.Linear(70, 70), nn.Linear(70, 50))
    engine = lt_zero.shard(model, config_of(2, **INT8))
    forms = {span.name: b.storage.moments.name for b in engine.buckets for span in b.layout.spans}
    assert forms == {"1.weight": "int8"} | dict.fromkeys(("0.weight", "1.bias", "2.weight", "2.bias"), "float32")
    assert all(
        span.lo % 256 == 0 for b in engine.buckets if b.storage.moments.name == "int8" for span in b.layout.spans
    )


def _accessed(path: str | None) -> None:
    zero = blocks(path, params=False) if path else {}
    model = nn.Linear(64, 48)
    with CODES():
        engine = lt_zero.shard(model, config_of(2, zero=zero, **INT8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = lt_zero.ShardedOptimizer(engine, optimizer)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    # All that is kept, in memory: less than half of two fp32 moments.
    held, whole = memory_report(engine, [sharded])["optimizer"]
    assert path or held == whole == 2 * (64 * 48 * 260 // 256 + 4 * 48)
    assert not path or measured(engine, [sharded]).get("moments", 0) == 0
    weight, row = model.weight, torch.linspace(-1, 1, 64 * 48)
    want = CodedMoments().kept(row, "exp_avg") + 0.0
    set_full_state(weight, row.view(48, 64), "exp_avg")
    assert torch.equal(full_state(weight, "exp_avg"), want.view(48, 64))
    set_local_state(weight, -row, "exp_avg")
    assert torch.equal(local_state(weight, "exp_avg"), -want)  # type: ignore[arg-type]
    if path:
        engine.offload_manager.close()


@needs("low_bit_states", "offload")
@pytest.mark.parametrize("files", [False, True])
def test_coded_moments_are_read_and_set_as_others(tmp_path: Path, files: bool) -> None:
    _accessed(str(tmp_path) if files else None)


# ---- planned and refused -------------------------------------------------------------------------------------------


@needs("low_bit_states")
@pytest.mark.parametrize("fused", [True, False])
def test_the_forecast_has_half_the_moments(fused: bool) -> None:
    found = {}
    for name, keys in (("bf16", BF16), ("int8", INT8), ("fp32", {})):
        model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256)) if name == "int8" else Net(depth=8)
        config = config_of(2, fused_step=fused, **keys)
        cast = lt_zero.estimate(model, config, device="cpu", saves=False)
        engine = lt_zero.shard(model, config)
        optimizer = torch.optim.AdamW(model.parameters())
        lt_zero.ShardedOptimizer(engine, optimizer)
        (model(torch.ones(2, 256)).sum() if name == "int8" else next_token_loss(model, 0, 0, 0)).backward()
        optimizer.step()
        held = {v.untyped_storage().data_ptr(): v for s in optimizer.state.values() for v in s.values() if v.dim()}
        nbytes = sum(value.untyped_storage().nbytes() for value in held.values())
        found[name] = cast.kinds("host")["moments"]
        assert nbytes == pytest.approx(found[name], rel=0.05)
    assert found["bf16"] * 2 == found["fp32"]
    assert found["int8"] == pytest.approx(2 * (2 * 256 * 64 * 260 / 256 + 4 * 320), rel=0.05)


def test_all_optimizers_of_torch_are_known() -> None:
    found = {
        cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert len(found) > 12
    assert all(map(is_known, found - {torch.optim.Optimizer}))
    assert not is_known(OwnAdam)


class OwnAdam(torch.optim.AdamW):
    """An optimizer that may keep anything."""


@pytest.mark.parametrize("make", [OwnAdam, torch.optim.Rprop, torch.optim.ASGD])
def test_refuses_states_that_may_be_more_than_moments(make: Any) -> None:
    model = nn.Linear(3, 2)
    engine = lt_zero.shard(model, config_of(2, **BF16))
    with pytest.raises(ConfigError, match=rf"optimizer_states.dtype=bfloat16: states of {make.__name__}") as error:
        lt_zero.ShardedOptimizer(engine, make(model.parameters(), lr=0.1))
    assert error.value.problems[0].key == "optimizer_states.dtype"


@pytest.mark.parametrize(
    ("dtype", "place"), only_rows([("fp32", ""), ("int8", "nvme")], itertools.product(["fp32", "int8"], PLACES))
)
def test_loading_the_states_that_an_optimizer_has_changes_nothing(tmp_path: Path, dtype: str, place: str) -> None:
    """torch casts states to the dtype of the parameters, and those of bf16 weights have more bits."""
    skip_without(dtype, "offload" if place else "")
    zero = {"offload_optimizer": {"device": place, **({"nvme_path": str(tmp_path)} if place == "nvme" else {})}}
    keys, found = {"optimizer_states": {"dtype": dtype}, "bf16": {"enabled": True}}, []
    for loads in (False, True):
        torch.manual_seed(0)
        model = Net()
        with CODES():
            engine = lt_zero.shard(model, config_of(2, zero if place else {}, **keys))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(3):
            if loads and step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            next_token_loss(model, step, 0, 0).backward()
            optimizer.step()
        found.append(full_values(engine))
        engine.offload_manager.close()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_hook_around_loading_keeps_its_word() -> None:
    model = nn.Linear(5, 3)
    engine = lt_zero.shard(model, config_of(1, bf16={"enabled": True}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)
    model(torch.ones(2, 5).bfloat16()).sum().backward()
    optimizer.step()

    def halved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        own = {n: {**s, "exp_avg": s["exp_avg"] / 2} for n, s in state["state"].items() if n == 0}
        return {**state, "state": own}

    want = optimizer.state[model.weight]["exp_avg"] / 2
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"].float(), want, rtol=2**-8, atol=0)
    assert model.bias not in optimizer.state


@needs("low_bit_states")
def test_a_form_that_no_moments_have_is_told() -> None:
    with pytest.warns(UserWarning, match=r"optimizer_states.dtype=int8 changes nothing.* 4096 elements"):
        lt_zero.shard(nn.Linear(63, 64), config_of(1, **INT8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lt_zero.shard(nn.Linear(64, 64), config_of(1, **INT8))
        lt_zero.shard(nn.Linear(5, 3), config_of(1, **BF16))
