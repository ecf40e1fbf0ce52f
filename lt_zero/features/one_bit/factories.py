"""The 1-bit optimizers that ``optimizer.type`` can name, with the rules of their ``params``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lt_zero.features.one_bit.onebit import BACKENDS, OneBitAdam, OneBitLamb
from lt_zero.features.one_bit.zero_one import ZeroOneAdam
from lt_zero.optim.params import Signature, choice, number, only
from lt_zero.optim.registry import OPTIMIZER_RULES, STEPS, Factory, without

_NOT_THERE = {  # accepted, and without effect
    name: only(False, "1-bit optimizers have no such variant; write false, or remove it")
    for name in ("amsgrad", "eps_inside_sqrt")
}
_RULES: Mapping[str, Any] = {
    **OPTIMIZER_RULES,
    "freeze_step": number(1, whole=True, example="23000"),
    "comm_backend_name": choice(BACKENDS),
    **dict.fromkeys(("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"), STEPS),
    "coeff_beta": number(0, 1, high_open=True, example="0.9"),
    "factor_max": number(0, example="4.0"),
    "factor_min": number(0, example="0.5"),
    "factor_threshold": number(0, example="0.1"),
}
_CLASSES: Mapping[str, type[Optimizer]] = {
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}


def factory_of(name: str) -> Factory:
    """The factory of the optimizer of this name, in lower case."""
    made = _CLASSES[name]
    return Factory(Signature.of(made, _RULES).plus(_NOT_THERE), partial(without, made, _NOT_THERE))
