"""The optimizers and schedulers that a configuration can name, by the names of DeepSpeed and torch."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.places import load
from lt_zero.core.engine.optimizer_spec import is_known
from lt_zero.optim.adam import UncorrectedAdam
from lt_zero.optim.lamb import Lamb
from lt_zero.optim.lion import Lion
from lt_zero.optim.muon import NS_METHODS, RATES, Muon
from lt_zero.optim.params import Flag, Signature, choice, nullable, number, only, per_group, problem, several
from lt_zero.optim.schedules import SCHEDULES


@dataclass(frozen=True)
class Factory:
    """Makes the optimizer or scheduler that a ``type`` names.

    Attributes:
        signature: the accepted ``params``.
        make: builds one from the parameters (or the optimizer) and checked ``params``.
        is_own: whether the class is lt_zero's or torch's, so that a trial instance is cheap and has no side effects.
        ungrouped: why ``optimizer.param_groups`` is not supported, and the remedy; "" if it is.
    """

    signature: Signature
    make: Callable[[Any, dict[str, Any]], Any]
    is_own: bool = True
    ungrouped: str = ""


RATE = number(0, example="1e-3")
STEPS = number(1, whole=True, example="1000")
SIZE = number(0, low_open=True, example="1000")
SHARE = number(0, example="0.1")
STAIRS = number(whole=True, example="0 (none)")

OPTIMIZER_RULES: Mapping[str, Any] = {
    "lr": RATE,
    "betas": several(2, number(0, 1, high_open=True), "[0.9, 0.999]"),
    "eps": number(0, example="1e-8"),
    "weight_decay": number(0, example="0.01"),
    "momentum": number(0, example="0.9"),
    "max_coeff": number(0, example="10.0"),
    "min_coeff": number(0, example="0.01"),
    "foreach": nullable(Flag),
    "fused": nullable(Flag),
}
_FP32 = only(True, "write true; for moments in bf16 set optimizer_states.dtype=bf16 instead")
_ADAM: Mapping[str, Any] = {
    "adam_w_mode": Flag,
    "torch_adam": Flag,
    "bias_correction": Flag,
    "fp32_optimizer_states": _FP32,
    "set_grad_none": Flag,
    "eps_inside_sqrt": only(False, "it belongs to Lamb; remove it"),  # configurations of 1-bit Adam have it, too
}
_HALVES = (
    "Muon has two fixed groups, the matrices of hidden layers and all other parameters. Remove the key and set their "
    "rates by optimizer.params.muon_lr and adam_lr. For other groups return lt_zero.optim.Muon from "
    "configure_optimizers."
)
_HEADS = "an attention projection is updated as one matrix; remove it. A matrix per head gets its own update"
# As in DeepSpeed 0.19.8, ``lr`` and ``weight_decay`` apply to both groups, ``muon_lr``, ``momentum`` and ``ns_method``
# to Muon, ``adam_lr``, ``betas`` and ``eps`` to Adam. Not in DeepSpeed: ``nesterov``, ``ns_steps``, ``adjust_lr_fn``.
_MUON_RULES: Mapping[str, Any] = {
    **OPTIMIZER_RULES,
    "muon_lr": RATE,
    "adam_lr": RATE,
    "ns_method": choice(NS_METHODS),
    "ns_steps": number(1, 99, whole=True, example="5"),
    "adjust_lr_fn": choice(RATES),
}
_NOT_OF_MUON: Mapping[str, Any] = {
    "torch_adam": Flag,  # selects an implementation, not an algorithm
    "fp32_optimizer_states": only(True, "write true; for moments in bf16 set optimizer_states.dtype=bf16"),
    "per_head_muon": only(False, _HEADS),
}
_NO_AMSGRAD = only(False, "Lamb has no such variant; write false, or remove it")
# Those of features, which may not be installed, by name in lower case: where what returns their factory is.
_OF_FEATURES: Mapping[str, str] = dict.fromkeys(
    ("onebitadam", "onebitlamb", "zerooneadam"), "lt_zero.features.one_bit.factories:factory_of"
)
UNSUPPORTED: Mapping[str, str] = {  # by name in lower case
    "muadam": "Use AdamW, and scale the learning rate of each parameter group as mup does.",
    "muadamw": "Use AdamW, and scale the learning rate of each parameter group as mup does.",
    "musgd": "Use SGD, and scale the learning rate of each parameter group as mup does.",
}

SCHEDULER_RULES: Mapping[str, Any] = {
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
_METRIC = Annotated[str, Field(min_length=1, description="the name of a logged metric, such as val_loss")]
PLATEAU = "ReduceLROnPlateau"  # stepped with a metric at the end of an epoch


def optimizer_factory(name: Any) -> Factory:
    """The optimizer that ``optimizer.type`` names.

    Raises:
        ConfigError: the name is unknown or cannot be used.
    """
    if not isinstance(name, str):
        raise _wrong("optimizer", name, "Write a name such as AdamW.")
    if (own := _own(name)) is not None:
        return own
    low = name.lower()
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
    return _from_class("optimizer", cls)


@functools.lru_cache(maxsize=64)  # making the types of arguments takes milliseconds
def _own(name: str) -> Factory | None:
    """The optimizer of a name that stands for more than a class and its constructor."""
    low = name.lower()
    if low in ("adam", "deepspeed_adam", "fusedadam", "deepspeedcpuadam", "adamw"):
        own = Signature.of(AdamW, OPTIMIZER_RULES, name).plus(_ADAM)
        return Factory(own, lambda params, values: _adam(params, values, decoupled=low == "adamw"))
    if low == "lion":
        extra = {"set_grad_none": Flag, "fp32_optimizer_states": _FP32}
        return Factory(Signature.of(Lion, OPTIMIZER_RULES).plus(extra), _lion)
    if low == "adagrad":
        own = Signature.of(Adagrad, OPTIMIZER_RULES).plus({"fp32_optimizer_states": _FP32})
        return Factory(own, partial(without, Adagrad, _ADAM))
    if low in ("lamb", "fusedlamb"):
        own = Signature.of(Lamb, OPTIMIZER_RULES).plus({"amsgrad": _NO_AMSGRAD})
        return Factory(own, partial(without, Lamb, ("amsgrad",)))
    if (place := _OF_FEATURES.get(low)) is not None:
        made: Factory = load(place, "optimizer.type", f"the optimizer {name}")(low)
        return made
    if low == "muon":
        own = Signature.of(Muon, _MUON_RULES).plus({**_NOT_OF_MUON, "lr": RATE})
        return Factory(own, _muon, ungrouped=_HALVES)
    return None


def scheduler_factory(name: Any) -> Factory:
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
    return _on_plateau() if name == PLATEAU else _from_class("scheduler", known[name])


@functools.cache
def _on_plateau() -> Factory:
    """``ReduceLROnPlateau`` with the argument ``monitor``, which Lightning reads and the scheduler does not know."""
    signature = Signature.of(ReduceLROnPlateau, SCHEDULER_RULES).plus({"monitor": _METRIC})
    signature = replace(signature, required=signature.required | {"monitor"})
    return Factory(signature, partial(without, ReduceLROnPlateau, ("monitor",)))


def without(cls: Callable[..., Any], others: Collection[str], target: Any, values: dict[str, Any]) -> Any:
    """An object of ``cls``, whose constructor does not have the arguments ``others``."""
    return cls(target, **{key: value for key, value in values.items() if key not in others})


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


def _muon(parameters: Iterable[Any], values: dict[str, Any]) -> Optimizer:
    """Muon; bare parameters are divided by their number of dimensions alone."""
    options = {key: value for key, value in values.items() if key not in _NOT_OF_MUON}
    if "lr" in options:
        rate = options.pop("lr")
        options = {"muon_lr": rate, "adam_lr": rate, **options}
    groups = list(parameters)
    if not any(isinstance(group, dict) for group in groups):
        divided = [(use, [p for p in groups if (_tensor(p).dim() == 2) is use]) for use in (True, False)]
        groups = [{"params": members, "use_muon": use} for use, members in divided if members]
    return Muon(groups, **options)


def _tensor(parameter: Any) -> torch.Tensor:
    """The tensor of a parameter, which may be a (name, parameter) pair as in torch."""
    tensor: torch.Tensor = parameter[1] if isinstance(parameter, tuple) else parameter
    return tensor


@functools.lru_cache(maxsize=64)
def _from_class(block: str, cls: type) -> Factory:
    try:
        signature = Signature.of(cls, OPTIMIZER_RULES if block == "optimizer" else SCHEDULER_RULES)
    except (ValueError, TypeError) as error:
        text = "Its constructor has no readable signature. Build it in configure_optimizers."
        raise _wrong(block, cls.__qualname__, text) from error
    return Factory(signature, partial(without, cls, ()), is_known(cls))


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
    return ConfigError([problem(f"{block}.type", name, f" cannot be used. {remedy}")])
