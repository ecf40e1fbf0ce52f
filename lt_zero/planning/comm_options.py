"""Options for the traffic between nodes: the bytes and seconds of each, and those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lt_zero.common.console import Console
from lt_zero.common.tables import bytes_cell, show
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import OptimizerBlock
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.config.rules import contradictions
from lt_zero.features import is_installed
from lt_zero.planning.estimate import Machine, Setting, estimate, estimate_step, estimate_traffic, misfit, settings
from lt_zero.planning.sizes import Model
from lt_zero.planning.step_time import Choice, Cluster, StepTime, choices, milliseconds
from lt_zero.planning.traffic import Traffic


@dataclass(frozen=True, eq=False)
class CommOption:
    """A stage, and further configuration.

    Attributes:
        zero: keys of ``zero_optimization``.
        blocks: other blocks -> their keys.
        exact: results differ from those of other exact options by the rounding of sums at most.
    """

    name: str
    stage: int
    zero: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exact: bool = True

    def of(self, config: ZeroConfig) -> ZeroConfig:
        """``config`` with this option; not validated."""
        block = config.zero_optimization.model_copy(update={"stage": self.stage, **self.zero})
        update: dict[str, Any] = {"zero_optimization": block}
        for name, keys in self.blocks.items():
            made = OptimizerBlock(**keys) if name == "optimizer" else getattr(config, name).model_copy(update=keys)
            update[name] = made
        return config.model_copy(update=update)


def candidates(stage: int, world: int, per_node: int, device: str) -> Iterator[CommOption]:
    """Options of ``stage``, exact ones first; ``world``, ``per_node``: data ranks."""
    groups = world % per_node == 0 and 1 < per_node < world
    yield CommOption(f"stage {stage}", stage)
    if device == "cpu":
        yield CommOption(f"stage {stage}, topology 1", stage, {}, {"communication": {"topology": 1}})
    if stage > 0:
        if groups:
            zero = {"mics_shard_size": per_node, "dp_replicate_size": 1}
            yield CommOption(f"stage {stage}, mics_shard_size {per_node}", stage, zero)
        codes: dict[str, Any] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        codes |= {"zero_hpz_partition_size": per_node} if stage == 3 and groups else {}
        if is_installed("zero_plus_plus"):
            yield CommOption(f"stage {stage}, ZeRO++", stage, codes, exact=False)
    for algorithm in ("2bit", "1bit") if is_installed("compression") else ():
        block = {"gradient_compression": {"algorithm": algorithm}}
        yield CommOption(f"stage {stage}, gradient_compression {algorithm}", stage, {}, block, exact=False)
    if stage < 2 and is_installed("one_bit"):
        yield CommOption(f"stage {stage}, OneBitAdam", stage, {}, {"optimizer": {"type": "OneBitAdam"}}, exact=False)


def valid(config: ZeroConfig, world: int, per_node: int, device: str, stage: int | None = None) -> list[CommOption]:
    """Options that do not contradict ``config``; ``stage``: only of this one."""
    stages, tensor = range(4) if stage is None else [stage], config.tensor_parallel.autotp_size
    of_stage = world // config.pipeline.ranks
    data = of_stage // tensor, max(1, min(of_stage, per_node) // tensor)
    found = [option for number in stages for option in candidates(number, *data, device)]
    return [option for option in found if next(contradictions(option.of(config)), None) is None]


def comm_options_table(
    model: Model,
    config: ZeroConfig,
    world: int,
    mbit: float,
    stage: int | None = None,
    console: Console | None = None,
    *,
    step_seconds: float | None = None,
    **options: Any,
) -> dict[CommOption, Traffic]:
    """Print the bytes that each node sends per step under every option, and their time; returns the bytes.

    Args:
        model, config, world, options: as in ``estimate_traffic``.
        mbit: rate of a node's link, in Mbit/s.
        stage: only this one.
        step_seconds: of a step inside one node: shows the time of the whole step.
    """
    per_node = options.get("ranks_per_node") or world
    title = f"{world} ranks, {per_node} per node, {mbit:g} Mbit/s: sent by a node per step"
    caption = "~ changes results (docs: Several nodes). In seconds; link: if nothing else uses it."
    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    columns = ["way", "gradients", "weights", "link", *(["step"] if step_seconds is not None else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    found: dict[CommOption, Traffic] = {}
    for option in valid(config, world, per_node, options.get("device", "cuda"), stage):
        found[option] = traffic = estimate_traffic(model, option.of(config), world, **options)
        seconds = traffic.seconds(mbit)
        cells = [bytes_cell(traffic.gradients), bytes_cell(traffic.weights), f"{seconds:.2f}"]
        cells += [f"{step_seconds + seconds:.2f}"] if step_seconds is not None else []
        table.add_row(f"{'' if option.exact else '~ '}{option.name}", *cells)
    show(table, console or Console(highlight=False))
    return found


def recommended(found: Mapping[CommOption, Traffic], mbit: float) -> list[str]:
    """Lines that recommend the exact option with least traffic, and an inexact one if that sends less still."""
    exact = min((option for option in found if option.exact), key=lambda option: found[option].total)
    lines = [f"least traffic: {exact.name} ({found[exact].topology})"]
    cheapest = min(found, key=lambda option: found[option].total)
    if found[cheapest].total < found[exact].total:
        seconds = found[cheapest].seconds(mbit), found[exact].seconds(mbit)
        lines.append(f"~ less, with other results: {cheapest.name} ({seconds[0]:.2f} instead of {seconds[1]:.2f} s)")
    return lines


def fitting(
    model: Model,
    machine: Machine,
    config: ZeroConfig,
    world: int,
    places: tuple[str, str],
    *,
    device: str = "cuda",
    **options: Any,
) -> dict[CommOption, tuple[Setting, Traffic]]:
    """Exact options that fit into a machine's memory, each in the first setting of the ladder in which it does.

    Args:
        places: device of ``offload_optimizer`` and of ``offload_param``, as ``cheapest`` found them: what is kept
            elsewhere costs more time than any option saves, so only these are tried.
        model, machine, config, world, device, options: as in ``cheapest``.
    """
    sent = {key: value for key, value in options.items() if key in ("precision", "accumulate_grad_batches")}
    found: dict[CommOption, tuple[Setting, Traffic]] = {}
    for setting in settings(device):
        for option in valid(config, world, machine.ranks, device, setting.stage) if setting.places == places else ():
            if not option.exact or any(option.name == other.name for other in found):
                continue
            chosen = option.of(setting.of(config))
            cast = estimate(model, chosen, world, ranks_per_node=machine.ranks, device=device, **options)
            if not misfit(cast, machine):
                traffic = estimate_traffic(model, chosen, world, ranks_per_node=machine.ranks, device=device, **sent)
                found[option] = setting, traffic
    return found


def many_shards(
    model: Model,
    machine: Machine,
    config: ZeroConfig,
    world: int,
    *,
    tokens: int,
    device: str = "cuda",
    **options: Any,
) -> list[str]:
    """Lines that say what the shards of ``config`` cost a step, and what fits and costs less; [] for few shards.

    Args:
        tokens: of a micro-batch.
        model, machine, config, world, device, options: as in ``fitting``.
    """
    found = (
        choices(config, world, machine.ranks) if device != "cpu" and ParallelSizes.of(config, world).is_plain else []
    )
    if len(found) < 2:
        return []
    sent = {key: value for key, value in options.items() if key in ("precision", "accumulate_grad_batches")}
    times: dict[Choice, StepTime] = {}
    for choice in found:
        chosen = choice.of(config)
        cast = estimate(model, chosen, world, ranks_per_node=machine.ranks, device=device, **options)
        if choice is found[0] or not misfit(cast, machine):
            times[choice] = estimate_step(model, chosen, world, ranks_per_node=machine.ranks, tokens=tokens, **sent)
    now, *others = times.items()
    lines = [
        f"over {world:,} shards a step with micro-batches of {tokens:,} tokens waits {milliseconds(now[1].waits)} for "
        f"the network, beside {milliseconds(now[1].computes)} of computing (by a model of {Cluster().name}):"
    ]
    better = sorted((pair for pair in others if pair[1].waits < now[1].waits), key=lambda pair: pair[1].waits)
    for choice, time in better:
        lines.append(f"    {'' if choice.exact else '~ '}{choice}: waits {milliseconds(time.waits)}")
    return lines if better else [f"{lines[0][:-1]}; no other setting waits less."]
