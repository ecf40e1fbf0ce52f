"""Parallelism beside data, as a feature: the ranks of a run become a mesh."""

from __future__ import annotations

from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.division import Division, PlannedDivision
from lt_zero.core.feature import Feature
from lt_zero.parallel.division import DividedRun
from lt_zero.parallel.mesh import mesh_of
from lt_zero.parallel.planned import PlannedMesh


class Parallelism(Feature):
    """Ranks with parts of tensors, of layers, of experts or of sequences."""

    def divide(self, group: ShardGroup) -> Division | None:
        mesh = mesh_of(self.config, group.world)
        return DividedRun(group, self.config, mesh) if mesh is not None else None

    def plan_division(self, ranks: int) -> PlannedDivision:
        return PlannedMesh(self.config, ParallelSizes.of(self.config, ranks))
