"""The ranks of a run as a mesh: which hold the parts of one model, and which see the same data.

Note [Families]
    A family is the ranks over which a parameter is the same, and ZeRO shards it over them. A parameter that is cut over
    tensor ranks is the same on the data ranks that have its part; one that is replicated is the same on all ranks. So
    each element of the model has one owner in the world: norms are one sum over the world, replicas cannot drift apart,
    and checkpoints need no deduplication. A replicated parameter's gradient is the mean over all ranks. Tensor ranks
    have equal gradients of it, or partial sums (local.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from lt_zero.comm.process_groups import one_queue
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.world import World
from lt_zero.common.compat import forget_meshes
from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.engine.engine import Engine
from lt_zero.parallel.first_gradients import FirstGradients
from lt_zero.parallel.local import LocalParts, is_cut, localize
from lt_zero.parallel.plan import parallelize, table

PIPELINE, DATA, SEQUENCE, TENSOR = "pipeline_parallel", "data_parallel", "sequence_parallel", "tensor_parallel"
AXES = (PIPELINE, DATA, SEQUENCE, TENSOR)  # outermost first: tensor ranks are neighbours, on one node


@dataclass(frozen=True)
class ParallelSizes:
    """Numbers of ranks along each axis of the mesh."""

    data: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, config: ZeroConfig, ranks: int) -> ParallelSizes:
        """The sizes that the configuration asks for.

        Raises:
            ConfigError: they are not those of so many ranks.
        """
        tensor, data = config.tensor_parallel.autotp_size, config.data_parallel_size
        if ranks % tensor:
            raise ConfigError.about(
                "tensor_parallel.autotp_size",
                f"tensor_parallel.autotp_size={tensor} does not divide the {ranks} ranks of this run. Use a divisor, "
                "or start another number of processes.",
            )
        if data not in (None, ranks // tensor):
            raise ConfigError.about(
                "data_parallel_size",
                f"data_parallel_size={data}, but {ranks} ranks with tensor_parallel.autotp_size={tensor} are "
                f"{ranks // tensor} data ranks. Remove the key, or change one of them.",
            )
        return cls(ranks // tensor, tensor)

    @property
    def is_plain(self) -> bool:
        """Whether all ranks are data ranks."""
        return self.tensor == 1


class ParallelMesh:
    """The ranks of a run along the axes of parallelism.

    Args:
        sizes: along each axis.
        world: all ranks. Collective.

    Attributes:
        device_mesh: with an axis for each of ``AXES``, also for those of size 1.
        data_rank: which data this rank sees, of ``sizes.data``. Its tensor ranks see the same.
        tensor_rank: which part of tensors this rank has, of ``sizes.tensor``.
    """

    def __init__(self, sizes: ParallelSizes, world: World) -> None:
        self.sizes, self._world = sizes, world
        self.data_rank, self.tensor_rank = divmod(world.rank, sizes.tensor)
        mesh = torch.arange(world.size).view(1, sizes.data, 1, sizes.tensor)
        rows = [mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis]).tolist() for axis in range(mesh.dim())]
        # Of this world, whose hang detection closes them: a rank that is gone would be waited for in a layer.
        groups = [world.new_group(None, parts, closes=True) for parts in rows]
        world.expect_in_layers(groups[AXES.index(TENSOR)])
        forget_meshes()
        self.device_mesh = DeviceMesh.from_group(groups, world.device.type, mesh, mesh_dim_names=AXES)
        self._cut = ShardGroup(world, rows[AXES.index(DATA)], divisor=sizes.data)

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that have the other parts of this rank's tensors."""
        return self.device_mesh[TENSOR]

    def cut(self, module: nn.Module, config: ZeroConfig) -> None:
        """Parallelize a module as its user, the configuration or its own plan says. Errors: ``parallelize``."""
        rows = parallelize(module, self.tensor, config)
        if self._world.rank == 0:
            Console().print(table(rows))

    def arguments(self, module: nn.Module, group: ShardGroup) -> dict[str, Any]:
        """Of ``lt_zero.shard``, for a module some of whose parameters are DTensors; ``group``: all ranks.

        Errors are those of ``localize``.
        """
        specs = localize(module, self.tensor)
        first = FirstGradients(self._world, self.sizes.tensor, {id(p): name for name, p in module.named_parameters()})
        return {"specs": specs, "group_of": self._group_of(group), "parts": LocalParts(first)}

    def watch(self, engine: Engine) -> None:
        """Compare the gradients of the first backward. See first_gradients.py."""
        parts, known = engine.parts, weakref.ref(engine)
        assert isinstance(parts, LocalParts)
        assert parts.first is not None
        engine.after_backward.append(partial(_compare, known, parts.first))

    def _group_of(self, group: ShardGroup) -> Callable[[str, nn.Parameter], ShardGroup]:
        def group_of(name: str, parameter: nn.Parameter) -> ShardGroup:
            return self._cut if is_cut(parameter) else group

        return group_of


def mesh_of(config: ZeroConfig, world: World) -> ParallelMesh | None:
    """The mesh that the configuration asks for; None if all ranks are data ranks. Collective.

    Raises:
        ConfigError: the sizes are not those of so many ranks; or a GPU has one queue for all groups.
    """
    sizes = ParallelSizes.of(config, world.size)
    if sizes.is_plain:
        return None
    if world.device.type == "cuda" and one_queue():
        key = "tensor_parallel.autotp_size"
        text = f"{key}={sizes.tensor} needs process groups beside the others, which CUDA_DEVICE_MAX_CONNECTIONS=1 does"
        raise ConfigError.about(key, f"{text} not allow: unset it.")
    return ParallelMesh(sizes, world)


def _compare(engine: weakref.ref[Engine], first: FirstGradients) -> None:
    known = engine()
    if known is not None and known.backwards > 0:  # a failed backward of this rank is not counted
        first.compare()
