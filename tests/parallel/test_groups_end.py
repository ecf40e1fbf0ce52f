"""A mesh's process groups end with it: further runs in one process need no more descriptors and threads."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from lt_zero.common.compat import process_groups
from lt_zero.core.comm.world import World
from lt_zero.parallel.mesh import ParallelMesh, ParallelSizes
from tests.support.pool import Pool

SIZES = {
    "tensor": ParallelSizes(tensor=2),
    "sequence": ParallelSizes(sequence=2),
    "pipeline": ParallelSizes(pipeline=2),
    "expert": ParallelSizes(data=2, expert=2),
}


def _kept(sizes: ParallelSizes) -> list[tuple[int, int, int]]:
    kept = []
    for _ in range(5):
        mesh = ParallelMesh(sizes, World.join(torch.device("cpu")))
        del mesh
        gc.collect()
        kept.append((len(process_groups()), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return kept[2:]


@pytest.mark.parametrize("axis", SIZES)
def test_meshes_that_are_gone_keep_no_groups(pool: Pool, axis: str) -> None:
    for kept in pool.run(2, _kept, SIZES[axis]):
        groups, descriptors, threads = ([counts[kind] for counts in kept] for kind in range(3))
        assert len(set(groups)) == 1, kept
        # A thread that ends, or a connection that closes, may still be counted once.
        assert descriptors[-1] - descriptors[0] <= 2, kept
        assert threads[-1] - threads[0] <= 2, kept
