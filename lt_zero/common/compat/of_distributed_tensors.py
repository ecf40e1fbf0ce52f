"""Private APIs of torch's DTensor. Checked on torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel


def await_collective(value: Any) -> None:
    """Wait for the collective of DTensor whose result ``value`` is, if it has not been waited for."""
    if isinstance(value, AsyncCollectiveTensor):
        value.trigger_wait()


def forget_meshes() -> None:
    """Empty DTensor's caches: a mesh that equals an earlier one would get that one's groups, which they keep alive."""
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


@contextmanager
def before_distribution(call: Callable[[], object]) -> Iterator[None]:
    """Context in which ``call`` runs once, before a style of ``parallelize_module`` first distributes a module."""
    style: Any = sys.modules[ColwiseParallel.__module__]
    known = style.distribute_module
    waiting = [call]

    def distribute(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.pop()()
        return known(*args, **kwargs)

    style.distribute_module = distribute
    try:
        yield
    finally:
        style.distribute_module = known


def is_distributed(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` is a DTensor, cut or replicated."""
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """The local tensor of a DTensor and a function that makes a DTensor of it again; else the tensor itself and None.

    The local tensor shares memory, but does not count all writes to the DTensor as its own version.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    mesh = tensor.device_mesh
    placements = tensor.placements
    shape = tensor.shape
    stride = tensor.stride()

    def distributed(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    with torch.no_grad():
        return tensor.to_local(), distributed


def local_tensor(parameter: DTensor) -> torch.Tensor:
    """The tensor of this rank, without a step of autograd."""
    return parameter._local_tensor


def set_local_tensor(parameter: DTensor, value: torch.Tensor) -> None:
    """Set this rank's tensor of ``parameter``; placements stay. ``parameter.data = ...`` would copy ``value``."""
    parameter._local_tensor = value
