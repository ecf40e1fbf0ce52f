"""A checkpoint that was saved on one mesh of ranks, at one stage, goes on at any other, and exports as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.kernels.moments import CodedMoments
from lt_zero.training.restore import Contents, ModuleContents, restore
from tests.support.features import needs
from tests.support.matrix import only_rows
from tests.support.parallel_nets import Net, Ranks, Run, all_states, all_weights, reference_step, start
from tests.support.parity import OPTIMIZERS, STAGES
from tests.support.pool import Pool

MESHES = [Ranks(), Ranks(1, 2), Ranks(1, 4), Ranks(3), Ranks(2, 2)]
STEPS = 2
NET = partial(Net, hidden=12)


def save(run: Run, path: str) -> None:
    world = run.engine.world
    content = {"state_dict": weight_fragments(run.engine), "optimizer_states": [optimizer_fragments(run.sharded)]}
    saved = bundle(content, [parameter_names(run.optimizer, run.engine)], world, {}, {})
    write(saved, make_directory(world, path), world, world.saving_group(background=False))


def load(run: Run, path: str) -> None:
    archive = Archive(path)
    found = as_lightning(archive)
    part = ModuleContents(run.model, run.engine, found["state_dict"])
    part = part.going_on({**found, "global_step": STEPS}, {0: (run.optimizer, found["optimizer_states"][0])})
    restore(Contents((part,)), run.engine.world, LossScaleController(run.engine.policy))
    archive.close()


def everything(run: Run) -> dict[str, dict[str, Tensor]]:
    return {"weights": all_weights(run.engine), **all_states(run)}


def _save(ranks: Ranks, stage: int, optimizer: str, path: str) -> dict[str, dict[str, Tensor]]:
    run = start(ranks, stage, optimizer, NET)
    run.train(range(STEPS))
    save(run, path)
    return everything(run)


def _resume(ranks: Ranks, stage: int, optimizer: str, path: str) -> tuple[Any, Any]:
    """All that the run goes on from, and the weights after one more step."""
    run = start(ranks, stage, optimizer, NET)
    load(run, path)
    restored = everything(run)
    run.train(range(STEPS, STEPS + 1))
    return restored, all_weights(run.engine)


Saved = Callable[[Ranks, int, str], tuple[str, dict[str, dict[str, Tensor]]]]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoint of a mesh at a stage, saved when it is first asked for, and what its run had."""
    known: dict[Any, Any] = {}

    def of(*setting: Any) -> Any:
        if setting not in known:
            path = str(tmp_path_factory.mktemp("saved") / "0.ckpt")
            known[setting] = path, pool.run(setting[0].all, _save, *setting, path)[0]
        return known[setting]

    return of


ELSEWHERE = [(MESHES[4], 3, MESHES[1], 1)]


@pytest.mark.parametrize(
    ("source", "before", "ranks", "stage"), only_rows(ELSEWHERE, itertools.product(MESHES, STAGES, MESHES, STAGES))
)
def test_goes_on_elsewhere(pool: Pool, saved: Saved, source: Ranks, before: int, ranks: Ranks, stage: int) -> None:
    """With all bits; then one step on the other data ranks is that of one process."""
    optimizer = "sgd" if ranks.data == 3 else "adamw"
    path, had = saved(source, before, optimizer)
    got, after = pool.run(ranks.all, _resume, ranks, stage, optimizer, path)[0]
    assert got.keys() == had.keys()
    assert len(got) == (2 if optimizer == "sgd" else 3)
    for kind, values in had.items():
        assert got[kind].keys() == values.keys()
        assert all(torch.equal(got[kind][name], value) for name, value in values.items()), kind
    reference = NET()
    expected = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(STEPS + 1):
        reference_step(reference, expected, step, source.data if step < STEPS else ranks.data)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-5, atol=2e-6)


CODED = partial(Net, hidden=48)  # 6 x 48 elements: blocks of 256 are others where two ranks have 24 columns each


def _coded(ranks: Ranks, stage: int, path: str, first: int) -> list[dict[str, dict[str, Tensor]]]:
    """What the run had when it was saved, or restored, and one step later."""
    with mock.patch("lt_zero.kernels.moments.SMALLEST", 100):
        run = start(ranks, stage, "adamw", CODED, optimizer_states={"dtype": "int8"})
    if first:
        load(run, path)
    else:
        run.train(range(STEPS))
        save(run, path)
    assert {b.storage.moments.name for b in run.engine.buckets} == {"int8", "float32"}
    had = everything(run)
    run.train(range(STEPS, STEPS + 1))
    return [had, everything(run)]


def _same(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> bool:
    return all(torch.equal(got[kind][name], value) for kind, values in want.items() for name, value in values.items())


@needs("low_bit_states")
def test_moments_in_8_bits_are_encoded_once_more_where_a_mesh_cuts_other_parts(pool: Pool, tmp_path: Path) -> None:
    """On the same mesh, at another stage, all bits stay. Blocks are of what a rank has of a parameter."""
    path, pair = str(tmp_path / "0.ckpt"), MESHES[1]
    had, later = pool.run(2, _coded, pair, 1, path, 0)[0]
    restored, after = pool.run(2, _coded, pair, 3, path, STEPS)[0]
    assert _same(restored, had)
    assert _same(after, later)
    whole = pool.run(1, _coded, MESHES[0], 2, path, STEPS)[0][0]
    assert _same({"weights": whole["weights"]}, {"weights": had["weights"]})
    changed = 0
    for key in ("exp_avg", "exp_avg_sq"):
        for name, value in had[key].items():
            expected = CodedMoments().kept(value, key).decoded() if value.numel() > 100 else value  # type: ignore[attr-defined]
            assert torch.equal(whole[key][name], expected), (key, name)
            changed += not torch.equal(expected, value)
    assert changed > 0


@pytest.mark.parametrize(("ranks", "stage"), only_rows([(MESHES[4], 1)], itertools.product(MESHES, STAGES)))
def test_exports_the_whole_model(saved: Saved, tmp_path: Path, ranks: Ranks, stage: int) -> None:
    path, had = saved(ranks, stage, "adamw")
    lt_zero.export(path, tmp_path / "weights.safetensors", dtype=torch.float32)
    exported = load_file(tmp_path / "weights.safetensors")
    assert exported.keys() == NET().state_dict().keys()
    assert all(torch.equal(value, had["weights"][name]) for name, value in exported.items())
