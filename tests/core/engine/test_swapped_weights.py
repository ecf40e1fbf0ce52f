"""Weights that are replaced and come back keep their master weights, whoever writes them (bucket_weights.py, Note
[Replaced weights]).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.engine import Engine
from tests.support.features import needs, skip_without
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool
from tests.support.simulated_device import machine

Change = Callable[[Engine], None]
State = dict[str, Any]
BF16 = torch.bfloat16


def _shown(engine: Engine) -> State:
    """A copy of what the module shows."""
    with lt_zero.gathered(engine.root):
        return {name: value.detach().clone() for name, value in engine.root.state_dict().items()}


def _halves(state: State) -> State:
    return {name: value * 0.5 for name, value in state.items()}


def _engine(stage: int, mode: str = "bf16-mixed", zero: dict[str, Any] | None = None, **keys: Any) -> Engine:
    torch.manual_seed(0)
    model = Net()
    model.blocks[0].requires_grad_(False)  # frozen weights, too, keep what they were loaded with
    config = config_of(stage, zero, torch.float16 if mode.startswith("16") else BF16, **keys)
    return lt_zero.shard(model, config, torch.device("cpu"), policy=dtype_policy(config, mode))


def _optimizer(engine: Engine) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([p for p in engine.root.parameters() if p.requires_grad], lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)
    return optimizer


def _backward(engine: Engine, number: int) -> None:
    compute = engine.policy.compute
    with torch.autocast("cpu", compute, enabled=engine.policy.autocast):
        loss = next_token_loss(engine.root, number, 0, engine.world.rank)
    loss.backward()


def _step(engine: Engine, optimizer: torch.optim.Optimizer, number: int) -> None:
    _backward(engine, number)
    optimizer.step()
    optimizer.zero_grad()


def _train(engine: Engine, change: Change | None, steps: int = 3) -> dict[str, Tensor]:
    """Train, with ``change`` before each step but the second; returns master and frozen weights."""
    optimizer = _optimizer(engine)
    for number in range(steps):
        if change is not None and number != 1:
            change(engine)
        _step(engine, optimizer, number)
    return full_values(engine)


# ---- swaps -----------------------------------------------------------------------------------------------------------


def _swap(engine: Engine) -> None:
    cached = _shown(engine)
    engine.root.load_state_dict(_halves(cached))
    with lt_zero.gathered(engine.root):
        assert all(torch.equal(p, 0.5 * cached[name]) for name, p in engine.root.named_parameters())
    engine.root.load_state_dict(cached)


def _swap_in_fp32(engine: Engine) -> None:
    """The average has full precision, and the copy was widened."""
    cached = {name: value.float() for name, value in _shown(engine).items()}
    average = {name: value * 0.3 + 1e-3 for name, value in cached.items()}
    engine.root.load_state_dict(average)
    for name, value in full_values(engine).items():
        assert torch.equal(value, average[name]), f"{name}: the precision of the state dict reaches the master weights"
    engine.root.load_state_dict(cached)


def _swap_nested(engine: Engine) -> None:
    """A swap within a swap, of parts of the model, in inference mode as Lightning's validations."""
    with torch.inference_mode():
        outer = _shown(engine)
        engine.root.load_state_dict({name: value.float() * 0.7 for name, value in outer.items()})
        inner = _shown(engine)
        part = {k.removeprefix("blocks.1."): v * 2 for k, v in inner.items() if k.startswith("blocks.1.")}
        engine.root.blocks[1].load_state_dict(part)
        others = {k: v * 3 for k, v in inner.items() if not k.startswith("blocks.1.")}
        engine.root.load_state_dict(others, strict=False)
        engine.root.load_state_dict(inner)
        for name in outer:
            engine.root.load_state_dict({name: outer[name]}, strict=False)


def _swap_by_hand(engine: Engine) -> None:
    """As SGM's LitEma; meanwhile a checkpoint is saved, which takes edits over."""
    parameters = list(engine.root.parameters())
    with lt_zero.gathered(engine.root):
        kept = [p.detach().clone() for p in parameters]
    with lt_zero.gathered(engine.root, write=True):
        for p in parameters:
            p.data.copy_(p.data.float() * 0.9)
    full_values(engine)
    with lt_zero.gathered(engine.root, write=True):
        for p, value in zip(parameters, kept, strict=True):
            p.data.copy_(value)


def _perturb(engine: Engine) -> None:
    """As in SAM by hand: weights are moved for a backward, and back."""
    parameters = list(engine.root.parameters())
    with lt_zero.gathered(engine.root):
        kept = [p.detach().clone() for p in parameters]
    with torch.no_grad(), lt_zero.gathered(engine.root, write=True):
        for p in parameters:
            p.add_(0.01)
    _backward(engine, 0)
    for p in parameters:
        p.grad = None
    with torch.no_grad(), lt_zero.gathered(engine.root, write=True):
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)


def _mixed(engine: Engine) -> None:
    """Loaded, and written back by hand."""
    cached = _shown(engine)
    engine.root.load_state_dict({name: value.float() * 0.9 for name, value in cached.items()})
    with lt_zero.gathered(engine.root, write=True):
        for name, p in engine.root.named_parameters():
            p.data.copy_(cached[name])


def _by_master(engine: Engine) -> None:
    """Through ``set_full_master``, and back from values in the compute dtype."""
    cached = _shown(engine)
    for name, p in engine.root.named_parameters():
        lt_zero.set_full_master(p, cached[name] * 0.5)
    for name, p in engine.root.named_parameters():
        lt_zero.set_full_master(p, cached[name])


SWAPS = [_swap, _swap_in_fp32, _swap_nested, _swap_by_hand, _perturb, _mixed, _by_master]


def _as_without(stage: int, mode: str, swaps: list[Change], zero: dict[str, Any] | None = None) -> None:
    want = _train(_engine(stage, mode, zero), None)
    assert not all(torch.equal(v, v.bfloat16().float()) for v in want.values()), "there is precision to lose"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for swap in swaps:
            engine = _engine(stage, mode, zero)
            got = _train(engine, swap)
            for name, value in want.items():
                assert torch.equal(got[name], value), (
                    f"stage {stage}, {mode}, {swap.__name__}: {name} is {(got[name] - value).abs().max():.1e} away"
                )
            assert not engine.replaced


ROWS: list[tuple[int, str]] = [(3, "bf16-mixed")]


@pytest.mark.parametrize(
    ("stage", "mode"),
    only_rows(ROWS, itertools.product([0, 1, 2, 3], ["bf16-mixed", "bf16-true", "16-mixed"])),
)
def test_weights_come_back_in_full_precision(pool: Pool, stage: int, mode: str) -> None:
    pool.run(3 if stage == 3 and mode == "bf16-mixed" else 2, _as_without, stage, mode, SWAPS)


FEATURES: dict[str, dict[str, Any]] = {
    "overlap_step": {"offload_optimizer": {"device": "cpu", "overlap_step": True}},
    "qwZ": {"zero_quantized_weights": True},
}


@pytest.mark.parametrize(
    ("stage", "feature"),
    only_rows([(3, "overlap_step"), (3, "qwZ")], [*itertools.product([0, 2, 3], ["overlap_step"]), (3, "qwZ")]),
)
def test_weights_come_back_with_other_features(pool: Pool, stage: int, feature: str) -> None:
    """While a step runs in the background, and where gathers round weights to 8 bits."""
    skip_without(FEATURES[feature])
    pool.run(2, _as_without, stage, "bf16-mixed", [_swap, _swap_by_hand], FEATURES[feature])


@needs("offload")
@pytest.mark.parametrize(("stage", "device"), only_rows([(3, "cpu")], itertools.product([0, 2, 3], ["cpu", "nvme"])))
def test_offloaded_weights_come_back(tmp_path: Path, stage: int, device: str) -> None:
    """On a simulated device, whose order of copies is checked."""
    zero: dict[str, Any] = {"offload_optimizer": {"device": device}}
    if device == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(tmp_path)
    with machine():
        want = _train(_engine(stage, zero=zero), None)
        engine = _engine(stage, zero=zero)
        for name, value in _train(engine, _swap_by_hand if device == "cpu" else _swap_nested).items():
            assert torch.equal(value, want[name]), name
        assert not engine.replaced


# ---- other loads -----------------------------------------------------------------------------------------------------


class Read:
    """Stands for a tensor, as those of litgpt's ``lazy_load``: it lacks the methods, and is read when used."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.shape = value.shape
        self.dtype = value.dtype

    def size(self) -> torch.Size:
        return self.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.value if isinstance(arg, Read) else arg for arg in args), **(kwargs or {}))


def _masters(engine: Engine, want: State) -> None:
    got = full_values(engine)
    for name, value in want.items():
        assert name not in got or torch.equal(got[name], value.float()), name


def _objects(engine: Engine) -> None:
    torch.manual_seed(5)
    state = Net().state_dict()
    engine.root.load_state_dict({name: Read(value) for name, value in state.items()})
    _masters(engine, state)


def _as_they_are(engine: Engine) -> None:
    """Values of fp32 that happen to be values of bf16 are not taken for rounded ones."""
    with torch.no_grad(), lt_zero.gathered(engine.root.scale, write=True):
        engine.root.scale.fill_(1.0)
    lt_zero.set_full_master(engine.root.scale, torch.full_like(engine.root.scale, 1.001, dtype=torch.float32))
    state = Net().state_dict()
    state["scale"] = torch.ones_like(state["scale"])
    engine.root.load_state_dict(state)
    _masters(engine, state)


def _one_of_many(engine: Engine) -> None:
    """Rows of a state dict that are changed, or stay."""
    before, cached = full_values(engine), _shown(engine)
    cached["blocks.1.up.weight"][3] = 0.25
    engine.root.load_state_dict(cached)
    before["blocks.1.up.weight"][3] = 0.25
    _masters(engine, before)


def _step_between(engine: Engine) -> None:
    """The weights of an earlier step come back rounded, with one warning, on rank 0."""
    optimizer = _optimizer(engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(engine, optimizer, 0)
        cached = _shown(engine)
        engine.root.load_state_dict(_halves(cached))
        engine.root.load_state_dict(cached)
        for number in range(1, 4):
            _step(engine, optimizer, number)
            assert not caught
            if number == 3:
                break
        engine.root.load_state_dict(cached)
        assert all(
            torch.equal(value.to(cached[name].dtype), cached[name]) for name, value in full_values(engine).items()
        )
        for number in range(4, 6):
            _step(engine, optimizer, number)
            engine.root.load_state_dict(cached)
    texts = [str(each.message) for each in caught]
    assert len(texts) == (dist.get_rank() == 0), texts
    assert all("values of bfloat16 in the place of master weights in float32" in text for text in texts), texts


def _edit_elsewhere(engine: Engine) -> None:
    """A load does not hide an edit of another parameter."""
    up, down = engine.root.blocks[1].up, engine.root.blocks[1].down
    assert engine.owner[id(up.weight)][0] is engine.owner[id(down.weight)][0]
    up.weight.data.fill_(0.3)
    down.load_state_dict({name: value * 2 for name, value in down.state_dict().items()})
    # Digits that the edit did not show stay.
    assert (full_values(engine)["blocks.1.up.weight"].bfloat16() == torch.tensor(0.3).bfloat16()).all()


def _other_loader(engine: Engine) -> None:
    """Where a module loads something else than the state dict has, or nothing, that is what counts."""
    up, down = engine.root.blocks[1].up, engine.root.blocks[1].down
    before = full_values(engine)
    up._load_from_state_dict = lambda *_: None
    plainly = down._load_from_state_dict

    def doubled(state: State, prefix: str, *more: Any) -> None:
        plainly({name: value * 2 for name, value in state.items()}, prefix, *more)

    down._load_from_state_dict = doubled
    torch.manual_seed(5)
    state = Net().state_dict()
    engine.root.load_state_dict(state)
    for name in ("blocks.1.up.weight", "blocks.1.up.bias"):
        state[name] = before[name]
    got = full_values(engine)
    for name in ("blocks.1.down.weight", "blocks.1.down.bias"):
        # Digits that the compute copy did not show stay.
        assert torch.equal(got[name].bfloat16(), (state.pop(name) * 2).bfloat16()), name
    _masters(engine, state)


def _by_one_rank(engine: Engine) -> None:
    """Replicas of master weights stay equal if rank 0 alone loads, inside of ``gathered``."""
    torch.manual_seed(5)
    state = Net().state_dict()
    with lt_zero.gathered(engine.root, write=True):
        if dist.get_rank() == 0:
            engine.root.load_state_dict(state)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, full_values(engine))
    for name, value in every[0].items():
        assert torch.equal(value.bfloat16(), state[name].bfloat16()), name
        assert all(torch.equal(other[name], value) for other in every), name


def _loads(stage: int) -> None:
    every = [_objects, _as_they_are, _one_of_many, _step_between, _by_one_rank]
    for check in [*every, *([_edit_elsewhere, _other_loader] if stage < 3 else [])]:
        check(_engine(stage))
    torch.manual_seed(0)
    plain = lt_zero.shard(Net(), config_of(stage))
    _objects(plain)
    plain.root.load_state_dict(Net().state_dict())
    assert not plain.replaced, "fp32 weights are shown as they are"


@pytest.mark.parametrize("stage", only([0, 3], [0, 1, 2, 3]))
def test_loads(pool: Pool, stage: int) -> None:
    pool.run(2, _loads, stage)
