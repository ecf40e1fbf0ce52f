"""LAMB on shards: its trust ratios need norms of full parameters, of which a rank has fragments (optim/lamb.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero import ops
from lt_zero.comm.communicator import Comm
from lt_zero.engine.bucket import Bucket
from lt_zero.optim.lamb import trust_rates
from lt_zero.step.fragments import Member
from lt_zero.step.kernels import Rows


class FullNorms:
    """Adds up squared norms of fragments over the ranks, in one all-reduce for all parameters of a step.

    The table that is reduced has a row for each parameter of the stepped buckets, zero where a rank has no fragment.
    Parameters that every rank has in full, or that the engine does not own, have no row.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._first: dict[Bucket, int] = {}  # row of a bucket's first parameter
        self._row_of: dict[int, int] = {}  # of a fragment, by id
        self._count = 0  # rows

    def expect(self, members: Mapping[Bucket, Sequence[Member]]) -> None:
        """Prepare for a step of these buckets, the same ones in the same order on all ranks."""
        self._first, self._row_of, self._count = {}, {}, 0
        for bucket, mine in members.items():
            if bucket.shard_range != (0, bucket.layout.numel):
                self._row_of.update({id(member.fragment): self._count + member.piece.index for member in mine})
                self._first[bucket] = self._count
                self._count += len(bucket.params)

    def __call__(self, fragments: list[Tensor], squares: Tensor) -> Tensor:
        """Squared norms (fp64, [fragments, any]) of the parameters that these are fragments of. Collective."""
        return self._summed([self._row_of.get(id(fragment)) for fragment in fragments], squares)

    def at(self, places: list[tuple[Bucket, int]], squares: Tensor) -> Tensor:
        """The same for fragments of these (bucket, index of a parameter). Collective."""
        rows = [first + index if (first := self._first.get(b)) is not None else None for b, index in places]
        return self._summed(rows, squares)

    def _summed(self, rows: list[int | None], squares: Tensor) -> Tensor:
        if self._count == 0:
            return squares
        table = torch.zeros(self._count, squares.shape[1], dtype=torch.float64, device=self._comm.device)
        held = [(number, row) for number, row in enumerate(rows) if row is not None]
        numbers, places = torch.tensor(held, dtype=torch.int64).view(-1, 2).unbind(1)
        table[places.to(table.device)] = squares[numbers.to(squares.device)].to(table.device)
        table = self._comm.sum_scalar(table, "norms of full parameters")
        full = squares.clone()
        full[numbers.to(squares.device)] = table[places.to(table.device)].to(squares.device)
        return full


def launch_lamb(calls: Sequence[Rows], norms: FullNorms | None, found_inf: Tensor | None) -> None:
    """Step LAMB by its two kernels, one fragment per row.

    Args:
        calls: the rows; may be none.
        norms: adds up norms over the ranks, once for all calls; None: all rows are full parameters.
        found_inf: 0D fp32; if it is not zero, nothing is written.
    """
    parts = [torch.zeros(0, 2, dtype=torch.float64)]
    for rows in calls:
        betas: dict[str, Any] = {"beta1": rows.options["beta1"], "beta2": rows.options["beta2"]}
        first, second = rows.states
        options = {**betas, **_rule(rows), "scale": rows.factor, "found_inf": found_inf}
        parts.append(ops.lamb_update(rows.params, rows.grads, first, second, **options))
    squares = torch.cat([part.to(parts[-1].device) for part in parts])
    if norms is not None:
        squares = norms.at([place for rows in calls for place in rows.places], squares)
    for rows, mine in zip(calls, squares.split([len(rows.params) for rows in calls]), strict=True):
        count, device = len(rows.params), rows.params[0].device
        bounds = (rows.options["lower"], rows.options["upper"])
        rates = trust_rates(mine, [rows.options["lr"]] * count, [bounds] * count).to(device, torch.float32)
        first, second = rows.states
        ops.lamb_apply(rows.params, first, second, rates, rows.outs, **_rule(rows), found_inf=found_inf)


def _rule(rows: Rows) -> dict[str, Any]:
    return {"eps": rows.options["eps"], "weight_decay": rows.options["weight_decay"]}
