"""Optimizers and learning-rate schedulers, as DeepSpeed's configuration blocks describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lt_zero.common.places import import_public, is_there
from lt_zero.features import is_installed
from lt_zero.optim.from_config import build_grouped, build_optimizer, build_scheduler, check_optimizer, check_scheduler
from lt_zero.optim.grouping import param_groups
from lt_zero.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

if TYPE_CHECKING:
    from lt_zero.features.one_bit.onebit import OneBitAdam, OneBitLamb
    from lt_zero.features.one_bit.zero_one import ZeroOneAdam
    from lt_zero.optim.lamb import Lamb
    from lt_zero.optim.lion import Lion
    from lt_zero.optim.muon import Muon, muon_groups

# Those that are imported when they are asked for, by their modules.
_LATER = {
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
if is_there("lt_zero.optim.lamb"):
    __all__ += ["Lamb", "Lion", "Muon", "muon_groups"]
if is_installed("one_bit"):
    __all__ += ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_public(_LATER[name], f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
