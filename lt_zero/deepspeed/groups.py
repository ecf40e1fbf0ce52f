"""``deepspeed.utils.groups``: the ranks of the engine that was made last, else those of the process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lt_zero.comm.process_groups import rank_and_size
from lt_zero.deepspeed.engines import current_engine
from lt_zero.parallel.mesh import DATA, ParallelMesh


def _mesh() -> ParallelMesh | None:
    engine = current_engine()
    return engine.session.mesh if engine is not None else None


def get_data_parallel_world_size() -> int:
    """The number of ranks, or sets of tensor-parallel ranks, that see different data."""
    mesh = _mesh()
    return mesh.sizes.data if mesh is not None else rank_and_size()[1]


def get_data_parallel_rank() -> int:
    """Index of this rank's data."""
    mesh = _mesh()
    return mesh.data_rank if mesh is not None else rank_and_size()[0]


def get_data_parallel_group() -> Any:
    """The ranks that see different data, and have the same part of the model."""
    mesh = _mesh()
    return mesh.device_mesh[DATA].get_group() if mesh is not None else dist.group.WORLD


def get_tensor_model_parallel_world_size() -> int:
    """The number of ranks that tensors are cut over."""
    mesh = _mesh()
    return mesh.sizes.tensor if mesh is not None else 1


def get_tensor_model_parallel_rank() -> int:
    """Index of this rank's part of tensors."""
    mesh = _mesh()
    return mesh.tensor_rank if mesh is not None else 0


def get_tensor_model_parallel_group() -> Any:
    """The ranks that have the other parts of this rank's tensors; None without tensor parallelism."""
    mesh = _mesh()
    return mesh.tensor.get_group() if mesh is not None else None


def _get_sequence_parallel_world_size() -> int:
    return 1  # sequences are not cut


def _get_sequence_parallel_rank() -> int:
    return 0


get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank, get_model_parallel_group = get_tensor_model_parallel_rank, get_tensor_model_parallel_group
_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
