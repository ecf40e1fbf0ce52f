"""The plan of an engine before anything is allocated: its units and their buckets.

``build.py`` makes the buckets, and memory planning adds up their bytes, so a forecast cannot differ from the engine.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import ParametrizationList

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config import ZeroConfig
from lt_zero.config.auto import resolve_sizes
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.schema import ZeroOptimization
from lt_zero.engine.find_units import UnitPlan, UnitRules, class_matches, clean_name, find_units
from lt_zero.engine.fp32_modules import BATCH_NORMS, DEFAULT_ISLANDS_MIXED, Fp32Modules, find_fp32_modules
from lt_zero.engine.layout import BucketLayout, Owners, Sharding, join, plan_bucket, split_by_size

_WEIGHTLESS_BACKWARD = (nn.Embedding, nn.EmbeddingBag)  # their backward needs indices only

_MUCH = 0.25  # padding, per element of the parameters, that is warned about

Named = tuple[str, Parameter]


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Parameters of one dtype and one kind (trainable or frozen) that are gathered and reduced together.

    Attributes:
        name: name of the unit, for messages.
        parameters: parameters and their names; they may be on the meta device.
        dtype: dtype of the gathered weights.
        sharding: what is sharded.
        owners: the rank that owns each parameter; None: shards cut through parameters.
    """

    name: str
    parameters: tuple[Named, ...]
    dtype: torch.dtype
    sharding: Sharding
    owners: tuple[int, ...] | None = None

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for _, p in self.parameters)

    def layout(self, world: int) -> BucketLayout:
        return plan_bucket([(n, p.shape) for n, p in self.parameters], world, self.owners)


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of the model and its buckets; the root's name is ''.

    Below stage 3 a bucket may hold parameters of later units, too (layout.py, Note [Padding]).
    """

    plan: UnitPlan
    buckets: tuple[BucketPlan, ...]

    @property
    def needs_weights(self) -> bool:
        """Whether its backward reads the weights."""
        return not self.plan.name or not isinstance(self.plan.module, _WEIGHTLESS_BACKWARD)


@dataclass(frozen=True)
class EnginePlan:
    """All buckets of a model in the order of construction: those of ``units``, then ``rest``.

    Attributes:
        root: the model.
        units: in registration order, the root last.
        rest: buckets of the unsharded small parameters of all units; they belong to the root.
        fp32_modules: modules and parameters that stay in fp32.
    """

    root: nn.Module
    units: tuple[PlannedUnit, ...]
    rest: tuple[BucketPlan, ...]
    fp32_modules: Fp32Modules

    @property
    def buckets(self) -> list[BucketPlan]:
        return [*(bucket for unit in self.units for bucket in unit.buckets), *self.rest]

    @property
    def joins(self) -> bool:
        """Whether a bucket has parameters of several units."""
        mine = [{p for _, p in unit.plan.parameters} for unit in self.units]
        held = [{p for bucket in unit.buckets for _, p in bucket.parameters} for unit in self.units]
        return any(some - unit for some, unit in zip(held, mine, strict=True))

    def padding(self, world: int) -> float:
        """The padding of all buckets, per element of the parameters."""
        elements = sum(p.numel() for bucket in self.buckets for _, p in bucket.parameters)
        return sum(bucket.layout(world).numel for bucket in self.buckets) / elements - 1 if elements else 0.0


def plan_engine(root: nn.Module, config: ZeroConfig, policy: DtypePolicy, world: int) -> EnginePlan:
    """Find the units of ``root`` and assign their parameters to buckets. Nothing is allocated or changed.

    Raises:
        ValueError: a pattern of ``fp16_override_modules``, or a class or module name in the configuration, matches
            nothing.
        TypeError: a lazy parameter has no shape yet.
    """
    zero = config.zero_optimization
    fp32_modules = _fp32_modules_of(root, policy)
    leaf = zero.leaf_module
    rules = UnitRules(
        zero.stage3_param_persistence_threshold, zero.reduce_bucket_size, leaf.classes, leaf.names, leaf.name_suffixes
    )
    _check_names(root, config)
    cutter = _Cutter(config, policy, fp32_modules.parameters, stay_whole(root, zero), world)
    small: list[Named] = []
    units: list[tuple[UnitPlan, list[Named]]] = []
    for plan in find_units(root, rules):
        tiny, large = cutter.divide(plan)
        small += tiny
        units.append((plan, large))
    cut = cutter.joined(units) if cutter.joins else [cutter.buckets(_name(plan), large) for plan, large in units]
    planned = tuple(PlannedUnit(plan, buckets) for (plan, _), buckets in zip(units, cut, strict=True))
    return EnginePlan(root, planned, cutter.buckets("small parameters", small, stay=True), fp32_modules)


def warn_of_padding(plan: EnginePlan, zero: ZeroOptimization, world: int) -> None:
    """Warn if owners leave much padding in the buckets. See layout.py, Note [Padding]."""
    share = plan.padding(world) if zero.shard_along == "parameter" else 0.0
    if share <= _MUCH:
        return
    remedy = "Use stage 2, where a bucket may hold parameters of several units,"
    if zero.stage < 3:
        sizes = f"reduce_bucket_size={zero.reduce_bucket_size} and allgather_bucket_size={zero.allgather_bucket_size}"
        remedy = f"Raise zero_optimization.{sizes}, so that a bucket holds more parameters,"
    warnings.warn(
        f"zero_optimization.shard_along='parameter': buckets are {share:.0%} larger than the parameters in them, as "
        f"some have too few, or too unequal, parameters to divide among {world} ranks. {remedy} or train with fewer "
        "ranks; element-wise optimizers (AdamW) need no whole parameters: shard_along='element'.",
        stacklevel=3,
    )


def _name(plan: UnitPlan) -> str:
    return plan.name or "the root module"


def stay_whole(root: nn.Module, zero: ZeroOptimization) -> frozenset[Parameter]:
    """The parameters that are not sharded, also at stage 3."""
    whole: set[Parameter] = set()
    total, limit = 0, zero.stage3_model_persistence_threshold if zero.stage == 3 else None
    for parameter in sorted(root.parameters(), key=lambda p: p.numel()):
        total += parameter.numel()
        if parameter.numel() < zero.stage3_param_persistence_threshold and (limit is None or total <= limit):
            whole.add(parameter)
    if zero.stage < 3:
        return frozenset(whole)  # none is sharded; the small ones get buckets of their own
    if zero.zero_force_param_types:
        whole |= _inside(root, zero.zero_force_param_types)
    if zero.zero_allowed_param_types:
        whole |= set(root.parameters()) - _inside(root, zero.zero_allowed_param_types)
    return frozenset(whole)


def _inside(root: nn.Module, classes: tuple[str, ...]) -> set[Parameter]:
    return {p for module in root.modules() if class_matches(module, classes) for p in module.parameters()}


def _check_names(root: nn.Module, config: ZeroConfig) -> None:
    """Refuse class and module names that match nothing: typing errors that would have no effect."""
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
    """Raise for a name that matches nothing, suggesting a similar name, or some that exist."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(filter(None, known[:8]))}, ..."
    raise ConfigError([Problem(key, f"{key}: {name!r}: {why}.{hint}")])


def _fp32_modules_of(root: nn.Module, policy: DtypePolicy) -> Fp32Modules:
    """The modules that the user keeps in fp32, and those that cannot run with 16-bit weights."""
    if not policy.low:
        return Fp32Modules((), frozenset())
    if policy.autocast:
        found = find_fp32_modules(root, policy.keep_fp32, keep=DEFAULT_ISLANDS_MIXED)
        # Norms written by users: their functions take fp32 activations only with fp32 weights.
        own = [m for m in root.modules() if not type(m).__module__.startswith("torch.nn.")]
        vectors = {p for m in own for p in m.parameters(recurse=False) if p.dim() <= 1}
        return Fp32Modules(found.modules, found.parameters | vectors)
    return find_fp32_modules(root, policy.keep_fp32, classes=(ParametrizationList,), keep=BATCH_NORMS)


class _Cutter:
    """Assigns the parameters of units to buckets of one dtype and one kind (trainable or frozen) each."""

    def __init__(
        self,
        config: ZeroConfig,
        policy: DtypePolicy,
        kept: frozenset[Parameter],
        whole: frozenset[Parameter],
        world: int,
    ) -> None:
        zero = config.zero_optimization
        self.sharding = Sharding.of_stage(zero.stage)
        # A bucket is reduced in one collective, and below stage 3 gathered in one after the step.
        whole_after_step = self.sharding.optim and not self.sharding.params
        gather_limit = zero.allgather_bucket_size if whole_after_step else zero.reduce_bucket_size
        step_limit = zero.sub_group_size if zero.offload_optimizer.device != "none" else gather_limit
        self._limit = max(1, min(zero.reduce_bucket_size, gather_limit, step_limit))
        self._policy, self._kept, self._whole, self._world = policy, kept, whole, world
        owned = zero.shard_along == "parameter" and self.sharding.optim
        self._owners = Owners(world) if owned else None

    @property
    def joins(self) -> bool:
        """Whether a bucket may hold parameters of several units. See layout.py, Note [Padding]."""
        return self._owners is not None and not self.sharding.params

    def divide(self, plan: UnitPlan) -> tuple[list[Named], list[Named]]:
        """(parameters that are not sharded, mostly small ones; the others)."""
        whole = [(n, p) for n, p in plan.parameters if p in self._whole]
        return whole, [(n, p) for n, p in plan.parameters if p not in self._whole]

    def buckets(self, name: str, parameters: Iterable[Named], stay: bool = False) -> tuple[BucketPlan, ...]:
        """The buckets of one unit; with ``stay`` their parameters are not sharded."""
        sharding = Sharding(self.sharding.optim, self.sharding.grads, params=False) if stay else self.sharding
        found = []
        for (dtype, _), members in self._kinds(parameters).items():
            for group in split_by_size([p.numel() for _, p in members], self._limit):
                found.append(self._bucket(name, [members[i] for i in group], dtype, sharding))
        return tuple(found)

    def joined(self, units: Sequence[tuple[UnitPlan, list[Named]]]) -> list[tuple[BucketPlan, ...]]:
        """The joined buckets of all units; a bucket belongs to the first unit that has a parameter in it."""
        number_of = {p: number for number, (_, members) in enumerate(units) for _, p in members}
        found: list[list[BucketPlan]] = [[] for _ in units]
        for (dtype, _), members in self._kinds(named for _, mine in units for named in mine).items():
            numels = [p.numel() for _, p in members]
            parts: list[list[int]] = []
            for _, unit in groupby(range(len(members)), key=lambda i: number_of[members[i][1]]):
                mine = list(unit)
                cuts = split_by_size([numels[i] for i in mine], self._limit)
                parts += [[mine[i] for i in cut] for cut in cuts]
            for group in join(numels, parts, self._limit, self._world):
                first, last = (number_of[members[i][1]] for i in (group[0], group[-1]))
                name = _name(units[first][0]) + (f" to {_name(units[last][0])}" if first != last else "")
                found[first].append(self._bucket(name, [members[i] for i in group], dtype, self.sharding))
        return [tuple(buckets) for buckets in found]

    def _kinds(self, parameters: Iterable[Named]) -> dict[tuple[torch.dtype, bool], list[Named]]:
        kinds: dict[tuple[torch.dtype, bool], list[Named]] = {}
        for n, p in parameters:
            kinds.setdefault((self._policy.dtype_of(p, p in self._kept), p.requires_grad), []).append((n, p))
        return kinds

    def _bucket(self, name: str, members: Sequence[Named], dtype: torch.dtype, sharding: Sharding) -> BucketPlan:
        owners = None
        if self._owners is not None:
            owners = self._owners.of([p.numel() for _, p in members], members[0][1].requires_grad)
        return BucketPlan(name, tuple(members), dtype, sharding, owners)


# ---- bucket sizes that are "auto" ------------------------------------------------------------------------------------


def hidden_size(root: nn.Module) -> tuple[int, str]:
    """The width of the residual stream, and how it was found. Only shapes of parameters are read.

    It is ``hidden_size``, or the largest of ``hidden_sizes``, of the ``config`` or ``config.text_config`` of the model
    or of one of its modules, as in transformers. Otherwise it is the most frequent dimension of matrices (embeddings
    and feed-forward layers have one other dimension, attention none); of equally frequent ones the smallest.

    Raises:
        ConfigError: there is no matrix.
    """
    for name, module in root.named_modules():
        config = getattr(module, "config", None)
        for place in (config, getattr(config, "text_config", None)):
            found = _of(place)
            if found is not None:
                return found, f"{name + '.' if name else ''}config of the model"
    sizes = Counter(size for p in root.parameters() if p.dim() == 2 for size in set(p.shape) if size > 1)
    if not sizes:
        raise ConfigError(
            [
                Problem(
                    "zero_optimization.reduce_bucket_size",
                    'A bucket size is "auto", and the model has neither config.hidden_size nor a matrix. Write numbers '
                    "for zero_optimization.reduce_bucket_size, stage3_prefetch_bucket_size and "
                    "stage3_param_persistence_threshold.",
                )
            ]
        )
    most = max(sizes.values())
    return min(size for size, count in sizes.items() if count == most), "the size that most matrices have"


def with_sizes(config: ZeroConfig, root: nn.Module) -> ZeroConfig:
    """The configuration with bucket sizes that were "auto" resolved for this model.

    Raises:
        ConfigError: there is no matrix.
    """
    return resolve_sizes(config, lambda: hidden_size(root))


def _of(config: Any) -> int | None:
    if config is None:
        return None
    values: Any = config if isinstance(config, dict) else _Attributes(config)
    size, sizes = values.get("hidden_size"), values.get("hidden_sizes")
    if isinstance(size, int) and size > 0:
        return size
    if isinstance(sizes, (list, tuple)) and sizes and all(isinstance(s, int) for s in sizes):
        return int(max(sizes))
    return None


class _Attributes:
    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, name: str) -> Any:
        return getattr(self._config, name, None)
