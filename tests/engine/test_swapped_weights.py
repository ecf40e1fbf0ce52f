"""Weights that are replaced and come back keep their master weights, whoever writes them (bucket_weights.py, Note
[Replaced weights]).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero.config.precision import dtype_policy
from lt_zero.engine.engine import Engine
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

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
    return lt_zero.shard(model, config, policy=dtype_policy(config, mode))


def _optimizer(engine: Engine) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([p for p in engine.root.parameters() if p.requires_grad], lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)
    return optimizer


def _backward(engine: Engine, number: int) -> None:
    compute = engine.policy.compute
    with torch.autocast("cpu", compute, enabled=engine.policy.autocast):
        loss = next_token_loss(engine.root, number, 0, dist.get_rank())
    loss.backward()


def _step(engine: Engine, optimizer: torch.optim.Optimizer, number: int) -> None:
    _backward(engine, number)
    optimizer.step()
    optimizer.zero_grad()


def _train(engine: Engine, change: Change | None, steps: int = 4) -> dict[str, Tensor]:
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


ROWS: list[tuple[int, str]] = [(2, "bf16-mixed"), (3, "bf16-mixed")]


@pytest.mark.parametrize(
    ("stage", "mode"),
    only_rows(ROWS, itertools.product([0, 1, 2, 3], ["bf16-mixed", "bf16-true", "16-mixed"])),
)
def test_weights_come_back_in_full_precision(pool: Pool, stage: int, mode: str) -> None:
    pool.run(3 if stage == 3 and mode == "bf16-mixed" else 2, _as_without, stage, mode, SWAPS)
