"""A saved state: the sum of the weights of all steps, of which each rank has its shard, and their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.layout import Piece
from lt_zero.core.engine.lazy_tensor import Fragment, elements_of
from lt_zero.core.feature import Entry, Feature, PlaceInRun


class Sums(Feature):
    """Sums of this rank's shard of each bucket."""

    @override
    def watch(
        self, engine: Engine, run: PlaceInRun
    ) -> None:  # nothing to take back: an engine that is detached takes no steps
        self.steps = 0
        self._rows = {bucket: torch.zeros_like(bucket.weights.values()) for bucket in engine.buckets}
        engine.after_step.append(self._add)

    def _add(self) -> None:
        self.steps += 1
        for bucket, rows in self._rows.items():
            rows += bucket.weights.values()

    def _parts(self) -> Iterator[tuple[Any, Piece, Tensor, tuple[int, ...]]]:
        """Yield the spec of each parameter, this rank's piece, the sums of that, and the ranks that have the pieces."""
        for bucket, rows in self._rows.items():
            for index, span in enumerate(bucket.layout.spans):
                piece = next(iter(bucket.pieces_of(index)), Piece(index, 0, 0, 0))
                yield span.spec, piece, rows.narrow(0, piece.offset, piece.numel), bucket.group.of_process

    @override
    def states(self) -> Mapping[str, Sums]:
        return {"sums": self}

    def state_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for spec, piece, rows, ranks in self._parts():
            where = piece.lo, piece.hi, rows.dtype, None, spec.local_box, ranks
            made[spec.name] = Fragment(partial(rows.view, -1), spec.global_shape, *where)
        return {"steps": self.steps, "rows": made}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.steps = state["steps"]
        for spec, piece, rows, _ in self._parts():
            rows.copy_(elements_of(state["rows"][spec.name], piece.lo, piece.hi, spec.local_box))


ENTRY = Entry("sums", "tests.outside.sums:Sums", "", lambda config: True)  # a run has it once it is registered
