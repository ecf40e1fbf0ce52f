"""Memory planning: how many bytes a run needs per rank and node, what a machine has, and which setting fits."""

from lt_zero.planning.estimate import Sizes, estimate
from lt_zero.planning.fit import Fit, Machine, cheapest, settings_table
from lt_zero.planning.forecast import Forecast
from lt_zero.planning.limits import NotEnoughMemory, check_host_memory

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
