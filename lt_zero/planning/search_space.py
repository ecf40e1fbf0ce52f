"""The search space of ``lt-zero tune``: candidates, the memory that each needs by its plan, facts about the script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lt_zero.common.errors import ConfigError
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import ActivationCheckpointing, PipelineParallel, ZeroOptimization
from lt_zero.config.document import MISSING, Document, leaves
from lt_zero.config.load import examine, plain, resolved
from lt_zero.config.options import engine_options
from lt_zero.config.pipelines import in_flight
from lt_zero.core.ask import adapted
from lt_zero.core.division import PartOfRun
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.partition import EnginePlan, plan_engine
from lt_zero.core.engine.storage_plan import DEVICE, HOST
from lt_zero.features import features_of, require
from lt_zero.planning.check import setup_of
from lt_zero.planning.estimate import Setting, settings
from lt_zero.planning.forecast import Forecast, forecast
from lt_zero.planning.setup import PlannedGroup, Setup, kind_of
from lt_zero.planning.step_time import Choice, choices

_Z = "zero_optimization"
_OFFLOADS = ("offload_optimizer", "offload_param")
_REUSE = "stage3_max_reuse_distance"
_LEAST_BUCKET = 1 << 16  # elements; smaller collectives cost more than they hide
_PARTS = (4, 16)  # of the configured bucket, or of the model if that is smaller


@dataclass(frozen=True)
class Candidate:
    """A configuration to try. None: as the script has it.

    Attributes:
        setting: stage, offload, and whether weights are released after forward.
        micro, accumulation: samples of a rank per micro-batch, and micro-batches per step; their product is fixed.
        checkpointing: ``activation_checkpointing.mode``.
        bucket: elements of ``reduce_bucket_size``, at stages 1 and 2 also of ``allgather_bucket_size``.
        schedule, count: ``pipeline.schedule`` and ``pipeline.num_microbatches``.
        sharing: keys of a ``Choice`` for many shards; ().
        rounding: those of one that rounds what is sent, and so changes results; ().
    """

    setting: Setting
    micro: int | None = None
    accumulation: int | None = None
    checkpointing: str | None = None
    bucket: int | None = None
    schedule: str | None = None
    count: int | None = None
    sharing: tuple[str, ...] = ()
    rounding: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [str(self.setting)]
        parts += [f"micro-batch {self.micro} * {self.accumulation}"] if self.micro is not None else []
        parts += [f"activation_checkpointing.mode: {self.checkpointing}"] if self.checkpointing is not None else []
        parts += [f"buckets of {self.bucket:,}"] if self.bucket is not None else []
        parts += [f"pipeline.schedule: {self.schedule}"] if self.schedule is not None else []
        parts += [f"pipeline.num_microbatches: {self.count}"] if self.count is not None else []
        parts += [key.replace("=", ": ").removeprefix(f"{_Z}.") for key in (*self.sharing, *self.rounding)]
        return ", ".join(parts)

    def overrides(self, base: ZeroConfig, nvme: str | None = None) -> list[str]:
        """Overrides, in Hydra's grammar, that make ``base`` this candidate; ``nvme``: folder for offload to files."""
        zero = base.zero_optimization
        stage = self.setting.stage
        found = dict[str, Any]()
        if self.setting != configured(base):
            found[f"{_Z}.stage"] = stage
            for key, place in zip(_OFFLOADS, self.setting.places, strict=True):
                device, block = place.replace("-", "none"), getattr(zero, key)
                found |= {f"{_Z}.{key}.device": device} if device != block.device else {}
                path = (nvme or "").replace("\\", "\\\\").replace("'", "\\'")
                found |= {f"{_Z}.{key}.nvme_path": f"'{path}'"} if device == "nvme" and nvme else {}
            if self.setting.releases:
                found[f"{_Z}.{_REUSE}"] = 0
            elif stage == 3 and getattr(zero, _REUSE) == 0:
                found[f"{_Z}.{_REUSE}"] = ZeroOptimization.model_fields[_REUSE].default
        if self.micro is not None:
            found["train_micro_batch_size_per_gpu"] = self.micro
            found["gradient_accumulation_steps"] = self.accumulation
            if base.pipeline.num_microbatches is not None:  # the same number, in a loop of one's own
                found["pipeline.num_microbatches"] = self.accumulation
        if self.checkpointing is not None:
            found["activation_checkpointing.mode"] = self.checkpointing
        if self.bucket is not None:
            found[f"{_Z}.reduce_bucket_size"] = self.bucket
            found |= {f"{_Z}.allgather_bucket_size": self.bucket} if stage in (1, 2) else {}
        found |= {"pipeline.schedule": self.schedule} if self.schedule is not None else {}
        found |= {"pipeline.num_microbatches": self.count} if self.count is not None else {}
        return [*(f"{key}={value}" for key, value in found.items()), *self.sharing, *self.rounding]


def kept(config: ZeroConfig, schedule: str | None = None, count: int | None = None) -> float:
    """Activations that the first rank of a pipeline keeps, in micro-batches through all of its layers.

    It is the rank that keeps most. ``schedule``, ``count``: in place of those of ``config``.
    """
    block = config.pipeline
    made = PipelineParallel(schedule=schedule or block.schedule, stages_per_rank=block.stages_per_rank)
    return in_flight(made.schedule, block.ranks, count or config.micro_batches, made.chunks, 0) / made.chunks


def configured(config: ZeroConfig) -> Setting:
    """The setting of a configuration."""
    zero = config.zero_optimization
    places = [zero.offload_optimizer.device, zero.offload_param.device if zero.stage == 3 else "none"]
    optimizer, param = (place.replace("none", "-") for place in places)
    return Setting(zero.stage, (optimizer, param), zero.stage == 3 and zero.stage3_max_reuse_distance == 0)


@dataclass(frozen=True)
class Plan:
    """Forecast of the memory planner for a setting with a bucket size.

    Attributes:
        accumulates: there are several micro-batches per step.
        running: bytes of a rank, on the device that computes, in a step; without activations.
        most: also while it is built and saved.
        problem: why it cannot be run; "" if it can.
        sharing: as for ``Candidate``.
    """

    setting: Setting
    bucket: int | None
    accumulates: bool
    running: int = 0
    most: int = 0
    problem: str = ""
    sharing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Facts that a run of the script reports before its first step.

    Attributes:
        device: type of the device that computes.
        data_ranks: ranks, or sets of ranks that share tensors, that see different samples.
        base: the written configuration in plain containers, without secrets.
        micro: samples of a rank per micro-batch, if configured; with a Trainer those of the data loader's batch.
        accumulation: micro-batches per step, of those.
        loop: the script has a loop of its own (``lt_zero.initialize``).
        bare: bytes of a rank without the engine's.
        unrepeated: why no activations can be checkpointed; "" if they can.
        layers: of the pipeline; 0: there are no stages.
        plans: of all settings and of the bucket sizes that cut the model differently, each with and without
            accumulation, in order of their expected speed.
        rounding: keys of choices for many shards that change results, each of which can be added to any candidate.
    """

    device: str
    data_ranks: int
    base: dict[str, Any]
    micro: int | None
    accumulation: int
    loop: bool
    bare: int
    unrepeated: str
    plans: tuple[Plan, ...]
    layers: int = 0
    rounding: tuple[tuple[str, ...], ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Facts:
        values = json.loads(path.read_text(encoding="utf-8"))
        plans = [
            Plan(**{**plan, "setting": Setting(stage, (places[0], places[1]), releases), "sharing": tuple(sharing)})
            for plan in values["plans"]
            for (stage, places, releases), sharing in [(plan["setting"], plan["sharing"])]
        ]
        return cls(**{**values, "plans": tuple(plans), "rounding": tuple(map(tuple, values["rounding"]))})


def written(config: ZeroConfig) -> dict[str, Any]:
    """The written keys of a configuration in plain containers, without secrets."""
    known, values = Document(resolved(config)), Document({})
    for path, value in leaves(plain(config), lists=False):
        if (safe := known.get(path)) is not MISSING or value == "auto":
            values.put(path, value if value == "auto" else safe)
    return values.values


# ---- in the script -----------------------------------------------------------------------------------------------


def unrepeated(engine: Engine, config: ZeroConfig) -> str:
    """Reason that no activations can be checkpointed; "" if they can. Collective if stages have other modules."""
    mode, problem = config.activation_checkpointing.mode, ""
    block = config.activation_checkpointing.model_copy(update={"mode": "full" if mode == "none" else mode})
    try:
        _find_modules(engine.root, block)
    except ConfigError as error:
        problem = str(error)
    told = engine.peers.ask_all(problem, "recomputation")
    return "" if "" in told else told[0]  # a stage without blocks has nothing to recompute


def _find_modules(root: nn.Module, block: ActivationCheckpointing) -> None:
    """Raise ConfigError if there are no modules to checkpoint, or activation checkpointing is not installed."""
    require("activation_checkpointing.mode")
    from lt_zero.features.activation_checkpointing.checkpointing import find_modules

    find_modules(root, block)


def layers_of(engine: Engine) -> int:
    """The layers of the pipeline that an engine's module is a stage of; 0: there is none."""
    return max((part.layers_on_ranks for part in engine.root.modules() if isinstance(part, PartOfRun)), default=0)


def plans_of(engine: Engine, config: ZeroConfig, saves: bool, nvme: str | None) -> Iterator[Plan]:
    """Plans of all settings, from an engine with its optimizers set up and its resolved configuration.

    Of the stages of a pipeline the one that needs most counts. Collective then: all ranks have to exhaust it.

    ``nvme``: a folder for files; offload to files is also planned if the configuration has one.
    """
    own = {span.name: span.numel for bucket in engine.buckets for span in bucket.layout.spans}
    stages = engine.peers.ask_all(own, "parameters of stages")
    elsewhere = sum({name: numel for names in stages for name, numel in names.items()}.values()) - sum(own.values())
    numel = max(sum(names.values()) for names in stages)
    saving = partial(setup_of, engine, [sharded.optimizer for sharded in engine.optimizers], saves=saves)
    setups = [replace(saving(accumulates=how), elsewhere=elsewhere) for how in (False, True)]
    buckets = (None, *_buckets(config.zero_optimization, numel))
    for setting in _ladder(engine, config, nvme):
        for choice in (choice for choice in choices_of(engine, setting.of(config)) if choice.exact):
            cuts = set[tuple[Any, ...]]()
            for bucket in buckets:
                candidate = Candidate(setting, bucket=bucket, sharing=choice.keys)
                mine = _plans(engine, config, candidate, setups, nvme)
                known = engine.peers.ask_all(mine, "plans of stages")
                if (cut := tuple(numels for numels, _ in known)) in cuts and all(cut):
                    continue
                cuts.add(cut)
                for plans in zip(*(plans for _, plans in known), strict=True):
                    yield _worst(plans)


def choices_of(engine: Engine, config: ZeroConfig) -> list[Choice]:
    """The choices that ``config`` has for the shards of an engine, where all of its ranks are data ranks."""
    group = engine.groups[0]
    if len(engine.groups) > 1 or not engine.everywhere:
        return [Choice(())]
    return choices(config, group.size, len(group.nodes[0]))


def _ladder(engine: Engine, config: ZeroConfig, nvme: str | None) -> Iterator[Setting]:
    """The settings that can be tried, from fast to slow, and the configured one."""
    has_disk = nvme is not None or any(
        getattr(config.zero_optimization, key).nvme_path is not None for key in _OFFLOADS
    )
    ladder = [rung for rung in settings(kind_of(engine.device)) if "nvme" not in rung.places or has_disk]
    if engine.world.size == 1:  # nothing is sharded: stages differ by what can be offloaded only
        ladder = list({rung.places: rung for rung in reversed(ladder)}.values())[::-1]
    yield from dict.fromkeys([*ladder, configured(config)])


def _plans(
    engine: Engine, config: ZeroConfig, candidate: Candidate, setups: Sequence[Setup], nvme: str | None
) -> tuple[tuple[int, ...], list[Plan]]:
    """The elements of each bucket of this rank's module, and the plans without and with accumulation."""
    setting = candidate.setting
    bucket = candidate.bucket
    sharing = candidate.sharing
    try:
        made = examine(written(config), overrides=candidate.overrides(config, nvme)).usable()
        made = made.model_copy(update={"zero_optimization": _resolved_sizes(made, config)})
        plan, everyone = _planned(engine, made)
    except ConfigError as error:
        return (), [Plan(setting, bucket, how, problem=str(error), sharing=sharing) for how in (False, True)]
    numels = tuple(sum(spec.local_box.numel for spec in planned.specs) for planned in plan.buckets)
    casts = [forecast(plan, made, engine.policy, replace(setup, group=everyone)) for setup in setups]
    return numels, [
        Plan(setting, bucket, how, *_needs(cast), sharing=sharing)
        for how, cast in zip((False, True), casts, strict=True)
    ]


def _worst(plans: Sequence[Plan]) -> Plan:
    """One plan for all stages: a rank's most."""
    running, most = max(plan.running for plan in plans), max(plan.most for plan in plans)
    problem = next((plan.problem for plan in plans if plan.problem), "")
    return replace(plans[0], running=running, most=most, problem=problem)


def _planned(engine: Engine, config: ZeroConfig) -> tuple[EnginePlan, PlannedGroup]:
    """The plan of an engine's model under another configuration, over the same ranks, and the group of all of them.

    Raises:
        ConfigError: they cannot be grouped as it says.
    """
    groups = {group: PlannedGroup.like(group, config.zero_optimization) for group in engine.groups}
    apart = [bucket for bucket in engine.buckets if bucket.group is not engine.groups[0]]
    of = {parameter: groups[bucket.group] for bucket in apart for parameter in bucket.params}
    sizes = {p: span.numel for bucket in apart for p, span in zip(bucket.params, bucket.layout.spans, strict=True)}
    wide = {parameter for bucket in engine.plan.buckets if bucket.is_wide for _, parameter in bucket.parameters}
    everyone = groups[engine.groups[0]]
    shards, specs = everyone.mesh.shards, engine.plan.parts
    options = adapted(engine_options(config, engine.policy), features_of(config))
    return plan_engine(engine.root, options, shards, specs, of, sizes, wide=wide), everyone


def _resolved_sizes(made: ZeroConfig, config: ZeroConfig) -> ZeroOptimization:
    """The block of ``made`` with the sizes that "auto" became in ``config``."""
    autos = {str(path[1]) for path in made.autos if path[0] == _Z and len(path) == 2}
    values: Mapping[str, Any] = {name: getattr(config.zero_optimization, name) for name in autos}
    return made.zero_optimization.model_copy(update=dict(values))


def _buckets(zero: ZeroOptimization, numel: int) -> list[int]:
    limit = min(zero.reduce_bucket_size, numel)
    sizes = [1 << max(0, (limit // part).bit_length()) for part in _PARTS]
    return [size for size in sizes if _LEAST_BUCKET <= size < limit]


def _needs(cast: Forecast) -> tuple[int, int]:
    """Bytes of rank 0 on the device that computes: in a step, and at most."""
    place = HOST if cast.setup.device == "cpu" else DEVICE
    needs = {phase: sum(cast.need_of_rank(phase, place, first=True).values()) for phase in cast.phases}
    running = max(nbytes for phase, nbytes in needs.items() if phase not in ("build", "checkpoint"))
    return running, max(needs.values())
