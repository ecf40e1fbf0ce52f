"""Released parameters: metadata works, values are loud, loading and copying do the right thing."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero.core.identity import check_identity
from tests.models import Net, next_token_loss, tokens
from tests.parity import STAGES, Case, check, config_of, full_values
from tests.pool import Pool


def _engine(stage: int, dtype: torch.dtype | None = None) -> Any:
    torch.manual_seed(0)
    return lt_zero.shard(Net(), config_of(stage, dtype=dtype))


def _metadata() -> None:
    engine, whole = _engine(3), Net()
    for (name, p), (_, q) in zip(engine.root.named_parameters(), whole.named_parameters(), strict=True):
        assert (p.shape, p.numel(), p.dim(), p.dtype, p.device) == (q.shape, q.numel(), q.dim(), q.dtype, q.device), (
            name
        )
        assert p.requires_grad
        assert p.is_leaf
        assert p.grad is None
        assert isinstance(p, nn.Parameter)
        assert torch.zeros_like(p).shape == q.shape
        assert torch.zeros_like(p).is_contiguous()
        assert len(p) == len(q)


def test_metadata_of_released_parameters(pool: Pool) -> None:
    pool.run(2, _metadata)


def _reads() -> None:
    engine = _engine(3)
    p = engine.root.blocks[0].up.weight
    reads = [
        lambda: p + 1,
        lambda: p.data,
        lambda: p.detach(),
        lambda: p.sum().item(),
        lambda: p.norm(),
        lambda: p[0],
        lambda: p.cpu(),
        lambda: copy.deepcopy(p),
        lambda: torch.save(engine.root.state_dict(), io.BytesIO()),
        lambda: p.mul_(2),
        lambda: torch.equal(p, p),
        lambda: engine.root.double(),
        lambda: p.numpy(force=True),
        lambda: p.tolist(),
        lambda: torch.stack([p, p]),
        lambda: p == 0,
    ]
    for read in reads:
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.weight'|'embedding.weight'|'scale'"):
            read()
    with lt_zero.gathered(p):
        assert torch.isfinite(p).all()
        with lt_zero.gathered(engine.root):
            assert torch.isfinite(p.sum())
        assert torch.isfinite(p).all(), "the inner context must not release what the outer one holds"
    with pytest.raises(RuntimeError, match="lt_zero.gathered"):
        p.sum()


def test_reading_values_is_loud(pool: Pool) -> None:
    pool.run(2, _reads)


def _load(stage: int, low: bool) -> None:
    dtype = torch.bfloat16 if low else None
    engine = _engine(stage, dtype)
    torch.manual_seed(5)
    other = Net()
    state = other.state_dict()
    missing = engine.root.load_state_dict(state)
    assert not missing.missing_keys
    for name, value in full_values(engine).items():
        assert torch.equal(value, state[name]), f"{name}: the checkpoint's own precision reaches the master weights"
    engine.root.blocks[0].load_state_dict(Net().blocks[0].state_dict())
    next_token_loss(engine.root, 0, 0, dist.get_rank()).backward()
    engine.settle_grads()


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_load_state_dict_needs_no_context(pool: Pool, stage: int, low: bool) -> None:
    pool.run(3, _load, stage, low)


def _lost_edit(stage: int) -> None:
    engine = _engine(stage, torch.bfloat16)
    optimizer = torch.optim.SGD(engine.root.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    root = engine.root
    if stage == 3:
        with pytest.raises(RuntimeError, match="scale"), torch.no_grad():
            root.scale.mul_(2)
        return
    with torch.no_grad():
        root.scale.mul_(2)
    assert (full_values(engine)["scale"] == 2).all(), "what is saved has the edit"
    with torch.no_grad():
        root.scale.mul_(2)
    next_token_loss(root, 0, 0, 0).backward()
    optimizer.step()
    assert (full_values(engine)["scale"] > 3).all(), "the step starts from the edit"


@pytest.mark.parametrize("stage", STAGES)
def test_edits_are_taken_over_or_reported(pool: Pool, stage: int) -> None:
    pool.run(2, _lost_edit, stage)


def _write_one_rank(stage: int, low: bool) -> None:
    engine = _engine(stage, torch.bfloat16 if low else None)
    before = full_values(engine)
    with torch.no_grad(), lt_zero.gathered(engine.root, write=True):
        if dist.get_rank() == 0:
            engine.root.blocks[1].up.weight[3].fill_(0.25)
    after = full_values(engine)
    for name, value in after.items():
        if name == "blocks.1.up.weight":
            assert (value[3] == 0.25).all()
            value, before[name] = value[:3], before[name][:3]
        assert torch.equal(value, before[name]), f"{name} was not edited and keeps its precision"


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_rank_zero_wins_in_gathered(pool: Pool, stage: int, low: bool) -> None:
    pool.run(3, _write_one_rank, stage, low)


def _identity() -> None:
    engine = _engine(2)
    check_identity(engine)
    engine.root.load_state_dict(Net().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="replaced"):
        check_identity(engine)
    engine = _engine(1)
    engine.root.double()
    with pytest.raises(RuntimeError, match="cast, moved"):
        check_identity(engine)


def test_replaced_and_cast_parameters_are_found(pool: Pool) -> None:
    pool.run(2, _identity)


def test_gathered_without_an_engine() -> None:
    net = Net()
    with lt_zero.gathered(net, write=True), torch.no_grad():
        net.scale.fill_(2.0)
    assert (net.scale == 2).all()
    net(tokens(0, 0, 0))


def _clamped(stage: int) -> None:
    def clamp(model: nn.Module, step: int) -> None:
        with torch.no_grad(), lt_zero.gathered([model.blocks[0].up.weight, model.scale], write=True):
            model.blocks[0].up.weight.clamp_(-0.1, 0.1)
            model.scale.mul_(1.5)

    check(Case(Net, next_token_loss, stage, "adamw", after_step=clamp))


@pytest.mark.parametrize("stage", STAGES)
def test_edits_inside_gathered(pool: Pool, stage: int) -> None:
    pool.run(3, _clamped, stage)
