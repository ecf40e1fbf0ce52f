"""``gradient_noise_scale``: the gradient noise is a figure of the monitors."""

from __future__ import annotations

from typing_extensions import override

from lt_zero.core.engine.engine import Engine
from lt_zero.core.feature import Feature, PlaceInRun
from lt_zero.tools.gradient_noise.gradient_noise import GradientNoise


class Noise(Feature):
    """Measures where a monitor shows it."""

    @override
    def watch(self, engine: Engine, run: PlaceInRun) -> GradientNoise:
        return GradientNoise(engine, run)
