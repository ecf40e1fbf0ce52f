"""The plan of an engine before anything is allocated: its units and their buckets.

``build.py`` makes the buckets, and memory planning adds up their bytes, so a forecast cannot differ from the engine.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import ParametrizationList

from lt_zero.common import plain_names
from lt_zero.common.boxes import ParamSpec
from lt_zero.common.compat import without_torch_function
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.moment_form import MomentForm
from lt_zero.common.users_code import warn
from lt_zero.core.comm.send_sizes import SendSizes
from lt_zero.core.comm.transport import Mesh
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.find_units import UnitRules, class_matches, clean_name, find_units
from lt_zero.core.engine.fp32_modules import BATCH_NORMS, DEFAULT_ISLANDS_MIXED, Fp32Modules, find_fp32_modules
from lt_zero.core.engine.layout import ALIGN, BucketLayout, Owners, Sharding, join, plan_bucket, split_by_size
from lt_zero.core.engine.options import EngineOptions

_MUCH = 0.25  # padding, per element of the parameters, that is warned about

Named = tuple[str, Parameter]
GradientOf = Callable[[Parameter], torch.Tensor | None]


class GroupFacts(Protocol):
    """Facts that plans and forecasts need about the ranks that shard a bucket.

    ``ShardGroup`` answers it in a run. A forecast assumes the answers, and has no processes.
    """

    @property
    def size(self) -> int: ...
    @property
    def alone(self) -> bool: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def nodes(self) -> Sequence[Sequence[int]]: ...
    @property
    def secondary_shards(self) -> int: ...
    @property
    def sends(self) -> SendSizes: ...
    @property
    def sums_wide(self) -> bool: ...
    @property
    def gathers_in_background(self) -> bool: ...


class Kind(NamedTuple):
    """The properties that all parameters of one bucket share."""

    dtype: torch.dtype  # of the gathered weights
    trains: bool
    compresses: bool
    group: GroupFacts | None  # over which they are sharded; None: that of the engine
    is_wide: bool  # the group has ranks with another model
    moments: MomentForm | None  # how its moments are kept; None: as the step computes them


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Parameters of one dtype, group and kind (trainable, trainable and compressed, or frozen), moved together."""

    name: str  # of the unit, for messages
    parameters: tuple[Named, ...]  # they may be on the meta device
    specs: tuple[ParamSpec, ...]  # what each is of a tensor of the model
    dtype: torch.dtype  # of the gathered weights
    sharding: Sharding
    owners: tuple[int, ...] | None = None  # the rank that owns each parameter; None: shards cut through parameters
    compresses: bool = False  # its gradients may be sent compressed
    group: GroupFacts | None = None  # over which it is sharded; None: that of the engine
    is_wide: bool = False  # the group has ranks with another model: grad_reducer.py, Note [Wide buckets]
    moments: MomentForm | None = None  # how its moments are kept; None: as the step computes them
    narrows: bool = False  # parameters come in a higher precision than ``dtype``
    most: int | None = None  # elements on the ranks that have the most of it; None: all have as many
    gradient_of: GradientOf = attrgetter("grad")  # in the shape of the parameter's spec
    align: int = ALIGN  # elements: where parameters and shards begin
    _layouts: dict[int, BucketLayout] = field(default_factory=dict, init=False, repr=False)  # asked for so far

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for _, p in self.parameters)

    def layout_in(self, shards: int, world: int) -> BucketLayout:
        """The layout in its group, or in one of ``world`` ranks that have ``shards`` shards."""
        if self.group is not None:
            shards, world = self.group.mesh.shards, self.group.size
        return self.layout(shards if self.sharding.optim or self.sharding.params else world)

    def counted(self, layout: BucketLayout) -> int:
        """The number of elements that counts in decisions which ranks of all groups have to take alike."""
        return layout.numel if self.most is None else self.most

    def layout(self, world: int) -> BucketLayout:
        if world not in self._layouts:
            self._layouts[world] = plan_bucket(self.specs, world, self.owners, self.align)
        return self._layouts[world]


@dataclass(frozen=True)
class UnitPlan:
    """A unit of the model and its buckets; the root's name is ''.

    Below stage 3 a bucket may hold parameters of later units, too (layout.py, Note [Padding]).
    """

    name: str
    module: nn.Module
    parameters: list[Named]
    buckets: list[BucketPlan]

    @property
    def needs_weights(self) -> bool:
        """True if its backward reads the weights."""
        return not self.name or not isinstance(self.module, (nn.Embedding, nn.EmbeddingBag))


@dataclass(frozen=True)
class EnginePlan:
    """All buckets of a model in the order of construction: those of ``units``, then ``rest``."""

    root: nn.Module
    units: list[UnitPlan]  # in registration order, the root last
    rest: list[BucketPlan]  # of the unsharded small parameters of all units; they belong to the root
    fp32_modules: Fp32Modules

    @property
    def buckets(self) -> list[BucketPlan]:
        return [*(bucket for unit in self.units for bucket in unit.buckets), *self.rest]

    @property
    def parts(self) -> list[ParamSpec]:
        """The specs of parameters that are a part of a tensor of the model."""
        return [spec for bucket in self.buckets for spec in bucket.specs if not spec.is_whole]

    @property
    def joins(self) -> bool:
        """True if a bucket has parameters of several units."""
        held = ({p for bucket in unit.buckets for _, p in bucket.parameters} for unit in self.units)
        return any(not some <= {p for _, p in unit.parameters} for some, unit in zip(held, self.units, strict=True))

    def padding(self, world: int) -> float:
        """The padding of all buckets, per element of the parameters."""
        elements = sum(spec.local_box.numel for bucket in self.buckets for spec in bucket.specs)
        return sum(bucket.layout_in(world, world).numel for bucket in self.buckets) / elements - 1 if elements else 0.0


def plan_engine(
    root: nn.Module,
    options: EngineOptions,
    world: int,
    specs: Iterable[ParamSpec] = (),
    groups: Mapping[Parameter, GroupFacts] | None = None,
    sizes: Mapping[Parameter, int] | None = None,
    gradient_of: GradientOf = attrgetter("grad"),
    wide: Collection[Parameter] = (),
) -> EnginePlan:
    """Find the units of ``root`` and assign their parameters to buckets. Nothing is allocated or changed.

    ``world``: the number of shards. ``specs``: of parameters that are, or will be, a part of a tensor of the model.
    ``groups``: of the parameters that are sharded over other ranks. ``sizes``: of the parameters that have other shapes
    on other ranks, the most elements that a rank has: all ranks have to cut their buckets alike. ``wide``: parameters
    that other ranks have in another model.

    Raises:
        ValueError: a pattern, or a class or module name, of the configuration matches nothing; a spec names nothing.
        TypeError: a lazy parameter has no shape yet.
    """
    dtypes = options.dtypes
    leaf = options.leaf_modules
    sizes = sizes or {}
    fp32_modules = fp32_modules_of(root, dtypes)
    rules = UnitRules(
        min_numel=options.param_persistence_threshold,
        max_numel=options.reduce_bucket_size,
        leaf_classes=leaf.classes,
        leaf_names=leaf.names,
        leaf_suffixes=leaf.name_suffixes,
        sizes=sizes,
    )
    _check_names(root, options)
    units = find_units(root, rules)
    whole = stay_whole(root, options, sizes) | set(wide)
    named = [(unit.name or "the root module", [(n, p) for n, p in unit.parameters if p not in whole]) for unit in units]
    small = [(n, p) for unit in units for n, p in unit.parameters if p in whole]  # mostly
    dense = options.sent_dense(root) if options.sent_dense is not None else None
    moments = options.moments
    kept_wide = keep_wide_moments(root, sizes, moments) if moments is not None else set()

    def kind_of(p: Parameter) -> Kind:
        dtype = dtypes.dtype_of(p, p in fp32_modules.parameters)
        compresses = dense is not None and p.requires_grad and p not in dense and dtype != torch.float64
        group = groups.get(p) if groups is not None else None
        return Kind(dtype, p.requires_grad, compresses, group, p in wide, None if p in kept_wide else moments)

    given = _specs_of(root, specs)

    def spec_of(name: str, p: Parameter) -> ParamSpec:
        return replace(given[p], name=name) if p in given else ParamSpec.whole(name, tuple(p.shape))

    *cut, rest = _cut(named, small, options, world, kind_of, spec_of, sizes, gradient_of)
    return EnginePlan(
        root, [UnitPlan(*unit, buckets) for unit, buckets in zip(units, cut, strict=True)], rest, fp32_modules
    )


def _specs_of(root: nn.Module, specs: Iterable[ParamSpec]) -> dict[Parameter, ParamSpec]:
    """The given specs by parameter.

    Raises:
        ValueError: one names no parameter, or there are two of one parameter; names it.
    """
    named = dict(plain_names.named_parameters(root))
    found: dict[Parameter, ParamSpec] = {}
    for spec in specs:
        parameter = named.get(clean_name(spec.name))
        if parameter is None:
            near = difflib.get_close_matches(spec.name, named, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"specs: the module has no parameter {spec.name!r}.{hint}")
        if parameter in found:
            raise ValueError(f"specs: {found[parameter].name!r} and {spec.name!r} are one parameter: give one spec.")
        found[parameter] = spec
    return found


def warn_of_padding(plan: EnginePlan, options: EngineOptions, world: int) -> None:
    """Warn if owners leave much padding in the buckets. See layout.py, Note [Padding]."""
    share = plan.padding(world) if options.shard_along == "parameter" else 0.0
    if share <= _MUCH:
        return
    remedy = "Use stage 2, where a bucket may hold parameters of several units,"
    if options.stage < 3:
        sizes = (
            f"reduce_bucket_size={options.reduce_bucket_size} and allgather_bucket_size={options.allgather_bucket_size}"
        )
        remedy = f"Raise zero_optimization.{sizes}, so that a bucket holds more parameters,"
    warn(
        f"zero_optimization.shard_along='parameter': buckets are {share:.0%} larger than the parameters in them, as "
        f"some have too few, or too unequal, parameters to divide among {world} ranks. {remedy} or train with fewer "
        "ranks; element-wise optimizers (AdamW) need no whole parameters: shard_along='element'.",
    )


def stay_whole(root: nn.Module, options: EngineOptions, sizes: Mapping[Parameter, int]) -> set[Parameter]:
    """The parameters that are not sharded, also at stage 3; at lower stages those that get buckets of their own."""

    def inside(classes: tuple[str, ...]) -> set[Parameter]:
        return {p for module in root.modules() if class_matches(module, classes) for p in module.parameters()}

    whole: set[Parameter] = set()
    total = 0
    limit = options.model_persistence_threshold if options.stage == 3 else None
    # Parameters that are sharded already have guards, which would intercept the access.
    with without_torch_function():
        numels = [(sizes.get(p, p.data.numel()), p) for p in root.parameters()]
    for numel, parameter in sorted(numels, key=itemgetter(0)):
        total += numel
        if numel >= options.param_persistence_threshold or (limit is not None and total > limit):
            break  # neither holds for a larger one
        whole.add(parameter)
    if options.stage == 3 and options.force_param_types:
        whole |= inside(options.force_param_types)
    if options.stage == 3 and options.allowed_param_types:
        whole |= set(root.parameters()) - inside(options.allowed_param_types)
    return whole


def keep_wide_moments(root: nn.Module, sizes: Mapping[Parameter, int], form: MomentForm) -> set[Parameter]:
    """The parameters whose moments are too sensitive, or too few, to be kept in this form."""
    wide = {p for module in root.modules() if isinstance(module, form.not_of) for p in module.parameters()}
    with without_torch_function():
        return wide | {p for p in root.parameters() if sizes.get(p, p.data.numel()) < form.least}


def _check_names(root: nn.Module, options: EngineOptions) -> None:
    """Refuse class and module names that match nothing: typing errors that would have no effect."""
    key = "zero_optimization.leaf_module"
    leaf = options.leaf_modules
    classes = {
        "zero_optimization.zero_allowed_param_types": options.allowed_param_types,
        "zero_optimization.zero_force_param_types": options.force_param_types,
        f"{key}.classes": leaf.classes,
    }
    if not (leaf.names or leaf.name_suffixes or any(classes.values())):
        return
    modules = {clean_name(f"{name}.").removesuffix("."): module for name, module in root.named_modules()}
    known = sorted({type(module).__name__ for module in modules.values()})
    for of_classes, names in classes.items():
        for name in names:
            if not any(class_matches(module, (name,)) for module in modules.values()):
                refuse_name(of_classes, name, "no module of the model is of this class", known)
    for name in leaf.names:
        if name not in modules:
            refuse_name(f"{key}.names", name, "the model has no module of this name", list(modules))
    for name in leaf.name_suffixes:
        if not name or not any(n.endswith(name) for n in modules):
            refuse_name(f"{key}.name_suffixes", name, "no module's name ends so", list(modules))


def refuse_name(key: str, name: str, why: str, known: list[str]) -> NoReturn:
    """Raise for a name that matches nothing, suggesting a similar name, or some that exist."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(filter(None, known[:8]))}, ..."
    raise ConfigError([Problem(key, f"{key}: {name!r}: {why}.{hint}")])


def fp32_modules_of(root: nn.Module, policy: DtypePolicy) -> Fp32Modules:
    """The modules that the user keeps in fp32, and those that cannot run with 16-bit weights."""
    if not policy.low:
        return Fp32Modules((), frozenset())
    if not policy.autocast:
        return find_fp32_modules(root, policy.keep_fp32, classes=(ParametrizationList,), keep=BATCH_NORMS)
    found = find_fp32_modules(root, policy.keep_fp32, keep=DEFAULT_ISLANDS_MIXED)
    # Norms written by users: their functions take fp32 activations only with fp32 weights.
    own = [m for m in root.modules() if not type(m).__module__.startswith("torch.nn.")]
    vectors = {p for m in own for p in m.parameters(recurse=False) if p.dim() <= 1}
    return Fp32Modules(found.modules, found.parameters | vectors)


def _cut(
    units: list[tuple[str, list[Named]]],
    small: list[Named],
    options: EngineOptions,
    world: int,
    kind_of: Callable[[Parameter], Kind],
    spec_of: Callable[[str, Parameter], ParamSpec],
    sizes: Mapping[Parameter, int],
    gradient_of: GradientOf,
) -> list[list[BucketPlan]]:
    """The buckets of each unit, then those of the ``small`` parameters, which are not sharded.

    A bucket has parameters of one kind. One of several units belongs to the first of them.
    """
    sharding = Sharding.of_stage(options.stage)
    # A bucket is reduced in one collective, and below stage 3 gathered in one after the step.
    gathers_after_step = sharding.optim and not sharding.params
    gather_limit = options.allgather_bucket_size if gathers_after_step else options.reduce_bucket_size
    step_limit = options.sub_group_size if options.offload_states.device != "none" else gather_limit
    limit = max(1, min(options.reduce_bucket_size, gather_limit, step_limit))
    owns = options.shard_along == "parameter" and sharding.optim
    owners: dict[GroupFacts | None, Owners] = {}
    joins = owns and not sharding.params  # a bucket may have several units: layout.py, Note [Padding]
    together = [range(len(units))] if joins else [range(n, n + 1) for n in range(len(units))]
    units = [*units, ("small parameters", small)]
    found: list[list[BucketPlan]] = [[] for _ in units]
    for numbers in (*together, [len(units) - 1]):
        kinds: dict[Kind, list[tuple[int, Named]]] = {}
        for number in numbers:
            for name, p in units[number][1]:
                kinds.setdefault(kind_of(p), []).append((number, (name, p)))
        for kind, members in kinds.items():
            specs = [spec_of(*parameter) for _, parameter in members]
            own = [spec.local_box.numel for spec in specs]
            numels = [sizes.get(p, size) for size, (_, (_, p)) in zip(own, members, strict=True)]
            shards = kind.group.mesh.shards if kind.group is not None else world
            groups: list[list[int]] = []
            for _, unit in groupby(range(len(members)), key=lambda i: members[i][0]):
                mine = list(unit)
                groups += [[mine[i] for i in cut] for cut in split_by_size([numels[i] for i in mine], limit)]
            for group in join(numels, groups, limit, shards) if len(numbers) > 1 else groups:
                first, last = members[group[0]][0], members[group[-1]][0]
                name = units[first][0] if first == last else f"{units[first][0]} to {units[last][0]}"
                of_rank = None
                if owns:
                    known = owners.setdefault(kind.group, Owners(shards))
                    of_rank = known.of([own[i] for i in group], kind.trains)
                whole = replace(sharding, params=False, grads=sharding.grads and not kind.is_wide)
                kept = whole if first == len(units) - 1 else sharding
                parameters, theirs = tuple(members[i][1] for i in group), tuple(specs[i] for i in group)
                most = sum(numels[i] for i in group) if any(p in sizes for _, p in parameters) else None
                narrows = any(p.dtype.itemsize > kind.dtype.itemsize for _, p in parameters)
                what = (kind.compresses, kind.group, kind.is_wide, kind.moments, narrows)
                how = (kind.dtype, kept, of_rank, *what, most, gradient_of)
                codec = options.resting if kept.params and not kind.trains else None
                blocks = [codec.block] if codec is not None else []
                align = max([options.align, *blocks, *([kind.moments.align] if kind.moments is not None else [])])
                found[first].append(BucketPlan(name, parameters, theirs, *how, align))
    return found


class Widths(NamedTuple):
    """Evidence of a model's hidden size: the one that it names, with its place, and shapes of matrices by name."""

    named: tuple[int, str] | None
    matrices: dict[str, tuple[int, ...]]


def widths_of(root: nn.Module, specs: Iterable[ParamSpec] = ()) -> Widths:
    """The widths of a module. Only shapes of parameters are read."""
    for name, module in root.named_modules():
        config = getattr(module, "config", None)
        for place in (config, getattr(config, "text_config", None)):
            values = place.get if isinstance(place, dict) else partial(getattr, place)
            size, sizes = values("hidden_size", None), values("hidden_sizes", None)
            if isinstance(sizes, (list, tuple)) and sizes and all(isinstance(s, int) for s in sizes):
                size = size if isinstance(size, int) and size > 0 else max(sizes)
            if isinstance(size, int) and size > 0:
                return Widths((size, f"{name + '.' if name else ''}config of the model"), {})
    whole = {clean_name(spec.name): spec.global_shape for spec in specs}
    named = plain_names.named_parameters(root, remove_duplicate=True)
    shapes = {name: whole.get(name, tuple(p.shape)) for name, p in named}
    return Widths(None, {name: shape for name, shape in shapes.items() if len(shape) == 2})


def hidden_size(parts: Iterable[Widths]) -> tuple[int, str]:
    """The width of the residual stream of a model, and how it was found; ``parts``: of the modules that ranks have.

    It is ``hidden_size``, or the largest of ``hidden_sizes``, of the ``config`` or ``config.text_config`` of the model
    or of one of its modules, as in transformers. Otherwise it is the most frequent dimension of matrices (embeddings
    and feed-forward layers have one other dimension, attention none); of equally frequent ones the smallest.

    Raises:
        ConfigError: there is no matrix.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        if part.named is not None:
            return part.named
        shapes |= part.matrices
    counts = Counter(size for shape in shapes.values() for size in set(shape) if size > 1)
    if not counts:
        message = (
            'A bucket size is "auto", and the model has neither config.hidden_size nor a matrix. Write numbers for '
            "zero_optimization.reduce_bucket_size, stage3_prefetch_bucket_size and stage3_param_persistence_threshold."
        )
        raise ConfigError([Problem("zero_optimization.reduce_bucket_size", message)])
    most = max(counts.values())
    return min(size for size, count in counts.items() if count == most), "the size that most matrices have"
