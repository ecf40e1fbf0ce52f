"""The rounding of a step's weights to master weights in fewer bits: by default to the nearest."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lt_zero.common.boxes import ParamSpec


class WeightRounding(Protocol):
    """Writes the weights that a step has computed to master weights, which may have fewer bits."""

    def store(self, values: Tensor, master: Tensor, spec: ParamSpec, lo: int, state: dict[str, Any]) -> None:
        """Round ``values`` to ``master``, a tensor of the same shape.

        Args:
            spec: of their parameter.
            lo: number of the first of these elements in this rank's part of it, row-major.
            state: the optimizer's after the step, for this parameter; scalars may be added.
        """


class RoundNearest:
    """Round to the nearest, as torch does."""

    def store(self, values: Tensor, master: Tensor, spec: ParamSpec, lo: int, state: dict[str, Any]) -> None:
        master.copy_(values)


NEAREST = RoundNearest()
