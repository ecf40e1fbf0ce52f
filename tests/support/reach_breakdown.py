"""Where ``wall_clock_breakdown``, ``memory_breakdown`` and ``gradient_noise_scale`` are looked for in a run."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

from tests.support.reach_engine import Config, Lab
from tests.support.reach_trainer import fit


def times(lab: Lab, config: Config) -> Any:
    """The steps at which times are told, of three."""
    return re.findall(r"^step (\d+), ms per step", fit(lab, config, max_steps=3).text, re.MULTILINE)


def memory(lab: Lab, config: Config) -> Any:
    """The steps of which memory is shown, of three."""
    return re.findall(r"Memory in MB .* at step (\d+)", fit(lab, config, max_steps=3).text)


def noise(lab: Lab, config: Config) -> Any:
    """The micro-batches of a step whose gradients are measured."""
    with mock.patch("lt_zero.tools.gradient_noise.gradient_noise.GradientNoise.begin") as began:
        fit(lab, config, max_steps=1, accumulate_grad_batches=2)
    return [call.args[0] for call in began.call_args_list]
