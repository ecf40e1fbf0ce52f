"""States in files, as checkpoints, user code and the Trainer see them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.load_states import load_full_optimizer_state
from lt_zero.common import accelerator
from lt_zero.core.engine.full_params import restore_whole
from lt_zero.core.engine.whole_model import full_state_dict
from tests.support.lightning_tools import GPT, weights
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.offload_runs import OPTIMIZERS, blocks, same, train
from tests.support.overflowing import make_trainer
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool


def _go_on(engine: Any, sharded: Any, first: int, steps: int = 2) -> dict[str, Tensor]:
    for step in range(first, first + steps):
        sharded.optimizer.zero_grad()
        for micro in range(2):
            next_token_loss(engine.root, step, micro, dist.get_rank()).float().backward()
        sharded.grads.clip_norm(0.5)
        sharded.optimizer.step()
    return full_values(engine)


def _resting(engine: Any) -> bool:
    return not any(store.nbytes for bucket in engine.buckets for store in bucket.stores() if store.streamed)


def _fresh(stage: int, path: str, optimizer: str) -> Any:
    torch.manual_seed(9)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, zero=blocks(path, stage == 3)))
    return engine, lt_zero.ShardedOptimizer(
        engine, getattr(torch.optim, optimizer)(model.parameters(), **OPTIMIZERS[optimizer])
    )


def _life(path: str, stage: int, optimizer: str) -> None:
    want, plain, one = train(stage, None, optimizer)
    got, resting, two = train(stage, path, optimizer)
    saved = [full_optimizer_state(one), full_optimizer_state(two)]
    assert _resting(resting)
    models = [full_state_dict(plain), full_state_dict(resting)]
    assert _resting(resting)
    if dist.get_rank() == 0:
        same(models[1], models[0], "state dict")
        for number, state in saved[0]["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved[1]["state"][number][key])), key
    box = [models[1], saved[1]]
    dist.broadcast_object_list(box)
    loaded, three = _fresh(stage, path, optimizer)
    loaded.root.load_state_dict(box[0])
    load_full_optimizer_state(three, box[1])
    assert _resting(loaded)
    want = _go_on(plain, one, 4)
    same(_go_on(resting, two, 4), want, "goes on")
    same(_go_on(loaded, three, 4), want, "resumed")
    for engine in (plain, loaded):
        with lt_zero.gathered(engine.root, write=True), torch.no_grad():
            for p in engine.root.parameters():
                p.mul_(0.5)
    same(_go_on(loaded, three, 6), _go_on(plain, one, 6), "edited")
    assert _resting(loaded)
    whole = three.optimizer.state_dict()["state"]
    rows = three.optimizer.state
    for state, p in zip(whole.values(), rows, strict=True):
        for key, value in state.items():
            assert value is rows[p][key]
            assert not isinstance(value, Tensor) or value.abs().sum() > 0, "read when somebody asks for all"
    want = full_values(plain)
    restore_whole(loaded)
    same(dict(loaded.root.named_parameters()), want, "restored")
    for engine in (resting, loaded):
        engine.offload_manager.close()


@pytest.mark.parametrize(
    ("stage", "optimizer"), only_rows([(3, "AdamW")], itertools.product([0, 1, 3], ["AdamW", "SGD"]))
)
def test_saved_loaded_edited(pool: Pool, tmp_path: Path, stage: int, optimizer: str) -> None:
    pool.run(2, _life, str(tmp_path), stage, optimizer)


def _frozen(path: str) -> None:
    results = []
    for where in (None, path):
        torch.manual_seed(0)
        model = Net()
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
        engine = lt_zero.shard(model, config_of(3, zero=blocks(where)))
        sharded = lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(model.parameters(), lr=1e-2))
        first = _go_on(engine, sharded, 0)
        if where:
            frozen = [b.weights.frozen for b in engine.buckets if b.weights.frozen is not None]
            assert frozen
            assert all(store.streamed for store in frozen)
        for p in model.blocks[0].parameters():  # unfrozen late
            p.requires_grad_(True)
        results.append((first, _go_on(engine, sharded, 2)))
        if where:
            assert _resting(engine)
            engine.offload_manager.close()
    for got, want in zip(results[1], results[0], strict=True):
        same(got, want, "frozen")


def test_frozen_weights_rest_too(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _frozen, str(tmp_path))


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_wide_frozen_weights_are_gathered_in_the_compute_dtype(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept in fp32, but moving that to the device would take twice the bytes."""
    monkeypatch.setattr(accelerator, "_apart", True)
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    device = {"device": where} if where == "cpu" else {"device": where, "nvme_path": str(tmp_path), "max_in_cpu": 0}
    engine = lt_zero.shard(model, config_of(3, zero={"offload_param": device}, dtype=torch.bfloat16))
    optimizer = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1)).optimizer
    frozen, trained = engine.buckets
    assert (frozen.weights.gather_source.dtype, frozen.weights.precision) == (torch.bfloat16, torch.float32)

    def output() -> Tensor:
        x = torch.ones(2, 48, dtype=torch.bfloat16)
        kept = model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
        seen: list[Tensor] = []
        model(x).sum().backward()
        kept.remove()
        return seen[0]

    def expected(weight: Tensor) -> Tensor:
        bias = full_values(engine)["0.bias"].bfloat16()
        return nn.functional.linear(torch.ones(2, 48, dtype=torch.bfloat16), weight.bfloat16(), bias)

    assert torch.equal(output(), expected(before))
    with lt_zero.gathered(model[0].weight, write=True), torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(output(), expected(2 * before))
    optimizer.step()
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    output()
    optimizer.step()
    assert frozen.weights.gather_source is not frozen.weights.copy or where == "nvme"
    after = full_values(engine)["0.weight"]
    assert not torch.equal(after, 2 * before)
    assert torch.equal(output(), expected(after))
    engine.offload_manager.close()


def _memory(path: str) -> tuple[int, int]:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    zero = blocks(path, buffer_count=3)
    zero["offload_param"]["buffer_count"] = 5
    engine = lt_zero.shard(model, config_of(3, zero=zero))
    sharded = lt_zero.ShardedOptimizer(engine, torch.optim.AdamW(model.parameters(), lr=1e-3))
    most = 0
    group = max(4 * 4 * (b.shard_range[1] - b.shard_range[0]) for b in engine.buckets)
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
        for store in [s for b in engine.buckets for s in b.stores() if s.streamed]:

            def counted(begin_step: Any = store.begin_step) -> None:
                nonlocal most
                begin_step()
                most = max(most, sum(s.nbytes for b in engine.buckets for s in b.stores() if s.streamed))

            store.begin_step = counted  # type: ignore[method-assign]
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    engine.offload_manager.close()
    return most, group


def test_three_buckets_have_memory_at_a_time(pool: Pool, tmp_path: Path) -> None:
    for most, group in pool.run(1, _memory, str(tmp_path)):
        assert group < most <= 3 * group


def _fit(stage: int, mode: str, path: str | None, steps: int, ckpt: str | None, save: str | None) -> Any:
    zero = {**blocks(path, stage == 3), "stage": stage, "stage3_param_persistence_threshold": 0}
    trainer = make_trainer(mode, stage, {"zero_optimization": zero}, max_steps=steps, use_distributed_sampler=False)
    module = GPT(dist.get_world_size(), "adamw")
    trainer.fit(module, ckpt_path=ckpt)
    if save:
        trainer.save_checkpoint(save)
    return weights(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-true"])
@pytest.mark.parametrize("stage", [1, 3])
def test_through_the_trainer(pool: Pool, tmp_path: Path, mode: str, stage: int) -> None:
    want = pool.run(2, _fit, stage, mode, None, 4, None, None)[0]
    save = str(tmp_path / "half.ckpt")
    pool.run(2, _fit, stage, mode, str(tmp_path), 2, None, save)
    for path in (None, str(tmp_path)):  # resumes with and without files
        got = pool.run(2, _fit, stage, mode, path, 4, save, None)[0]
        for name, value in want.items():
            assert np.array_equal(got[name], value), (path, name)
