"""Experts on the ranks of meshes with sequence, tensor and pipeline ranks, in fp64, against one process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm

import lt_zero
from lt_zero.core.engine.guard import owner_of
from lt_zero.parallel.first_gradients import FirstGradients
from lt_zero.parallel.mesh import ParallelSizes
from tests.support.blended import OneProcess, start
from tests.support.features import skip_without
from tests.support.matrix import only_rows
from tests.support.mixtures import WIDTH, Mixture
from tests.support.pipeline_saves import everything, load, save
from tests.support.pipelines import all_weights
from tests.support.pool import Pool

BOUND = {"rtol": 0, "atol": 1e-11}


def _train(sizes: ParallelSizes, stage: int, optimizer: str, splits: bool = False) -> None:
    """Compare gradients, their norm, and weights after each step."""
    run, one = start(sizes, stage, optimizer, splits=splits), OneProcess(sizes.data, optimizer)
    for step in range(2):
        loss, want = run.backward(step), one.backward(step)
        if sizes.data == 1:
            torch.testing.assert_close(loss, want, **BOUND)
        for name, parameter in run.model.named_parameters():
            found, wanted = lt_zero.full_grad(parameter), one.model.get_parameter(name).grad
            torch.testing.assert_close(found, wanted, msg=f"{name}, step {step}", **BOUND)
        norm = torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)
        assert norm > 0.05
        assert float(run.sharded.grads.clip_norm(0.05)) == pytest.approx(float(norm), rel=1e-11)
        run.optimizer.step()
        one.optimizer.step()
        for name, value in all_weights(run.engine).items():
            wanted = one.model.get_parameter(name).detach()
            torch.testing.assert_close(value, wanted, msg=f"{name}, step {step}", **BOUND)
    run.over()


SEQUENCE, TENSOR, PIPELINE = (
    ParallelSizes(1, sequence=2, expert=2),
    ParallelSizes(2, tensor=2, expert=2),
    ParallelSizes(2, pipeline=2, expert=2),
)
MESHES = [
    TENSOR,
    PIPELINE,
    ParallelSizes(2, sequence=2, expert=4),
    ParallelSizes(2, sequence=2, expert=2),
    ParallelSizes(1, sequence=2, tensor=2, expert=2),
]
ROWS = [(2, SEQUENCE, stage, name) for stage in range(4) for name in ("sgd", "adamw")]
ROWS += [(4, sizes, stage, name) for sizes in MESHES for stage in range(4) for name in ("sgd", "adamw")]
FAST = [(2, SEQUENCE, 3, "adamw"), (4, TENSOR, 3, "sgd"), (4, PIPELINE, 2, "adamw")]


@pytest.mark.parametrize(("ranks", "sizes", "stage", "optimizer"), only_rows(FAST, ROWS))
def test_experts_train_on_meshes_as_in_one_process(
    pool: Pool, ranks: int, sizes: ParallelSizes, stage: int, optimizer: str
) -> None:
    pool.run(ranks, _train, sizes, stage, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_ranks_may_have_different_tokens(pool: Pool, stage: int) -> None:
    """Experts and routers are marked: their gradients are parts of a sum."""
    pool.run(4, _train, TENSOR, stage, "sgd", True)


def _norms(stage: int) -> None:
    """Functions that handle all gradients of a model take those that are cut over tensor, expert and data ranks."""
    run, one = start(TENSOR, stage, "sgd"), OneProcess(TENSOR.data, "sgd")
    run.backward(0)
    one.backward(0)
    for order in (2.0, float("inf")):
        found, want = grad_norm(run.model, order), grad_norm(one.model, order)
        assert found.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(found[name], want[name], check_dtype=False, rtol=1e-6, atol=0)
    clipped = [torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.05) for each in (run, one)]
    torch.testing.assert_close(*clipped, rtol=1e-11, atol=0)
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.004)
    torch.nn.utils.clip_grad_value_(one.model.parameters(), 0.004)
    for name, parameter in run.model.named_parameters():
        found_grad, want_grad = lt_zero.full_grad(parameter), one.model.get_parameter(name).grad
        torch.testing.assert_close(found_grad, want_grad, msg=name, **BOUND)
    run.over()


@pytest.mark.parametrize("stage", only_rows([(0,)], [(0,), (1,), (2,), (3,)]))
def test_norms_and_clipping_of_all_gradients(pool: Pool, stage: int) -> None:
    pool.run(4, _norms, stage)


def _seen() -> set[str]:
    """The parameters whose gradients are compared between tensor ranks."""
    seen = set[str]()
    run = start(TENSOR, 1)
    with pytest.MonkeyPatch.context() as patch:
        names = {id(parameter): name for name, parameter in run.model.named_parameters()}
        patch.setattr(FirstGradients, "see", lambda first, parameter, grad: seen.add(names[id(parameter)]))
        run.backward(0)
    run.over()
    return seen


def test_tensor_ranks_compare_gradients_of_experts(pool: Pool) -> None:
    for seen in pool.run(4, _seen):
        assert {"pipe.layers.2.experts.up", "pipe.layers.2.router.weight"} <= seen
        assert "pipe.layers.1.up.weight" not in seen, "is cut"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _goes_on(folder: str, runs: list[tuple[ParallelSizes, int]]) -> None:
    """Each run goes on from the checkpoint of the one before, and trains a step, as one process does."""
    one, run, had = OneProcess(1), None, dict[str, Any]()
    for number, (sizes, stage) in enumerate(runs):
        run = start(sizes, stage)
        if number:
            load(run, f"{folder}/{number - 1}")
            found = everything(run)
            assert found.keys() == had.keys()
            for kind, values in had.items():
                same = (torch.equal(torch.as_tensor(found[kind][n]), torch.as_tensor(v)) for n, v in values.items())
                assert all(same), (number, kind)
        one.data = sizes.data
        run.train(range(number, number + 1))
        one.backward(number)
        one.optimizer.step()
        had = everything(run)
        assert len(had) > 2
        for name, value in had["weights"].items():
            torch.testing.assert_close(value, one.model.get_parameter(name).detach(), msg=f"{name}, {number}", **BOUND)
        save(run, f"{folder}/{number}")
        run.over()


WALKS = [
    (2, [(SEQUENCE, 3), (ParallelSizes(2), 1), (ParallelSizes(1, tensor=2), 0), (ParallelSizes(2, expert=2), 2)]),
    (
        4,
        [
            (TENSOR, 3),
            (PIPELINE, 1),
            (ParallelSizes(2, sequence=2, expert=4), 0),
            (ParallelSizes(4), 3),
            (ParallelSizes(1, sequence=2, tensor=2, expert=2), 2),
            (ParallelSizes(2, pipeline=2, expert=2), 3),
            (TENSOR, 0),
        ],
    ),
]


@pytest.mark.parametrize(("ranks", "runs"), only_rows([], WALKS))
def test_checkpoints_go_on_at_other_meshes(
    pool: Pool, tmp_path: Path, ranks: int, runs: list[tuple[ParallelSizes, int]]
) -> None:
    pool.run(ranks, _goes_on, str(tmp_path), runs)


# ---- inference -------------------------------------------------------------------------------------------------------


def _outputs(ranks: int, stage: int, file: str | None, keys: dict[str, Any], bound: float) -> None:
    """Each rank sees data of its own, and uses the experts of others."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **keys.get("zero_optimization", {})}
    block = {"enabled": True, "autoep_size": ranks}
    whole = Mixture()
    with lt_zero.empty_weights() if file is not None else nullcontext():
        model = Mixture()
    lt_zero.inference(model, {**keys, "zero_optimization": zero, "expert_parallel": block}, weights=file)
    for step in range(2):
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with torch.no_grad():
            torch.testing.assert_close(model(x), whole(x), rtol=bound, atol=bound)
    engine: Any = owner_of(model.head.weight)
    assert sum(bucket.layout.numel for bucket in engine.buckets) < sum(p.numel() for p in whole.parameters())
    with pytest.raises(RuntimeError, match="Run as many forwards on all ranks"), lt_zero.synced(model):
        pass


KINDS = {
    "": ({}, 1e-5),
    "host": ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, 1e-5),
    "8 bits": ({"quantize": 8}, 5e-2),
}
INFERENCE = [(2, 2, 3, "host", True), (2, 2, 0, "", False)]
INFERENCE += [(4, ranks, stage, kind, True) for ranks in (2, 4) for stage in (0, 3) for kind in ("", "8 bits")]


@pytest.mark.parametrize(("world", "ranks", "stage", "kind", "saved"), only_rows(INFERENCE[:1], INFERENCE))
def test_inference_sends_tokens_to_experts(
    pool: Pool, tmp_path: Path, world: int, ranks: int, stage: int, kind: str, saved: bool
) -> None:
    skip_without(KINDS[kind])
    torch.save(Mixture().state_dict(), tmp_path / "weights.pt")
    pool.run(world, _outputs, ranks, stage, str(tmp_path / "weights.pt") if saved else None, *KINDS[kind])
