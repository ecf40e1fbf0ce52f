"""Python values of ranks: as bytes, the gather of such bytes, and values that go through the first rank.

Note [Equal values]
    Most values that ranks gather are the same on many of them: plans of a pipeline's stages, names of parameters,
    configurations. ``all_gather_object`` would send each rank's copy to each rank, padded to the longest, and let it
    unpickle all of them: with 4,096 ranks and a hundred names that takes seconds and hundreds of MB. So ranks gather
    digests first, then each value once. The cost of a gather is 24 bytes per rank and the values that differ.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DIGEST = 16  # bytes


class _Pickler(pickle.Pickler):
    """Pickles tensors as bytes; by default pickle calls ``torch.save`` for the full storage of each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            return NotImplemented
        # A CUDA tensor arrives on the CPU: by default it would arrive on the sender's device.
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).cpu()
        return _unpacked, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def packed(value: Any) -> bytes:
    """A picklable value as bytes, which ``pickle.loads`` reads; tensors arrive on the CPU."""
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


def _unpacked(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def gather(mine: bytes, rank: int, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks from their ``packed`` bytes. Equal ones are one object. Collective.

    See Note [Equal values].

    Args:
        mine: bytes of this rank's value.
        rank: this one, of ``size`` ranks of ``group``.
        group: for tensors on the host.
    """
    digest = struct.unpack("<2q", hashlib.blake2b(mine, digest_size=_DIGEST).digest())
    row = torch.tensor([len(mine), *digest], device="cpu")  # whatever the user's default device is
    rows = torch.empty(size * row.numel(), dtype=row.dtype, device="cpu")
    gather_rows: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather_rows(rows, row, group=group)
    keys = list(map(tuple, rows.view(size, -1).tolist()))
    first: dict[tuple[int, ...], int] = {}
    for holder, key in enumerate(keys):
        first.setdefault(key, holder)
    if len(first) == 1:
        return [pickle.loads(mine)] * size
    # Each byte is of one rank, and zero on all others: their sum is the values in a row, of any lengths.
    parts = [mine if holder == rank else bytes(length) for (length, *_), holder in first.items()]
    row_of_values = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    del parts  # as large as the row
    dist.all_reduce(row_of_values, op=dist.ReduceOp.SUM, group=group)
    data = io.BytesIO(row_of_values.numpy().data)
    values = {key: pickle.load(data) for key in first}
    return [values[key] for key in keys]


def gather_to_first(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The picklable values of all ranks on the first one, in the order of ranks; [] on the others. Collective.

    ``group``: the ranks; None: one process.
    """
    if group is None:
        return [mine]
    first = dist.get_rank(group) == 0
    told = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(mine, told, dst=dist.get_global_rank(group, 0), group=group)
    return told or []


def scatter_from_first(parts: list[Any] | None, group: dist.ProcessGroup | None) -> Any:
    """This rank's value out of ``parts``, which the first rank has, one for each. Collective.

    ``group``: as for ``gather_to_first``.
    """
    if group is None:
        assert parts is not None
        return parts[0]
    received = [None]
    dist.scatter_object_list(received, parts, src=dist.get_global_rank(group, 0), group=group)
    return received[0]
