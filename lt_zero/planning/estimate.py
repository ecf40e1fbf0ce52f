"""The memory forecast for a model or for sizes alone, and the fastest setting that fits a machine."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero import optim
from lt_zero.common.arguments import expect_number, wrong
from lt_zero.common.errors import ConfigError
from lt_zero.common.numbers import count_of
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.units import format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import ZeroOptimization
from lt_zero.config.options import engine_options, with_sizes
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.config.precision import MODES, dtype_policy, resolve_mode
from lt_zero.core.ask import adapted, plan_division
from lt_zero.core.comm.process_groups import Communicators
from lt_zero.core.division import PlannedParts
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.partition import EnginePlan, GroupFacts, plan_engine
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME
from lt_zero.features import features_of, is_installed
from lt_zero.planning.check import CheckedRun
from lt_zero.planning.communicators import planned_communicators
from lt_zero.planning.forecast import PLACES, Forecast, forecast
from lt_zero.planning.setup import PlannedGroup, Setup, states_and_kernel
from lt_zero.planning.sizes import Model, Sizes, Stage, fullest, parts_of_all, skeleton, stages_of_sizes
from lt_zero.planning.step_time import Cluster, StepTime, step_time
from lt_zero.planning.traffic import Traffic, forecast_traffic

_OF_HIDDEN = ("bucket_size", "persistence_threshold")  # suffixes of keys that "auto" derives from the hidden size
_OFFLOADS = ("offload_optimizer", "offload_param")
_EVERYTHING = 1 << 62  # bytes: not limited


def estimate(
    model: Model,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    ranks_per_node: int | None = None,
    optimizer: str | float | Optimizer = "adam",
    precision: str | None = None,
    device: str = "cuda",
    accumulate_grad_batches: int = 1,
    saves: bool = True,
) -> Forecast:
    """The bytes that each rank and node needs. Allocates nothing and needs no process group.

    Args:
        model: a module on any device, also "meta"; or ``Sizes``, or the number of parameters (also "7B"). For a module
            that is not sharded yet the engine's own plan is used. For sizes the padding of ``shard_along=parameter`` is
            unknown and not counted, and with tensor parallelism all parameters are taken to be cut. With
            ``pipeline.stages`` above 1, it is the rank with most parameters that counts; a module is one rank's.
        config: as for ``ZeroStrategy``. With ``tensor_parallel.autotp_size`` above 1, a module is cut as in a run.
        world: ranks.
        ranks_per_node: ranks on one node; default: all on CPUs, at most 8 on GPUs.
        optimizer: a class of ``torch.optim`` ("adam", "sgd", ...; "momentum" is SGD with momentum), an optimizer, or
            the bytes of its states per parameter (8 for Adam).
        precision: as for ``Trainer``; default: that of the config, or "32-true".
        device: "cuda" or "cpu", where the ranks will compute.
        accumulate_grad_batches: as for ``Trainer``; stages 0 and 1 keep whole gradients if it is above 1.
        saves: whether checkpoints will be saved; for full ones rank 0 collects a full copy in host memory.

    Raises:
        ValueError: a value is wrong, or precision and config contradict each other.
        ConfigError: the tensor ranks do not divide ``world``, or a module has no plan that they fit.
    """
    options = (ranks_per_node, optimizer, precision, device, accumulate_grad_batches, saves)
    return forecast(*_planned(model, config, world, *options))


def estimate_traffic(
    model: Model,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    ranks_per_node: int | None = None,
    precision: str | None = None,
    device: str = "cuda",
    accumulate_grad_batches: int = 1,
) -> Traffic:
    """The bytes that ZeRO makes each node send to others in an optimizer step. Arguments, errors: as for ``estimate``.

    With pipelines, of a node of the rank with most parameters; what stages send each other is not counted.
    """
    options = (ranks_per_node, "adam", precision, device, accumulate_grad_batches, False)
    plan, parsed, policy, setup = _planned(model, config, world, *options)
    tensor = parsed.tensor_parallel.autotp_size
    if setup.world > setup.per_node and setup.per_node % tensor:
        key = "tensor_parallel.autotp_size"
        text = f"{key}={tensor} does not divide the {setup.per_node} ranks of a node: activations would cross"
        raise ConfigError.about(key, f"{text} the network in each layer, which is not counted. Use a divisor.")
    if setup.world < world > setup.per_node:
        _check_nodes(setup, world // setup.world)
        setup = replace(setup, per_node=min(setup.per_node, setup.world))
    return forecast_traffic(plan, parsed, policy, setup, accumulate_grad_batches * parsed.micro_batches)


def estimate_step(
    model: Model,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    ranks_per_node: int | None = None,
    precision: str | None = None,
    accumulate_grad_batches: int = 1,
    tokens: int = 4096,
    cluster: Cluster | None = None,
) -> StepTime:
    """The time of a step on GPUs, with ``tokens`` in a micro-batch, by the model of step_time.py.

    Other arguments, errors: as for ``estimate``. Data ranks only: what tensor, pipeline and expert ranks send is not
    counted. ``cluster``: default: of H100.
    """
    plan, parsed, policy, setup = _planned(
        model, config, world, ranks_per_node, "adam", precision, "cuda", accumulate_grad_batches, False
    )
    return step_time(plan, parsed, policy, setup, tokens, accumulate_grad_batches, cluster)


def _check_nodes(setup: Setup, stages: int) -> None:
    """Refuse stages that have parts of nodes."""
    if setup.world % setup.per_node and setup.per_node % setup.world:
        key = "pipeline.stages"
        raise ConfigError.about(
            key,
            f"{key}={stages}: the {setup.world} ranks of a stage are on parts of nodes of {setup.per_node}, whose "
            "traffic is not counted. Use numbers that divide each other.",
        )


def _planned(
    model: Model,
    config: ZeroConfig | dict[str, Any] | None,
    world: int,
    ranks_per_node: int | None,
    optimizer: str | float | Optimizer,
    precision: str | None,
    device: str,
    accumulate_grad_batches: int,
    saves: bool,
) -> tuple[EnginePlan, ZeroConfig, DtypePolicy, Setup]:
    """The plan of a run, its configuration, precision and setup; arguments as for ``estimate``."""
    config = ZeroConfig.of(config)
    counts = {"world": world, "ranks_per_node": ranks_per_node, "accumulate_grad_batches": accumulate_grad_batches}
    for name, count in counts.items():
        if count is not None or name != "ranks_per_node":
            expect_number(count, f"estimate({name}=...)", whole=True)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} is not 'cuda' or 'cpu'.")
    if precision is not None and precision not in MODES:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(MODES)}.")
    per_node = ranks_per_node or (world if device == "cpu" else min(world, 8))
    if world < 1 or not 1 <= per_node <= world:
        raise ValueError(f"world={world}, ranks_per_node={per_node}: 1 <= ranks_per_node <= world is needed.")
    ranks = ParallelSizes.of(config, world)
    stage = _stage_of(model, config)
    module, config, parts = _cut_module(stage.model, config, ranks, world)
    policy = dtype_policy(config, resolve_mode(config, precision or "32-true"))
    if module is not stage.model:
        policy = replace(policy, keep_fp32=())  # the names of modules are unknown
    states, kernel = states_of(optimizer)
    groups = _Groups(ranks, world, config.zero_optimization, device, per_node)
    setup = Setup(
        groups.of_stage,
        per_node,
        device,
        states,
        kernels=frozenset({kernel} if kernel and config.fused_step else ()),
        accumulates=accumulate_grad_batches * config.micro_batches > 1,
        saves=saves,
        communicators=planned_communicators(config, ranks) if device == "cuda" else Communicators(),
        elsewhere=stage.elsewhere,
    )
    named = dict(module.named_parameters())
    specs = [*parts.tensors, *parts.stacks]
    sizes = {named[spec.name]: spec.local_box.numel for spec in specs}
    others = groups.of_parameters(named, parts)
    shards = groups.of_stage.mesh.shards
    options = adapted(engine_options(config, policy), features_of(config))
    plan = plan_engine(module, options, shards, specs, others, sizes, wide=set(parts.shared))
    return plan, config, policy, setup


def _stage_of(model: Model, config: ZeroConfig) -> Stage:
    """The stage with most parameters of a model; a module is that already."""
    if isinstance(model, Stage):
        return model
    if not isinstance(model, nn.Module):
        sizes = model if isinstance(model, Sizes) else Sizes(count_of(model, "model"))
        return fullest(stages_of_sizes(sizes, config)) if config.pipeline.ranks > 1 else Stage(sizes, 0, 0, 0, 0)
    return Stage(model, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Groups:
    """The ranks over which parameters are sharded: ``ParallelMesh``, without processes."""

    ranks: ParallelSizes
    world: int
    zero: ZeroOptimization
    device: str
    per_node: int

    def _sized(self, size: int, of_experts: bool = False) -> PlannedGroup:
        # Groups with other parts of the same tensors are beside each other on each node.
        neighbours = min(self.per_node, self.ranks.of_stage) // max(1, self.ranks.of_stage // size)
        least = min(self.ranks.tensor, self.per_node) if of_experts else 1  # tensor ranks have the same experts
        in_node, neighbours = self.world == self.per_node, max(least, neighbours)
        return PlannedGroup.assumed(size, self.world, self.zero, self.device, in_node, neighbours, of_experts)

    @property
    def of_stage(self) -> PlannedGroup:
        """The ranks that have the same stage."""
        return self._sized(self.ranks.of_stage)

    def of_parameters(self, named: Mapping[str, Parameter], parts: PlannedParts) -> dict[Parameter, GroupFacts]:
        """The groups of parameters with another one. ``named``: all parameters."""
        cut = {named[spec.name] for spec in parts.tensors}
        found: dict[Parameter, GroupFacts] = dict.fromkeys(cut, self._sized(self.ranks.with_part))
        of_experts = self._sized(self.ranks.with_experts, of_experts=True)
        found |= {named[spec.name]: of_experts for spec in parts.stacks}
        for parameter, stages in parts.shared.items():
            ranks = self.ranks.of_stage * stages
            found[parameter] = self._sized(ranks // (self.ranks.tensor if parameter in cut else 1))
        return found


def _cut_module(
    model: nn.Module | Sizes, config: ZeroConfig, ranks: ParallelSizes, world: int
) -> tuple[nn.Module, ZeroConfig, PlannedParts]:
    """The module that is planned, its configuration, and what a rank has of it."""
    tensor, expert = ranks.tensor, ranks.expert
    if isinstance(model, nn.Module):
        config = with_sizes(config, model)
        return model, config, plan_division(features_of(config), world).parts(model)
    if expert > 1 and not model.experts:
        key = "expert_parallel.autoep_size"
        raise ConfigError.about(
            key,
            f"{key}={expert}: the number of parameters does not say how many of them are experts'. Give "
            "--expert-params (Sizes(experts=...)), or --experts with --layers, or the module.",
        )
    if sizes_left := sorted(path[1] for path in config.autos if path[1:] and str(path[1]).endswith(_OF_HIDDEN)):
        raise ValueError(f'{", ".join(map(str, sizes_left))} "auto" needs the model, not its size: write numbers.')
    along = config.zero_optimization.model_copy(update={"shard_along": "element"})
    config = config.model_copy(update={"zero_optimization": along})
    limit = min(config.zero_optimization.reduce_bucket_size, config.zero_optimization.allgather_bucket_size)
    made = skeleton(model, limit, tensor, expert)
    return made, config, parts_of_all(made, tensor, expert)


def states_of(optimizer: str | float | Optimizer) -> tuple[float, str]:
    """The number of element-wise states of an optimizer (mean of its groups), and the kernel that steps it, or ''.

    Raises:
        ValueError: the optimizer is unknown.
    """
    if isinstance(optimizer, (int, float)):
        if optimizer < 0:
            raise ValueError(f"optimizer={optimizer}: bytes of state per parameter are not negative.")
        return optimizer / torch.float32.itemsize, ""
    if isinstance(optimizer, str):
        name = optimizer.lower()
        classes: dict[str, Any] = {n.lower(): c for n, c in vars(torch.optim).items() if inspect.isclass(c)}
        known = {n: c for n, c in classes.items() if issubclass(c, Optimizer) and c is not Optimizer}
        known |= {n.lower(): partial(_made, n) for n in optim.OPTIMIZERS}
        known["momentum"] = partial(torch.optim.SGD, momentum=0.9)
        if name not in known:
            raise ValueError(
                f"optimizer={name!r} is not one of {', '.join(sorted(known))}. Pass the bytes of its states per "
                "parameter as a number."
            )
        try:
            optimizer = known[name]([Parameter(torch.zeros(1, 1))])
        except TypeError as error:
            raise ValueError(f"optimizer={name!r} has no defaults ({error}). Pass an instance.") from error
        assert isinstance(optimizer, Optimizer)
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise wrong("optimizer", optimizer, "pass a name such as 'adam', an instance, or bytes per parameter")
    return states_and_kernel(optimizer)


def _made(name: str, parameters: list[Parameter]) -> Optimizer:
    """An optimizer of ``lt_zero.optim``, which is imported now."""
    made: Optimizer = getattr(optim, name)(parameters)
    return made


class Setting(NamedTuple):
    """One rung of the ladder.

    Attributes:
        stage: of ZeRO.
        places: device of ``offload_optimizer`` and of ``offload_param``; "-" for none.
        releases: no unit stays gathered between its forward and its backward.
    """

    stage: int
    places: tuple[str, str] = ("-", "-")
    releases: bool = False

    def __str__(self) -> str:
        named = zip(_OFFLOADS, self.places, strict=True)
        parts = [f"{key}: {place}" for key, place in named if place != "-"]
        parts += ["stage3_max_reuse_distance: 0"] if self.releases else []
        return ", ".join([f"stage {self.stage}", *parts])

    def of(self, config: ZeroConfig) -> ZeroConfig:
        """``config`` with this setting; a missing ``nvme_path`` is left for the user to fill."""
        block = config.zero_optimization
        values = {name: getattr(block, name) for name in block.model_fields_set} | {"stage": self.stage}
        for key, place in zip(_OFFLOADS, self.places, strict=True):
            kept = {name: getattr(getattr(block, key), name) for name in getattr(block, key).model_fields_set}
            values[key] = {"nvme_path": Path("nvme_path"), **kept, "device": place.replace("-", "none")}
        if self.places[1] == "nvme":
            values["offload_param"]["max_in_cpu"] = 0
        if self.releases:
            values["stage3_max_reuse_distance"] = 0
        return config.model_copy(update={"zero_optimization": ZeroOptimization.model_validate(values)})


# From fast to slow: collectives that are saved, then states that cross PCIe each step, then weights that cross it twice
# per micro-batch, then the disk.
_LADDER = (
    *(Setting(stage) for stage in (0, 1, 2, 3)),
    Setting(3, releases=True),
    *(Setting(stage, ("cpu", "-")) for stage in (1, 2, 3)),
    Setting(3, ("cpu", "cpu")),
    Setting(3, ("cpu", "cpu"), releases=True),
    *(Setting(stage, ("nvme", "-")) for stage in (2, 3)),
    Setting(3, ("nvme", "cpu")),
    Setting(3, ("nvme", "nvme"), releases=True),
)


@dataclass(frozen=True)
class Machine:
    """One node.

    Attributes:
        device: bytes of one GPU that model states may take; None: not limited, or no GPU.
        host: bytes of its memory; None: not limited.
        nvme: bytes of its disk.
        ranks: processes on it.
    """

    host: int | None
    device: int | None = None
    nvme: int = 0
    ranks: int = 8


@dataclass(frozen=True)
class Fit:
    """The first setting that fits (None: none does), and why those before it do not."""

    setting: Setting | None
    forecast: Forecast | None
    skipped: tuple[tuple[Setting, str], ...]


def settings(device: str = "cuda", stage: int | None = None) -> list[Setting]:
    """The ladder. On CPUs, offloading to the CPU changes nothing and is left out."""
    useful = [setting for setting in _LADDER if device != "cpu" or "cpu" not in setting.places]
    if not is_installed("offload"):
        useful = [setting for setting in useful if setting.places == ("-", "-")]
    return [setting for setting in useful if stage in (None, setting.stage)]


def cheapest(
    model: Model,
    machine: Machine,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int | None = None,
    *,
    device: str = "cuda",
    **options: Any,
) -> Fit:
    """The fastest setting that fits. See ``_LADDER`` for the order.

    Args:
        model: as in ``estimate``.
        machine: one node; all are alike.
        config: everything but stage, offload and reuse distance.
        world: ranks; default: one node.
        device: "cuda" or "cpu".
        options: further arguments of ``estimate``.
    """
    parsed = ZeroConfig.of(config)
    skipped: list[tuple[Setting, str]] = []
    for setting in settings(device):
        cast = estimate(
            model, setting.of(parsed), world or machine.ranks, ranks_per_node=machine.ranks, device=device, **options
        )
        problem = misfit(cast, machine)
        if not problem:
            return Fit(setting, cast, tuple(skipped))
        skipped.append((setting, problem))
    return Fit(None, None, tuple(skipped))


def advice(run: CheckedRun, host: int, ranks: int) -> str:
    """The first setting that fits a run with too little memory: so many ``ranks`` on a ``host`` of so many bytes."""
    setup = run.setup
    fit = cheapest(
        run.root,
        Machine(host=host, nvme=_EVERYTHING, ranks=ranks),
        run.config,
        setup.world * run.config.pipeline.ranks,
        device=setup.device,
        optimizer=run.optimizer,
        precision=run.policy.mode,
        accumulate_grad_batches=2 if setup.accumulates else 1,
        saves=setup.saves,
    )
    more = "`lt-zero estimate` shows what each setting needs;"
    if fit.setting is None or fit.forecast is None:
        return f"No setting fits: take more or larger machines, or a smaller model. {more}"
    disk = fit.forecast.node(NVME)
    room = f" (with nvme_path on a disk that has {format_bytes(disk)} for this node)" if disk else ""
    return f"What would fit: {fit.setting}{room}. Or start fewer ranks per machine. {more}"


def misfit(cast: Forecast, machine: Machine) -> str:
    """A sentence on the memory that is too small; "" if everything fits."""
    lacking = []
    for place, word, limit in (
        (DEVICE, "GPU", machine.device),
        (HOST, "host", machine.host),
        (NVME, "NVMe", machine.nvme),
    ):
        need = cast.rank(DEVICE) + cast.communicators if place == DEVICE else cast.node(place)
        if limit is not None and need > limit:
            phases = [cast.need_of_node(phase, place) for phase in cast.phases]
            peak = max(phases, key=lambda kinds: sum(kinds.values()))
            kind, most = max(peak.items(), key=lambda item: item[1])
            most //= cast.setup.per_node if place == DEVICE else 1
            beside = f"; NCCL, {format_bytes(cast.communicators)}" if place == DEVICE and cast.communicators else ""
            lacking.append(
                f"{word}: {format_bytes(need)} needed, {format_bytes(limit)} there (most: {kind}, {format_bytes(most)}"
                f"{beside})"
            )
    return "; ".join(lacking)


def _left_out(cast: Forecast) -> str:
    """List what tables of forecasts do not have."""
    return f"Without activations{f', and NCCL: {cast.of_nccl}' if cast.communicators else ''}."


def settings_table(
    model: Model,
    config: ZeroConfig | dict[str, Any] | None = None,
    world: int = 1,
    *,
    device: str = "cuda",
    stage: int | None = None,
    console: Console | None = None,
    **options: Any,
) -> Table:
    """Print, and return, the peak memory of each rung of the ladder, per rank and per node.

    Args:
        model, config, world, device, options: as in ``estimate``.
        stage: only this one.
        console: where to print.
    """
    parsed = ZeroConfig.of(config)
    casts = [
        (setting, estimate(model, setting.of(parsed), world, device=device, **options))
        for setting in settings(device, stage)
    ]
    per_node = casts[0][1].setup.per_node
    tensor, stages = parsed.tensor_parallel.autotp_size, parsed.pipeline.ranks
    ranks = f"{world} rank(s), {per_node} per node" + (f", {tensor} tensor ranks" if tensor > 1 else "")
    ranks += f", {stages} pipeline ranks (the fullest)" if stages > 1 else ""
    ranks += f", {parsed.sequence_parallel_size} sequence ranks" if parsed.sequence_parallel_size > 1 else ""
    table = Table(
        title=f"{casts[0][1].parameters:,} parameters, {ranks}",
        caption=f"{_left_out(casts[-1][1])} optim., param: device of offload_optimizer, offload_param.\n"
        "* stage3_max_reuse_distance: 0, nothing stays gathered after its forward.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("stage", "optim.", "param"):
        table.add_column(name, no_wrap=True)
    for name in (f"{place}\n/ {unit}" for unit in ("rank", "node") for place in PLACES):
        table.add_column(name, justify="right", no_wrap=True)
    for setting, cast in casts:
        each = [cast.rank(place) for place in PLACES] + [cast.node(place) for place in PLACES]
        stage_cell = f"{setting.stage}{' *' if setting.releases else ''}"
        table.add_row(stage_cell, *setting.places, *[bytes_cell(nbytes, 1) for nbytes in each])
    return show(table, console)
