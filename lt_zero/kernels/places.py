"""Places of elements in their parameters, as kernels of steps that round at random take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.boxes import ParamSpec


class SteppedFragment(NamedTuple):
    """A fragment of a parameter in a row of elements that one kernel steps.

    Attributes:
        spec: of the parameter.
        begin: number of the fragment's first element in the row.
        lo: number of that element in this rank's part of the parameter, row-major.
        numel: of the fragment.
    """

    spec: ParamSpec
    begin: int
    lo: int
    numel: int


class ElementPlace(NamedTuple):
    """Position of consecutive elements of a tensor in their parameter, with the ingredients of their random bits.

    Attributes:
        tensor: number of the tensor in a list.
        begin: the first of the elements there; the last one is before the next place.
        first: index of its first element in the whole parameter.
        row: elements of a row, which follow each other there.
        stride: from the first element of a row to that of the next.
        seed: of the parameter, 64 bits.
        step: of the parameter.
    """

    tensor: int
    begin: int
    first: int
    row: int
    stride: int
    seed: int
    step: int


def place_table(places: Iterable[ElementPlace], device: torch.device) -> Tensor:
    """The places of all elements of a list of tensors, in order, as steps take them (2D int64, a row for each).

    Nothing waits for ``device``.
    """
    # Seeds have no sign; torch has no such integers, but their bits.
    rows = [place._replace(seed=place.seed - (place.seed >> 63 << 64)) for place in places]
    return accelerator.send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
