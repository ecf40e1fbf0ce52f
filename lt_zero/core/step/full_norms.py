"""Norms of full parameters, of which a rank has fragments: for a ``NormedOptimizer``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.norms import VectorNorm
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.shard_group import combine_rows
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.optimizer_spec import CombinedNorms
from lt_zero.core.step.param_groups import BucketStep


class FullNorms(CombinedNorms):
    """Adds up squared norms of fragments over the ranks, in one all-reduce for all parameters of a step.

    The table that is reduced has a row for each parameter of the stepped buckets, zero where a rank has no fragment.
    Parameters that every rank has in full, or that the engine does not own, have no row. Where a parameter is a part of
    a tensor, the norm is that of the tensor.

    Args:
        device: of the reduction.
        norm: of order 2, whose parts describe fragments; None: sums of squares do.

    Attributes:
        sums_squares: whether sums of squares describe fragments, as kernels take them.
    """

    def __init__(self, device: torch.device, norm: VectorNorm | None = None) -> None:
        self._device = device
        self._norm = norm
        self.sums_squares = norm is None
        self._rows: dict[tuple[Bucket, int], int] = {}  # the row of a parameter
        self._row_of: dict[int, int] = {}  # the row of a fragment, by id
        self._groups: list[Ranks] = []  # the ranks of each row
        self._repeats: set[int] = set()  # rows that another rank contributes

    def expect(self, steps: Iterable[BucketStep]) -> None:
        """Prepare for these steps, of the same buckets in the same order on all ranks."""
        self._rows = {}
        self._row_of = {}
        self._groups = []
        self._repeats = set()
        for step in steps:
            bucket = step.bucket
            sharded = not bucket.storage.is_whole
            for index, span in enumerate(bucket.layout.spans):
                if sharded or not span.spec.is_whole:
                    self._rows[bucket, index] = row = len(self._groups)
                    self._groups.append(bucket.holders(index))
                    self._repeats.update([row] if bucket.repeats(index) else ())
            places = ((member.fragment, (bucket, member.piece.index)) for member in step.members)
            self._row_of.update({id(fragment): self._rows[p] for fragment, p in places if p in self._rows})

    @override
    def part(self, tensor: Tensor) -> Tensor:
        return super().part(tensor) if self._norm is None else self._norm.part([tensor], tensor.device)

    @override
    def of_parts(self, tensors: list[Tensor], rows: Sequence[Tensor], columns: int) -> Tensor:
        if self._norm is None:
            return self(tensors, super().of_parts(tensors, rows, columns))
        width = self._norm.columns
        parts = self(tensors, super().of_parts(tensors, rows, columns * width))
        return self._norm.finish(parts.view(-1, width)).square().view(-1, columns)

    @override
    def __call__(self, fragments: list[Tensor], squares: Tensor, /) -> Tensor:
        """Squared norms (fp64, [fragments, any]) of the parameters that these are fragments of. Collective."""
        return self._combined([self._row_of.get(id(fragment)) for fragment in fragments], squares)

    def maxima(self, fragments: list[Tensor], values: Tensor) -> Tensor:
        """The maxima of ``values`` (fp64, [fragments, any], none below 0) in the same way. Collective."""
        return self._combined([self._row_of.get(id(fragment)) for fragment in fragments], values, maximum=True)

    def at(self, places: list[tuple[Bucket, int]], squares: Tensor) -> Tensor:
        """Squared norms as from ``__call__``, for fragments of these (bucket, index of a parameter). Collective."""
        return self._combined([self._rows.get(place) for place in places], squares)

    def _combined(self, rows: list[int | None], squares: Tensor, maximum: bool = False) -> Tensor:
        if not self._groups:
            return squares
        table = torch.zeros(len(self._groups), squares.shape[1], dtype=torch.float64, device=self._device)
        held = [(number, row) for number, row in enumerate(rows) if row is not None]
        counts = [row not in self._repeats for _, row in held]
        columns = [[number for number, _ in held], [row for _, row in held], counts]
        index = torch.tensor(columns, dtype=torch.int64)
        devices = squares.device, table.device, squares.device
        numbers, places, count = (accelerator.send(i, device) for i, device in zip(index, devices, strict=True))
        table[places] = (squares[numbers] * count[:, None]).to(table.device)
        table = combine_rows(table, self._groups, "norms of full parameters", maximum)
        full = squares.clone()
        full[numbers] = table[places].to(squares.device)
        return full
