"""A pipeline on paper: layers of its ranks, the time that they wait, the activations that they keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lt_zero.common.tables import bytes_cell, show
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks import PipelineParallel
from lt_zero.config.pipelines import Schedule, bubble, in_flight, running
from lt_zero.planning.drawing import shown
from lt_zero.planning.sizes import Sizes, Stage
from lt_zero.planning.transformer import Transformer


def schedules_table(config: ZeroConfig, console: Console) -> Table:
    """Print, and return, the costs of each schedule with the configured micro-batches."""
    ranks, count, block = config.pipeline.ranks, config.micro_batches, config.pipeline
    table = Table(
        title=f"{ranks} pipeline ranks, {count} micro-batches",
        caption="bubble: the share of a step in which ranks wait, if all stages take equally long.\n"
        "in flight: forwards of a stage that wait for their backward, on the first and the last rank.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("schedule", "stages / rank", "bubble", "in flight"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for schedule in get_args(Schedule):
        chosen = schedule == block.schedule
        chunks = block.chunks if chosen else PipelineParallel(schedule=schedule).chunks
        runs = running(schedule, ranks, count)
        name = schedule if runs == schedule else f"{schedule} (runs {runs})"
        first, last = (in_flight(schedule, ranks, count, chunks, rank) for rank in (0, ranks - 1))
        share = f"{bubble(ranks, count, chunks):.1%}"
        table.add_row(f"{name}{' *' if chosen else ''}", str(chunks), share, f"{first} to {last}")
    return show(table, console)


def kept(stage: Stage, shape: Transformer, config: ZeroConfig) -> tuple[float, float, float]:
    """Bytes of activations that a rank of the pipeline keeps: whole, with fused attention, and recomputed.

    Recomputed ones are the inputs of blocks, and one block's in full. Those of the embedding and the head are not in.
    """
    block, of_block = config.pipeline, shape.activations(config.tensor_parallel.autotp_size)
    waiting = in_flight(block.schedule, block.ranks, config.micro_batches, block.chunks, stage.rank)
    assert isinstance(stage.model, Sizes)
    blocks = stage.model.units().count(shape.block)
    each = waiting * blocks / block.chunks  # blocks of a stage, for each forward that waits
    return each * of_block.whole, each * of_block.fused, each * of_block.recomputed + of_block.fused


def stages_table(stages: Sequence[Stage], config: ZeroConfig, shape: Transformer | None, console: Console) -> Table:
    """Print, and return, layers, parameters and activations of each pipeline rank. Long pipelines are abbreviated."""
    table = Table(title="Ranks of the pipeline", box=SIMPLE_HEAD, pad_edge=False)
    columns = ["rank", "layers", "parameters", "in flight"]
    for name in (*columns, *(["activations", "fused attention", "recomputed"] if shape is not None else [])):
        table.add_column(name, justify="right")
    block, count = config.pipeline, config.micro_batches
    for number in shown(len(stages)):
        if number is None:
            table.add_row(*["..."] * len(table.columns))
            continue
        stage = stages[number]
        waiting = in_flight(block.schedule, block.ranks, count, block.chunks, number)
        cells = [str(number), str(stage.layers), f"{stage.parameters:,}", str(waiting)]
        more = [bytes_cell(nbytes, 1) for nbytes in kept(stage, shape, config)] if shape is not None else []
        table.add_row(*cells, *more)
    return show(table, console)


def reductions(config: ZeroConfig) -> Iterator[str]:
    """Lines that say how often gradients are reduced."""
    stage, count = config.zero_optimization.stage, config.micro_batches
    if stage >= 2 and count > 1:
        yield f"Stage {stage} reduces gradients for each of the {count} micro-batches; stages 0 and 1 once per step."
