"""Tensor parallelism with low precision, accumulation, frozen parameters, recomputation, offload and the rest."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lt_zero.common import accelerator
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.common.errors import ConfigError
from lt_zero.config.precision import dtype_policy
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.build import built_by
from tests.support.features import skip_without
from tests.support.matrix import only, only_rows
from tests.support.parallel_nets import (
    Net,
    Ranks,
    Run,
    adapted,
    all_weights,
    batch,
    frozen,
    loss_of,
    parallelize,
    reference_step,
    start,
)
from tests.support.parity import OPTIMIZERS, STAGES
from tests.support.pool import Pool

MESH, STEPS = Ranks(2, 2), 3


def equals_one_process(
    run: Run,
    reference: Net,
    optimizer: str,
    micro: int = 1,
    limit: float = 0.05,
    every: bool = False,
) -> None:
    """Train both, and compare weights and norms. ``every``: reduce after each micro-batch."""
    expected = OPTIMIZERS[optimizer]([p for p in reference.parameters() if p.requires_grad])
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for number in range(micro):
            run.engine.reducer.sync = every or number == micro - 1
            (loss_of(run.model, step, run.data_rank, number) / micro).backward()
        norm = run.sharded.grads.clip_norm(limit)
        want = reference_step(reference, expected, step, run.ranks.data, micro, limit)
        assert want is not None
        assert want > limit
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)
        run.optimizer.step()
    got = all_weights(run.engine)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-5, atol=2e-6, msg=name)


# ---- low precision ---------------------------------------------------------------------------------------------------

MODES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "bf16-mixed": torch.bfloat16}


def low_loss(model: nn.Module, mode: str, step: int, data: int) -> Tensor:
    x = batch(step, data)
    if mode.endswith("true"):
        result: Tensor = model(x.to(MODES[mode])).float()
    elif mode.endswith("mixed"):
        with torch.autocast("cpu", MODES[mode]):
            result = model(x).float()
    else:
        result = model(x.double())
    return result.square().mean()


def plain(mode: str, optimizer: str, data: int, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Plain PyTorch on one data rank: master weights of 32 bits, or in mode "exact" all of 64."""
    master = Net().double() if mode == "exact" else Net()
    made = OPTIMIZERS[optimizer](master.parameters())
    for step in range(STEPS):
        made.zero_grad()
        for rank in range(data):
            model = copy.deepcopy(master).to(MODES[mode]) if mode.endswith("true") else copy.deepcopy(master)
            if mesh is not None:
                parallelize(model, mesh, True)
            low_loss(model, mode, step, rank).backward()
            for mine, theirs in zip(master.parameters(), model.parameters(), strict=True):
                grad = theirs.grad.full_tensor() if isinstance(theirs.grad, DTensor) else theirs.grad
                assert grad is not None
                part = grad.to(mine.dtype) / data
                mine.grad = part if mine.grad is None else mine.grad + part
        made.step()
    return {name: p.detach() for name, p in master.named_parameters()}


def _errors(mode: str, stage: int, optimizer: str, ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", tuple(ranks), mesh_dim_names=("data", "tensor"))["tensor"]
    exact, theirs = plain("exact", optimizer, ranks.data), plain(mode, optimizer, ranks.data, mesh)
    run = start(ranks, stage, optimizer, policy=partial(dtype_policy, mode=mode))
    for step in range(STEPS):
        run.optimizer.zero_grad()
        low_loss(run.model, mode, step, run.data_rank).backward()
        run.optimizer.step()
    for name, got in all_weights(run.engine).items():
        assert got.dtype == torch.float32
        error, bound = (got - exact[name]).abs().max(), (theirs[name] - exact[name]).abs().max()
        assert error <= 2 * bound + 1e-7, f"{name}: error {error:g}, plain PyTorch {bound:g}"


@pytest.mark.parametrize(
    ("mode", "stage", "optimizer", "ranks"),
    only_rows(
        [("bf16-mixed", 2, "adamw", Ranks(1, 2)), ("16-true", 3, "sgd", Ranks(1, 2))],
        itertools.product(MODES, STAGES, OPTIMIZERS, [Ranks(1, 2), MESH]),
    ),
)
def test_error_is_that_of_plain_pytorch(pool: Pool, mode: str, stage: int, optimizer: str, ranks: Ranks) -> None:
    pool.run(ranks.all, _errors, mode, stage, optimizer, ranks)


def _gated(stage: int, bad: set[int], drop: bool) -> dict[str, Tensor]:
    """At steps ``bad`` the gradient of one parameter overflows on rank 3; with ``drop`` these steps are left out."""
    block = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 9}
    run = start(MESH, stage, "adamw", fp16=block)
    gate = LossScaleController(run.engine.policy, built_by(run.engine).on_min_scale)
    for step in range(4):
        if drop and step in bad:
            continue
        run.optimizer.zero_grad()
        gate.before_backward([run.sharded])
        loss = low_loss(run.model, "16-true", step, run.data_rank) * gate.scale
        if step in bad:
            name = "layers.1.up.bias"
            parameter = run.model.get_parameter(name)
            factor = float("inf") if dist.get_rank() == 3 else 1.0
            handle = parameter.register_hook(lambda grad, factor=factor: grad * factor)
        loss.backward()
        if step in bad:
            handle.remove()
        gate.examine(run.sharded)
        assert gate.skip == (step in bad)
        gate.unscale(run.sharded)
        if not gate.skip:
            run.optimizer.step()
        gate.conclude(run.sharded, 0)
    assert gate.skipped == (0 if drop else len(bad))
    return all_weights(run.engine)


def _with_and_without(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _gated(stage, {1, 2}, False), _gated(stage, {1, 2}, True)


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_all_ranks_skip_a_step_that_overflows_on_one(pool: Pool, stage: int) -> None:
    with_overflow, without = pool.run(4, _with_and_without, stage)[0]
    assert all(torch.equal(value, with_overflow[name]) for name, value in without.items())


# ---- what is trained, and when it is reduced -------------------------------------------------------------------------


def _trains(stage: int, optimizer: str, model: Callable[[], Net], micro: int, every: bool) -> None:
    run, reference = start(MESH, stage, optimizer, model), model()
    equals_one_process(run, reference, optimizer, micro, 0.001, every)


@pytest.mark.parametrize(
    ("stage", "optimizer", "model", "every"),
    only_rows(
        [(3, "adamw", adapted, False)],
        itertools.product(STAGES, OPTIMIZERS, [Net, frozen, adapted], [False, True]),
    ),
)
def test_accumulates_and_trains_some(
    pool: Pool, stage: int, optimizer: str, model: Callable[[], Net], every: bool
) -> None:
    """Over three micro-batches; with frozen parameters, and with adapters beside parts of frozen matrices."""
    pool.run(4, _trains, stage, optimizer, model, 3, every)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _saves_memory(stage: int, ranks: Ranks, options: dict[str, Any], apart: bool) -> None:
    accelerator._apart = apart
    try:
        equals_one_process(start(ranks, stage, "adamw", **options), Net(), "adamw", micro=2)
    finally:
        accelerator._apart = False


RECOMPUTES = {"activation_checkpointing": {"mode": "full"}}
CPU_STATES = {"zero": {"offload_optimizer": {"device": "cpu"}}}
BESIDE = {"zero": {"offload_optimizer": {"device": "cpu", "overlap_step": True}}}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [Ranks(1, 2), MESH])
@pytest.mark.parametrize(
    ("stage", "options"),
    only_rows(
        [(0, RECOMPUTES), (3, RECOMPUTES), (1, CPU_STATES), (3, CPU_STATES), (2, BESIDE), (3, BESIDE)],
        itertools.product(STAGES, [RECOMPUTES, CPU_STATES, BESIDE]),
    ),
)
def test_recomputes_and_offloads(pool: Pool, stage: int, ranks: Ranks, options: dict[str, Any]) -> None:
    if options is RECOMPUTES:
        skip_without("activation_checkpointing")
    pool.run(ranks.all, _saves_memory, stage, ranks, options, options is not RECOMPUTES)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [Ranks(1, 2), MESH])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloads_states_and_parameters(pool: Pool, tmp_path: Path, stage: int, ranks: Ranks, device: str) -> None:
    where = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    zero: dict[str, Any] = {"offload_optimizer": where}
    if stage == 3:
        zero["offload_param"] = {**where, **({"max_in_cpu": 0} if device == "nvme" else {})}
    pool.run(ranks.all, _saves_memory, stage, ranks, {"zero": zero}, device == "cpu")


# ---- other sets of ranks ---------------------------------------------------------------------------------------------

REPLICAS = {"mics_shard_size": 2}
SECOND_COPY = {"zero_hpz_partition_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "zero"), [(1, REPLICAS), (2, REPLICAS), (3, REPLICAS), (3, SECOND_COPY)])
def test_replicas_of_shards_and_second_copies(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    """On 2 data ranks with 2 parts each: whole tensors have 2 replicas of 2 shards, parts one."""
    skip_without(zero)
    pool.run(4, _saves_memory, stage, MESH, {"zero": zero}, False, env={"LT_ZERO_SHARED_MEMORY": "0"})


def _does_not_fit(zero: dict[str, Any]) -> None:
    (key,) = zero
    with pytest.raises(ConfigError, match=rf"zero_optimization\.{key}=2 does not divide .* 1.*remove the key"):
        start(Ranks(1, 2), 3, zero=zero)


@pytest.mark.parametrize("zero", [REPLICAS])
def test_replicas_that_do_not_fit_are_refused(pool: Pool, zero: dict[str, Any]) -> None:
    """Parts are on one data rank each."""
    pool.run(2, _does_not_fit, zero)


# ---- compilation -----------------------------------------------------------------------------------------------------


def _compile(model: Net) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def _compiles(stage: int) -> None:
    torch.compiler.reset()
    run = start(Ranks(1, 2), stage, "adamw", prepare=_compile, sequence=False)
    assert all(is_compiled(layer) for layer in run.model.layers)
    equals_one_process(run, Net(), "adamw")
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_compiled_blocks(pool: Pool, stage: int) -> None:
    pool.run(2, _compiles, stage)
