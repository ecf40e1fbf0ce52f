"""The rounding of a step's weights to master weights in fewer bits: by default to the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lt_zero.common.boxes import ParamSpec
from lt_zero.kernels.places import ElementPlace, SteppedFragment


class RandomBits(Protocol):
    """The random bits by which a kernel rounds the fragments that it steps.

    Attributes:
        count_key: key of the state that counts the steps, for optimizers that do not.
        seed_key: key of the state that has the seed.
    """

    @property
    def count_key(self) -> str: ...
    @property
    def seed_key(self) -> str: ...

    def holds(self, states: Sequence[dict[str, Any]]) -> bool:
        """True if these are the seeds in the fragments' states."""

    def adopt(self, number: int, state: dict[str, Any]) -> None:
        """Take the seed of one fragment from its state, which gets one if it has none."""

    def places(self, first: int, last: int, steps: Sequence[float]) -> list[ElementPlace]:
        """The places of the fragments from ``first`` to ``last``, with the number of each one's step."""


class WeightRounding(Protocol):
    """Writes the weights that a step has computed to master weights, which may have fewer bits."""

    def store(self, values: Tensor, master: Tensor, spec: ParamSpec, lo: int, state: dict[str, Any]) -> None:
        """Round ``values`` to ``master``, a tensor of the same shape.

        Args:
            spec: of their parameter.
            lo: number of the first of these elements in this rank's part of it, row-major.
            state: the optimizer's after the step, for this parameter; scalars may be added.
        """

    def bits(self, master: torch.dtype, fragments: Iterable[SteppedFragment]) -> RandomBits | None:
        """The random bits by which a kernel rounds to the dtype ``master``; None: it rounds to the nearest."""


class RoundNearest:
    """Round to the nearest, as torch does."""

    def store(self, values: Tensor, master: Tensor, spec: ParamSpec, lo: int, state: dict[str, Any]) -> None:
        master.copy_(values)

    def bits(self, master: torch.dtype, fragments: Iterable[SteppedFragment]) -> RandomBits | None:
        return None


NEAREST = RoundNearest()
