"""The optimizers and schedulers that a configuration can name, by the names of DeepSpeed and torch."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.optim.adam import UncorrectedAdam
from lt_zero.optim.lamb import Lamb
from lt_zero.optim.lion import Lion
from lt_zero.optim.muon import Muon
from lt_zero.optim.muon_config import make_muon, muon_signature
from lt_zero.optim.onebit import BACKENDS, OneBitAdam, OneBitLamb
from lt_zero.optim.param_types import (
    Reader,
    Signature,
    choice,
    flag,
    nullable,
    number,
    only,
    per_group,
    refused,
    several,
    shown,
)
from lt_zero.optim.schedules import SCHEDULES
from lt_zero.optim.zero_one import ZeroOneAdam


@dataclass(frozen=True)
class Kind:
    """The optimizer or scheduler that a ``type`` names.

    Attributes:
        name: of the class.
        signature: the accepted ``params``.
        make: builds one from the parameters (or the optimizer) and checked ``params``.
        is_own: whether the class is lt_zero's or torch's, so that a trial instance is cheap and has no side effects.
        ungrouped: why ``optimizer.param_groups`` is not supported, and the remedy; "" if it is.
    """

    name: str
    signature: Signature
    make: Callable[[Any, dict[str, Any]], Any]
    is_own: bool = True
    ungrouped: str = ""


RATE = number(0, example="1e-3")
STEPS = number(1, whole=True, example="1000")
SIZE = number(0, low_open=True, example="1000")
SHARE = number(0, example="0.1")
STAIRS = number(whole=True, example="0 (none)")

OPTIMIZER_RULES: Mapping[str, Reader] = {
    "lr": RATE,
    "betas": several(2, number(0, 1, high_open=True), "[0.9, 0.999]"),
    "eps": number(0, example="1e-8"),
    "weight_decay": number(0, example="0.01"),
    "momentum": number(0, example="0.9"),
    "max_coeff": number(0, example="10.0"),
    "min_coeff": number(0, example="0.01"),
    "foreach": nullable(flag),
    "fused": nullable(flag),
}
_FP32 = only(True, "write true; for moments in bf16 set bf16.bf16_optimizer_states=true instead")
_ADAM: Mapping[str, Reader] = {
    "adam_w_mode": flag,
    "torch_adam": flag,
    "bias_correction": flag,
    "fp32_optimizer_states": _FP32,
    "set_grad_none": flag,
    "eps_inside_sqrt": only(False, "it belongs to Lamb; remove it"),  # configurations of 1-bit Adam have it, too
}
_HALVES = (
    "Muon has two fixed groups, the matrices of hidden layers and all other parameters. Remove the key and set their "
    "rates by optimizer.params.muon_lr and adam_lr. For other groups return lt_zero.optim.Muon from "
    "configure_optimizers."
)
_NO_AMSGRAD = only(False, "Lamb has no such variant; write false, or remove it")
_ONE_BIT = "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
_ONE_BIT += "local_step_clipper coeff_beta factor_max factor_min factor_threshold"
REFUSED: Mapping[str, Reader] = {
    "max_grad_norm": refused("remove it, and set gradient_clipping, at the top of the configuration, to this norm"),
    **dict.fromkeys(_ONE_BIT.split(), refused("it belongs to the 1-bit optimizers; remove it")),
    **dict.fromkeys(("max_coeff", "min_coeff", "eps_inside_sqrt"), refused("it belongs to Lamb; remove it")),
    **dict.fromkeys(("muon_lr", "adam_lr", "ns_method", "per_head_muon"), refused("it belongs to Muon; remove it")),
}
_NOT_IN_ONE_BIT = {  # accepted, and without effect
    name: only(False, "1-bit optimizers have no such variant; write false, or remove it")
    for name in ("amsgrad", "eps_inside_sqrt")
}
_ONE_BIT_RULES: Mapping[str, Reader] = {
    **OPTIMIZER_RULES,
    "freeze_step": number(1, whole=True, example="23000"),
    "comm_backend_name": choice(BACKENDS),
    **dict.fromkeys(("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"), STEPS),
    "coeff_beta": number(0, 1, high_open=True, example="0.9"),
    "factor_max": number(0, example="4.0"),
    "factor_min": number(0, example="0.5"),
    "factor_threshold": number(0, example="0.1"),
}
_ONE_BIT_CLASSES: Mapping[str, type[Optimizer]] = {
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}
UNSUPPORTED: Mapping[str, str] = {  # by name in lower case
    "muadam": "Use AdamW, and scale the learning rate of each parameter group as mup does.",
    "muadamw": "Use AdamW, and scale the learning rate of each parameter group as mup does.",
    "musgd": "Use SGD, and scale the learning rate of each parameter group as mup does.",
}

SCHEDULER_RULES: Mapping[str, Reader] = {
    "warmup_min_lr": per_group(RATE),
    "warmup_max_lr": nullable(per_group(RATE)),
    "warmup_num_steps": STEPS,
    "warmup_type": choice(("log", "linear")),
    "total_num_steps": STEPS,
    "warmup_min_ratio": SHARE,
    "cos_min_ratio": SHARE,
    "last_batch_iteration": number(-1, whole=True, example="-1"),
    "lr_range_test_min_lr": per_group(RATE),
    "lr_range_test_step_size": STEPS,
    "lr_range_test_step_rate": number(0, example="1.0"),
    "cycle_min_lr": per_group(RATE),
    "cycle_max_lr": per_group(RATE),
    "decay_lr_rate": SHARE,
    "cycle_first_step_size": SIZE,
    "cycle_second_step_size": nullable(number(0, example="1000")),
    "cycle_first_stair_count": STAIRS,
    "cycle_second_stair_count": nullable(STAIRS),
    "decay_step_size": number(0, example="1000"),
    "cycle_min_mom": per_group(number(0, 1, high_open=True, example="0.8")),
    "cycle_max_mom": per_group(number(0, 1, high_open=True, example="0.9")),
    "decay_mom_rate": number(example="0.0"),
    "milestones": several(None, number(0, whole=True), "[1000, 2000]"),
}
_OBJECTS = "It takes functions or other schedulers, which a configuration cannot hold"
_IN_CODE = "Return it from configure_optimizers, or use WarmupDecayLR or WarmupCosineLR."
UNSUPPORTED_SCHEDULERS: Mapping[str, str] = dict.fromkeys(
    ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), f"{_OBJECTS}. {_IN_CODE}"
)
PLATEAU = "ReduceLROnPlateau"  # stepped with a metric at the end of an epoch


def optimizer_kind(name: Any) -> Kind:
    """The optimizer that ``optimizer.type`` names.

    Raises:
        ConfigError: the name is unknown or cannot be used.
    """
    if not isinstance(name, str):
        raise _wrong("optimizer", name, "Write a name such as AdamW.")
    low = name.lower()
    if low in ("adam", "deepspeed_adam", "fusedadam", "deepspeedcpuadam", "adamw"):
        own = Signature.of(AdamW, OPTIMIZER_RULES)
        return Kind(name, own.plus(_ADAM), lambda params, values: _adam(params, values, decoupled=low == "adamw"))
    if low == "lion":
        extra: dict[str, Reader] = {"set_grad_none": flag, "fp32_optimizer_states": _FP32}
        return Kind("Lion", Signature.of(Lion, OPTIMIZER_RULES).plus(extra), _lion)
    if low == "adagrad":
        own = Signature.of(Adagrad, OPTIMIZER_RULES)
        return Kind("Adagrad", own.plus({"fp32_optimizer_states": _FP32}), _adagrad)
    if low in ("lamb", "fusedlamb"):
        own = Signature.of(Lamb, OPTIMIZER_RULES)
        return Kind("Lamb", own.plus({"amsgrad": _NO_AMSGRAD}), _lamb)
    if (one_bit := _ONE_BIT_CLASSES.get(low)) is not None:
        own = Signature.of(one_bit, _ONE_BIT_RULES)
        return Kind(one_bit.__name__, own.plus(_NOT_IN_ONE_BIT), partial(_one_bit, one_bit))
    if low == "muon":
        return Kind("Muon", muon_signature(OPTIMIZER_RULES), make_muon, ungrouped=_HALVES)
    if low in UNSUPPORTED:
        raise _wrong("optimizer", name, f"It is not supported. {UNSUPPORTED[low]}")
    cls = _torch_classes().get("SGD" if low == "sgd" else name)
    if cls is None and re.fullmatch(r"\w+(\.\w+)+", name):
        cls = _imported(name)
    if cls is None:
        known = [
            "Adam",
            "AdamW",
            "Adagrad",
            "Lamb",
            "Lion",
            "Muon",
            "OneBitAdam",
            "OneBitLamb",
            "SGD",
            "ZeroOneAdam",
            *_torch_classes(),
        ]
        raise _wrong("optimizer", name, _nearest(name, known) + " An import path (package.module.Class) works, too.")
    if cls is Muon:  # the path of our class; torch.optim.Muon is another one
        raise _wrong("optimizer", name, "Its parameters must be divided into two groups. Write Muon, which does that.")
    return _from_class("optimizer", cls, OPTIMIZER_RULES)


def scheduler_kind(name: Any) -> Kind:
    """The scheduler that ``scheduler.type`` names, case-sensitive as in DeepSpeed.

    Raises:
        ConfigError: the name is unknown or cannot be used.
    """
    if not isinstance(name, str):
        raise _wrong("scheduler", name, "Write a name such as WarmupLR.")
    if name in UNSUPPORTED_SCHEDULERS:
        raise _wrong("scheduler", name, f"It is not supported. {UNSUPPORTED_SCHEDULERS[name]}")
    classes: dict[str, type] = {n: c for n, c in _classes(torch.optim.lr_scheduler, LRScheduler)}
    known: dict[str, type] = {**{n: c for n, c in classes.items() if n not in UNSUPPORTED_SCHEDULERS}, **SCHEDULES}
    if name not in known:
        raise _wrong("scheduler", name, _nearest(name, [*SCHEDULES, *known]))
    kind = _from_class("scheduler", known[name], SCHEDULER_RULES)
    return _on_plateau(kind) if name == PLATEAU else kind


def _on_plateau(kind: Kind) -> Kind:
    """``kind`` with the parameter ``monitor``, which Lightning reads and the scheduler does not know."""
    signature = kind.signature.plus({"monitor": _metric})
    signature = replace(signature, required=signature.required | {"monitor"})

    def make(optimizer: Any, values: dict[str, Any]) -> Any:
        return ReduceLROnPlateau(optimizer, **{key: value for key, value in values.items() if key != "monitor"})

    return Kind(kind.name, signature, make)


def _metric(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("write the name of a logged metric, such as val_loss")
    return value


def _adam(parameters: Iterable[Any], values: dict[str, Any], decoupled: bool) -> Optimizer:
    """DeepSpeed's Adam is AdamW unless ``adam_w_mode`` is false, and its weight decay is 0 by default."""
    options = {key: value for key, value in values.items() if key not in _ADAM}
    decoupled = decoupled or values.get("adam_w_mode", True)
    if not values.get("torch_adam", False):
        options.setdefault("weight_decay", 0.0)
    if values.get("bias_correction", True):
        return (AdamW if decoupled else Adam)(parameters, **options)
    for key in ("amsgrad", "capturable", "differentiable"):
        if options.pop(key, False):
            path = f"optimizer.params.{key}"
            text = f"{path}=True cannot be combined with optimizer.params.bias_correction=False. Remove one of them."
            raise ConfigError([Problem(path, text)])
    for key in ("foreach", "fused"):  # they select an implementation, not an algorithm
        options.pop(key, None)
    options.setdefault("weight_decay", 0.01 if decoupled else 0.0)  # torch's default, with torch_adam
    return UncorrectedAdam(parameters, decoupled_weight_decay=decoupled, **options)


def _lion(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    """Lion with DeepSpeed's defaults, which differ from the paper's."""
    options = {"lr": 1e-3, "betas": (0.9, 0.999), **values}
    return Lion(parameters, **{k: v for k, v in options.items() if k not in _ADAM})


def _lamb(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    return Lamb(parameters, **{key: value for key, value in values.items() if key != "amsgrad"})


def _one_bit(cls: type[Optimizer], parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    return cls(parameters, **{k: v for k, v in values.items() if k not in _NOT_IN_ONE_BIT})


def _adagrad(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    return Adagrad(parameters, **{k: v for k, v in values.items() if k not in _ADAM})


def _from_class(block: str, cls: type, rules: Mapping[str, Reader]) -> Kind:
    try:
        signature = Signature.of(cls, rules)
    except (ValueError, TypeError) as error:
        text = "Its constructor has no readable signature. Build it in configure_optimizers."
        raise _wrong(block, cls.__qualname__, text) from error
    own = cls.__module__.startswith(("torch.optim.", "lt_zero.optim."))
    return Kind(cls.__name__, signature, lambda target, values: cls(target, **values), own)


def _imported(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing runs the module's code
        text = f"It cannot be imported ({type(error).__name__}: {error}). Correct the path, or install the package."
        raise _wrong("optimizer", path, text) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)) or found is Optimizer:
        raise _wrong("optimizer", path, "It is not a subclass of torch.optim.Optimizer. Name one, such as AdamW.")
    return found


def _torch_classes() -> dict[str, type]:
    return dict(_classes(torch.optim, Optimizer))


def _classes(module: Any, base: type) -> list[tuple[str, type]]:
    found = [(name, getattr(module, name)) for name in dir(module) if not name.startswith("_")]
    return [(n, c) for n, c in found if isinstance(c, type) and issubclass(c, base) and c is not base]


def _nearest(name: str, known: Iterable[str]) -> str:
    by_case = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_case, n=1)
    known = ", ".join(dict.fromkeys(by_case.values()))
    return f"Did you mean {by_case[near[0]]}?" if near else f"Known are: {known}."


def _wrong(block: str, name: Any, remedy: str) -> ConfigError:
    key = f"{block}.type"
    return ConfigError([Problem(key, f"{key}={shown(name)} cannot be used. {remedy}")])
