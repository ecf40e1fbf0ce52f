"""The command ``lt-zero estimate``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from torch import nn

from lt_zero.common.console import Console
from lt_zero.common.errors import ConfigError
from lt_zero.common.numbers import count_of
from lt_zero.common.tables import show
from lt_zero.common.units import GB, format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME
from lt_zero.planning.comm_options import comm_options_table, fitting, many_shards, recommended
from lt_zero.planning.drawing import rank_table, shares
from lt_zero.planning.estimate import Fit, Machine, cheapest, estimate, settings_table
from lt_zero.planning.forecast import Forecast, kinds_table
from lt_zero.planning.long_sequences import ActivationCounter, remedies_table
from lt_zero.planning.meshes import Rates, TrainingJob, meshes_table, plans, reasons
from lt_zero.planning.pipelines import reductions, schedules_table, stages_table
from lt_zero.planning.sizes import Model, Sizes, Stage, fullest, stages_of_module, stages_of_sizes
from lt_zero.planning.state_dtypes import dtypes_table
from lt_zero.planning.tensor_sizes import fits_by_size, sizes_table
from lt_zero.planning.transformer import Transformer

# Options by the groups of the help.
_OfNet = partial(typer.Option, rich_help_panel="The model")
_OfRanks = partial(typer.Option, rich_help_panel="Ranks")
_OfRun = partial(typer.Option, rich_help_panel="The run")
_OfHost = partial(typer.Option, rich_help_panel="What fits a machine")
_OfTables = partial(typer.Option, rich_help_panel="Other tables")
_DIMENSIONS = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "pipeline.stages",
    "pipeline.num_microbatches",
    "pipeline.schedule",
    "expert_parallel.autoep_size",
)

ModuleOption = Annotated[
    str | None, _OfNet(help="Instead of --params: pkg.mod:function that returns the model; nothing is allocated.")
]
TensorOption = Annotated[
    int | None,
    _OfRanks(min=1, help="Ranks that share the tensors of each layer. Default: tensor_parallel.autotp_size."),
]
SequenceRanksOption = Annotated[
    int | None, _OfRanks(min=1, help="Ranks with parts of the same sequences. Default: sequence_parallel_size.")
]
SequenceLengthOption = Annotated[
    int | None, _OfRun(min=1, help="Tokens of a sequence: forecasts activations. Default with --layers: 4096.")
]
PipelineOption = Annotated[
    int | None, _OfRanks(min=1, help="Ranks with layers one after the other. Default: pipeline.stages.")
]
MicroBatchesOption = Annotated[
    int | None, _OfRanks(min=1, help="Of a pipeline; default: pipeline.num_microbatches, or twice the ranks.")
]
LayersOption = Annotated[
    int | None, _OfNet(min=1, help="Instead of --params: transformer blocks of --hidden, with --heads.")
]
ExpertRanksOption = Annotated[
    int | None, _OfRanks(min=1, help="Ranks that share experts. Default: expert_parallel.autoep_size.")
]
ExpertsOption = Annotated[int, _OfNet(min=0, help="With --layers: of each block, in place of its feed-forward layer.")]
BatchOption = Annotated[
    int | None, _OfHost(min=1, help="With --fit: sequences of a step on all ranks; default: 2 micro-batches a rank.")
]
MbitOption = Annotated[
    float | None, _OfTables(min=0.001, help="Rate of a node's link in Mbit/s: shows the traffic of a step.")
]
StepSecondsOption = Annotated[
    float | None, _OfTables(min=0, help="With --mbit: seconds of a step in one node: shows those of the whole step.")
]
DtypesOption = Annotated[
    bool, _OfTables("--dtypes", help="Show states with moments, master weights or frozen weights in fewer bits.")
]
AdaptersOption = Annotated[
    str | None, _OfTables(help="With --dtypes: parameters of adapters beside frozen weights; default: 1 % of all.")
]


def estimate_command(
    params: Annotated[str | None, _OfNet(help="Number of parameters of the model, such as 7.5e9, 7B or 350M.")] = None,
    largest: Annotated[str | None, _OfNet(help="Parameters of its largest layer; default: 1/32 of all.")] = None,
    expert_params: Annotated[str | None, _OfNet(help="Parameters of experts, of --params.")] = None,
    module: ModuleOption = None,
    world: Annotated[int, _OfRanks(help="Number of ranks.")] = 1,
    per_node: Annotated[int | None, _OfRanks(help="Ranks per node; default: at most 8.")] = None,
    tensor: TensorOption = None,
    sequence_ranks: SequenceRanksOption = None,
    expert_ranks: ExpertRanksOption = None,
    pipeline: PipelineOption = None,
    micro_batches: MicroBatchesOption = None,
    schedule: Annotated[str | None, _OfRanks(help="1F1B, GPipe, Interleaved1F1B or LoopedBFS.")] = None,
    layers: LayersOption = None,
    hidden: Annotated[int | None, _OfNet(min=1, help="Width of a block.")] = None,
    heads: Annotated[int | None, _OfNet(min=1, help="Of attention; default: one for each 128 of --hidden.")] = None,
    vocabulary: Annotated[int, _OfNet(min=0, help="Rows of the embedding, and of the head: for logits.")] = 0,
    experts: ExpertsOption = 0,
    top_k: Annotated[int, _OfNet(min=1, help="Experts that a token is sent to.")] = 2,
    sequence_length: SequenceLengthOption = None,
    micro_batch: Annotated[int, _OfRun(min=1, help="Sequences of a micro-batch, for activations.")] = 1,
    batch: BatchOption = None,
    stage: Annotated[int | None, _OfRun(min=0, max=3, help="Show only this stage.")] = None,
    precision: Annotated[str | None, _OfRun(help="As for the Trainer: bf16-mixed, 32-true, ...")] = None,
    config: Annotated[Path | None, _OfRun(help="A JSON or YAML file, whose memory is itemized.")] = None,
    optimizer: Annotated[str, _OfRun(help="adam, sgd, momentum, ..., or bytes of state per parameter.")] = "adam",
    accumulate: Annotated[int, _OfRun(min=1, help="accumulate_grad_batches.")] = 1,
    checkpoints: Annotated[bool, _OfRun(help="Whether they are saved; full ones make rank 0 collect a copy.")] = True,
    device: Annotated[str, _OfRun(help="cuda or cpu.")] = "cuda",
    gpu_gb: Annotated[float | None, _OfHost(help="With --fit: memory of a GPU, without that of activations.")] = None,
    cpu_gb: Annotated[float | None, _OfHost(help="With --fit: host memory of a node; default: not limited.")] = None,
    nvme_gb: Annotated[float, _OfHost(help="With --fit: disk space of a node.")] = 0.0,
    nodes: Annotated[int | None, _OfRanks(min=1, help="Number of nodes, of --per-node ranks each.")] = None,
    mbit: MbitOption = None,
    step_seconds: StepSecondsOption = None,
    fit: Annotated[bool, _OfHost("--fit", help="Find the fastest setting that fits the machine.")] = False,
    dtypes: DtypesOption = False,
    adapters: AdaptersOption = None,
) -> None:
    """Estimate the memory of a run per rank and node, by stage and offload. 1 GB is 1e9 bytes."""
    console = Console(highlight=False)
    try:
        length = sequence_length or 4096
        shape = _shape(layers, hidden, heads, (length, micro_batch, vocabulary, experts, top_k))
        dimensions = (tensor, sequence_ranks, pipeline, micro_batches, schedule, expert_ranks)
        parsed = _config(config, stage, dimensions, module)
        world, per_node = _ranks(world, nodes, per_node)
        stages = _stages(params, largest, expert_params, module, shape, parsed, world)
        model = stages[0].model if len(stages) == 1 else fullest(stages)
        _draw(parsed, world, per_node, device, console)
        options = _options(per_node, optimizer, precision, device, accumulate, checkpoints)
        if mbit is not None:
            _print_traffic(model, parsed, world, mbit, stage, step_seconds, options, console)
        _print_pipeline(stages, parsed, shape, console)
        if adapters is not None and (not dtypes or module is not None):
            raise ValueError(
                f"--adapters {adapters} goes with --dtypes and a model that is given by its size. Of a"
                " module its own adapters count."
            )
        if dtypes:
            trained = None if adapters is None else count_of(adapters, "--adapters")
            dtypes_table(model, parsed, world, adapters=trained, console=console, **options)
            return
        if fit:
            tokens = length * micro_batch
            fits = _fit(model, parsed, world, options, (gpu_gb, cpu_gb, nvme_gb), mbit, tokens, console)
            is_plain = ParallelSizes.of(parsed, world).is_plain and isinstance(model, Sizes) and not model.experts
            if isinstance(model, Sizes) and is_plain and device == "cuda" and world > 1:
                known = shape or Transformer.like(model.total, length, micro_batch)
                _suggest(_job(model, known, batch, parsed, world, options, gpu_gb, mbit), shape is None, console)
            raise typer.Exit(0 if fits else 1)
        settings_table(model, parsed, world, stage=stage, console=console, **options)
        cast = estimate(model, parsed, world, **options)
        _print_parts(cast, parsed, module is None, console)
        if shape is not None:
            _print_tokens(shape, parsed, cast.setup.per_node, console)
        if config is not None or stage is not None:
            kinds_table(cast, f"Stage {parsed.zero_optimization.stage} as configured", console)
        if (shape is not None or sequence_length is not None) and parsed.pipeline.ranks == 1:
            counted = shape or _counted(model, length, micro_batch, vocabulary)
            counter = ActivationCounter(counted, micro_batch, parsed, precision)
            _print_activations(counter, cast, length, gpu_gb, console)
        _note_resident(cast, console)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None


def _print_traffic(
    model: Model,
    config: ZeroConfig,
    world: int,
    mbit: float,
    stage: int | None,
    step_seconds: float | None,
    options: Mapping[str, Any],
    console: Console,
) -> None:
    """Print the traffic between nodes under each option, and the recommended ones."""
    sent = {key: options[key] for key in ("ranks_per_node", "precision", "device", "accumulate_grad_batches")}
    found = comm_options_table(model, config, world, mbit, stage, console, step_seconds=step_seconds, **sent)
    for line in recommended(found, mbit):
        console.print(line, markup=False, soft_wrap=True)


def _print_pipeline(stages: Sequence[Stage], config: ZeroConfig, shape: Transformer | None, console: Console) -> None:
    """Print schedules, stages and reductions of a pipeline, if there is one."""
    if config.pipeline.ranks > 1:
        schedules_table(config, console)
        stages_table(stages, config, shape, console)
        for line in reductions(config):
            console.print(line, markup=False, soft_wrap=True)


def _counted(model: Model, length: int, micro_batch: int, vocabulary: int) -> Transformer | nn.Module:
    """The model whose activations are counted."""
    if isinstance(model, Sizes):
        return replace(Transformer.like(model.total, length, micro_batch), vocabulary=vocabulary)
    assert isinstance(model, nn.Module)
    return model


def _print_activations(
    counter: ActivationCounter, cast: Forecast, length: int, gpu_gb: float | None, console: Console
) -> None:
    """Print activations with each remedy, and the longest sequences that fit beside the states of the model."""
    limit = None if gpu_gb is None else gpu_gb * GB - cast.rank(DEVICE) - cast.communicators
    remedies_table(counter, length, cast.setup.device, limit, console)
    config = counter.config
    if limit is not None:
        states = format_bytes(cast.rank(DEVICE), 1)
        nccl = f", and NCCL {format_bytes(cast.communicators, 1)}" if cast.communicators else ""
        text = f"longest: tokens of a sequence in {gpu_gb:g} GB, of which the states of stage "
        console.print(f"{text}{config.zero_optimization.stage} take {states}{nccl}.", markup=False, soft_wrap=True)
    if isinstance(counter.model, nn.Module) and config.tensor_parallel.autotp_size > 1:
        console.print("Activations are those of a rank that has all of each layer: tensor ranks are not counted.")


def _options(
    per_node: int | None, optimizer: str, precision: str | None, device: str, accumulate: int, checkpoints: bool
) -> dict[str, Any]:
    """Further arguments of ``estimate``."""
    return {
        "ranks_per_node": per_node,
        "optimizer": float(optimizer) if optimizer.replace(".", "", 1).isdigit() else optimizer,
        "precision": precision,
        "device": device,
        "accumulate_grad_batches": accumulate,
        "saves": checkpoints,
    }


def _draw(config: ZeroConfig, world: int, per_node: int | None, device: str, console: Console) -> None:
    """Draw the ranks, unless all are data ranks."""
    sizes = ParallelSizes.of(config, world)
    if not sizes.is_plain:
        _draw_mesh(sizes, per_node or (world if device == "cpu" else min(world, 8)), console)


def _draw_mesh(sizes: ParallelSizes, per_node: int, console: Console) -> None:
    axes = {"pipeline": sizes.pipeline, "data": sizes.data, "sequence": sizes.sequence, "tensor": sizes.tensor}
    show(rank_table({axis: size for axis, size in axes.items() if size > 1 or axis == "data"}, per_node), console)
    for line in shares(sizes, per_node):
        console.print(line, markup=False, soft_wrap=True)


def _print_parts(cast: Forecast, config: ZeroConfig, assumed: bool, console: Console) -> None:
    """Print the share of the model that a rank has, unless it has all of it."""
    if cast.local >= cast.parameters:
        return
    sizes = (
        ("tensor", config.tensor_parallel.autotp_size),
        ("pipeline", config.pipeline.ranks),
        ("expert", config.expert_parallel.ranks),
    )
    kinds = " and ".join(name for name, size in sizes if size > 1)
    text = f"Of {cast.parameters:,} parameters a {kinds} rank has {cast.local:,}"
    if config.pipeline.ranks > 1:
        text = f"{text}, at most"
    elif assumed and config.tensor_parallel.autotp_size > 1:
        text = f"{text}: all are taken to be cut; --module counts the model's plan"
    else:
        text = f"{text}: its parts, and what is not cut"
    console.print(f"{text}. ZeRO shards these.", markup=False, soft_wrap=True)


def _print_tokens(shape: Transformer, config: ZeroConfig, per_node: int, console: Console) -> None:
    """Print what expert ranks send each other."""
    ranks = config.expert_parallel.ranks
    if not shape.experts or ranks == 1:
        return
    nbytes = shape.layers // config.pipeline.ranks * shape.to_experts(config.sequence_parallel_size)
    beside = min(ranks, max(1, per_node // config.tensor_parallel.autotp_size))
    console.print(
        f"Of each micro-batch a rank sends {format_bytes(nbytes)} of tokens to experts and back, in 16 bits: "
        f"{1 - 1 / ranks:.0%} to other ranks and {1 - beside / ranks:.0%} to other nodes, if routers balance them.",
        markup=False,
        soft_wrap=True,
    )


def _note_resident(cast: Forecast, console: Console) -> None:
    """Print the memory of a process that a forecast leaves out, on a CPU."""
    if cast.setup.device != "cpu":
        return
    libraries, gaps = psutil.Process().memory_info().rss, cast.parameters * torch.float32.itemsize
    console.print(
        f"The resident memory (RSS) of a rank is higher, by {format_bytes(libraries, 0)} of Python and libraries (as "
        f"this process now), about {format_bytes(gaps, 1)} of gaps that freed gradients leave in the heap, and the "
        "activations.",
        markup=False,
    )


def _ranks(world: int, nodes: int | None, per_node: int | None) -> tuple[int, int | None]:
    """The number of ranks, and those per node (None: not given)."""
    if nodes is None:
        return world, per_node
    if world > 1 and (world % nodes or per_node not in (None, world // nodes)):
        raise ValueError(f"--world {world} --nodes {nodes} --per-node {per_node}: world = nodes * ranks per node.")
    per_node = per_node or (world // nodes if world > 1 else 8)
    return nodes * per_node, per_node


def _shape(layers: int | None, hidden: int | None, heads: int | None, others: Sequence[int]) -> Transformer | None:
    """The transformer that the options describe; None: they do not. ``others``: its further fields, in order."""
    if (layers is None) != (hidden is None) or (layers is None and heads is not None):
        raise ValueError("--layers and --hidden describe a transformer: give both; --heads goes with them.")
    if layers is None or hidden is None:
        return None
    return Transformer(layers, hidden, heads or max(1, hidden // 128), *others)


def _stages(
    params: str | None,
    largest: str | None,
    experts: str | None,
    module: str | None,
    shape: Transformer | None,
    config: ZeroConfig,
    world: int,
) -> list[Stage]:
    """The stage of each rank of a pipeline; without one, the model."""
    if (params is not None) + (module is not None) + (shape is not None) != 1:
        raise ValueError("Give --params (with --largest), --layers with --hidden, or --module pkg.mod:function.")
    if module is None:
        sizes = shape.sizes() if shape is not None else None
        if sizes is None:
            of_experts = 0 if experts is None else count_of(experts, "--expert-params")
            one = None if largest is None else count_of(largest, "--largest")
            sizes = Sizes(count_of(params, "--params"), one, experts=of_experts)
        return stages_of_sizes(sizes, config) if config.pipeline.ranks > 1 else [Stage(sizes, 0, 0, sizes.total, 0)]
    build = partial(_module, module)
    return stages_of_module(build, config, world) if config.pipeline.ranks > 1 else [Stage(build(), 0, 0, 0, 0)]


def _module(module: str) -> nn.Module:
    """Call the function ``module`` on the meta device: its result has no values."""
    path, _, name = module.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        function: Any = importlib.import_module(path)
        for part in name.split("."):
            function = getattr(function, part)
        with torch.device("meta"):
            model = function()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ValueError(
            f"--module {module}: {error}. Name a function without arguments as pkg.mod:function."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--module {module} returned {type(model).__name__}, not an nn.Module.")
    return model


def _config(path: Path | None, stage: int | None, dimensions: Sequence[Any], module: str | None) -> ZeroConfig:
    """The configuration in a file, overridden by ``stage`` and by values for ``_DIMENSIONS`` (None: as in the file)."""
    given = [f"{key}={value}" for key, value in zip(_DIMENSIONS, dimensions, strict=True) if value is not None]
    given += ["expert_parallel.enabled=true"] if any(each.startswith("expert") for each in given) else []
    config = ZeroConfig.of(path, stage, given)
    sizes = [".".join(map(str, key)) for key in config.autos if key[0] == "zero_optimization"]
    if sizes and module is None:
        raise ValueError(f'--config {path}: "auto" in {", ".join(sorted(sizes))} requires the model: give --module.')
    return config


def _job(
    sizes: Sizes,
    shape: Transformer,
    batch: int | None,
    config: ZeroConfig,
    world: int,
    options: dict[str, Any],
    gpu_gb: float | None,
    mbit: float | None,
) -> TrainingJob:
    """The training job of the given options."""
    per_node = options["ranks_per_node"] or min(world, 8)
    more = {key: value for key, value in options.items() if key not in ("ranks_per_node", "accumulate_grad_batches")}
    rates = Rates() if mbit is None else Rates(between=mbit * 1e6 / 8 / per_node)
    if not sizes.layers and sizes.largest is None:
        each, rest = divmod(sizes.total, shape.layers)
        sizes = Sizes(sizes.total, layers=tuple(each + (number < rest) for number in range(shape.layers)))
    of_step = batch or 2 * world * shape.micro_batch
    return TrainingJob(shape, sizes, of_step, world, per_node, int((gpu_gb or 0) * GB), config, more, rates)


def _suggest(job: TrainingJob, assumed: bool, console: Console) -> None:
    """Print the meshes that fit, the suggested one, and why."""
    found = plans(job)
    if assumed:
        text = f"Taken to be a transformer of {job.model}; --layers, --hidden, --sequence-length describe another."
        console.print(text, markup=False, soft_wrap=True)
    if not found:
        console.print("No mesh of these ranks fits without offload, also with recomputed blocks.", soft_wrap=True)
        return
    meshes_table(found, job, console)
    if not found[0].sizes.is_plain:
        _draw_mesh(found[0].sizes, job.per_node, console)
    for line in reasons(found, job):
        console.print(line, markup=False, soft_wrap=True)


def _fit(
    model: Model,
    config: ZeroConfig,
    world: int,
    options: dict[str, Any],
    sizes: tuple[float | None, float | None, float],
    mbit: float | None,
    tokens: int,
    console: Console,
) -> bool:
    """Print the fastest setting that fits; returns whether there is one."""
    gpu, cpu, nvme = sizes
    on_cpu = options["device"] == "cpu"
    if (cpu if on_cpu else gpu) is None:
        missing = "--cpu-gb, the host memory of a node" if on_cpu else "--gpu-gb, the memory of a GPU (or --device cpu)"
        raise ValueError(f"--fit requires {missing}, in GB (1e9 bytes).")
    ranks = options["ranks_per_node"] or (world if options["device"] == "cpu" else min(world, 8))
    options = {key: value for key, value in options.items() if key != "ranks_per_node"}
    limit = None if gpu is None else int(gpu * GB)
    machine = Machine(None if cpu is None else int(cpu * GB), limit, int(nvme * GB), ranks)
    by_size = fits_by_size(model, machine, config, world, **options) if config.tensor_parallel.autotp_size > 1 else {}
    found = cheapest(model, machine, config, world, **options)
    for setting, problem in found.skipped:
        console.print(f"does not fit: {setting}\n    {problem}", markup=False, soft_wrap=True)
    if found.setting is None or found.forecast is None:
        console.print("Nothing fits. Use more ranks or nodes, or larger ones, or fewer bits: --dtypes shows them.")
        by_size = by_size or fits_by_size(model, machine, config, world, **options)
        if any(isinstance(fit, Fit) and fit.setting is not None for fit in by_size.values()):
            sizes_table(by_size, world // config.sequence_parallel_size, console)
        return False
    cast = found.forecast
    needs = (("GPU", cast.rank(DEVICE)), ("host of a node", cast.node(HOST)), ("NVMe of a node", cast.node(NVME)))
    console.print(f"fits: {found.setting}", markup=False, soft_wrap=True)
    console.print(
        "    " + ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in needs if nbytes), soft_wrap=True
    )
    if cast.communicators:
        console.print(f"    beside these, NCCL: {cast.of_nccl}", markup=False, soft_wrap=True)
    if cpu is None:
        console.print("    The host memory was not limited; --cpu-gb does.", markup=False)
    kinds_table(cast, str(found.setting), console)
    if by_size:
        sizes_table(by_size, world // config.sequence_parallel_size, console)
    _note_resident(cast, console)
    if mbit is not None and world > ranks:
        fast = fitting(model, machine, config, world, found.setting.places, **options)
        option, (setting, traffic) = min(fast.items(), key=lambda item: item[1][1].total)
        releases = ", stage3_max_reuse_distance: 0" if setting.releases else ""
        line = f"of what fits, least is sent by: {option.name}{releases} ({traffic.seconds(mbit):.2f} s on the link)"
        console.print(f"{line}: {traffic.topology}", markup=False, soft_wrap=True)
    chosen = found.setting.of(config)
    for line in many_shards(model, machine, chosen, world, tokens=tokens, **options):
        console.print(line, markup=False, soft_wrap=True)
    return True
