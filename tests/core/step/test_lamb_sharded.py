"""LAMB on fragments: the steps of one process, whatever ranks, stages, memory and precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.load_states import load_full_optimizer_state
from lt_zero.common import accelerator
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.optim import Lamb
from tests.support.checkpoint_tools import everything, resume, same
from tests.support.features import needs, skip_without
from tests.support.lamb_tools import RULE, Odd, Transcript, groups_of, lamb, loss
from tests.support.lightning_tools import GPT
from tests.support.matrix import only, only_rows
from tests.support.parity import STAGES, Case, check, config_of, full_values
from tests.support.pool import Pool


def _fifty_steps() -> None:
    """In fp64 the order of sums does not show: 50 steps amplify 1e-16 by far less than 1e4.

    All 50 at every stage with three ranks; with fewer, where time allows.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    start = Odd().double()
    reference = copy.deepcopy(start)
    transcript, wanted = Transcript(groups_of(reference)), []
    for step in range(50):
        transcript.zero_grad()
        for r in range(world):
            (loss(reference, step, 0, r) / world).backward()
        transcript.step()
        wanted.append({n: p.detach().clone() for n, p in reference.named_parameters()})
    moved = {name for name, p in start.named_parameters() if not torch.equal(wanted[-1][name], p)}
    assert moved == {name for name in wanted[-1] if "never" not in name}
    for stage in STAGES:
        model = copy.deepcopy(start)
        engine = lt_zero.shard(model, config_of(stage))
        optimizer = lamb(model)
        lt_zero.ShardedOptimizer(engine, optimizer)
        steps = 50 if world == 3 or stage == world else 10
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, step, 0, rank).backward()
            optimizer.step()
            if step in (1, steps - 1):
                torch.testing.assert_close(full_values(engine), wanted[step], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", only([2], [1, 2, 3]))
def test_fifty_steps_are_those_of_one_process(pool: Pool, world: int) -> None:
    pool.run(world, _fifty_steps)


def _accumulating(stage: int) -> None:
    check(Case(Odd, loss, stage, lamb, steps=4, micro=2, zero={"stage3_param_persistence_threshold": 50}))


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_micro_batches_and_small_parameters(pool: Pool, stage: int) -> None:
    pool.run(2, _accumulating, stage)


def train(
    stage: int,
    zero: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    clip: float | None = None,
    keys: dict[str, Any] | None = None,
    start: Any = None,
    steps: range = range(4),
) -> tuple[dict[str, Tensor], Any, Any]:
    torch.manual_seed(0)
    model = Odd()
    engine = lt_zero.shard(model, config_of(stage, {"reduce_bucket_size": 100, **(zero or {})}, dtype, **(keys or {})))
    sharded = lt_zero.ShardedOptimizer(engine, lamb(model))
    if start is not None:
        engine.root.load_state_dict(start[0])
        load_full_optimizer_state(sharded, start[1])
    for step in steps:
        sharded.optimizer.zero_grad()
        loss(model, step, 0, dist.get_rank()).backward()
        if clip is not None:
            sharded.grads.clip_norm(clip)
        sharded.optimizer.step()
    return full_values(engine), engine, sharded


def close(got: dict[str, Tensor], want: dict[str, Tensor], what: Any) -> None:
    """To the last bits of fp32: norms are added up in fp64, in an order that depends on the ranks."""
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=2e-7, atol=1e-9, msg=lambda t, n=name: f"{what} {n}\n{t}")


def _sums() -> None:
    """One all-reduce per step where there are fragments, none where every rank has all."""
    names: list[str] = []
    plain = ShardGroup.sum_scalar

    def counted(self: ShardGroup, value: Tensor, name: str) -> Tensor:
        names.append(name)
        return plain(self, value, name)

    ShardGroup.sum_scalar = counted  # type: ignore[method-assign]
    try:
        for stage in STAGES:
            names.clear()
            train(stage)
            assert names == ["norms of full parameters"] * (4 if stage else 0)
    finally:
        ShardGroup.sum_scalar = plain  # type: ignore[method-assign]


def test_one_sum_per_step(pool: Pool) -> None:
    pool.run(2, _sums)


def _resting(path: str, stage: int) -> None:
    """Files, host memory, and a thread that is asked to step: the same; a rank may hold nothing of a bucket."""
    want, plain, _ = train(stage, clip=0.5)
    rows = [len(bucket.pieces) for bucket in plain.buckets]
    assert stage == 0 or dist.get_rank() == 0 or 0 in rows, "a bucket of which this rank holds nothing"
    for overlap in (False, True) if stage == 3 else (False,):
        nvme = {"device": "nvme", "nvme_path": path, "overlap_step": overlap, "ratio": 1.0 if overlap else 0.7}
        got, engine, _ = train(stage, {"offload_optimizer": nvme}, clip=0.5)
        assert any("exp_avg_sq" in b.states.by_key for b in engine.buckets) or dist.get_rank() > 0
        close(got, want, (stage, "nvme"))
        engine.offload_manager.close()
        accelerator._apart = True
        try:
            got, engine, _ = train(stage, {"offload_optimizer": {"device": "cpu", "overlap_step": overlap}}, clip=0.5)
        finally:
            accelerator._apart = False
        close(got, want, (stage, "cpu"))
        engine.offload_manager.close()


@needs("offload")
@pytest.mark.parametrize(("world", "stage"), only_rows([(3, 3)], [(1, 0), (3, 1), (3, 3)]))
def test_offload(pool: Pool, tmp_path: Path, world: int, stage: int) -> None:
    pool.run(world, _resting, str(tmp_path), stage)


LOW: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {}),
    (torch.bfloat16, {"bf16": {"bf16_master_weights_and_grads": True}}),  # computed in fp32, rounded in the kernel
    (torch.bfloat16, {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    (torch.float16, {}),
]


def _sixteen_bits(dtype: torch.dtype, keys: dict[str, Any]) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} if keys else {}
    want, _, _ = train(0, zero, dtype, 0.5, keys)
    for stage in (1, 3):
        got, engine, _ = train(stage, zero, dtype, 0.5, keys)
        assert any(bucket.storage.staged for bucket in engine.buckets) == (len(keys.get("bf16", {})) == 1)
        close(got, want, (stage, dtype))


@needs("offload")
@pytest.mark.parametrize(("dtype", "keys"), only_rows([LOW[1]], LOW), ids=str)
def test_low_precision(pool: Pool, dtype: torch.dtype, keys: dict[str, Any]) -> None:
    pool.run(2, _sixteen_bits, dtype, keys)


def _unfreezing(stage: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Odd().double()
    model.blocks.requires_grad_(False)
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage))
    mine = Lamb([p for p in model.parameters() if p.requires_grad], **RULE)
    lt_zero.ShardedOptimizer(engine, mine)
    theirs = Transcript([{"params": [p for p in reference.parameters() if p.requires_grad]}])
    for step in range(6):
        if step == 3:
            for net in (model, reference):
                net.blocks.requires_grad_(True)
            mine.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.03})
            theirs.groups.append({**RULE, "params": list(reference.blocks.parameters()), "lr": 0.03})
        mine.zero_grad()
        theirs.zero_grad()
        for r in range(world):
            (loss(reference, step, 0, r) / world).backward()
        mine.step(lambda s=step: loss(model, s, 0, rank).backward())  # type: ignore[misc]
        theirs.step()
        got = full_values(engine)
        torch.testing.assert_close(got, {n: p.detach() for n, p in reference.named_parameters()}, rtol=1e-12, atol=0)


@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_a_group_that_comes_later(pool: Pool, stage: int) -> None:
    pool.run(3, _unfreezing, stage)


def _two(stage: int) -> None:
    """An optimizer of each kind, of which one step follows one backward."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = Odd().double()
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, {"reduce_bucket_size": 100}))
    parts = [
        [p for n, p in net.named_parameters() if ("blocks" in n) == b] for net in (model, reference) for b in (0, 1)
    ]
    first, second = Lamb(parts[0], **RULE), torch.optim.AdamW(parts[1])
    for optimizer in (first, second):
        lt_zero.ShardedOptimizer(engine, optimizer)
    others = Transcript([{"params": parts[2]}]), torch.optim.AdamW(parts[3])
    for step in range(3):
        for either in (first, second, *others):
            either.zero_grad()
        loss(model, step, 0, rank).backward()
        for r in range(world):
            (loss(reference, step, 0, r) / world).backward()
        for either in (first, second, *others):
            either.step()
    torch.testing.assert_close(full_values(engine), {n: p.detach() for n, p in reference.named_parameters()})


def test_beside_another_optimizer(pool: Pool) -> None:
    pool.run(2, _two, 3)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def _save(stage: int, path: str) -> None:
    _, engine, sharded = train(stage)
    state = full_optimizer_state(sharded)
    model = {name: value.clone() for name, value in full_values(engine).items()}
    if dist.get_rank() == 0:
        assert state["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
        torch.save((model, state), path)


def _go_on(stage: int, path: str, zero: dict[str, Any]) -> Any:
    start = torch.load(path, weights_only=True)
    loaded, engine, _ = train(stage, zero, start=start, steps=range(0))
    close(loaded, start[0], "loaded")
    engine.offload_manager.close()
    got, engine, _ = train(stage, zero, start=start, steps=range(4, 7))
    engine.offload_manager.close()
    return {name: value.numpy() for name, value in got.items()}


@pytest.mark.parametrize(("stage", "place"), only_rows([(3, "nvme")], [(1, "none"), (3, "none"), (3, "nvme")]))
def test_goes_on_with_other_ranks(pool: Pool, tmp_path: Path, stage: int, place: str) -> None:
    """From two ranks to three; all stages go on as stage 0 does."""
    if place != "none":
        skip_without("offload")
    path = str(tmp_path / "saved.pt")
    pool.run(2, _save, 3, path)
    zero = {"offload_optimizer": {"device": place, "nvme_path": str(tmp_path)}}
    want, got = pool.run(3, _go_on, 0, path, {})[0], pool.run(3, _go_on, stage, path, zero)[1]
    close(*({n: torch.from_numpy(v) for n, v in run.items()} for run in (got, want)), stage)


class Unconfigured(GPT):
    """Its optimizer comes from the configuration."""

    configure_optimizers: Any = pl.LightningModule.configure_optimizers


def _visit(stage: int, target: str, source: str | None, whole: str) -> dict[str, Any]:
    """Two steps of two micro-batches each in fp16, clipped, from ``source`` on, which holds what ``whole`` says."""
    params = {"lr": 2e-2, "weight_decay": 0.1, "max_coeff": 2.0}
    config = {"checkpoint": {"format": "sharded"}, "optimizer": {"type": "Lamb", "params": params}}
    options: dict[str, Any] = {"config": {**config, "fp16": {"initial_scale_power": 4}}, "precision": "16-mixed"}
    options |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 99}
    module, steps = Unconfigured(dist.get_world_size()), 4 if source else 2
    restored, trainer = resume(source, stage, module, steps=steps, **options)  # type: ignore[arg-type]
    assert type(trainer.optimizers[0]).__name__ == "Lamb"
    assert trainer.optimizers[0].param_groups[0]["max_coeff"] == 2.0
    trainer.save_checkpoint(target)
    after = everything(trainer)
    if dist.get_rank() == 0 and source:
        want = torch.load(whole, weights_only=True)
        same(restored["weights"], want["weights"])
        same(restored["optimizers"], want["optimizers"])
        assert any(state["exp_avg"].any() for state in restored["optimizers"][0]["state"].values())
    elif dist.get_rank() == 0:
        torch.save(after, whole)
    return {name: value.numpy() for name, value in after["weights"].items()}


@pytest.mark.slow
def test_trainer_by_name_then_other_ranks(pool: Pool, tmp_path: Path) -> None:
    """Mixed precision, loss scale, clipping and accumulation; saved by two ranks, resumed by three and by one."""
    saved, whole = str(tmp_path / "saved"), str(tmp_path / "whole")
    pool.run(2, _visit, 3, saved, None, whole)
    three, one = (pool.run(n, _visit, s, str(tmp_path / f"{n}"), saved, whole)[0] for n, s in ((3, 1), (1, 0)))
    for name, value in three.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
