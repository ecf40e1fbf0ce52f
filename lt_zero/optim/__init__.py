"""Optimizers and learning-rate schedulers, as DeepSpeed's configuration blocks describe them."""

from lt_zero.optim.from_config import build_grouped, build_optimizer, build_scheduler, check_optimizer, check_scheduler
from lt_zero.optim.grouping import param_groups
from lt_zero.optim.lamb import Lamb
from lt_zero.optim.lion import Lion
from lt_zero.optim.muon import Muon, muon_groups
from lt_zero.optim.onebit import OneBitAdam, OneBitLamb
from lt_zero.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from lt_zero.optim.zero_one import ZeroOneAdam

__all__ = [
    "LRRangeTest",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroOneAdam",
    "build_grouped",
    "build_optimizer",
    "build_scheduler",
    "check_optimizer",
    "check_scheduler",
    "muon_groups",
    "param_groups",
]
