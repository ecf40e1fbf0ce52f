"""The engine on a GPU, stages 0-3: against one process, over NCCL of one rank, late collectives, two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import lt_zero
from lt_zero.config.precision import dtype_policy
from lt_zero.core.engine.full_params import restore_whole
from lt_zero.optim import Lamb
from lt_zero.optim.muon import orthogonalize
from tests.support.gpu_engine import LOW, STEPS, batch, far, loss_of, net, plain, sgd, sharded
from tests.support.parity import STAGES, config_of, full_values
from tests.support.paths import ROOT
from tests.support.pool import Pool
from tests.support.simulated import LateGroup, group_of_one

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_is_one_process(device: torch.device, stage: int, clip: float | None) -> None:
    assert far(full_values(sharded(device, stage, clip=clip)), plain(device, clip=clip)) < 1e-6


@pytest.mark.parametrize("mode", LOW)
@pytest.mark.parametrize("stage", STAGES)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(device: torch.device, stage: int, mode: str) -> None:
    exact = plain(device)
    allowed = 2 * far(plain(device, mode), exact)
    assert far(full_values(sharded(device, stage, mode)), exact) <= allowed


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_of_one_rank(device: torch.device, stage: int) -> None:
    with group_of_one(device) as group:
        got = full_values(sharded(device, stage, group=group))
    assert far(got, plain(device)) < 1e-6


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("stage", "prefetch"), [(1, 0), (2, 0), (3, 0), (3, 10**9)])
def test_late_collectives(device: torch.device, stage: int, prefetch: int, early: bool) -> None:
    reference = net().to(device)
    config = config_of(stage, {"stage3_prefetch_bucket_size": prefetch, "stage3_max_reuse_distance": 0})
    engine = lt_zero.shard(net(), config, device, group=LateGroup(device, early))
    for step in range(3):
        for model in (reference, engine.root):
            model(batch(device, step)).square().mean().backward()
    engine.finish_reductions()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for bucket in engine.buckets:
        for piece in bucket.pieces:
            span = bucket.layout.spans[piece.index]
            want = wanted[span.name]
            assert want is not None
            got = bucket.grads.of(piece)
            torch.testing.assert_close(got, want.reshape(-1)[piece.lo : piece.hi], rtol=1e-4, atol=1e-5)


def _rank_of_two(kind: str, stage: int) -> float:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    rank = torch.distributed.get_rank()
    return far(full_values(sharded(device, stage, rank=rank)), plain(device, ranks=2))


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_on_one_device(device: torch.device, pool: Pool, stage: int) -> None:
    assert max(pool.run(2, _rank_of_two, device.type, stage)) < 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_units(device: torch.device, stage: int) -> None:
    config = config_of(stage)
    engine = lt_zero.shard(net(), config, device)
    for unit in engine.root.children():
        unit.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    optimizer = sgd(engine.root)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(engine.root, batch(device, step), "32-true").backward()
        optimizer.step()
    assert far(full_values(engine), plain(device)) < 1e-5


NO_KERNELS = """
import torch
from tests.support.gpu_engine import far, plain, sharded
from tests.support.parity import full_values
device = torch.device("{}")
assert far(full_values(sharded(device, 3, clip=0.1)), plain(device, clip=0.1)) < 1e-6
"""


def test_without_kernels(device: torch.device) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "LT_ZERO_NATIVE": "0", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_KERNELS.format(device)], env=environment, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lamb])
@pytest.mark.parametrize(("stage", "mode"), [(0, "32-true"), (2, "bf16-mixed"), (3, "bf16-mixed"), (3, "bf16-true")])
def test_the_host_never_waits_for_the_gpu_in_a_step(cuda: torch.device, stage: int, mode: str, kind: Any) -> None:
    config = config_of(stage)
    engine = lt_zero.shard(net(), config, cuda, policy=dtype_policy(config, mode))
    optimizer = kind(engine.root.parameters(), lr=1e-3)
    owner = lt_zero.ShardedOptimizer(engine, optimizer)
    x = batch(cuda, 0)
    for step in range(5):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        try:
            optimizer.zero_grad()
            loss_of(engine.root, x, mode).backward()
            owner.grads.clip_norm(1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_model_is_restored_in_host_memory(cuda: torch.device) -> None:
    engine = sharded(cuda, 3)
    want = full_values(engine)
    restore_whole(engine)
    got = {name: p.detach() for name, p in engine.root.named_parameters()}
    assert {value.device.type for value in got.values()} == {"cpu"}
    assert far(got, want) == 0


@pytest.mark.parametrize("shape", [(64, 64), (96, 40), (40, 96)])
def test_muon_iterates_in_fp16(cuda: torch.device, shape: tuple[int, int]) -> None:
    """fp16 overflows above 65504, so a matrix is scaled before."""
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for scale in (1e-6, 1.0, 1e6):
        got = orthogonalize((matrix * scale).to(cuda))
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.cpu().float(), orthogonalize(matrix * scale), rtol=0, atol=0.01)
