"""Sequences that are cut over ranks, through a Trainer, Fabric and a loop, against one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.matrix import only_rows
from tests.support.pool import Pool
from tests.support.sequences import FACES, keys_of, one_process

STEPS, ACCUMULATES = 2, 2
GATHER = {"sequence_parallel": {"method": "gather", "zigzag": True}}


def _trained(rows: list[tuple[str, int, str, dict[str, Any]]], sequence: int) -> list[list[torch.Tensor]]:
    found = []
    for face, stage, optimizer, keys in rows:
        torch.manual_seed(0)
        found.append(FACES[face](stage, STEPS, ACCUMULATES, optimizer, keys_of(sequence, **keys)))
    return found


COVER = [("trainer", 3, "adamw", {}), ("fabric", 2, "sgd", {}), ("loop", 1, "adamw", GATHER)]
EVERY = [(face, stage, opt, {}) for face, stage, opt in itertools.product(FACES, range(4), ["adamw", "sgd"])]


def check(rows: list[tuple[str, int, str, dict[str, Any]]], pool: Pool, world: int, sequence: int) -> None:
    for row, weights in zip(rows, pool.run(world, _trained, rows, sequence)[0], strict=True):
        wanted = one_process(10**6, STEPS, ACCUMULATES, world // sequence, row[2])
        for value, want in zip(weights, wanted, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-5, atol=2e-6, msg=lambda text, row=row: f"{row}: {text}")


@pytest.mark.parametrize(("world", "sequence"), only_rows([(2, 2)], [(2, 2), (4, 2), (3, 3), (4, 4)]))
def test_each_face_trains_as_one_process(pool: Pool, world: int, sequence: int) -> None:
    gathers = {2: (False, True), 3: (True,), 4: (False,)}[sequence]  # of 4 heads, and 12 tokens in zigzag order
    rows = [row for row in COVER if bool(row[3]) in gathers]
    check(rows, pool, world, sequence)


@pytest.mark.slow
def test_all_stages_and_optimizers(pool: Pool) -> None:
    check(EVERY, pool, 4, 2)
