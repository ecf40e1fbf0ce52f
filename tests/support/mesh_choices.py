"""Meshes for models, contexts, GPUs and networks: the table of docs/parallelism.md, computed by the forecasts.

Short sequences: what ``lt-zero estimate --fit`` suggests. Long ones, and mixtures: the first that is tried and fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lt_zero.common.units import GB, format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.core.engine.storage_plan import DEVICE
from lt_zero.parallel.mesh import ParallelSizes
from lt_zero.planning.estimate import Setting, estimate
from lt_zero.planning.long_sequences import LADDER, RankPart, Remedies, activations_of
from lt_zero.planning.meshes import Rates, TrainingJob, plans
from lt_zero.planning.sizes import Sizes
from lt_zero.planning.transformer import Transformer

GPU, PER_NODE, MODE = 80 * GB, 8, "bf16-mixed"
OPTIONS = {"precision": MODE}
SLOW = Rates(between=25e9 / 8 / PER_NODE)  # 25 Gbit/s for a node of 8 GPUs
WAYS = (LADDER[1], LADDER[2], LADDER[3])  # fused attention, then recomputed blocks, then the loss in tiles
SHOWN = ("", ", blocks recomputed", ", blocks recomputed, loss in tiles")


class Case(NamedTuple):
    """A model to train: text for the table, its shape, ranks, and what they are tried along beside data."""

    text: str
    shape: Transformer
    world: int
    network: str = "400 Gbit/s a GPU"
    rates: Rates = Rates()
    axis: str = ""  # "": as ``--fit``


def like(parameters: str, sequence: int = 4096) -> Transformer:
    return Transformer.like(Sizes(parameters).total, sequence)  # type: ignore[arg-type]


LLAMA = Transformer(32, 4096, 32, vocabulary=128256)
MIXTURE = Transformer(32, 4096, 32, vocabulary=32000, experts=8, top_k=2)
CASES = (
    Case("7B", like("7B"), 8, "one node"),
    Case("7B", like("7B"), 64),
    Case("70B", like("70B"), 64),
    Case("70B", like("70B"), 64, "25 Gbit/s a node", SLOW),
    Case("400B", like("400B"), 1024),
    Case("7B", replace(LLAMA, sequence=131072), 8, "one node", axis="sequence"),
    Case("7B", replace(LLAMA, sequence=1048576), 64, axis="sequence"),
    Case("37B, 8 experts", MIXTURE, 64, axis="expert"),
)


def table() -> Iterator[str]:
    yield "| parameters | tokens | GPUs | network | mesh and stage | a GPU needs | with data ranks alone |"
    yield "|---|--:|--:|---|---|--:|---|"
    for case in CASES:
        cells = _suggested(case) if not case.axis else _tried(case)
        yield f"| {case.text} | {case.shape.sequence:,} | {case.world:,} | {case.network} | {' | '.join(cells)} |"


def _suggested(case: Case) -> tuple[str, str, str]:
    sizes = Sizes(case.shape.sizes().total)
    each, rest = divmod(sizes.total, case.shape.layers)
    sizes = Sizes(sizes.total, layers=tuple(each + (number < rest) for number in range(case.shape.layers)))
    config = ZeroConfig.of(None)
    job = TrainingJob(
        case.shape, sizes, 8 * case.world, case.world, min(PER_NODE, case.world), GPU, config, OPTIONS, case.rates
    )
    found = plans(job)
    best, plain = found[0], next((plan for plan in found if plan.sizes.is_plain), None)
    alone = "the same" if best.sizes.is_plain else "do not fit"
    if plain is not None and plain is not best:
        alone = f"stage {plain.stage}, {(plain.lost - best.lost) / job.seconds:+.0%} time"
    return str(best), format_bytes(best.nbytes, 0), alone


def _tried(case: Case) -> tuple[str, str, str]:
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if case.world % size == 0 and size <= 8 * PER_NODE]
    sizes = [size for size in sizes if size <= (case.shape.experts or case.shape.heads)]
    tried = itertools.product(sizes, (1, 2, 3))
    if case.axis == "expert":  # stage 3 would gather experts for each micro-batch
        tried = ((size, stage) for stage, size in itertools.product((1, 2, 3), sizes))
    for (way, shown), (size, stage) in itertools.product(zip(WAYS, SHOWN, strict=True), list(tried)):
        if (nbytes := _needs(case, size, stage, way)) <= GPU:
            mesh = ParallelSizes(case.world // (size if case.axis == "sequence" else 1), **{case.axis: size})
            axes = {"sequence": mesh.sequence, "expert": mesh.expert}
            named = " x ".join(f"{number} {axis}" for axis, number in axes.items() if number > 1)
            named = f"{named}{' x ' if named and mesh.data > 1 else ''}{f'{mesh.data} data' if mesh.data > 1 else ''}"
            alone = "the same" if size == 1 else format_bytes(_needs(case, 1, 3, WAYS[-1]), 0)
            if size > 1 and case.axis == "expert":
                alone = f"stage 3: {format_bytes(_needs(case, 1, 3, way), 0)}"
            return f"{named}, stage {stage}{shown}", format_bytes(nbytes, 0), alone
    return "offload", "-", "-"


def _needs(case: Case, size: int, stage: int, way: Remedies) -> int:
    """Bytes of a GPU, with one sequence on ``size`` ranks, or experts on them."""
    key = {"sequence": "sequence_parallel_size", "expert": "expert_parallel.autoep_size"}[case.axis]
    extra = ["expert_parallel.enabled=true"] if case.axis == "expert" and size > 1 else []
    config = Setting(stage).of(ZeroConfig.of(None, overrides=[f"{key}={size}", *extra] if size > 1 else []))
    states = estimate(case.shape.sizes(), config, case.world, ranks_per_node=min(PER_NODE, case.world), **OPTIONS)
    part = RankPart(sequence=size if case.axis == "sequence" else 1)
    return states.rank(DEVICE) + activations_of(case.shape, way, MODE, part).most
