"""Norms of full parameters for an optimizer whose groups hold fragments (optim/lamb.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lt_zero.comm.communicator import Comm
from lt_zero.engine.bucket import Bucket
from lt_zero.step.fused_step import Member


class FullNorms:
    """Adds up squared norms of fragments over the ranks, in one all-reduce for all parameters of a step.

    The table that is reduced has a row for each parameter of the stepped buckets, zero where a rank has no fragment.
    Parameters that every rank has in full, or that the engine does not own, have no row.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._row_of: dict[int, int] = {}  # of a fragment, by id
        self._count = 0  # rows

    def expect(self, members: Mapping[Bucket, Sequence[Member]]) -> None:
        """Prepare for a step of these buckets, the same ones in the same order on all ranks."""
        self._row_of, self._count = {}, 0
        for bucket, mine in members.items():
            if bucket.shard_range != (0, bucket.layout.numel):
                self._row_of.update({id(member.fragment): self._count + member.piece.index for member in mine})
                self._count += len(bucket.params)

    def __call__(self, fragments: list[Tensor], squares: Tensor) -> Tensor:
        """Squared norms (fp64, [fragments, any]) of the parameters that these are fragments of. Collective."""
        if self._count == 0:
            return squares
        table = torch.zeros(self._count, squares.shape[1], dtype=torch.float64, device=self._comm.device)
        held = [(number, self._row_of[id(f)]) for number, f in enumerate(fragments) if id(f) in self._row_of]
        numbers, rows = torch.tensor(held, dtype=torch.int64).view(-1, 2).unbind(1)
        table[rows.to(table.device)] = squares[numbers.to(squares.device)].to(table.device)
        table = self._comm.sum_scalar(table, "norms of full parameters")
        full = squares.clone()
        full[numbers.to(squares.device)] = table[rows.to(table.device)].to(squares.device)
        return full
