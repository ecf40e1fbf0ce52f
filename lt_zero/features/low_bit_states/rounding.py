"""``bf16.stochastic_rounding``: steps round master weights up or down at random."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.feature import Feature
from lt_zero.kernels.rounding import RoundStochastic


class RandomRounding(Feature):
    """Stochastic rounding of master weights, with the seed of the run."""

    @override
    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        return replace(options, rounding=RoundStochastic)
