"""Released parameters: metadata works, values are loud, loading and copying do the right thing."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero.checkpoint.native.plain import to_plain
from lt_zero.core.engine.absent_tensor import AbsentTensor
from lt_zero.core.engine.full_params import take_over_assigned
from tests.support.features import needs
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss, tokens
from tests.support.parity import STAGES, Case, check, config_of, full_values
from tests.support.pool import Pool


def _engine(stage: int, dtype: torch.dtype | None = None) -> Any:
    torch.manual_seed(0)
    return lt_zero.shard(Net(), config_of(stage, dtype=dtype))


# What needs the shape, dtype and device of a released parameter, and no values.
METADATA: list[Callable[[Any, Any], object]] = [
    lambda p, x: (p.shape, p.numel(), p.dim(), p.dtype, p.device, len(p), p.nbytes, p.is_leaf, p.requires_grad, p.grad),
    lambda p, x: (
        p.stride(),
        p.stride(0),
        p.is_contiguous(),
        p.is_floating_point(),
        p.type(),
        isinstance(p, nn.Parameter),
    ),
    lambda p, x: (x.type_as(p).dtype, x.to(p).dtype, x.to(p.data), torch.result_type(x, p), torch.result_type(p, x)),
    lambda p, x: (x[0].expand_as(p).shape, x[0].expand_as(p.data).shape, x[:1].view_as(p[:1, :1]).shape),
    lambda p, x: (
        p.new_zeros(3),
        p.new_full((2,), 3.0),
        p.data.new_ones(2),
        torch.zeros_like(p),
        torch.ones_like(p.data),
    ),
    lambda p, x: (torch.zeros_like(p).is_contiguous(), torch.empty_like(p.t()).shape, torch.randn_like(p.data).shape),
    lambda p, x: (p.squeeze().shape, p.view(-1).shape, p.flatten().shape, p.reshape(-1, 1).shape, p.unsqueeze(0).shape),
    lambda p, x: (p.t().shape, p.t().stride(), p.t().is_contiguous(), p.T.shape, p.mT.shape, p.transpose(0, 1).shape),
    lambda p, x: (p[0].shape, p[0, 1].shape, p[:, 1:3].stride(), p[None, ..., 0].shape, p.view(-1)[3:5].shape),
    lambda p, x: ([row.shape for row in p], [q.shape for q in p.chunk(2)], [q.shape for q in torch.split(p, 2)]),
    lambda p, x: (p.unbind()[0].shape, p.expand(3, *p.shape).shape, p.narrow(0, 1, 2).shape, p.diagonal().shape),
    lambda p, x: (torch.transpose(p, 0, 1).shape, torch.flatten(p).shape, torch.permute(p, (1, 0)).stride()),
    lambda p, x: (
        p.data.shape,
        p.data.dim(),
        p.data.dtype,
        p.data.t()[0].shape,
        p.data.view(-1).numel(),
        p.data.stride(),
    ),
    lambda p, x: (p.detach().shape, p.detach().view(-1).shape, p.data.data.shape, p.data.is_floating_point()),
    lambda p, x: (p.view(-1).requires_grad, p.t().is_leaf, p.view(-1)[0].requires_grad, p.data.requires_grad),
    lambda p, x: (
        p.data.is_leaf,
        p.t().detach().requires_grad,
        p in {p},
        nn.init._calculate_fan_in_and_fan_out(p.data),
    ),
]


def _same(got: object, want: object) -> bool:
    if isinstance(got, tuple) and isinstance(want, tuple):
        return len(got) == len(want) and all(map(_same, got, want))
    return torch.equal(got, want) if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) else got == want


def _metadata() -> None:
    engine, whole = _engine(3), Net()
    for (name, p), (_, q) in zip(engine.root.named_parameters(), whole.named_parameters(), strict=True):
        assert repr(p).startswith(f"Parameter containing:\nReleasedTensor(shape={tuple(q.shape)}, dtype=torch.float32")
        assert (str(p), f"{p}") == (repr(p), f"{p!s}")
        for number, function in enumerate(METADATA if p.dim() == 2 else METADATA[:1]):
            got, want = function(p, torch.ones(3, dtype=torch.float64)), function(q, torch.ones(3, dtype=torch.float64))
            assert _same(got, want), (name, number, got, want)
    assert not any(bucket.resident for bucket in engine.buckets)
    for shown in (lambda m: m, lambda m: nn.ParameterList(m.parameters()), lambda m: nn.ParameterDict({"p": m.scale})):
        assert repr(shown(engine.root)) == repr(shown(whole))


def test_metadata_of_released_parameters(pool: Pool) -> None:
    pool.run(2, _metadata)


# Reads and writes of views of a released parameter, with its data.
USES: list[Callable[[Any, Any], object]] = [
    lambda p, data: p.view(-1).sum(),
    lambda p, data: p.t() @ data,
    lambda p, data: p[0][0].item(),
    lambda p, data: bool(p[0, 0] > 0),
    lambda p, data: float(p[0, 0]),
    lambda p, data: p[0].tolist(),
    lambda p, data: p.t().numpy(force=True),
    lambda p, data: copy.deepcopy(p[0]),
    lambda p, data: p[p > 0],
    lambda p, data: p[torch.tensor([0])],
    lambda p, data: p.t().contiguous(),
    lambda p, data: p.t().reshape(-1),
    lambda p, data: torch.cat([p.view(-1), torch.ones(3)]),
    lambda p, data: torch.ones(3).copy_(p.view(-1)[:3]),
    lambda p, data: torch.where(torch.ones(3) > 0, torch.ones(3), p.view(-1)[:3]),
    lambda p, data: p.view(-1).add_(1),
    lambda p, data: p[0].fill_(1),
    lambda p, data: data.__setitem__(0, 1.0),
    lambda p, data: data.clone(),
    lambda p, data: data.copy_(torch.ones(p.shape)),
    lambda p, data: data.zero_(),
    lambda p, data: nn.init.normal_(data),
    lambda p, data: data.resize_(3),
    lambda p, data: data.set_(),
    lambda p, data: data.t_(),
    lambda p, data: data.share_memory_(),
    lambda p, data: data.untyped_storage(),
    lambda p, data: data.data_ptr(),
    lambda p, data: torch.from_dlpack(data),
    lambda p, data: np.asarray(data),
    lambda p, data: pickle.dumps(data),
    lambda p, data: torch.tensor(data),
    lambda p, data: setattr(data, "data", torch.ones(p.shape)),
    lambda p, data: torch._foreach_norm([data]),
    lambda p, data: nn.utils.parameters_to_vector([p]),
]


def _uses() -> None:
    engine = _engine(3)
    p = engine.root.blocks[0].up.weight
    kept = p.view(-1)
    row = p[0]
    data = p.data
    for number, use in enumerate(USES):
        with pytest.raises(RuntimeError) as caught:
            use(p, data)
        assert "'blocks.0.up.weight' are sharded over 2 ranks and not in memory here" in str(caught.value), number
        assert "lt_zero.gathered(parameter)" in str(caught.value)
    with lt_zero.gathered(engine.root, write=True):
        for view in (kept, row, data):
            with pytest.raises(RuntimeError, match="'blocks.0.up.weight' are sharded over 2 ranks"):
                view.sum()
            with pytest.raises(RuntimeError, match="'blocks.0.up.weight' are sharded over 2 ranks"):
                view.zero_()
        torch.manual_seed(0)
        want = Net().blocks[0].up.weight
        assert torch.equal(p.detach(), want)
        assert torch.equal(p.view(-1)[3:5].clone(), want.view(-1)[3:5])


def test_views_of_released_parameters_have_no_values(pool: Pool) -> None:
    pool.run(2, _uses)


def _reads() -> None:
    engine = _engine(3)
    p = engine.root.blocks[0].up.weight
    reads = [
        lambda: p + 1,
        lambda: p.data.sum(),
        lambda: p.detach().clone(),
        lambda: p.detach().cpu(),
        lambda: p.detach().to("cpu"),
        lambda: copy.deepcopy(p.detach()),
        lambda: torch.equal(p.detach(), torch.zeros(p.shape)),
        lambda: p.detach().data.sum(),
        lambda: p.detach().numpy(),
        lambda: p.detach().untyped_storage(),
        lambda: copy.deepcopy(engine.root.state_dict()),
        lambda: Net().load_state_dict(engine.root.state_dict()),
        lambda: engine.root.load_state_dict(engine.root.state_dict()),
        lambda: pickle.dumps(engine.root.state_dict()),
        lambda: to_plain({"mine": engine.root.state_dict()}),
        lambda: p.sum().item(),
        lambda: p.norm(),
        lambda: p[0].sum(),
        lambda: p.cpu().sum(),  # on a CPU that is the parameter itself
        lambda: p.to(torch.float64),
        lambda: copy.deepcopy(p),
        lambda: torch.save(engine.root.state_dict(), io.BytesIO()),
        lambda: p.mul_(2),
        lambda: engine.root.double(),
        lambda: p.numpy(force=True),
        lambda: p.tolist(),
        lambda: torch.stack([p, p]),
        lambda: p == 0,
    ]
    for read in reads:
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.weight'|'embedding.weight'|'scale'"):
            read()
    state, whole = engine.root.state_dict(), Net().state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in whole.items()}
    assert not any(value.requires_grad for value in state.values())
    assert not torch.equal(p, torch.zeros(p.shape)), "ranks compare together"
    with lt_zero.gathered(engine.root):
        assert not any(isinstance(value, AbsentTensor) for value in engine.root.state_dict().values())
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
    engine.finish_reductions()


@pytest.mark.parametrize(("stage", "low"), only_rows([(1, False), (3, True)], itertools.product(STAGES, [False, True])))
def test_load_state_dict_needs_no_context(pool: Pool, stage: int, low: bool) -> None:
    pool.run(3 if stage == 3 else 2, _load, stage, low)


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


@pytest.mark.parametrize("stage", only([1, 3], STAGES))
def test_edits_are_taken_over_or_reported(pool: Pool, stage: int) -> None:
    pool.run(2, _lost_edit, stage)


def _clip(model: nn.Module, step: int) -> None:
    """As in a Wasserstein GAN, in the two ways that people write it."""
    for number, p in enumerate(model.parameters()):
        if number % 2:
            p.data.clamp_(-0.2, 0.2)
        else:
            p.data = p.data.clamp(-0.2, 0.2)


def _clip_low(stage: int) -> None:
    engine = _engine(stage, torch.bfloat16)
    optimizer = torch.optim.SGD(engine.root.parameters(), lr=0.1, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(5):
        _clip(engine.root, step)
        next_token_loss(engine.root, step, 0, dist.get_rank()).backward()
        optimizer.param_groups[0]["lr"] = 0.1 if step < 4 else 0.0
        optimizer.step()
        optimizer.zero_grad()
    limit = torch.tensor(0.2).bfloat16()
    for name, value in full_values(engine).items():
        assert value.bfloat16().abs().max() <= limit, f"{name}: the last step, by 0, starts from what was clipped"


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_edits_through_data(pool: Pool, stage: int) -> None:
    pool.run(2, _clipped, stage)


def _clipped(stage: int) -> None:
    check(Case(Net, next_token_loss, stage, after_step=_clip))
    _clip_low(stage)


def _clip_at(place: str, folder: str) -> None:
    """Edits begin late; states in files, and the compute copy has their dtype, so that the whole run can be exact."""
    optim = {"device": "nvme", "nvme_path": folder, "overlap_step": place == "beside backward"}
    runs = []
    for config in (config_of(1, {"offload_optimizer": optim}), None):
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config) if config is not None else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if engine is not None:
            lt_zero.ShardedOptimizer(engine, optimizer)
        for step in range(7):
            late = step > 4 and place == "after backward"
            for p in model.parameters() if step > 4 and not late else ():
                p.data.clamp_(-0.2, 0.2)
            next_token_loss(model, step, 0, 0).backward()
            for p in model.parameters() if late else ():
                p.data.clamp_(-0.2, 0.2)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(full_values(engine) if engine is not None else dict(model.named_parameters()))
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], msg=lambda text, name=name: f"{name}: {text}")


@needs("offload")
@pytest.mark.parametrize("place", ["before forward", "beside backward", "after backward"])
def test_edits_through_data_that_begin_late(pool: Pool, place: str, tmp_path: Path) -> None:
    pool.run(2, _clip_at, place, str(tmp_path))


def _clip_late(stage: int) -> None:
    engine = _engine(stage, torch.bfloat16)
    optimizer = torch.optim.SGD(engine.root.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(6):
        next_token_loss(engine.root, step, 0, 0).backward()
        if step == 5:
            for p in engine.root.parameters():
                p.data.fill_(0.25)
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
    for name, value in full_values(engine).items():
        assert (value.bfloat16() == 0.25).all(), f"{name}: digits that the edit did not show stay, no more"


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_an_edit_between_backward_and_step(pool: Pool, stage: int) -> None:
    pool.run(2, _clip_late, stage)


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


@pytest.mark.parametrize(("stage", "low"), only_rows([(1, False), (3, True)], itertools.product(STAGES, [False, True])))
def test_rank_zero_wins_in_gathered(pool: Pool, stage: int, low: bool) -> None:
    pool.run(2, _write_one_rank, stage, low)


def _assigned(stage: int) -> None:
    engine = _engine(stage)
    before = full_values(engine)
    weight, moved = engine.root.blocks[0].up.weight, engine.root.blocks[1].up.bias
    weight.data = torch.full_like(weight, 0.25 + dist.get_rank())
    if dist.get_rank() == 1:
        moved.data = torch.zeros_like(moved)  # on another rank, where rank 0's value wins
    take_over_assigned(engine)
    after = full_values(engine)
    for name, value in after.items():
        want = torch.full_like(value, 0.25) if name == "blocks.0.up.weight" else before[name]
        assert torch.equal(value, want), name
    assert (weight == 0.25).all()
    bucket, index = engine.owner[id(weight)]
    assert weight.data_ptr() == bucket.compute.views[index].data_ptr()
    if dist.get_rank() == 1:
        engine.root.scale.data = engine.root.scale.data.double()
    with pytest.raises(RuntimeError, match=r"'scale' \(it was \(10,\), torch.float32, cpu\) was cast, moved or"):
        take_over_assigned(engine)


@pytest.mark.parametrize("stage", only([2], [0, 1, 2]))
def test_what_is_assigned_to_parameters_is_taken_over_or_named(pool: Pool, stage: int) -> None:
    pool.run(2, _assigned, stage)


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


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_edits_inside_gathered(pool: Pool, stage: int) -> None:
    pool.run(2, _clamped, stage)
