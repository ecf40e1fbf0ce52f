"""A checkpoint that was saved on one mesh of ranks, at one stage, goes on at any other, and exports as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lt_zero
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.load import as_lightning, restore_weights
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.save import bundle, make_directory, write
from lt_zero.session.checkpoints import Progress, restore_optimizers
from tests.support.matrix import cover
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
    restore_weights(run.model, run.engine, run.engine.config, found["state_dict"], strict=True)
    Progress(stepped=True).restore(run.engine, None)
    restore_optimizers(run.engine, {0: (run.optimizer, found["optimizer_states"][0])})
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


@pytest.mark.parametrize(("source", "before", "ranks", "stage"), cover(MESHES, STAGES, MESHES, STAGES))
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


@pytest.mark.parametrize(("ranks", "stage"), cover(MESHES, STAGES))
def test_exports_the_whole_model(saved: Saved, tmp_path: Path, ranks: Ranks, stage: int) -> None:
    path, had = saved(ranks, stage, "adamw")
    lt_zero.export(path, tmp_path / "weights.safetensors", dtype=torch.float32)
    exported = load_file(tmp_path / "weights.safetensors")
    assert exported.keys() == NET().state_dict().keys()
    assert all(torch.equal(value, had["weights"][name]) for name, value in exported.items())
