"""From a module to an engine: find units, lay out buckets, move the parameters in, install hooks.

Parameters arrive in one of three ways: in full (an ordinary module), on the meta device (initialised here, unit by
unit, so that no rank ever holds the full model), or sharded at construction (construction.py).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lt_zero.common import accelerator, plain_names
from lt_zero.common.arguments import expect
from lt_zero.common.boxes import ParamSpec
from lt_zero.common.compat import clean_name, without_torch_function
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.garbage import without_gc
from lt_zero.common.module_hooks import is_compiled_by_jit, no_hook
from lt_zero.common.names import alone
from lt_zero.common.places import load_if_installed
from lt_zero.common.progress_bar import ProgressBar, progress_bar
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import check_same
from lt_zero.config.options import communication_options, engine_options, group_options, with_sizes
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core import ask
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine, has_groups
from lt_zero.core.engine.fp32_modules import Fp32Modules
from lt_zero.core.engine.gather import Unit, remedy
from lt_zero.core.engine.guard import Owner, owner_of
from lt_zero.core.engine.loading import install_load_hooks
from lt_zero.core.engine.materialize import Materializer
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import (
    BucketPlan,
    EnginePlan,
    plan_engine,
    warn_of_padding,
)
from lt_zero.core.engine.parts import Parts, Unjoined
from lt_zero.core.engine.same_on_ranks import Snapshot, compare, compare_models
from lt_zero.core.engine.storage_plan import plan_storage
from lt_zero.core.engine.weight_rounding import NEAREST, WeightRounding
from lt_zero.core.feature import Feature, PlaceInRun, Undo
from lt_zero.core.followers import Follower, follow
from lt_zero.core.stores.pinned import return_freed_memory
from lt_zero.features import features_of
from lt_zero.kernels.library import missing
from lt_zero.planning.check import check_build
from lt_zero.planning.setup import MANY_SHARDS

log = logging.getLogger("lt_zero")

_configs = weakref.WeakKeyDictionary[Engine, ZeroConfig]()


def built_by(engine: Engine) -> ZeroConfig:
    """The configuration that an engine was built by, with sizes for its model."""
    return _configs[engine]


@without_gc
def shard(
    module: nn.Module,
    config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str],
    device: torch.device | None = None,
    policy: DtypePolicy | None = None,
    group: ShardGroup | None = None,
    training: bool = True,
    saved: Mapping[nn.Parameter, Callable[[], torch.Tensor]] | None = None,
    specs: Iterable[ParamSpec] = (),
    group_of: Callable[[str, nn.Parameter], ShardGroup] | None = None,
    parts: Parts | None = None,
    ready: bool = True,
) -> Engine:
    """Shard ``module`` in place over all ranks of the default process group.

    Args:
        module: the model; its parameters keep identity, shape and names.
        config: the ZeRO stage and sizes: ``ZeroConfig(stage=3)``, a mapping, or the path of a file.
        device: where to compute; default: the device of the first parameter.
        policy: dtypes of weights, gradients and master weights; default: as configured.
        group: the ranks that have this module, over which it is sharded; default: all. Others shard modules of their
            own, with other parameters, in the same call.
        training: make master weights and keep weights gathered for backward; without it both wait until an optimizer
            is sharded, and weights are released after each use.
        saved: reads the full values of parameters, of which only the shapes count then.
        specs: of parameters that are a part of a tensor of the model, whose other parts are on ranks of other groups.
            They have that part's shape; checkpoints have the whole tensor.
        group_of: the ranks over which a parameter is the same, and sharded; default: ``group``, whose world they share.
            The same on all ranks of ``group``. It may have others: see grad_reducer.py, Note [Wide buckets].
        parts: of parameters that have the shape of the whole tensor although this rank has a part; default: the shape
            of each is that of its spec, and what needs whole tensors in memory is refused.
        ready: False: the weights come later, and then the caller lets its features follow the engine.

    Raises:
        ValueError: a parameter is sharded already; or a pattern of ``fp16_override_modules`` matches nothing; or
            ``device`` is not the current GPU; or a spec does not fit its parameter.
        ConfigError: on all ranks, if their configurations differ and ``group`` is not given; or activation
            checkpointing is on, and no module can be checkpointed; or ``ops`` is "required", and
            native kernels are missing on a rank; or ``training`` with ``quantize``; or a key needs the same parameters
            on all ranks.
        NotEnoughMemory: a machine has too little memory; the module is unchanged.
        RuntimeError: on all ranks, if their models, or what ``group_of`` returns, differ.
    """
    expect(module, nn.Module, "The module of lt_zero.shard", "pass an nn.Module")
    specs = tuple(specs)
    of_ranks = partial(group.ask_all, name="sizes of the model") if group is not None else alone
    config = ZeroConfig.of(config)
    placed = (t.device for t in chain(module.parameters(), module.buffers()) if t.device.type != "meta")
    device = accelerator.with_index(device or next(placed, torch.device("cpu")))
    if not accelerator.is_current(device):
        raise ValueError(
            f"device={device} is not the current device, {accelerator.default_device()}, whose streams torch uses: "
            f"call torch.accelerator.set_device_index({device.index}) first."
        )
    if group is None:
        world = World.join(device, communication_options(config))
        check_same(config, world.host_gather)
        group = ShardGroup.of_all(world)
    config = with_sizes(config, module, specs, of_ranks)
    group.world.advise(remedy)
    # Inside, files are read and the user's modules initialised: an error of one rank is raised on all.
    with group.world.together("lt_zero.shard"):
        engine = _shard(module, config, device, policy, group, training, saved, specs, group_of, parts or Unjoined())
        if ready and training:
            follow(engine, PlaceInRun())
    return engine


def _shard(
    module: nn.Module,
    config: ZeroConfig,
    device: torch.device,
    policy: DtypePolicy | None,
    group: ShardGroup,
    training: bool,
    saved: Mapping[nn.Parameter, Callable[[], torch.Tensor]] | None,
    specs: Iterable[ParamSpec],
    group_of: Callable[[str, nn.Parameter], ShardGroup] | None,
    parts: Parts,
) -> Engine:
    """Plan the buckets of ``module``, check that they fit, and build the engine."""
    policy = policy or dtype_policy(config, resolve_mode(config, "32-true"))
    features = features_of(config)
    options = ask.adapted(engine_options(config, policy), features, training)
    policy = options.dtypes
    groups = _groups_of(module, options, group, group_of)
    apart = [p for p in module.parameters() if groups.get(p, group).size < group.size]
    wide = {p for p, of in groups.items() if not set(of.ranks) <= set(group.ranks)}
    compare_models(group, module, policy, apart)
    sizes = _most_elements(module, group, apart)
    _check_kernels(config, device, group.world)
    distinct = list(dict.fromkeys([group, *groups.values()]))
    _check_groups(features, distinct)
    for each in distinct:
        ask.configure_group(each, group_options(config), features)
    # Parameters that are sharded already have guards, which would intercept each access.
    with ExitStack() as undo, ExitStack() as undo_at_error, without_torch_function():
        for feature in features:
            if (prepared := feature.prepare(module, group, training)) is not None:
                (undo_at_error if feature.stays else undo).callback(prepared.remove)
        _check_specs(module, specs)
        plan = plan_engine(module, options, group.mesh.shards, specs, groups, sizes, parts.gradient, wide)
        _compare_wide(plan, groups)
        _check_whole(plan)
        _check_hooks(plan)
        _refuse_coded_modules(module)
        for feature in features:
            feature.check(plan, options, group, training)
        if group.world.rank == 0:
            warn_of_padding(plan, options, group.mesh.shards)
        check_build(plan, config, policy, group, training)
        if training and group.world.rank == 0:
            _tell_cost(plan, config, policy, group)
        if not config.compile.disable:
            from lt_zero.core.engine.compiled_blocks import compile_blocks

            undo.callback(compile_blocks(module, config.compile.backend, config.compile.kwargs, group).remove)
        installed = undo.pop_all()
        undo_at_error.pop_all()
    engine = _build(module, device, plan, config, features, options, group, groups, training, saved, parts)
    engine.handles.append(Undo(installed))
    engine.handles.extend(map(Follower, features))
    return engine


def _tell_cost(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, group: ShardGroup) -> None:
    """Log what many shards cost a step on a cluster of GPUs, if ``lt-zero estimate`` is installed, which knows it."""
    few = group.mesh.shards < MANY_SHARDS or not any(bucket.sharding.optim for bucket in plan.buckets)
    if group.backend == "gloo" or few:
        return
    cost = load_if_installed("lt_zero.planning.step_time:cost_of_shards")
    try:
        if cost is not None:
            log.info(cost(plan, config, policy, group))
    except Exception:  # it only informs, and the other ranks would wait for this one
        log.debug("The cost of shards could not be estimated.", exc_info=True)


def _build(
    module: nn.Module,
    device: torch.device,
    plan: EnginePlan,
    config: ZeroConfig,
    features: Sequence[Feature],
    options: EngineOptions,
    group: ShardGroup,
    groups: Mapping[nn.Parameter, ShardGroup],
    training: bool,
    saved: Mapping[nn.Parameter, Callable[[], torch.Tensor]] | None,
    parts: Parts,
) -> Engine:
    """Move the parameters into the buckets of ``plan``, and install hooks. ``groups``: of those not in ``group``."""
    engine_ref: list[weakref.ref[Engine]] = []  # lets the engine be collected while parameters still point to it

    def owner() -> Owner | None:
        return engine_ref[0]() if engine_ref else None

    materializer, world = Materializer(module, device, saved, parts), group.world
    of_bucket = {bucket: groups.get(bucket.parameters[0][1], group) for bucket in plan.buckets}
    policy = options.dtypes
    planned = ask.plan_exchange(features, plan, policy.check_overflow, group)
    codecs = ask.codecs_by(features, planned, training)
    rounding = _rounding_of(options, world)
    storage = plan_storage(plan, options, group, accelerator.is_apart(device), codecs, training, rounding)
    exchange = planned.make(group, of_bucket.values())
    shared = owner, deque[Bucket]()
    made = {}
    for bucket, its in of_bucket.items():
        gathers = ask.gathers_of(features, storage[bucket], its)
        made[bucket] = Bucket(bucket, storage[bucket], its, gathers, *shared)
    offload_manager = ask.place(features, list(made.values()), world, options, device)
    with progress_bar(f"Sharding {len(plan.units)} units ({len(made)} buckets)", len(made), rank=world.rank) as work:
        units, root = _move_in(plan, made, materializer, work)
        materializer.fill_buffers()
    if policy.buffers is not None:
        names = config.data_types.keep_in_fp32_modules if policy.low or policy.compute is None else ()
        _cast_buffers(module, policy.buffers, plan.fp32_modules, names)
    engine = Engine(
        root=module,
        units=units,
        root_unit=root,
        groups=list(dict.fromkeys([group, *groups.values()])),
        options=options,
        plan=plan,
        offload_manager=offload_manager,
        exchange=exchange,
        use_outside=_use_outside,
        training=training,
        parts=parts,
    )
    _configs[engine] = config
    offload_manager.check(world, "the files of states")
    if policy.low and policy.compute is not None:
        from lt_zero.core.engine.fp32_hooks import install_fp32_modules

        engine.handles.extend(
            install_fp32_modules(plan.fp32_modules, policy.compute, device.type, cast_back=not policy.autocast)
        )
    if policy.low and policy.compute is not None and policy.autocast:
        from lt_zero.core.engine.outside_steps import AutocastOutsideOfSteps

        low = {id(p) for bucket in engine.buckets if bucket.dtype == policy.compute for p in bucket.params}
        having = [child for child in module.modules() if any(id(p) in low for p in child.parameters())]
        engine.handles.append(AutocastOutsideOfSteps(having, policy.compute, device.type))
    engine_ref.append(weakref.ref(engine))
    install_load_hooks(engine)
    return engine


def _use_outside(engine: Engine, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``full_params.use_outside``, for scripts that use weights outside of their unit's forward."""
    from lt_zero.core.engine.full_params import use_outside

    return use_outside(engine, parameters, func, args, kwargs)


def _rounding_of(options: EngineOptions, world: World) -> WeightRounding:
    """The rounding of the weights of a step. Collective if it has a seed: all ranks take that of rank 0."""
    if options.rounding is None:
        return NEAREST
    return options.rounding(world.host_gather(torch.initial_seed(), "seed of stochastic rounding")[0])


def _check_specs(module: nn.Module, specs: Iterable[ParamSpec]) -> None:
    """Raise ValueError if a parameter is not the box that its spec says; names it."""
    named = dict(plain_names.named_parameters(module))
    for spec in specs:
        parameter = named.get(clean_name(spec.name))
        if parameter is not None and tuple(parameter.data.shape) != spec.shape:
            raise ValueError(
                f"specs: {spec.name!r} has the shape {tuple(parameter.data.shape)}, and its box {spec.local_box}"
                f" of {spec.global_shape} has {spec.shape}. Give the box that the parameter is."
            )


_CODED_PARAMETERS = {  # libraries whose parameters hold codes, not values, by the first part of their modules' names
    "bitsandbytes": "bitsandbytes (BitsAndBytesConfig, load_in_4bit, load_in_8bit)",
    "torchao": "torchao (TorchAoConfig, quantize_)",
    "optimum": "quanto (QuantoConfig)",
}
_GATHERED_IN_FLOAT8 = "WeightWithDynamicFloat8CastTensor"  # of torchao: it holds values, which FSDP2 gathers as codes


def _refuse_coded_modules(module: nn.Module) -> None:
    """Raise ConfigError for parameters of another library, which hold codes, or are gathered as codes by FSDP2 only."""
    for name, parameter in module.named_parameters():
        if type(parameter).__name__ == _GATHERED_IN_FLOAT8:
            raise ConfigError.about(
                "enable_fsdp_float8_all_gather",
                f"{name} of {type(module).__name__} is a {_GATHERED_IN_FLOAT8} of torchao: "
                "enable_fsdp_float8_all_gather=True of its Float8LinearConfig lets FSDP2 gather weights in float8, and "
                "only FSDP2 knows how. Set enable_fsdp_float8_all_gather=False: the layers compute in float8 all the "
                "same, and weights are gathered in their own dtype.",
            )
        libraries = [kind.__module__.partition(".")[0] for kind in type(parameter).__mro__]
        found = next((_CODED_PARAMETERS[library] for library in libraries if library in _CODED_PARAMETERS), None)
        if found is not None:
            raise ConfigError.about(
                "quantize",
                f"{name} of {type(module).__name__} is a {type(parameter).__name__} of {found}: its codes mean nothing "
                "without a state that shards lack. Load the model without that quantization, and set quantize=4 or 8: "
                "frozen weights are then sharded and gathered in so many bits.",
            )


def _check_whole(plan: EnginePlan) -> None:
    for name, parameter in chain.from_iterable(bucket.parameters for bucket in plan.buckets):
        engine = owner_of(parameter)
        if isinstance(engine, Engine) and engine.attached:
            raise ValueError(
                f"Parameter {name!r} of {type(plan.root).__name__} is sharded already, over {engine.world.size} ranks. "
                "Use the module as it is, or make a new one, with weights that lt_zero.export has written."
            )


def _check_hooks(plan: EnginePlan) -> None:
    """Raise TypeError if a module that is to be gathered, or is the model itself, takes no hooks."""
    if is_compiled_by_jit(plan.root):
        try:
            plan.root.register_forward_pre_hook(no_hook).remove()
        except RuntimeError as error:
            raise _compiled("The model") from error
        return  # a traced one: all of it is gathered for its own call
    sharded = {p for bucket in plan.buckets if bucket.sharding.params for _, p in bucket.parameters}
    for name, module in plan.root.named_modules():
        if is_compiled_by_jit(module) and not sharded.isdisjoint(module.parameters()):
            raise _compiled(f"Module {clean_name(name)!r}")


def _compiled(what: str) -> TypeError:
    return TypeError(
        f"{what} is compiled by torch.jit.script, and takes no hooks. Shard the module that it was made from; use "
        "torch.compile if it has to be compiled. At stages 0 to 2 parts of a model may be compiled."
    )


def _move_in(
    plan: EnginePlan,
    made: dict[BucketPlan, Bucket],
    materializer: Materializer,
    work: ProgressBar,
) -> tuple[list[Unit], Unit]:
    """Initialise parameters and move them into buckets, unit by unit; returns units with parameters, and the root."""
    units: list[Unit] = []
    # Fill all units first: a bucket may need the values of later ones.
    if plan.joins:
        for planned in plan.units:
            materializer.fill(p for _, p in planned.parameters)
    arriving = [[made[bucket] for bucket in planned.buckets] for planned in plan.units]
    # The root is the last unit, and gets the buckets of no unit.
    arriving[-1] += [made[bucket] for bucket in plan.rest]
    ordered = [bucket for buckets in arriving for bucket in buckets]
    for group in dict.fromkeys(bucket.group for bucket in ordered):
        group.expect_broadcasts((bucket.name, bucket.layout.numel) for bucket in ordered if bucket.group is group)
    for planned, buckets in zip(plan.units, arriving, strict=True):
        materializer.fill([p for _, p in planned.parameters])
        for bucket in buckets:
            bucket.load_initial(materializer.fetch)
            work.advance()
        if buckets:
            # The gaps that the module's parameters leave in the heap would add up to a copy of the model.
            return_freed_memory()
        units.append(Unit(planned.name, planned.module, buckets, planned.needs_weights))
    *others, root = units
    return [unit for unit in others if unit.buckets], root


def _groups_of(
    module: nn.Module,
    options: EngineOptions,
    group: ShardGroup,
    group_of: Callable[[str, nn.Parameter], ShardGroup] | None,
) -> dict[nn.Parameter, ShardGroup]:
    """The groups of parameters, compared with those of other ranks. Collective if ``group_of`` is given.

    Raises:
        ValueError: a group is of another world.
        RuntimeError: on all ranks, if they have other groups, or sizes of buckets.
    """
    if group_of is None:
        return {}
    named = {name: (p, group_of(name, p)) for name, p in module.named_parameters()}
    for name, (_, found) in named.items():
        if found.world is not group.world:
            raise ValueError(
                f"group_of({name!r}) is a group of another World. Make all groups of the World of `group`."
            )
    if not group.world.alone:
        facts: dict[str, object] = {
            "zero_optimization.reduce_bucket_size": options.reduce_bucket_size,
            "zero_optimization.stage3_param_persistence_threshold": options.param_persistence_threshold,
            "zero_optimization.stage3_prefetch_bucket_size": options.prefetch_bucket_size,
        }
        facts |= {f"the group of parameter {name!r}": found.described for name, (_, found) in named.items()}
        compare(group, Snapshot.of(facts), "groups of parameters")
    return dict(named.values())


def _compare_wide(plan: EnginePlan, groups: Mapping[nn.Parameter, ShardGroup]) -> None:
    """Compare buckets with those of ranks that have another module. Collective.

    Raises:
        RuntimeError: on the ranks of a group, if they differ.
    """
    of_group: dict[ShardGroup, dict[str, str]] = {}
    for bucket in plan.buckets:
        if bucket.is_wide:
            form = f"{[spec.shape for spec in bucket.specs]}, {bucket.dtype}, trained: {bucket.trains}"
            facts = of_group.setdefault(groups[bucket.parameters[0][1]], {})
            facts[f"shared parameters {', '.join(name for name, _ in bucket.parameters)}"] = form
    for group, facts in of_group.items():
        compare(group, Snapshot.of(facts), "shared parameters")


def _most_elements(module: nn.Module, peers: ShardGroup, apart: Collection[nn.Parameter]) -> dict[nn.Parameter, int]:
    """The most elements that a rank has of each parameter whose shape may differ between ranks. Collective."""
    if not apart:
        return {}
    differ = set(apart)
    with without_torch_function():
        counts = [p.data.numel() if p in differ and not is_lazy(p) else 0 for p in module.parameters()]
    most = torch.tensor(counts)
    peers.host_max(most, "elements of parameters").wait()
    return {p: count for p, count in zip(module.parameters(), most.tolist(), strict=True) if p in differ}


def _check_groups(features: Sequence[Feature], groups: list[ShardGroup]) -> None:
    """Raise ConfigError for what is done in one group only."""
    if not has_groups(groups):
        return
    for key in (feature.needs_one_model for feature in features if feature.needs_one_model):
        number = len(groups) if len(groups) > 1 else groups[0].world.size // groups[0].size
        text = f"{key}: this needs the same parameters on all ranks, and these are sharded over {number} groups"
        raise ConfigError([Problem(key, f"{text}. Remove the key.")])


def _check_kernels(config: ZeroConfig, device: torch.device, world: World) -> None:
    """Check that all ranks have native kernels if ``ops`` is "required". Collective then.

    Raises:
        ConfigError: on all ranks, if kernels are missing on one.
    """
    if config.ops != "required":
        return
    offloads = config.zero_optimization.offload_optimizer.device != "none"  # offloaded states are stepped on the CPU
    kinds = {device.type, "cpu"} if offloads else {device.type}
    mine = " ".join(filter(None, map(missing, sorted(kinds))))
    ranks: dict[str, list[str]] = {}
    for rank, problem in enumerate(world.host_gather(mine, "native kernels")):
        if problem:
            ranks.setdefault(problem, []).append(str(rank))
    if ranks:
        told = " ".join(f"Rank {', '.join(which)}: {problem}" for problem, which in ranks.items())
        remedy = "Or set ops='auto': torch's operations run then."
        raise ConfigError([Problem("ops", f"ops='required', but native kernels are missing. {told} {remedy}")])


def _cast_buffers(root: nn.Module, dtype: torch.dtype, fp32_modules: Fp32Modules, names: str | tuple[str, ...]) -> None:
    kept = {child for _, module in fp32_modules.modules for child in module.modules()}
    # For "auto": transformers' models name such modules in this attribute.
    if isinstance(names, str):
        names = tuple(n for m in root.modules() for n in getattr(m, "_keep_in_fp32_modules", None) or ())
    for path, module in root.named_modules():
        if any(fnmatchcase(part, name) for part in path.split(".") for name in names):
            kept |= set(module.modules())
    kept |= {m for m in root.modules() if any(p in fp32_modules.parameters for p in m.parameters(recurse=False))}
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and module not in kept:
                setattr(module, name, buffer.to(dtype))
