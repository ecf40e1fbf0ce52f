"""Optimizers and learning-rate schedulers, as DeepSpeed's configuration blocks describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt_zero.common.places import is_there, public_names
from lt_zero.features import is_installed

if TYPE_CHECKING:
    from lt_zero.features.one_bit.onebit import OneBitAdam, OneBitLamb
    from lt_zero.features.one_bit.zero_one import ZeroOneAdam
    from lt_zero.optim.from_config import (
        build_grouped,
        build_optimizer,
        build_scheduler,
        check_optimizer,
        check_scheduler,
    )
    from lt_zero.optim.grouping import param_groups
    from lt_zero.optim.lamb import Lamb
    from lt_zero.optim.lion import Lion
    from lt_zero.optim.muon import Muon, muon_groups
    from lt_zero.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

_BUILDERS = ("build_grouped", "build_optimizer", "build_scheduler", "check_optimizer", "check_scheduler")
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
# Imported when they are first used, by their modules: most runs use none of them.
_MODULES = {
    **dict.fromkeys(_BUILDERS, "lt_zero.optim.from_config"),
    **dict.fromkeys(_SCHEDULES, "lt_zero.optim.schedules"),
    "param_groups": "lt_zero.optim.grouping",
    "Lamb": "lt_zero.optim.lamb",
    "Lion": "lt_zero.optim.lion",
    "Muon": "lt_zero.optim.muon",
    "OneBitAdam": "lt_zero.features.one_bit.onebit",
    "OneBitLamb": "lt_zero.features.one_bit.onebit",
    "ZeroOneAdam": "lt_zero.features.one_bit.zero_one",
    "muon_groups": "lt_zero.optim.muon",
}

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_grouped",
    "build_optimizer",
    "build_scheduler",
    "check_optimizer",
    "check_scheduler",
    "param_groups",
]
OPTIMIZERS: list[str] = []  # names of classes
if is_there("lt_zero.optim.lamb"):
    OPTIMIZERS += ["Lamb", "Lion", "Muon"]
    __all__ += ["Lamb", "Lion", "Muon", "muon_groups"]
if is_installed("one_bit"):
    OPTIMIZERS += ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
    __all__ += ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]

__getattr__ = public_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
