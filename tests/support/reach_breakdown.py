"""Where ``wall_clock_breakdown`` and ``memory_breakdown`` are looked for in a run."""

from __future__ import annotations

import re
from typing import Any

from tests.support.reach_engine import Config, Lab
from tests.support.reach_trainer import fit


def times(lab: Lab, config: Config) -> Any:
    """The steps at which times are told, of three."""
    return re.findall(r"^step (\d+), ms per step", fit(lab, config, max_steps=3).text, re.MULTILINE)


def memory(lab: Lab, config: Config) -> Any:
    """The steps of which memory is shown, of three."""
    return re.findall(r"Memory in MB .* at step (\d+)", fit(lab, config, max_steps=3).text)
