"""``deepspeed.comm``, beside the functions of ``torch.distributed``, and ``deepspeed.utils.groups``.

Groups are those of the engine that was made last, else of the default process group.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lt_zero.common.compat import DeviceMesh
from lt_zero.core.comm.process_groups import rank_and_size
from lt_zero.core.division import Division
from lt_zero.core.health.launchers import local_rank
from lt_zero.deepspeed.engines import current_engine

# ---- deepspeed.comm --------------------------------------------------------------------------------------------------


log = logging.getLogger("lt_zero")


def get_local_rank() -> int:
    """The rank of this process on its host."""
    return local_rank()


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank, among all, of rank ``group_rank`` of a group."""
    return dist.get_global_rank(group if group is not None else get_world_group(), group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group (default: all)."""
    return dist.get_process_group_ranks(group if group is not None else get_world_group())


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """``all_gather_into_tensor``."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """``reduce_scatter_tensor``."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """``all_reduce``."""
    return dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(tensors: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """``all_reduce`` of each tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def has_all_gather_into_tensor() -> bool:
    """True if torch has ``all_gather_into_tensor``."""
    return hasattr(dist, "all_gather_into_tensor")


def has_reduce_scatter_tensor() -> bool:
    """True if torch has ``reduce_scatter_tensor``."""
    return hasattr(dist, "reduce_scatter_tensor")


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A device mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from lt_zero.common import accelerator

    return init_device_mesh(accelerator.default_kind().type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def configure(*args: Any, **kwargs: Any) -> None:
    """Say where collectives are logged: DeepSpeed's logger of them is switched on here."""
    log.warning(
        "deepspeed.comm.configure has no effect: a Trainer logs collectives with comms_logger.enabled=true, and "
        "elsewhere torch.profiler shows them."
    )


def set_backend(*args: Any, **kwargs: Any) -> None:
    """Do nothing: collectives are those of the default process group."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Say where collectives are logged; {} with ``return_dict``."""
    configure()
    return {} if return_dict else None


def gather_objects(value: Any, group: Any) -> list[Any]:
    """The values of all ranks of a group, in their order."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


# ---- deepspeed.utils.groups ------------------------------------------------------------------------------------------


def _division() -> Division | None:
    engine = current_engine()
    return engine.session.division if engine is not None else None


def _axis(name: str) -> DeviceMesh | None:
    """The ranks along an axis of parallelism that this rank belongs to; None: all are data ranks."""
    division = _division()
    mesh = division.device_mesh if division is not None else None
    return mesh[name] if mesh is not None else None


def get_data_parallel_world_size() -> int:
    """The number of ranks, or sets of tensor-parallel ranks, that see different data."""
    division = _division()
    return division.data_ranks if division is not None else rank_and_size()[1]


def get_data_parallel_rank() -> int:
    """Index of this rank's data."""
    division = _division()
    return division.data_rank if division is not None else rank_and_size()[0]


def get_data_parallel_group() -> Any:
    """The ranks that see different data, and have the same part of the model."""
    ranks = _axis("data_parallel")
    return ranks.get_group() if ranks is not None else dist.group.WORLD


def get_tensor_model_parallel_world_size() -> int:
    """The number of ranks that tensors are cut over."""
    ranks = _axis("tensor_parallel")
    return ranks.size() if ranks is not None else 1


def get_tensor_model_parallel_rank() -> int:
    """Index of this rank's part of tensors."""
    division = _division()
    return division.part_rank if division is not None else 0


def get_tensor_model_parallel_group() -> Any:
    """The ranks that have the other parts of this rank's tensors; None without tensor parallelism."""
    ranks = _axis("tensor_parallel")
    return ranks.get_group() if ranks is not None else None


def get_sequence_parallel_world_size() -> int:
    """The ranks of a sequence; 1: sequences are not cut."""
    ranks = _axis("sequence_parallel")
    return ranks.size() if ranks is not None else 1


def get_sequence_parallel_rank() -> int:
    """Index of this rank's part of sequences."""
    ranks = _axis("sequence_parallel")
    return ranks.get_local_rank() if ranks is not None else 0


def get_sequence_parallel_group() -> Any:
    """The ranks that have the other parts of this rank's sequences.

    Raises:
        RuntimeError: sequences are not cut.
    """
    ranks = _axis("sequence_parallel")
    if ranks is None or ranks.size() == 1:
        raise RuntimeError(
            "get_sequence_parallel_group(): the engine that was made last cuts no sequences over ranks. Call it after "
            "deepspeed.initialize, with sequence_parallel_size in the configuration."
        )
    return ranks.get_group()


get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank, get_model_parallel_group = get_tensor_model_parallel_rank, get_tensor_model_parallel_group
_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank, _get_sequence_parallel_group = get_sequence_parallel_rank, get_sequence_parallel_group
