"""The loss scale of a run, as each face makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt_zero.common.places import load_if_installed
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import on_min_scale
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.step.loss_scale import LossScaleController, plain_report

if TYPE_CHECKING:
    from lt_zero.core.step.overflow import OverflowReport


def loss_scale_controller(config: ZeroConfig, policy: DtypePolicy) -> LossScaleController:
    """A controller that names modules and parameters whose values are not finite, if monitoring is installed."""
    return LossScaleController(policy, on_min_scale(config), _report)


def _report() -> OverflowReport:
    named = load_if_installed("lt_zero.training.overflow:NamedOverflow")
    made: OverflowReport = named() if named is not None else plain_report()
    return made
