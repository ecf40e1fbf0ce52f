"""The data that each rank sees: ranks that have parts of one model, or of the same sequences, see the same."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.core.comm.world import World
from lt_zero.parallel.mesh import ParallelMesh


def digest_of_batch(batch: Any) -> list[tuple[tuple[int, ...], str, int]]:
    """Shape, dtype and checksum of each tensor in ``batch``. Waits for the device."""
    return [(tuple(t.shape), str(t.dtype).removeprefix("torch."), _checksum(t)) for t in iter_tensors(batch)]


def _checksum(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return 0
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def check_same_batch(mesh: ParallelMesh, world: World, batch: Any) -> None:
    """Compare a batch between the ranks that have parts of one model, or of its sequences. Collective.

    Raises:
        RuntimeError: on all ranks, if two of them have different batches; names them and the first difference.
    """
    found = world.host_gather(digest_of_batch(batch), "the first batch")
    for rank, mine in enumerate(found):
        first = mesh.sizes.firsts()[mesh.sizes.data_rank(rank)]
        if mine != found[first]:
            sizes = f"tensor_parallel.autotp_size={mesh.sizes.tensor}, pipeline.stages={mesh.sizes.pipeline}"
            parts = f"one model ({sizes})"
            if mesh.sizes.sequence > 1:
                sizes = f"tensor_parallel.autotp_size={mesh.sizes.tensor}"
                parts = f"the same sequences (sequence_parallel_size={mesh.sizes.sequence}, {sizes})"
            raise RuntimeError(
                f"Ranks {first} and {rank} have parts of {parts}, and need the same batches, but "
                f"{_difference(found[first], mine)}. Draw samples by the data rank (Lightning's own sampler does, or "
                "num_replicas and rank of strategy.distributed_sampler_kwargs), and shuffle with the same seed on all "
                "ranks."
            )


def _difference(one: list[Any], other: list[Any]) -> str:
    if len(one) != len(other):
        return f"their first batches have {len(one)} and {len(other)} tensors"
    index = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    (shape, dtype, _), (its_shape, its_dtype, _) = one[index], other[index]
    what = f"tensor {index} of their first batches"
    if (shape, dtype) != (its_shape, its_dtype):
        return f"{what} is {dtype} {shape} on one and {its_dtype} {its_shape} on the other"
    return f"{what} ({dtype} {shape}) has different values"
