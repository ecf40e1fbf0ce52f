"""Chunks of master weights, as the references of all steps go through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lt_zero.kernels.dispatch import chunks, random_rounding, store


@dataclass(frozen=True)
class Weights:
    """A chunk of master weights in a reference.

    Attributes:
        values: in fp32, where the step is computed: ``stored`` itself, or a copy.
        stored: the master weights.
        out: receives a copy of these, or None.
        places: of all elements of the list, or None.
        tensor: number of the tensor.
        lo: number of the first element in it.
    """

    values: Tensor
    stored: Tensor
    out: Tensor | None
    places: Tensor | None
    tensor: int
    lo: int

    def keep(self) -> None:
        """Round ``values`` to the master weights, and copy these to ``out``."""
        if self.places is not None:
            random_rounding()(self.values, self.stored, self.places, self.tensor, self.lo)
        else:
            store(self.stored, self.values)
        store(self.out, self.stored)


def weight_chunks(
    params: Sequence[Tensor], outs: Sequence[Tensor] | None, places: Tensor | None, *lists: Sequence[Tensor] | None
) -> Iterator[tuple[Any, ...]]:
    """Yield ``Weights`` of one chunk after the other, and the same chunk of each of ``lists``."""
    for number, param in enumerate(params):
        own = ([tensors[number]] if tensors else None for tensors in (outs, *lists))
        lo = 0
        for stored, out, *others in chunks([param], *own):
            yield Weights(stored.float(), stored, out, places, number, lo), *others
            lo += stored.numel()
