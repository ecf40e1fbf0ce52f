"""What an engine is made of, before anything is allocated: units, and the buckets that each is cut into.

``build.py`` makes buckets of it, memory planning adds up their bytes, so a forecast cannot differ from the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import ParametrizationList

from lt_zero.config import ZeroConfig
from lt_zero.config.errors import ConfigError, Problem
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.schema import ZeroOptimization
from lt_zero.core.bucket import Sharding
from lt_zero.core.islands import BATCH_NORMS, DEFAULT_ISLANDS_MIXED, Islands, find_islands
from lt_zero.core.layout import BucketLayout, plan_bucket, split_by_size
from lt_zero.core.units import UnitPlan, UnitRules, class_matches, clean_name, find_units

_WEIGHTLESS_BACKWARD = (nn.Embedding, nn.EmbeddingBag)  # their backward needs indices only

Named = tuple[str, Parameter]


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Parameters of one dtype and one kind (trainable or frozen) that are gathered and reduced together.

    Attributes:
        name: of the unit, for messages.
        parameters: with their names; they may be on the meta device.
        dtype: of the gathered weights.
        sharding: what a rank holds only a shard of.
    """

    name: str
    parameters: tuple[Named, ...]
    dtype: torch.dtype
    sharding: Sharding

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for _, p in self.parameters)

    def layout(self, world: int) -> BucketLayout:
        return plan_bucket([(n, p.shape) for n, p in self.parameters], world)


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of the model and its buckets; the root's has the name ''."""

    plan: UnitPlan
    buckets: tuple[BucketPlan, ...]

    @property
    def needs_weights(self) -> bool:
        """Whether its backward reads the weights."""
        return not self.plan.name or not isinstance(self.plan.module, _WEIGHTLESS_BACKWARD)


@dataclass(frozen=True)
class EnginePlan:
    """All buckets of a model, in the order in which they are made: those of ``units``, then ``rest``.

    Attributes:
        root: the model.
        units: in registration order, the root last.
        rest: small parameters of all units, which stay whole; they belong to the root.
        islands: what stays in fp32.
    """

    root: nn.Module
    units: tuple[PlannedUnit, ...]
    rest: tuple[BucketPlan, ...]
    islands: Islands

    @property
    def buckets(self) -> list[BucketPlan]:
        return [*(bucket for unit in self.units for bucket in unit.buckets), *self.rest]


def plan_engine(root: nn.Module, config: ZeroConfig, policy: DtypePolicy) -> EnginePlan:
    """Find the units of ``root`` and cut their parameters into buckets. Nothing is allocated or changed.

    Raises:
        ValueError: a pattern of ``fp16_override_modules``, or a class or module that the configuration names, matches
            nothing.
        TypeError: a lazy parameter has no shape yet.
    """
    zero = config.zero_optimization
    islands = _islands(root, policy)
    leaf = zero.leaf_module
    rules = UnitRules(
        zero.stage3_param_persistence_threshold, zero.reduce_bucket_size, leaf.classes, leaf.names, leaf.name_suffixes
    )
    _check_names(root, config)
    cutter = _Cutter(config, policy, islands.parameters, stay_whole(root, zero))
    small: list[Named] = []
    units = []
    for plan in find_units(root, rules):
        tiny, large = cutter.divide(plan)
        small += tiny
        units.append(PlannedUnit(plan, cutter.buckets(plan.name or "the root module", large, cutter.sharding)))
    whole = Sharding(cutter.sharding.optim, cutter.sharding.grads, params=False)
    return EnginePlan(root, tuple(units), cutter.buckets("small parameters", small, whole), islands)


def stay_whole(root: nn.Module, zero: ZeroOptimization) -> frozenset[Parameter]:
    """The parameters of which every rank has all elements also at stage 3."""
    whole: set[Parameter] = set()
    total, limit = 0, zero.stage3_model_persistence_threshold if zero.stage == 3 else None
    for parameter in sorted(root.parameters(), key=lambda p: p.numel()):
        total += parameter.numel()
        if parameter.numel() < zero.stage3_param_persistence_threshold and (limit is None or total <= limit):
            whole.add(parameter)
    if zero.stage < 3:
        return frozenset(whole)  # all are whole; the small ones are together in buckets of their own
    if zero.zero_force_param_types:
        whole |= _inside(root, zero.zero_force_param_types)
    if zero.zero_allowed_param_types:
        whole |= set(root.parameters()) - _inside(root, zero.zero_allowed_param_types)
    return frozenset(whole)


def _inside(root: nn.Module, classes: tuple[str, ...]) -> set[Parameter]:
    return {p for module in root.modules() if class_matches(module, classes) for p in module.parameters()}


def _check_names(root: nn.Module, config: ZeroConfig) -> None:
    """A name that matches nothing is a typing error, and would change nothing in silence."""
    zero, leaf = config.zero_optimization, config.zero_optimization.leaf_module
    modules = {clean_name(f"{name}.").removesuffix("."): module for name, module in root.named_modules()}
    known = sorted({type(module).__name__ for module in modules.values()})
    for key in ("zero_allowed_param_types", "zero_force_param_types"):
        for name in getattr(zero, key):
            if not any(class_matches(module, (name,)) for module in modules.values()):
                refuse_name(f"zero_optimization.{key}", name, "no module of the model is of this class", known)
    for name in leaf.names:
        if name not in modules:
            refuse_name(
                "zero_optimization.leaf_module.names", name, "the model has no module of this name", list(modules)
            )
    for name in leaf.name_suffixes:
        if not name or not any(n.endswith(name) for n in modules):
            refuse_name("zero_optimization.leaf_module.name_suffixes", name, "no module's name ends so", list(modules))


def refuse_name(key: str, name: str, why: str, known: list[str]) -> NoReturn:
    """Raise for a name that matches nothing, with one that is near or some that there are."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(filter(None, known[:8]))}, ..."
    raise ConfigError([Problem(key, f"{key}: {name!r}: {why}.{hint}")])


def _islands(root: nn.Module, policy: DtypePolicy) -> Islands:
    """What the user wants in fp32, and what cannot run with 16-bit weights."""
    if policy.compute is None:
        return Islands((), frozenset())
    if policy.autocast:
        found = find_islands(root, policy.keep_fp32, keep=DEFAULT_ISLANDS_MIXED)
        # Norms that users write: their functions take fp32 activations with fp32 weights only.
        own = [m for m in root.modules() if not type(m).__module__.startswith("torch.nn.")]
        vectors = {p for m in own for p in m.parameters(recurse=False) if p.dim() <= 1}
        return Islands(found.modules, found.parameters | vectors)
    return find_islands(root, policy.keep_fp32, classes=(ParametrizationList,), keep=BATCH_NORMS)


class _Cutter:
    """Cuts the parameters of a unit into buckets of one dtype and one kind (trainable or frozen) each."""

    def __init__(
        self, config: ZeroConfig, policy: DtypePolicy, kept: frozenset[Parameter], whole: frozenset[Parameter]
    ) -> None:
        zero = config.zero_optimization
        self.sharding = Sharding.of_stage(zero.stage)
        # A bucket is reduced as one, and below stage 3 gathered as one after the step.
        whole_after_step = self.sharding.optim and not self.sharding.params
        gather_limit = zero.allgather_bucket_size if whole_after_step else zero.reduce_bucket_size
        step_limit = zero.sub_group_size if zero.offload_optimizer.device != "none" else gather_limit
        self._limit = max(1, min(zero.reduce_bucket_size, gather_limit, step_limit))
        self._policy, self._kept, self._whole = policy, kept, whole

    def divide(self, plan: UnitPlan) -> tuple[list[Named], list[Named]]:
        """Parameters that stay whole, most of them small, and the others."""
        whole = [(n, p) for n, p in plan.parameters if p in self._whole]
        return whole, [(n, p) for n, p in plan.parameters if p not in self._whole]

    def buckets(self, name: str, parameters: Iterable[Named], sharding: Sharding) -> tuple[BucketPlan, ...]:
        kinds: dict[tuple[torch.dtype, bool], list[Named]] = {}
        for n, p in parameters:
            kinds.setdefault((self._policy.dtype_of(p, p in self._kept), p.requires_grad), []).append((n, p))
        found = []
        for (dtype, _), members in kinds.items():
            for group in split_by_size([p.numel() for _, p in members], self._limit):
                found.append(BucketPlan(name, tuple(members[i] for i in group), dtype, sharding))
        return tuple(found)
