"""Bytes of one rank by place, kind and phase, added up over the rows of a plan.

Note [Phases]
    Kinds that never exist together are not added: local gradients of an accumulation window give way to the
    accumulators, gathered weights are gone when the optimizer steps. A forecast therefore has phases:
      build         buckets are filled, one copy in full precision at a time
      accumulation  micro-batches before the last one, where gradients are not sharded (stages 0 and 1)
      backward      reductions and gathers are under way
      step          one bucket after the other is brought from its file, or copied to fp32
      checkpoint    sharded: each rank writes its part, or (checkpoint.async) copies it first. Full: rank 0 collects
                    a full copy on its host, and Lightning makes the file's bytes in memory
    Activations, what libraries and the allocator keep for themselves, and the caller's data are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lt_zero.comm.shared_memory import SEND_BUFFERS
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.schema import ZeroOptimization
from lt_zero.engine.gather import Residency
from lt_zero.engine.partition import BucketPlan, EnginePlan
from lt_zero.io.pinned import rounded
from lt_zero.memory.rows import DEVICE, HOST, NVME, Row, Setup, rows_of


@dataclass(frozen=True)
class Gathered:
    """Elements, bytes and buckets that one unit gathers, and whether its backward needs them."""

    numel: int
    nbytes: int
    buckets: int
    needs_weights: bool


@dataclass(frozen=True)
class Ahead:
    """Limits of prefetching, in elements and buckets."""

    numel: int
    buckets: float = float("inf")


def residency_of(zero: ZeroOptimization) -> Residency:
    """The limits on what stays gathered."""
    return Residency(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size)


def gathered_peak(units: Sequence[Gathered], root: Gathered, residency: Residency, ahead: Ahead, window: bool) -> int:
    """Peak bytes of gathered weights in a forward and backward after the first, which records the order.

    Args:
        units: all but the root, in forward order; small parameters, which are never released, are not counted.
        root: the root unit, which always stays gathered.
        residency: limits on what stays gathered after its forward.
        ahead: limits of prefetching; none if ``numel`` is 0.
        window: weights stay gathered between micro-batches if the whole model may (Gatherer.fits_whole).
    """
    total = root.numel + sum(unit.numel for unit in units)
    stays = residency.keep_after_forward([unit.numel for unit in units])
    keep = {i for i, unit in enumerate(units) if stays[i] and unit.needs_weights}
    fits = total <= residency.max_live and total < residency.max_reuse_distance
    play = _Play(units, residency, ahead, keep if window and fits else ())
    for index in range(len(units)):
        play.visit(index, range(index + 1, len(units)))
        if index not in keep:
            play.release(index)
    for index in reversed(range(len(units))):
        if units[index].needs_weights:
            # A unit is released when its inputs have gradients, before backward reaches the previous unit.
            play.visit(index, (i for i in range(index - 1, -1, -1) if units[i].needs_weights))
            play.release(index)
    return root.nbytes + play.peak


class _Play:
    """Gathers and releases units, and records the peak."""

    def __init__(self, units: Sequence[Gathered], residency: Residency, ahead: Ahead, start: Iterable[int]) -> None:
        self._units, self._residency, self._ahead = units, residency, ahead
        self._here: set[int] = set()
        self._early: set[int] = set()  # prefetched, not visited yet
        self._numel = self._nbytes = self.peak = 0
        for index in start:
            self._gather(index)

    def _gather(self, index: int) -> None:
        if index not in self._here:
            self._here.add(index)
            self._numel += self._units[index].numel
            self._nbytes += self._units[index].nbytes
            self.peak = max(self.peak, self._nbytes)

    def release(self, index: int) -> None:
        if index in self._here:
            self._here.remove(index)
            self._numel -= self._units[index].numel
            self._nbytes -= self._units[index].nbytes

    def visit(self, index: int, upcoming: Iterable[int]) -> None:
        """Gather a unit, and prefetch those that ``Gatherer.visit`` would."""
        self._gather(index)
        self._early.discard(index)
        flying = sum(self._units[i].numel for i in self._early)
        buckets = sum(self._units[i].buckets for i in self._early)
        for other in upcoming if self._ahead.numel > 0 else ():
            unit = self._units[other]
            if other in self._here:
                continue
            if len(self._early) >= self._residency.ahead:
                return
            flying, buckets = flying + unit.numel, buckets + unit.buckets
            live = self._numel + unit.numel
            if flying > self._ahead.numel or live > self._residency.max_live or buckets > self._ahead.buckets:
                return
            self._gather(other)
            self._early.add(other)


WEIGHTS, MASTER, MOMENTS = "weights", "master weights", "moments"
GRADS, LOCAL, FRESH = "gradients", "local gradients", "autograd's gradients"
GATHERED, REDUCE, OFFLOAD = "gathered weights", "reduce buffers", "offload buffers"
BUILD, STEP, COPY, FILE = "build buffers", "step copies", "checkpoint copy", "checkpoint file"
KINDS = (WEIGHTS, MASTER, GRADS, LOCAL, FRESH, MOMENTS, GATHERED, REDUCE, OFFLOAD, BUILD, STEP, COPY, FILE)
STATES = (WEIGHTS, MASTER, GRADS, LOCAL, MOMENTS)  # kept from step to step (LOCAL: within one step)

SAVE_BUFFERS = 2 * 4 * (4 << 20)  # bytes: buffers of the threads and those being filled (io/checked_file.py)

Part = tuple[str, str, int]  # place, kind, bytes


def kept(rows: Sequence[Row]) -> list[Part]:
    """Weights and master weights (``Bucket.adopt``)."""
    total: list[Part] = []
    files: set[tuple[str, torch.dtype]] = set()
    for row in rows:
        if not row.sharding.params:
            total.append((DEVICE, WEIGHTS, row.numel * row.dtype.itemsize))
        held = [(row.states, MASTER, row.master)] if row.trains and not row.master_is_view else []
        held += [(row.weights, WEIGHTS, row.dtype)] if row.copies_weights else []
        held += [(row.weights, WEIGHTS, row.kept_dtype)] if not row.trains and (row.wide or row.sharding.params) else []
        for place, kind, dtype in held:
            if place == NVME:
                files.add((kind, dtype))
            else:
                total.append((place, kind, row.own * dtype.itemsize))
    return total + [(NVME, kind, _file(rows, dtype)) for kind, dtype in files]


def _file(rows: Sequence[Row], dtype: torch.dtype) -> int:
    """Bytes of one NVMe file: a record of full blocks for every bucket, also for those that do not use it."""
    return sum(rounded(row.own * dtype.itemsize) for row in rows)


def moments(trained: Sequence[Row], rows: Sequence[Row], setup: Setup) -> list[Part]:
    """The optimizer's states."""
    total = [(r.states, MOMENTS, int(r.held * r.step.itemsize * setup.states)) for r in trained if r.states != NVME]
    files = {row.step for row in trained if row.states == NVME}
    return total + [(NVME, MOMENTS, int(_file(rows, dtype) * setup.states)) for dtype in files]


def gradients(trained: Sequence[Row], rows: Sequence[Row], setup: Setup) -> list[Part]:
    """The accumulators (``Accumulator.launch_reduce``). Without the fused step those in fp16 are unscaled in fp32."""

    def size(row: Row) -> int:
        return 4 if row.accum == torch.float16 and not setup.fused else row.accum.itemsize

    files = {row.accum for row in trained if row.states == NVME}
    total = [(row.states, GRADS, row.own * size(row)) for row in trained if row.states != NVME]
    return total + [(NVME, GRADS, _file(rows, dtype)) for dtype in files]


def reducing(trained: Sequence[Row], setup: Setup) -> list[Part]:
    """Accumulators that are moved off the device: two in flight, two being written."""
    files = max((rounded(row.own * row.accum.itemsize) for row in trained if row.states == NVME), default=0)
    landing = max((row.own * row.accum.itemsize for row in trained if row.moved), default=0)
    total = [(_memory(setup), OFFLOAD, 4 * files)]
    return total if setup.device == "cpu" else [*total, (DEVICE, OFFLOAD, 2 * landing)]


def crossing(trained: Sequence[Row], setup: Setup) -> list[Part]:
    """Staging buffers for low-precision weights from host memory to the device (``HostLink``)."""
    cast = [row.own * row.dtype.itemsize for row in trained if row.moved and row.dtype != row.master]
    return [(HOST, OFFLOAD, 2 * max(cast, default=0) if setup.device != "cpu" else 0)]


def spare(rows: Sequence[Row], setup: Setup) -> list[Part]:
    """Free buffers that are kept for the next stored tensor (``io.pinned.Buffers``)."""
    sizes = [row.own * row.master.itemsize for row in rows if NVME in (row.states, row.weights)]
    pools = 1 if all(row.states == NVME for row in rows if row.weights == NVME) else 2
    return [(_memory(setup), OFFLOAD, 2 * pools * rounded(max(sizes, default=0)))]


def local(trained: Sequence[Row], setup: Setup) -> list[Part]:
    """Gradients of an accumulation window before they are reduced (``Accumulator.local``)."""
    whole = [row for row in trained if not row.sharding.grads] if setup.accumulates else []
    return [(DEVICE, LOCAL, row.numel * row.accum.itemsize) for row in whole]


def fresh(plan: EnginePlan, setup: Setup) -> list[Part]:
    """``p.grad`` between autograd and the accumulator: of one unit, and of the root until backward ends."""

    def nbytes(buckets: Iterable[BucketPlan]) -> int:
        return sum(p.numel() * b.dtype.itemsize for b in buckets for _, p in b.parameters if p.requires_grad)

    units = [nbytes(unit.buckets) for unit in plan.units]
    return [(DEVICE, FRESH, max(units[:-1], default=0) + units[-1] + nbytes(plan.rest))] if setup.training else []


def gathered(plan: EnginePlan, table: Mapping[BucketPlan, Row], config: ZeroConfig, setup: Setup) -> list[Part]:
    """Flat storages of gathered buckets, and read buffers if parameters are stored in files."""

    def of(buckets: Iterable[BucketPlan], needs_weights: bool) -> Gathered:
        rows = [table[b] for b in buckets if b.sharding.params]
        numel, nbytes = sum(row.numel for row in rows), sum(row.numel * row.dtype.itemsize for row in rows)
        return Gathered(numel, nbytes, len(rows), needs_weights)

    zero = config.zero_optimization
    reads = zero.param_offload.device == "nvme"
    ahead = Ahead(zero.stage3_prefetch_bucket_size if setup.background or reads else 0)
    if reads:
        ahead = Ahead(min(ahead.numel, zero.param_offload.buffer_size), zero.param_offload.buffer_count)
    units = [of(unit.buckets, unit.needs_weights) for unit in plan.units[:-1] if unit.buckets]
    root = of(plan.units[-1].buckets, True)
    limits = residency_of(zero) if setup.training else residency_of(zero).without_training()
    total = [(DEVICE, GATHERED, gathered_peak(units, root, limits, ahead, setup.accumulates))]
    resting = {row.exact if not row.copies_weights else row.dtype for row in table.values() if row.weights == NVME}
    if resting:
        most = min(ahead.numel, sum(u.numel for u in units)) + max((u.numel for u in [*units, root]), default=0)
        itemsize = max(dtype.itemsize for dtype in resting)
        total.append((_memory(setup), OFFLOAD, most // setup.world * itemsize))
    return total


def reduce(rows: Sequence[Row], config: ZeroConfig, setup: Setup) -> list[Part]:
    """The buffers of ``Reducer``: send buffers, and scratch of the same size where the collective needs it."""
    limit, total = config.zero_optimization.reduce_bucket_size, 0
    if not setup.training:
        return []
    for dtype in {row.send for row in rows if row.trains}:
        alike = [row.numel for row in rows if row.send == dtype]
        reusable = max((numel for numel in alike if numel <= limit), default=0)
        shared = setup.windows and rows[0].sharding.optim
        buffers = SEND_BUFFERS if shared else 2 if setup.world == 1 else 4
        total += reusable * dtype.itemsize * buffers
        own = sorted(
            (row.numel for row in rows if row.send == dtype and row.trains and row.numel > limit), reverse=True
        )
        total += sum(own[:2]) * dtype.itemsize * (1 if setup.world == 1 else 2)
    return [(DEVICE, REDUCE, total)]


def stepping(trained: Sequence[Row], config: ZeroConfig, setup: Setup) -> list[Part]:
    """Buckets in memory for a step: read from files, or fp32 copies (stepper.py, Note [Staged buckets])."""
    optim = config.zero_optimization.offload_optimizer
    groups = [_group(row, setup.states) for row in trained if row.states == NVME]
    leaving = max(0, min(1, optim.buffer_count - 2)) if optim.pipeline_write else 0
    ahead = 1 if optim.pipeline_read and 2 + leaving <= optim.buffer_count else 0
    window = 1 + leaving + ahead
    most = max((sum(groups[i : i + window]) for i in range(len(groups))), default=0)
    copies = [
        row.own * row.step.itemsize * (1 + (row.accum != row.step))
        for row in trained
        if not row.step == row.master == row.accum and not (setup.fused and row.step == row.master == torch.float32)
    ]
    place = _memory(setup) if any(row.moved for row in trained) else DEVICE
    return [(_memory(setup), OFFLOAD, most), (place, STEP, max(copies, default=0))]


def overlapping(trained: Sequence[Row], config: ZeroConfig, setup: Setup) -> list[Part]:
    """Buckets in memory for steps that overlap with backward or the next forward (step/overlap.py)."""
    how = config.zero_optimization.offload_optimizer.overlap_step
    beside = [row for row in trained if row.states == NVME and (how is True or row.sharding.params)]
    return stepping(beside, config, setup) if how is not False and setup.fused else []


def _group(row: Row, states: float) -> int:
    """Bytes that the step of one bucket reads, and the weights that it writes to another file."""
    copy = [rounded(row.own * row.dtype.itemsize)] if row.copies_weights and row.weights == NVME else []
    return sum(row.step_sizes(states) + copy)


def building(rows: Sequence[Row], setup: Setup) -> list[Part]:
    """One bucket in full precision while its shard is built (``Bucket.adopt``)."""

    def nbytes(row: Row) -> int:
        apart = row.wide or (row.trains and not row.master_is_view)
        flat = row.numel * row.dtype.itemsize if row.sharding.params else 0
        stored = rounded(row.own * row.master.itemsize) if NVME in (row.states, row.weights) else 0
        return (row.numel * row.master.itemsize if apart else 0) + flat + stored

    return [(DEVICE, BUILD, max(map(nbytes, rows), default=0))]


def collecting(rows: Sequence[Row], trained: Sequence[Row], setup: Setup) -> list[Part]:
    """One bucket gathered from the shards of all ranks (``full_params.gather_own``), after a read from files."""
    apart = [row for row in rows if row.own != row.numel]
    widest = {id(row): row.step.itemsize if row.trains and setup.states else 0 for row in rows}
    flat = max((row.numel * max(row.exact.itemsize, widest[id(row)]) for row in apart), default=0)
    files = [sum(row.step_sizes(setup.states)) for row in trained if row.states == NVME]
    return [(DEVICE, COPY, flat), (_memory(setup), OFFLOAD, max(files, default=0))]


def staging(rows: Sequence[Row], trained: Sequence[Row], config: ZeroConfig, setup: Setup) -> list[Part]:
    """A sharded save: buffers of the writer threads, a bucket read from files, and the copy of an async save."""
    files = [sum(row.step_sizes(setup.states)) for row in trained if row.states == NVME]
    copy = 0
    if config.checkpoint.async_save:
        copy = sum(row.own * row.exact.itemsize for row in rows)
        copy += sum(int(row.own * row.step.itemsize * setup.states) for row in trained)
    return [(HOST, COPY, copy), (HOST, FILE, SAVE_BUFFERS), (_memory(setup), OFFLOAD, max(files, default=0))]


def full_copy(rows: Sequence[Row], setup: Setup) -> list[Part]:
    """A full save: rank 0's copy, and the file, which Lightning builds in memory (``_atomic_save``)."""
    total = sum(row.elements * row.exact.itemsize for row in rows)
    if setup.training:
        total += sum(int(row.elements * row.step.itemsize * setup.states) for row in rows if row.trains)
    return [(HOST, COPY, total), (HOST, FILE, total)]


def _memory(setup: Setup) -> str:
    """The place that files are read into."""
    return DEVICE if setup.device == "cpu" else HOST


PHASES = ("build", "accumulation", "backward", "step", "checkpoint")

Amounts = Mapping[tuple[str, str], int]  # (place, kind) -> bytes


@dataclass(frozen=True)
class Forecast:
    """The memory that a run needs.

    Attributes:
        setup: ranks, device, optimizer.
        parameters: elements of the model.
        phases: (place, kind) -> bytes of one rank, in each phase. See Note [Phases].
        first: (place, kind) -> additional bytes of rank 0, in each phase.
    """

    setup: Setup
    parameters: int
    phases: Mapping[str, Amounts]
    first: Mapping[str, Amounts]

    def kinds(self, place: str) -> dict[str, int]:
        """Peak bytes of each kind on rank 0. The peaks may occur in different phases."""
        found: dict[str, int] = {}
        for phase in self.phases:
            for kind, nbytes in self.need_of_rank(phase, place, first=True).items():
                found[kind] = max(found.get(kind, 0), nbytes)
        return {kind: found[kind] for kind in KINDS if found.get(kind)}

    def rank(self, place: str) -> int:
        """Peak bytes of one rank, other than rank 0."""
        return max(sum(self.need_of_rank(phase, place).values()) for phase in self.phases)

    def node(self, place: str) -> int:
        """Peak bytes of the first node, which has rank 0."""
        return max(sum(self.need_of_node(phase, place).values()) for phase in self.phases)

    def model_states(self) -> int:
        """Peak bytes of one rank's weights, gradients, master weights and moments, as the ZeRO paper counts them."""
        amounts = [[n for (_, kind), n in phase.items() if kind in STATES] for phase in self.phases.values()]
        return max(map(sum, amounts))

    def need_of_rank(self, phase: str, place: str, first: bool = False) -> dict[str, int]:
        """Bytes of one rank by kind, in one phase; ``first``: of rank 0."""
        total = Counter(_at(place, self.phases[phase]))
        total.update(_at(place, self.first.get(phase, {})) if first else {})
        return {kind: total[kind] for kind in KINDS if total[kind]}

    def need_of_node(self, phase: str, place: str) -> dict[str, int]:
        """Bytes of the first node by kind, in one phase."""
        others = self.setup.per_node - 1
        total = Counter(self.need_of_rank(phase, place, first=True))
        total.update({kind: nbytes * others for kind, nbytes in self.need_of_rank(phase, place).items()})
        return {kind: total[kind] for kind in KINDS if total[kind]}


def _at(place: str, amounts: Amounts) -> dict[str, int]:
    return {kind: nbytes for (where, kind), nbytes in amounts.items() if where == place}


def forecast(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> Forecast:
    """Sum up a plan. Allocates nothing; ranks differ only by ``Forecast.first``."""
    table = dict(zip(plan.buckets, rows_of(plan, config, policy, setup), strict=True))
    rows = list(table.values())
    trained = [row for row in rows if row.trains] if setup.training else []
    weights, buffers = kept(rows), reduce(rows, config, setup)
    states = [*weights, *moments(trained, rows, setup), *spare(rows, setup), *crossing(trained, setup)]
    moving = [*buffers, *gathered(plan, table, config, setup), *fresh(plan, setup)]
    grads = [*states, *gradients(trained, rows, setup)]
    phases = {
        "build": [*weights, *building(rows, setup)],
        "backward": [
            *grads,
            *moving,
            *reducing(trained, setup),
            *overlapping(trained, config, setup),
        ],
        "step": [*grads, *buffers, *stepping(trained, config, setup)],
    }
    full = not config.sharded_checkpoints
    if setup.saves:
        how = collecting(rows, trained, setup) if full else staging(rows, trained, config, setup)
        phases["checkpoint"] = [*grads, *buffers, *how]
    if window := local(trained, setup):
        phases["accumulation"] = [*states, *moving, *window]
    fold = setup.device == "cpu"
    return Forecast(
        setup=setup,
        parameters=sum(row.elements for row in rows),
        phases={name: _sum(phases[name], fold) for name in PHASES if name in phases},
        first={"checkpoint": _sum(full_copy(rows, setup) if full else [], fold)},
    )


def _sum(parts: Iterable[Part], fold: bool) -> Amounts:
    """``fold``: the device is the host."""
    total: Counter[tuple[str, str]] = Counter()
    for place, kind, nbytes in parts:
        total[HOST if fold and place == DEVICE else place, kind] += nbytes
    return {key: nbytes for key, nbytes in total.items() if nbytes}
