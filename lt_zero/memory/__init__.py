"""Memory planning: the bytes that a run needs per rank and node, those of a machine, and settings that fit."""

from lt_zero.memory.estimate import Fit, Machine, cheapest, estimate, settings_table
from lt_zero.memory.forecast import Forecast
from lt_zero.memory.limits import NotEnoughMemory, check_host_memory
from lt_zero.memory.sizes import Sizes

__all__ = [
    "Fit",
    "Forecast",
    "Machine",
    "NotEnoughMemory",
    "Sizes",
    "cheapest",
    "check_host_memory",
    "estimate",
    "settings_table",
]
