"""Stores for the inputs of checkpointed modules, opened as a configuration asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lt_zero.activation.partitioned import PartitionedStore
from lt_zero.activation.stores import ActivationStore
from lt_zero.comm.part_ranks import PartRanks
from lt_zero.common import accelerator
from lt_zero.config.blocks import ActivationCheckpointing, Aio
from lt_zero.io.pinned import host_buffer
from lt_zero.offload.host_store import is_apart
from lt_zero.offload.reuse import Arena, LoanPool
from lt_zero.offload.saved_activations import DeviceStorage, FileStorage, HostStorage, Storage

_SPARE = 2  # slots for prefetched tensors, in addition to the stored ones


def open_store(
    block: ActivationCheckpointing,
    device: torch.device,
    count: int,
    aio: Aio | None = None,
    rank: int = 0,
    ranks: PartRanks | None = None,
) -> ActivationStore | None:
    """The store that the configuration asks for, with ``count`` checkpointed modules; None: inputs stay where they are.

    Args:
        rank: of this process in the run.
        ranks: that may have the same inputs; None: no others.

    Raises:
        SwapError: files cannot be created in ``nvme_path`` on this rank; other ranks may have succeeded.
    """
    splits = block.partition_activations and ranks is not None
    storage = _storage(block, device, count, aio or Aio(), rank)
    if storage is None and splits:
        storage = DeviceStorage(LoanPool(_memory(device)))
    if storage is None:
        return None
    if splits and ranks is not None:
        return PartitionedStore(storage, device, ranks, rank == 0)
    return ActivationStore(storage, device)


def _storage(block: ActivationCheckpointing, device: torch.device, count: int, aio: Aio, rank: int) -> Storage | None:
    if block.nvme_path is not None:
        return FileStorage(block.nvme_path, rank, aio, device, is_apart(device))

    def arena(make: Callable[[int], Tensor], spare: int = 0) -> Arena:
        return Arena(make, block.number_checkpoints or max(1, count), block.number_checkpoints is None, spare)

    in_one_block = block.contiguous_memory_optimization
    if block.cpu_checkpointing and is_apart(device):
        pinned = partial(host_buffer, pin=accelerator.is_accelerator(device))
        return HostStorage(arena(pinned) if in_one_block else LoanPool(pinned), device)
    return DeviceStorage(arena(_memory(device), _SPARE)) if in_one_block else None


def _memory(device: torch.device) -> Callable[[int], Tensor]:
    return partial(torch.empty, dtype=torch.uint8, device=device)
