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
from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.names import OfRanks
from lt_zero.common.places import load
from lt_zero.core.engine.optimizer_spec import is_known
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
        divide: the parameter groups of a module, as ``muon_groups`` returns them; None: the parameters, as they are.
        shares: lines for the user on the groups that ``divide`` has made: who steps them, how many, and which.
    """

    signature: Signature
    make: Callable[[Any, dict[str, Any]], Any]
    is_own: bool = True
    ungrouped: str = ""
    divide: Callable[[nn.Module, OfRanks], list[dict[str, Any]]] | None = None
    shares: Callable[[Optimizer], Iterable[tuple[str, str, str]]] = lambda optimizer: ()


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
FP32_STATES = only(True, "write true; for moments in bf16 set optimizer_states.dtype=bf16 instead")
ADAM_RULES: Mapping[str, Any] = {
    "adam_w_mode": Flag,
    "torch_adam": Flag,
    "bias_correction": Flag,
    "fp32_optimizer_states": FP32_STATES,
    "set_grad_none": Flag,
    "eps_inside_sqrt": only(False, "it belongs to Lamb; remove it"),  # configurations of 1-bit Adam have it, too
}
# By name in lower case: where the function is that returns the factory of this name. Imported if one is named.
_PLACES: Mapping[str, str] = {
    **dict.fromkeys(("lamb", "fusedlamb"), "lt_zero.optim.lamb:factory_of"),
    "lion": "lt_zero.optim.lion:factory_of",
    "muon": "lt_zero.optim.muon:factory_of",
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), "lt_zero.features.one_bit.factories:factory_of"),
}
_ONLY_BY_NAME: Mapping[str, str] = {  # why a path cannot name a class
    "lt_zero.optim.muon.Muon": "Its parameters must be divided into two groups. Write Muon, which does that.",
}
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
    if (why := _ONLY_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
        raise _wrong("optimizer", name, why)
    return _from_class("optimizer", cls)


@functools.lru_cache(maxsize=64)  # making the types of arguments takes milliseconds
def _own(name: str) -> Factory | None:
    """The optimizer of a name that stands for more than a class and its constructor."""
    low = name.lower()
    if low in ("adam", "deepspeed_adam", "fusedadam", "deepspeedcpuadam", "adamw"):
        own = Signature.of(AdamW, OPTIMIZER_RULES, name).plus(ADAM_RULES)
        return Factory(own, lambda params, values: _adam(params, values, decoupled=low == "adamw"))
    if low == "adagrad":
        own = Signature.of(Adagrad, OPTIMIZER_RULES).plus({"fp32_optimizer_states": FP32_STATES})
        return Factory(own, partial(without, Adagrad, ADAM_RULES))
    if (place := _PLACES.get(low)) is not None:
        made: Factory = load(place, "optimizer.type", f"the optimizer {name}")(low)
        return made
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
    return _on_plateau() if known[name] is ReduceLROnPlateau else _from_class("scheduler", known[name])


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
    options = {key: value for key, value in values.items() if key not in ADAM_RULES}
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
    uncorrected = load(
        "lt_zero.optim.adam:UncorrectedAdam", "optimizer.params.bias_correction", "Adam without bias correction"
    )
    made: Optimizer = uncorrected(parameters, decoupled_weight_decay=decoupled, **options)
    return made


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
