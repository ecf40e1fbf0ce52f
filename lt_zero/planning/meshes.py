"""The mesh of tensor, pipeline and data ranks, and the stage, that fit and lose least time for a transformer.

Note [Time that is lost]
    A step takes the time of its multiplications on all ranks, and loses more: for sending, as if nothing ran meanwhile,
    in the pipeline's bubble, and for one more forward where blocks are recomputed. Data ranks send gradients and
    weights in rings, where one rank of each node sends to the next node. Tensor ranks send four all-reduces of a
    block's width for each block and micro-batch, inside a node; pipeline ranks an activation and its gradient for each
    micro-batch. All meshes compute the same batch, so fewer data ranks run more micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lt_zero.common.places import is_there
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.units import format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.config.parallel_sizes import ParallelSizes
from lt_zero.config.pipelines import bubble, in_flight
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.storage_plan import DEVICE
from lt_zero.planning.estimate import Setting, estimate
from lt_zero.planning.sizes import Sizes, Stage, fullest, stages_of_sizes
from lt_zero.planning.transformer import Transformer

_STAGES = (1, 2, 3)  # of ZeRO; at stage 0 a rank sends as much as at stage 1, and needs more memory
_SHOWN = 8  # meshes


@dataclass(frozen=True)
class Rates:
    """Rates of a rank, per second. The defaults are those of an H100 with NVLink, and a link of 400 Gbit/s each.

    Attributes:
        inside: bytes that it sends to its node.
        between: bytes that it sends to other nodes.
        flops: floating-point operations, as far as training reaches them.
    """

    inside: float = 450e9
    between: float = 50e9
    flops: float = 400e12


@dataclass(frozen=True)
class TrainingJob:
    """A model to train, and the machine for it.

    Attributes:
        model: a transformer.
        sizes: its parameters, layer by layer.
        batch: sequences of a step.
        world: ranks.
        per_node: those of a node.
        gpu: bytes of a GPU.
        config: of all but the mesh and the stage.
        options: further arguments of ``estimate``.
    """

    model: Transformer
    sizes: Sizes
    batch: int
    world: int
    per_node: int
    gpu: int
    config: ZeroConfig
    options: Mapping[str, Any]
    rates: Rates = Rates()

    @property
    def policy(self) -> DtypePolicy:
        return dtype_policy(self.config, resolve_mode(self.config, self.options.get("precision") or "32-true"))

    @property
    def seconds(self) -> float:
        """Seconds of a step in which nothing is lost."""
        return 6 * self.sizes.total * self.batch * self.model.sequence / self.world / self.rates.flops


@dataclass(frozen=True)
class MeshPlan:
    """A mesh with a stage.

    Attributes:
        sizes: of the mesh.
        stage: of ZeRO.
        count: micro-batches of each data rank.
        recomputes: blocks keep their input only.
        nbytes: of a GPU, with activations.
        inside, between: bytes that a rank sends per step, to its node and to others.
        waits: share of a step that is the bubble.
        lost: seconds of a step. See Note [Time that is lost].
    """

    sizes: ParallelSizes
    stage: int
    count: int
    recomputes: bool
    nbytes: int
    inside: float
    between: float
    waits: float
    lost: float

    def __str__(self) -> str:
        axes = {"tensor": self.sizes.tensor, "pipeline": self.sizes.pipeline, "data": self.sizes.data}
        named = " x ".join(f"{size:,} {axis}" for axis, size in axes.items() if size > 1 or axis == "data")
        return f"{named}, stage {self.stage}{', recomputing blocks' if self.recomputes else ''}"


def meshes(job: TrainingJob) -> Iterator[ParallelSizes]:
    """Meshes that can run: tensor ranks on one node that divide heads, stages with a layer, whole micro-batches."""
    divides = is_there("lt_zero.parallel")  # else all are data ranks
    for tensor in _divisors(math.gcd(job.world, job.per_node) if divides else 1):
        for stages in _divisors(job.world // tensor if divides else 1):
            data = job.world // tensor // stages
            whole = job.batch % (data * job.model.micro_batch) == 0
            if job.model.heads % tensor == 0 and stages <= len(job.sizes.units()) and whole:
                yield ParallelSizes(data, tensor, stages)


def _divisors(number: int) -> Iterator[int]:
    yield from (each for each in range(1, number + 1) if number % each == 0)


def plans(job: TrainingJob) -> list[MeshPlan]:
    """The meshes that fit, each with the lowest stage that does, with and without recomputing; the best first.

    Raises:
        ValueError: no mesh can run the batch.
    """
    found, tried = list[MeshPlan](), False
    for sizes in meshes(job):
        tried = True
        found += _plans_on(job, sizes)
    if not tried:
        raise ValueError(
            f"--batch {job.batch} with --micro-batch {job.model.micro_batch}: no mesh of {job.world} ranks cuts it "
            "into whole micro-batches. Use a multiple of the data ranks times the micro-batch."
        )
    return sorted(found, key=lambda plan: (plan.lost, plan.sizes.pipeline, plan.sizes.tensor))


def _plans_on(job: TrainingJob, sizes: ParallelSizes) -> Iterator[MeshPlan]:
    config = with_mesh(job.config, sizes)
    count = job.batch // (sizes.data * job.model.micro_batch)
    has = fullest(stages_of_sizes(job.sizes, config)) if sizes.pipeline > 1 else _whole(job.sizes)
    assert isinstance(has.model, Sizes)
    missing = {False, True}
    for stage in _STAGES:
        states = _states(job, config, has, stage, count)
        for recomputes in sorted(missing):
            nbytes = states + _activations(job, sizes, has, count, recomputes)
            if nbytes <= job.gpu:
                missing.discard(recomputes)
                yield _plan(job, sizes, has, stage, count, recomputes, nbytes)
        if not missing:
            return


def _whole(sizes: Sizes) -> Stage:
    return Stage(sizes, 0, len(sizes.units()), sizes.total, 0)


def with_mesh(config: ZeroConfig, sizes: ParallelSizes) -> ZeroConfig:
    """``config`` on such a mesh."""
    asked = {"tensor_parallel.autotp_size": sizes.tensor, "pipeline.stages": sizes.pipeline}
    return ZeroConfig.of(config, overrides=[f"{key}={size}" for key, size in asked.items()])


def _states(job: TrainingJob, config: ZeroConfig, has: Stage, stage: int, count: int) -> int:
    """Bytes of a rank without activations."""
    plain = count if config.pipeline.ranks == 1 else 1
    options = {"ranks_per_node": job.per_node, **job.options, "accumulate_grad_batches": plain}
    model = has if config.pipeline.ranks > 1 else job.sizes
    return estimate(model, Setting(stage).of(config), job.world, **options).rank(DEVICE)


def _blocks(job: TrainingJob, has: Stage) -> float:
    """The blocks of a stage: its share of the model's, where layers are not those of the transformer."""
    assert isinstance(has.model, Sizes)
    known = has.model.units().count(job.model.block)
    return known or job.model.layers * has.parameters / job.sizes.total


def _activations(job: TrainingJob, sizes: ParallelSizes, has: Stage, count: int, recomputes: bool) -> int:
    """Bytes of activations on the first stage, with fused attention."""
    of_block = job.model.activations(sizes.tensor)
    waiting = in_flight("1F1B", sizes.pipeline, count, 1, 0) if sizes.pipeline > 1 else 1
    each = waiting * _blocks(job, has)
    return int(each * of_block.recomputed + of_block.fused if recomputes else each * of_block.fused)


def _plan(
    job: TrainingJob, sizes: ParallelSizes, has: Stage, stage: int, count: int, recomputes: bool, nbytes: int
) -> MeshPlan:
    inside, between = sent(job, sizes, has, stage, count)
    waits = bubble(sizes.pipeline, count)
    lost = inside / job.rates.inside + between / job.rates.between
    lost += job.seconds * (waits / (1 - waits) + recomputes / 3)  # a forward is a third of a step
    return MeshPlan(sizes, stage, count, recomputes, nbytes, inside, between, waits, lost)


def sent(job: TrainingJob, sizes: ParallelSizes, has: Stage, stage: int, count: int) -> tuple[float, float]:
    """Bytes that a rank sends in a step: to its node, and to others. See Note [Time that is lost]."""
    policy = job.policy
    data = sizes.data
    tensor = sizes.tensor
    dtype = policy.compute or torch.float32
    grads = (policy.wire_of(dtype) or policy.accumulate_of(dtype)).itemsize
    rounds = {1: (1, 1), 2: (count, 1), 3: (count, 2 * count)}[stage]  # of reductions, and of gathers
    each = has.parameters / tensor * (data - 1) / data
    ring = each * (rounds[0] * grads + rounds[1] * dtype.itemsize)
    together = min(data, job.per_node // tensor)  # data ranks on a node
    crossing = ring / together if data > together else 0.0
    inside, between = ring - crossing, crossing
    inside += count * _blocks(job, has) * 4 * 2 * (tensor - 1) / tensor * job.model.boundary
    if sizes.pipeline > 1:
        nodes, steps = max(1.0, job.world / job.per_node), sizes.pipeline - 1
        apart = min(1.0, (nodes - 1) / steps)  # of the steps between stages, those to another node
        # The mean of the ranks: the first sends no gradient, and the last no activation.
        hops = 2 * steps / sizes.pipeline * count * job.model.boundary
        inside, between = inside + (1 - apart) * hops, between + apart * hops
    return inside, between


def meshes_table(found: Sequence[MeshPlan], job: TrainingJob, console: Console) -> Table:
    """Print, and return, the meshes that lose least."""
    rates = job.rates
    table = Table(
        title=f"Meshes of {job.world:,} ranks that fit {format_bytes(job.gpu, 0)}, {job.batch:,} sequences per step",
        caption=f"Sent by a rank per step; lost: by sending without overlap ({format_bytes(rates.inside, 0)}/s in a "
        f"node, {format_bytes(rates.between)}/s between nodes),\nin the bubble, and by recomputing, beside "
        f"{job.seconds:.3g} s of computing at {rates.flops / 1e12:,.0f} TFLOP/s. GPU: with activations "
        "(fused attention).",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    columns = ("tensor", "pipeline", "data", "micro-batches", "stage", "recompute", "GPU", "in node", "between")
    for name in (*columns, "bubble", "lost"):
        table.add_column(name, justify="right")
    for plan in found[:_SHOWN]:
        sizes = plan.sizes
        cells = [sizes.tensor, sizes.pipeline, sizes.data, plan.count, plan.stage, "yes" if plan.recomputes else "no"]
        numbers = [bytes_cell(nbytes, 1) for nbytes in (plan.nbytes, plan.inside, plan.between)]
        table.add_row(*map(str, cells), *numbers, f"{plan.waits:.0%}", f"{plan.lost:.2f} s")
    return show(table, console)


def reasons(found: Sequence[MeshPlan], job: TrainingJob) -> Iterator[str]:
    """Lines that say why the first is suggested."""
    best, sizes = found[0], found[0].sizes
    yield f"suggested: {best}, {best.count} micro-batches of {job.model.micro_batch}"
    yield "    " + _strategy(best)
    plain = next((plan for plan in found if plan.sizes.is_plain), None)
    if not sizes.is_plain:
        if plain is None:
            yield "    Data ranks alone do not fit."
        else:
            yield f"    Data ranks alone need stage {plain.stage}, and lose {plain.lost - best.lost:.2f} s more."
    if sizes.tensor > 1:
        yield f"    Tensor ranks stay on a node, and divide what it keeps by {sizes.tensor}."
    if sizes.pipeline > 1:
        yield f"    The pipeline waits for {best.waits:.0%} of a step; more sequences per step make that less."
    if best.stage == 1:
        yield "    Stage 1 reduces gradients once per step, whatever the number of micro-batches."
    else:
        yield f"    A lower stage than {best.stage} does not fit this mesh, or what else does loses more."


def _strategy(plan: MeshPlan) -> str:
    """The constructor of the strategy."""
    sizes, parts = plan.sizes, [f"stage={plan.stage}"]
    parts += [f"tensor_parallel_size={sizes.tensor}"] if sizes.tensor > 1 else []
    if sizes.pipeline == 1:
        return f"ZeroStrategy({', '.join(parts)}), accumulate_grad_batches={plan.count}"
    parts += [
        f"pipeline_parallel_size={sizes.pipeline}",
        f'config={{"pipeline": {{"num_microbatches": {plan.count}}}}}',
    ]
    return f"ZeroStrategy({', '.join(parts)})"
