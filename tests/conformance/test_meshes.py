"""Saving with tensor ranks, also in the background, and going on at another mesh of ranks, stage and face."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_zero
from tests.conformance.faces import GAS, Face, Plain, Settings, adamw, close, run
from tests.support.matrix import only_rows
from tests.support.models import WIDTH, Net
from tests.support.parallel_nets import Ranks
from tests.support.pool import Pool

STEPS = 2  # before the save, and after it


def cuttable() -> Net:
    """Tied weights, and blocks that two and four ranks cut."""
    net = Net()
    for block in net.blocks:
        block.up, block.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
    return net


def settings_of(stage: int, ranks: Ranks) -> Settings:
    rules = [
        {"patterns": [".*up.weight"], "partition_type": "column"},
        {"patterns": [".*down.weight"], "partition_type": "row"},
    ]
    cut = {"autotp_size": ranks.tensor, "partition_config": {"layer_specs": rules}}
    config: dict[str, Any] = {"checkpoint": {"async": True, "format": "sharded"}}
    if ranks.tensor > 1:
        config["tensor_parallel"] = cut
    return Settings(stage, config=config, optimizer=adamw)


def _step(face: Face, step: int) -> None:
    for micro in range(GAS):
        face.backward(step, micro)
    face.step()


def _values(face: Face) -> list[Tensor]:
    """All that training goes on from, as whole tensors."""
    given = list(face.net.parameters())
    return [
        *map(lt_zero.full_master, given),
        *(lt_zero.full_state(p, key) for p in given for key in ("exp_avg", "exp_avg_sq")),
    ]


def _saves(path: str, face: Face) -> list[Tensor]:
    for step in range(STEPS):
        _step(face, step)
    saved = _values(face)
    face.save(path)
    _step(face, STEPS)  # while it is written
    face.wait()
    return saved


def _goes_on(path: str, face: Face) -> tuple[list[Tensor], list[Tensor]]:
    face.load(path)
    loaded = _values(face)
    for step in range(STEPS, 2 * STEPS):
        _step(face, step)
    return loaded, [lt_zero.full_master(p) for p in face.net.parameters()]


def _run(face: str, stage: int, ranks: Ranks, path: str, loads: bool) -> Any:
    contract = partial(_goes_on if loads else _saves, path)
    return run(face, settings_of(stage, ranks), contract, path if loads else None, cuttable)


TO_OTHERS = [("fabric", "loop"), ("loop", "fabric"), *((face, face) for face in ("trainer", "fabric", "loop"))]
MESHES = [Ranks(2, 2), Ranks(1, 2), Ranks(1, 4), Ranks(3, 2), Ranks(3)]
FAST = [("fabric", "loop", Ranks(2, 2), Ranks(3), 3)]  # of a Trainer: tests/parallel/test_trainer.py
EVERY = [
    (*faces, *meshes, stage)
    for faces, meshes, stage in itertools.product(TO_OTHERS, itertools.permutations(MESHES, 2), range(4))
]
SLOW = [
    ("trainer", "trainer", Ranks(1, 4), Ranks(2, 2), 2),
    ("loop", "fabric", Ranks(1, 2), Ranks(1, 4), 1),
]
ROWS = list(dict.fromkeys([*FAST, *SLOW, *EVERY[::19]]))  # 19 has no factor with the numbers of faces, pairs and stages


@pytest.mark.parametrize(("saves", "loads", "before", "after", "stage"), only_rows(FAST, ROWS))
def test_a_run_goes_on_at_another_mesh(
    pool: Pool, tmp_path: Path, saves: str, loads: str, before: Ranks, after: Ranks, stage: int
) -> None:
    path = str(tmp_path / "saved")
    saved = pool.run(before.all, _run, saves, stage, before, path, False)[0]
    loaded, weights = pool.run(after.all, _run, loads, (stage + 1) % 4, after, path, True)[0]
    for value, other in zip(saved, loaded, strict=True):
        assert torch.equal(value, other)
    plain = Plain(adamw, cuttable)
    for step in range(2 * STEPS):
        plain.backward(step, world=before.data if step < STEPS else after.data)
        plain.optimizer.step()
    for value, (name, q) in zip(weights, plain.net.named_parameters(), strict=True):
        close(value, q.detach(), name, rtol=1e-5, atol=2e-6)
