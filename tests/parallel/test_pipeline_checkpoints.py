"""A checkpoint of a pipeline goes on with any other stages, ranks and ZeRO stage, and has the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lt_zero
from lt_zero.checkpoint.live_weights import export_engine
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.core.engine.whole_model import full_state_dict
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.parallel import LayerSpec
from lt_zero.training.checkpoints import frozen_names
from lt_zero.training.restore import Contents, ModuleContents, restore
from tests.support.lightning_tools import quick
from tests.support.matrix import only, only_rows
from tests.support.parity import OPTIMIZERS, STAGES
from tests.support.pipeline_saves import Counting, Mesh, everything, layers, load, mesh, save, train
from tests.support.pipelines import VOCABULARY, WIDTH, Model, Ranks, Run, all_weights, batch, reference_step, start
from tests.support.pool import Pool

MESHES = [
    mesh(pipeline=2),
    mesh(pipeline=3),
    mesh(data=2, pipeline=2),
    mesh(tensor=2, pipeline=2),
    mesh(pipeline=2, schedule="Interleaved1F1B"),
    mesh(),
    mesh(data=3),
]
STEPS = 2


def _save(source: Mesh, stage: int, optimizer: str, path: str) -> dict[str, Any]:
    run = source.start(stage, optimizer)
    train(run, range(STEPS))
    save(run, path)
    return everything(run)


def _resume(ranks: Mesh, stage: int, optimizer: str, path: str) -> tuple[Any, Any]:
    """All that the run goes on from, and the weights after one more step."""
    run = ranks.start(stage, optimizer)
    load(run, path)
    restored = everything(run)
    train(run, range(STEPS, STEPS + 1))
    return restored, all_weights(run.engine) if ranks.ranks.tensor == 1 else None


Saved = Callable[[Mesh, int, str], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoint of a mesh at a stage, saved when it is first asked for, and what its run had."""
    known: dict[str, Any] = {}

    def of(source: Mesh, *setting: Any) -> Any:
        if (key := repr((source, setting))) not in known:
            path = str(tmp_path_factory.mktemp("saved") / "0.ckpt")
            known[key] = path, pool.run(source.ranks.all, _save, source, *setting, path)[0]
        return known[key]

    return of


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for kind, values in expected.items():
        assert found[kind].keys() == values.keys(), kind
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(found[kind][name]), torch.as_tensor(value)), f"{kind} of {name}"


TWO, THREE, DATA, TENSOR, LOOPED, ONE, DATA_ONLY = MESHES
ELSEWHERE = [  # one process and several, each kind of stages
    (TENSOR, 3, THREE, 1),
    (LOOPED, 1, DATA, 2),
    (TWO, 0, ONE, 3),
]


@pytest.mark.parametrize(
    ("source", "before", "ranks", "stage"), only_rows(ELSEWHERE, itertools.product(MESHES, STAGES, MESHES, STAGES))
)
def test_goes_on_elsewhere(pool: Pool, saved: Saved, source: Mesh, before: int, ranks: Mesh, stage: int) -> None:
    """With all bits; then one step is that of one process."""
    optimizer = "sgd" if ranks.ranks.data == 3 else "adamw"
    path, had = saved(source, before, optimizer)
    assert had["weights"].keys() == dict(Model(layers).named_parameters()).keys()
    got, after = pool.run(ranks.ranks.all, _resume, ranks, stage, optimizer, path)[0]
    same(got, had)
    reference = Model(layers)
    expected = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(STEPS + 1):
        reference_step(reference, expected, step, source.ranks.data if step < STEPS else ranks.ranks.data)
    for name, parameter in reference.named_parameters() if after is not None else ():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("source", "stage"), only_rows([row[:2] for row in ELSEWHERE], itertools.product(MESHES[:5], STAGES))
)
def test_a_checkpoint_has_the_whole_model_in_order(saved: Saved, tmp_path: Path, source: Mesh, stage: int) -> None:
    path, had = saved(source, stage, "adamw")
    with closing(Archive(path)) as archive:
        assert list(archive.weights) == list(Model(layers).state_dict())
    lt_zero.export(path, tmp_path / "weights.safetensors", dtype=torch.float32)
    exported = load_file(tmp_path / "weights.safetensors")
    values = {**had["weights"], **had["buffers"]}
    assert exported.keys() == values.keys()
    assert all(torch.equal(value, values[name].to(value.dtype)) for name, value in exported.items())


def _whole(ranks: Mesh, stage: int, folder: str) -> None:
    """What is gathered on rank 0 is that of one process, and goes on in a pipeline."""
    run = ranks.start(stage, "adamw")
    train(run, range(STEPS))
    had, world, reference = everything(run), run.engine.world, Model(layers)
    path = Path(folder, "weights.pt")
    state, packed = full_state_dict(run.engine), full_optimizer_state(run.sharded)
    export_engine(run.engine, path, dtype=torch.float32)
    if world.rank == 0:
        values = {**had["weights"], **had["buffers"]}
        for found in (state, torch.load(path)):
            assert list(found) == list(reference.state_dict())
            assert all(torch.equal(value, values[name]) for name, value in found.items())
        optimizer = OPTIMIZERS["adamw"](reference.parameters())
        optimizer.load_state_dict(packed)
        for name, parameter in reference.named_parameters():
            saved = optimizer.state[parameter]
            assert all(torch.equal(saved[key], had[key][name]) for key in ("exp_avg", "exp_avg_sq"))
            assert float(saved["step"]) == had["steps"][name] == STEPS
    else:
        assert state == packed == {}
    state, packed = (world.host_broadcast(each, "of one file") for each in (state, packed))
    again = ranks.start(stage, "adamw")
    assert again.model.load_state_dict(state) == ([], [])
    part = ModuleContents(again.model, again.engine, optimizers={0: (again.optimizer, packed)})
    restore(Contents((part,)), world, LossScaleController(again.engine.policy))
    same(everything(again), had)
    own = next(name for name, _ in again.model.pipe.named_parameters())
    for wrong in ({**state, "pipe.layers.99.weight": torch.ones(1)}, {k: v for k, v in state.items() if own not in k}):
        with pytest.raises(RuntimeError, match="Unexpected key|Missing key"):
            again.model.load_state_dict(wrong)


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(LOOPED, 1)], itertools.product(MESHES[:5], STAGES)))
def test_rank_0_gathers_the_whole_model(pool: Pool, tmp_path: Path, ranks: Mesh, stage: int) -> None:
    pool.run(ranks.ranks.all, _whole, ranks, stage, str(tmp_path))


def _of_parameters(ranks: Mesh, stage: int) -> None:
    """Each rank reads and sets what it has: layers of its stage, and with the others what all have."""
    run, reference = ranks.start(stage, "adamw"), Model(layers)
    expected, whole = OPTIMIZERS["adamw"](reference.parameters()), dict(reference.named_parameters())
    train(run, range(1))
    reference_step(reference, expected, 0, 1)
    run.backward(1, clears=True)
    expected.zero_grad()
    reference.loss(*batch(1, 0)).backward()
    for name, parameter in run.model.named_parameters():
        want = whole[name]
        torch.testing.assert_close(lt_zero.full_master(parameter), want.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lt_zero.full_grad(parameter), want.grad, rtol=1e-4, atol=1e-6)
        found = lt_zero.full_state(parameter, "exp_avg")
        torch.testing.assert_close(found, expected.state[want]["exp_avg"], rtol=1e-4, atol=1e-6)
        lt_zero.set_full_master(parameter, torch.full_like(want, 0.5))
        lt_zero.set_full_state(parameter, torch.full_like(want, 0.25), "exp_avg")
    values = everything(run)
    assert all(bool((value == 0.5).all()) for value in values["weights"].values())
    assert all(bool((value == 0.25).all()) for value in values["exp_avg"].values())
    with lt_zero.gathered(run.model, write=True), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1)
    if run.mesh is not None and run.mesh.pipeline_rank == 1:  # of its own layers alone
        with lt_zero.gathered(run.model.pipe.layers):
            assert all(bool((p == 1.5).all()) for p in run.model.pipe.layers.parameters())
        lt_zero.full_master(next(run.model.pipe.layers.parameters()))
    assert all(bool((value == 1.5).all()) for value in all_weights(run.engine).values())


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(TWO, 1)], itertools.product([TWO, TENSOR], STAGES)))
def test_values_of_single_parameters(pool: Pool, ranks: Mesh, stage: int) -> None:
    pool.run(ranks.ranks.all, _of_parameters, ranks, stage)


def _shared_on_one_stage() -> str:
    with quick():
        run = mesh(pipeline=2).start(1, "sgd")
        if run.engine.world.rank == 1:
            with pytest.raises(RuntimeError) as caught:
                train(run, range(1))
        else:
            with pytest.raises(RuntimeError) as caught:
                lt_zero.full_master(run.model.scale)
    return str(caught.value)


def test_a_shared_parameter_that_one_stage_asks_for_is_an_error_on_all(pool: Pool) -> None:
    for text in pool.run(2, _shared_on_one_stage):
        assert "lt_zero.full_master" in text


def only_buffers() -> list[Any]:
    """The second of two stages has no parameters of its own."""
    ends: list[Any] = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    return [*ends, LayerSpec(Counting, 1), LayerSpec(Counting, 2)]


def _only_buffers(path: str, freezes: bool) -> tuple[list[str], list[str]]:
    """Save, with frozen weights left out, and load; returns the names in the checkpoint, and those left out."""

    def begin() -> Run:
        def prepare(model: Model, mesh: Any) -> None:
            model.pipe.requires_grad_(not freezes)

        return start(Ranks(), 1, "sgd", only_buffers, {"partition_method": "uniform"}, prepare)

    run = begin()
    train(run, range(STEPS))
    left_out = frozen_names(run.engine, leave_out=freezes)
    save(run, path, left_out)
    had, again = everything(run), begin()
    load(again, path)
    same(everything(again), had)
    with closing(Archive(path)) as archive:
        return list(archive.weights), archive.meta["lt_zero"]["frozen_left_out"]


@pytest.mark.parametrize("freezes", only([True], [False, True]))
def test_a_stage_of_buffers_only_is_saved(pool: Pool, tmp_path: Path, freezes: bool) -> None:
    names, left_out = pool.run(2, _only_buffers, str(tmp_path / "0.ckpt"), freezes)[0]
    model = Model(only_buffers)
    frozen = {name for name, _ in model.pipe.named_parameters(prefix="pipe")} if freezes else set()
    assert names == [name for name in model.state_dict() if name not in frozen]
    assert set(left_out) == frozen


def _own_buffers(path: str, keys: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Masks that each rank has before a save and after a load."""

    def masks(run: Run) -> list[float]:
        return [float(value.sum()) for name, value in run.model.named_buffers() if name.endswith("mask")]

    ranks = mesh(data=2, pipeline=2)
    run, again = ranks.start(1, "sgd", **keys), ranks.start(1, "sgd", **keys)
    train(run, range(1))
    for name, value in run.model.named_buffers():
        if name.endswith("mask"):
            value.fill_(run.engine.world.rank)
    save(run, path)
    load(again, path)
    return masks(run), masks(again)


@pytest.mark.slow
def test_each_rank_goes_on_with_its_own_buffers(pool: Pool, tmp_path: Path) -> None:
    """If data ranks do not share them, as without pipelines."""
    found = pool.run(4, _own_buffers, str(tmp_path / "0.ckpt"), {"broadcast_buffers": False})
    for rank, (before, after) in enumerate(found):
        assert before == after == [3.0 * rank]
