"""NCCL between ranks that share one GPU: collectives by themselves, and training beside one process.

With the CPU in the GPU's place all of it runs over gloo. See tests/support/gpu_ranks.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lt_zero
from lt_zero.common import accelerator
from tests.support import gpu_collectives, pipelines
from tests.support.features import needs, skip_without
from tests.support.gpu import GPU
from tests.support.gpu_collectives import place
from tests.support.gpu_engine import STEPS, batch, far, net, plain, sharded, started
from tests.support.gpu_layers import by_flash, check_attention, check_experts, check_tensor_ranks
from tests.support.gpu_ranks import pool_of, texts_of
from tests.support.parity import OPTIMIZERS, RELEASE, STAGES, full_values
from tests.support.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]  # longer than ``Pool.run`` and ``texts_of`` wait for ranks

CLIP = 0.1
EAGER = RELEASE | {"stage3_prefetch_bucket_size": 10**9}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Workers whose default process group is NCCL's."""
    workers = pool_of(GPU.type)
    if GPU.type == "cpu" or torch.cuda.is_available():
        # Their start, which takes minutes on a machine with other work, does not count for the limit of a test here.
        # A test that it ended would leave it to the next one.
        workers.ensure(4)
    yield workers
    workers.close()


# ---- collectives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("form", gpu_collectives.FORMS)
def test_collectives(device: torch.device, ranks: Pool, form: str, world: int) -> None:
    ranks.run(world, gpu_collectives.check, device.type, form)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("form", gpu_collectives.OF_NCCL)
def test_collectives_of_nccl_alone(cuda: torch.device, ranks: Pool, form: str, world: int) -> None:
    ranks.run(world, gpu_collectives.check, cuda.type, form)


# ---- the engine ----------------------------------------------------------------------------------------------------


def _beside_one_process(kind: str, stage: int, mode: str, zero: dict[str, Any], clip: float | None = None) -> None:
    """A few steps; in 16 bits at most twice as far from fp32 as plain PyTorch is."""
    device, world = place(kind), dist.get_world_size()
    got = full_values(sharded(device, stage, mode, rank=dist.get_rank(), clip=clip, **zero))
    exact = plain(device, ranks=world, clip=clip)
    allowed = 1e-5 if mode == "32-true" else 2 * far(plain(device, mode, ranks=world, clip=clip), exact)
    assert far(got, exact) <= allowed


@pytest.mark.parametrize(("world", "clip"), [(2, None), (3, CLIP)])
@pytest.mark.parametrize("stage", STAGES)
def test_stages(device: torch.device, ranks: Pool, stage: int, world: int, clip: float | None) -> None:
    """Clipping hides the factor of all gradients, and shows their norm."""
    ranks.run(world, _beside_one_process, device.type, stage, "32-true", RELEASE if stage == 3 else {}, clip)


def test_stages_with_weights_gathered_early(device: torch.device, ranks: Pool) -> None:
    ranks.run(2, _beside_one_process, device.type, 3, "32-true", EAGER)


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [2, 3])
def test_stages_in_bf16(device: torch.device, ranks: Pool, stage: int, mode: str) -> None:
    ranks.run(2, _beside_one_process, device.type, stage, mode, RELEASE if stage == 3 else {})


@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["MiCS", "hpZ"])
def test_replicas(device: torch.device, ranks: Pool, zero: dict[str, Any]) -> None:
    skip_without(zero)
    ranks.run(4, _beside_one_process, device.type, 3, "32-true", RELEASE | zero)


def _in_few_bits(kind: str, stage: int, zero: dict[str, Any]) -> None:
    """The same on all ranks, and near one process.

    8 bits err by 1/254 of a block's largest element, in each step and before and after the sum of all ranks.
    """
    device, world = place(kind), dist.get_world_size()
    got = full_values(sharded(device, stage, rank=dist.get_rank(), **zero))
    exact = plain(device, ranks=world)
    begun = {name: p.detach() for name, p in net().named_parameters()}
    assert 0 < far(got, exact) <= STEPS * 2 / 254 * far(begun, exact)
    flat = torch.cat([value.flatten().float() for value in got.values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


@needs("zero_plus_plus")
@pytest.mark.parametrize(
    ("stage", "zero"),
    [(3, RELEASE | {"zero_quantized_weights": True}), (2, {"zero_quantized_gradients": True})],
    ids=["qwZ", "qgZ"],
)
def test_exchanges_in_few_bits(device: torch.device, ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    ranks.run(2, _in_few_bits, device.type, stage, zero)


def _without_waits(kind: str, stage: int) -> None:
    """The last of some steps ends in an error if the host waits for the GPU."""
    device = place(kind)
    _, step = started(device, stage, "bf16-mixed", clip=CLIP)
    x = batch(device, 0, dist.get_rank())
    for mode in ["default"] * 4 + ["error"] * 2:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_never_waits_for_the_gpu_in_a_step(cuda: torch.device, ranks: Pool, stage: int) -> None:
    ranks.run(2, _without_waits, cuda.type, stage)


# ---- ranks that share layers, sequences and stages -----------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_ranks(device: torch.device, ranks: Pool, stage: int) -> None:
    ranks.run(2, check_tensor_ranks, device.type, stage)


def test_expert_ranks(device: torch.device, ranks: Pool) -> None:
    ranks.run(2, check_experts, device.type)


@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_sequence_ranks(device: torch.device, ranks: Pool, method: str) -> None:
    # Causal with gathered keys asks for other kernels than the function allows.
    function = by_flash if method == "ulysses" else F.scaled_dot_product_attention
    ranks.run(2, check_attention, device.type, function, torch.bfloat16, {"is_causal": True, "method": method})


def _pipeline(kind: str, stage: int, schedule: str) -> None:
    """Two pipeline stages, and data ranks beside them."""
    device = place(kind)
    shape = pipelines.Ranks(data=dist.get_world_size() // 2, pipeline=2)

    def layers() -> list[Any]:
        return pipelines.specs(tied=False)

    run = pipelines.start(shape, stage, "sgd", layers, {"schedule": schedule}, device=device)
    reference = pipelines.Model(layers).to(device)
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        _, norm = run.step(step, limit=0.5)
        _, wanted = pipelines.reference_step(reference, optimizer, step, shape.data, limit=0.5)
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=1e-6)
    weights = pipelines.all_weights(run.engine)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights[name].cpu(), value.detach().cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "stage", "schedule"),
    [(2, 1, "1F1B"), (2, 3, "GPipe"), (2, 1, "Interleaved1F1B"), (4, 1, "1F1B"), (4, 3, "GPipe")],
)
def test_pipelines(device: torch.device, ranks: Pool, world: int, stage: int, schedule: str) -> None:
    ranks.run(world, _pipeline, device.type, stage, schedule)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def _trained(kind: str, stage: int) -> tuple[Any, Any]:
    """An engine of ``lt_zero.initialize``, and a step of it that returns its loss."""
    block = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": block,
    }
    engine, *_ = lt_zero.initialize(model=net(), config=config)

    def step(number: int) -> float:
        loss = engine(batch(place(kind), number, dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return engine, step


def _resumed(kind: str, stage: int, folder: str) -> None:
    """Loading continues a run bit for bit: its losses, and its weights at the end."""
    engine, step = _trained(kind, stage)
    step(0)
    engine.save_checkpoint(folder, tag="one")
    wanted = [step(number) for number in (1, 2)]
    again, step_again = _trained(kind, stage)
    again.load_checkpoint(folder, tag="one")
    assert [step_again(number) for number in (1, 2)] == wanted
    values = engine.module_state_dict()
    for name, value in again.module_state_dict().items():
        assert torch.equal(value, values[name]), name
    for each in (engine, again):
        each.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints(device: torch.device, ranks: Pool, stage: int, tmp_path: Path) -> None:
    ranks.run(2, _resumed, device.type, stage, str(tmp_path))


# ---- faults --------------------------------------------------------------------------------------------------------


def _error_of(engine: Any, run: Any) -> str:
    """The error that ends ``run``, as a Trainer handles it: the device comes to rest, as what is stuck is aborted."""
    with pytest.raises(RuntimeError) as caught:
        run()
    engine.world.give_up(caught.value)
    accelerator.synchronize(engine.device)
    return str(caught.value)


def _other_modules(kind: str) -> str:
    """One rank runs the second module, the other one the third, of the same size."""
    device = place(kind)
    engine, step = started(device, 3, stage3_max_reuse_distance=0)
    x = batch(device, 0)
    for _ in range(2):
        step(x)
    layers: list[nn.Module] = list(engine.root.children())

    def run() -> None:
        layers[1 + dist.get_rank()](layers[0](x)).square().mean().backward()
        step(x)

    return _error_of(engine, run)


def test_a_fault_of_other_modules(device: torch.device, tmp_path: Path) -> None:
    texts = texts_of(device.type, 2, tmp_path, _other_modules, device.type)
    assert texts.keys() == {0, 1}
    for text in texts.values():
        assert "all-gather of '1'" in text
        assert "all-gather of '2'" in text


def _one_saves(kind: str, folder: str) -> str:
    """One rank goes on training, the other one saves: each waits for what the other one does not launch."""
    engine, step = _trained(kind, 3)
    step(0)
    run = (lambda: step(1)) if dist.get_rank() == 0 else (lambda: engine.save_checkpoint(folder))
    return _error_of(engine, run)


def test_a_fault_that_hangs(device: torch.device, tmp_path: Path) -> None:
    texts = texts_of(device.type, 2, tmp_path, _one_saves, device.type, str(tmp_path / "saved"))
    assert texts.keys() == {0, 1}
    for text in texts.values():
        assert "`engine.save_checkpoint` was called on rank 1" in text
        assert "and not on rank 0" in text


def _ends(kind: str) -> str:
    """Rank 1 ends in the middle of a step."""
    device = place(kind)
    engine, step = started(device, 3, stage3_max_reuse_distance=0)
    x = batch(device, 0)
    for _ in range(2):
        step(x)
    if dist.get_rank() == 1:
        engine.root(x)
        os._exit(0)
    return _error_of(engine, lambda: step(x))


def test_a_fault_that_ends_a_rank(device: torch.device, tmp_path: Path) -> None:
    texts = texts_of(device.type, 2, tmp_path, _ends, device.type)
    assert texts.keys() == {0}
    assert "Rank 1 ended without an error message" in texts[0]
