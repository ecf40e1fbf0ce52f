"""Bytes of one rank by place, kind and phase: sums over what is kept of each bucket (core/engine/storage_plan.py).

Note [Phases]
    Kinds that never exist together are not added: local gradients of an accumulation window give way to the
    accumulators, gathered weights are gone when the optimizer steps. A forecast therefore has phases:
      build         buckets are filled, one copy in full precision at a time
      accumulation  micro-batches before the last one: gradients that are not sharded (stages 0 and 1) are kept whole
      backward      reductions and gathers are under way
      step          one bucket after the other is brought from its file, or copied to fp32
      swap          between steps, when gradients are gone, a script loads other weights: master weights that the
                    compute copy does not show in full are kept until they come back
      checkpoint    sharded: each rank writes its part, or (checkpoint.async) copies it first. Full: rank 0 collects
                    a full copy on its host, and Lightning makes the file's bytes in memory
    Activations, what libraries and the allocator keep for themselves, and the caller's data are not in it. NCCL's
    buffers are not, either, as they are no part of a plan: ``Forecast.communicators`` has a number for them.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lt_zero.common.codec import Codec
from lt_zero.common.console import Console
from lt_zero.common.moment_form import MomentForm, PlainMoments
from lt_zero.common.tables import bytes_cell, show
from lt_zero.common.units import format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.config.options import engine_options
from lt_zero.core import ask
from lt_zero.core.comm.send_sizes import SendSizes
from lt_zero.core.engine.bucket import Live
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.gather import Residency
from lt_zero.core.engine.grad_reducer import IN_FLIGHT
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.core.engine.storage_plan import DEVICE, HOST, NVME, StoragePlan, largest_sends, plan_storage
from lt_zero.core.stores.checked_file import RING_BUFFER
from lt_zero.core.stores.pinned import rounded
from lt_zero.core.stores.store import record_nbytes
from lt_zero.features import features_of
from lt_zero.planning.setup import Setup

PLACES = (DEVICE, HOST, NVME)
PHASES = ("build", "accumulation", "backward", "step", "swap", "checkpoint")
WEIGHTS = "weights"
MASTER = "master weights"
MOMENTS = "moments"
REPLACED = "replaced master weights"
GRADS = "gradients"
LOCAL = "local gradients"
FRESH = "autograd's gradients"
RESIDUALS = "residuals"
GATHERED = "gathered weights"
REDUCE = "reduce buffers"
OFFLOAD = "offload buffers"
BUILD = "build buffers"
STEP = "step copies"
COPY = "checkpoint copy"
FILE = "checkpoint file"
KINDS = (
    *(WEIGHTS, MASTER, REPLACED, GRADS, LOCAL, FRESH, MOMENTS, RESIDUALS, GATHERED, REDUCE, OFFLOAD, BUILD, STEP, COPY),
    FILE,
)
STATES = (WEIGHTS, MASTER, GRADS, LOCAL, MOMENTS)  # kept from step to step (LOCAL: within one step)

SAVE_BUFFERS = 2 * 4 * (4 << 20)  # bytes: buffers of the threads and those being filled (core/stores/checked_file.py)

Part = tuple[str, str, int]  # place, kind, bytes
Amounts = Mapping[tuple[str, str], int]  # (place, kind) -> bytes


def planned(
    plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup
) -> tuple[EngineOptions, ExchangePlan, dict[BucketPlan, StoragePlan]]:
    """The options and plans from which ``build`` makes an engine: the exchange, and a rank's storage by bucket."""
    features = features_of(config)
    options = ask.adapted(engine_options(config, policy), features, setup.training)
    exchange = ask.plan_exchange(features, plan, policy.check_overflow, setup.group)
    codecs = ask.codecs_by(features, exchange, setup.training)
    return options, exchange, plan_storage(plan, options, setup.group, setup.device != "cpu", codecs, setup.training)


def _kept(row: StoragePlan, setup: Setup) -> list[tuple[MomentForm, float]]:
    """Forms of what is kept beside the master weights of a bucket, and how many of each: moments, averages."""
    return [(row.moments, setup.states), (PlainMoments(_averages_in(row)), setup.averages)]


def _averages_in(row: StoragePlan) -> torch.dtype:
    return torch.promote_types(row.precision, torch.float32)


def _kept_nbytes(row: StoragePlan, setup: Setup) -> float:
    """Bytes of these for one element."""
    return sum(form.bytes_per_element * count for form, count in _kept(row, setup))


def read_nbytes(row: StoragePlan, setup: Setup) -> int:
    """Bytes that a step of a bucket reads from files: master weights, gradients, each of the optimizer's states."""
    total = sum(rounded(record_nbytes(row.shard_numel, dtype)) for dtype in (row.master, row.accumulate))
    for form, count in _kept(row, setup):
        total += int(count) * rounded(form.nbytes(row.shard_numel))
        total += rounded(int(row.shard_numel * form.bytes_per_element * (count - int(count))))
    return total


def _moment_numels(table: Mapping[BucketPlan, StoragePlan]) -> list[int]:
    """Elements of each bucket on the rank of its group with most to step: ranks differ if parameters are not cut."""
    owned = {bucket: Counter[int]() for bucket in table if bucket.owners is not None}
    totals: dict[GroupFacts | None, Counter[int]] = {}  # elements to step, by group and rank
    for bucket, numels in owned.items():
        for spec, owner in zip(bucket.specs, bucket.owners or (), strict=True):
            numels[owner] += spec.local_box.numel
        totals.setdefault(bucket.group, Counter()).update(numels if bucket.trains else {})
    most = {group: max(counts, key=lambda rank: (counts[rank], -rank), default=0) for group, counts in totals.items()}
    return [owned[b][most[b.group]] if b in owned else row.shard_numel for b, row in table.items()]


class Taken(NamedTuple):
    """Bytes that gathers take: flat tensors, codes of all ranks, and buffers of files."""

    flat: int = 0
    codes: int = 0
    files: int = 0

    def plus(self, other: Taken, sign: int = 1) -> Taken:
        return Taken(*(mine + sign * its for mine, its in zip(self, other, strict=True)))

    def most(self, other: Taken) -> Taken:
        """The larger of each."""
        return Taken(*map(max, self, other))


class Gathered(NamedTuple):
    """Elements and bytes that one unit gathers.

    Attributes:
        numel: elements.
        buckets: how many.
        needs_weights: its backward needs them.
        ahead: taken when it was prefetched, and not used yet.
        arrives: while it is waited for; later only the flat tensors.
    """

    numel: int
    buckets: int
    needs_weights: bool
    ahead: Taken
    arrives: Taken

    @property
    def stays(self) -> Taken:
        return Taken(self.arrives.flat)


def _peak_gathered(units: Sequence[Gathered], limits: Residency, keeps_whole: bool) -> Taken:
    """Peak of the micro-batches after the first one, which records the order, as ``Gatherer`` runs them.

    Args:
        units: all but the root, in forward order; small parameters, which are never released, are not counted.
        limits: on what stays gathered, and on what is prefetched.
        keeps_whole: units stay gathered after backward.
    """
    stays = limits.keep_after_forward([unit.numel for unit in units])
    keep = {i for i, unit in enumerate(units) if stays[i] and unit.needs_weights}
    here = set(keep) if keeps_whole else set[int]()
    early = set[int]()  # prefetched, not visited yet
    live, taken = Live(numel=sum(units[i].numel for i in here)), Taken(sum(units[i].arrives.flat for i in here))
    peak = taken
    forward = list(range(len(units)))
    # A unit is released when its inputs have gradients, before backward reaches the previous unit.
    backward = [i for i in reversed(forward) if units[i].needs_weights]
    for order, kept in ((forward, keep), (backward, set[int]())):
        live = Live(live.numel)  # in flight are the units in ``early``: none yet
        # Index in ``order``: units before it were gathered, and stay so until they are visited.
        ahead = 0
        for position, index in enumerate(order):
            arrives = index in early or index not in here
            if index in early:
                early.remove(index)
                live.in_flight.add(-units[index].numel, -units[index].buckets)
                taken = taken.plus(units[index].ahead, -1)
            elif index not in here:
                here.add(index)
                live.add(units[index].numel)
            taken = taken.plus(units[index].arrives) if arrives else taken
            # Gather the unit, and prefetch those that ``Gatherer.visit`` would.
            ahead = max(ahead, position)
            while ahead < (len(order) if limits.prefetch > 0 else position + 1):
                other = order[ahead]
                unit = units[other]
                if other not in here:
                    if not limits.may_prefetch(unit.numel, unit.buckets, live, len(early)):
                        break
                    early.add(other)
                    live.in_flight.add(unit.numel, unit.buckets)
                    here.add(other)
                    live.add(unit.numel)
                    taken = taken.plus(unit.ahead)
                ahead += 1
            peak = peak.most(taken)
            if arrives:
                taken = taken.plus(units[index].arrives, -1).plus(units[index].stays)
            if index not in kept:
                here.remove(index)
                live.add(-units[index].numel)
                taken = taken.plus(units[index].stays, -1)
    return peak


class _Sums:
    """The bytes of each purpose, summed over the buckets of a plan; ``forecast`` combines them into phases."""

    def __init__(self, plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> None:
        self.plan = plan
        self.config = config
        self.zero = config.zero_optimization
        self.setup = setup
        self.options, self.exchange, self.table = planned(plan, config, policy, setup)
        self.rows, self.moment_numels = list(self.table.values()), _moment_numels(self.table)
        shards, size = setup.group.mesh.shards, setup.group.size
        layouts = ((row, bucket.layout_in(shards, size)) for bucket, row in self.table.items())
        self.residual = sum(self.exchange.kept_nbytes(row, layout) for row, layout in layouts)
        self.trained = [row for row in self.rows if row.trains]
        self.stored = [row for row in self.trained if row.states == NVME]  # in files between steps
        self.memory = DEVICE if setup.device == "cpu" else HOST  # the place that files are read into

    def _file(self, kind: str, dtype: torch.dtype, codec: Codec | None = None) -> int:
        """Bytes of one NVMe file: a record of full blocks for every bucket, or for each that trains (``NvmeFiles``).

        Also for those that do not use it.
        """
        rows = self.rows if kind == WEIGHTS else self.trained
        return sum(rounded(record_nbytes(row.shard_numel, dtype, codec)) for row in rows)

    def weights(self) -> list[Part]:
        """Weights and master weights (``Bucket.load_initial``)."""
        total: list[Part] = []
        files: set[tuple[str, torch.dtype, Codec | None]] = set()
        for row in self.rows:
            if not row.sharding.params:
                total.append((DEVICE, WEIGHTS, row.numel * row.dtype.itemsize))
            stored: list[tuple[str, str, torch.dtype, Codec | None]] = []
            stored += [(row.states, MASTER, row.master, None)] if row.keeps_master else []
            stored += [(row.weights, WEIGHTS, row.dtype, None)] if row.copies_weights else []
            stored += [(row.weights, WEIGHTS, row.precision, row.codecs.rests)] if row.keeps_frozen else []
            for place, kind, dtype, codec in stored:
                if place == NVME:
                    files.add((kind, torch.uint8 if codec is not None else dtype, codec))
                else:
                    total.append((place, kind, record_nbytes(row.shard_numel, dtype, codec)))
        return total + [(NVME, kind, self._file(kind, dtype, codec)) for kind, dtype, codec in files]

    def states(self) -> list[Part]:
        """The optimizer's states, and the buffers that offloading keeps from step to step."""
        total = [
            (row.states, MOMENTS, int(numel * _kept_nbytes(row, self.setup)))
            for row, numel in zip(self.rows, self.moment_numels, strict=True)
            if row.trains and row.states != NVME
        ]
        if self.stored:
            own = sum(rounded(row.moments.nbytes(row.shard_numel)) for row in self.trained)
            total.append((NVME, MOMENTS, int(own * self.setup.states)))
        averages = {_averages_in(row) for row in self.stored}
        total += [(NVME, MOMENTS, int(self._file(MOMENTS, dtype) * self.setup.averages)) for dtype in averages]
        # Free buffers that are kept for the next stored tensor (io.pinned.BufferPool).
        pools = 1 if all(row.states == NVME for row in self.rows if row.weights == NVME) else 2
        total.append((self.memory, OFFLOAD, 2 * pools * max(map(self._buffer_nbytes, self.rows), default=0)))
        # Staging buffers for low-precision weights from host memory to the device (HostLink).
        cast = max((row.cast_nbytes for row in self.rows), default=0)
        return [*total, (HOST, OFFLOAD, 2 * cast if self.memory == HOST else 0)]

    def _buffer_nbytes(self, row: StoragePlan) -> int:
        """Bytes of the largest buffer of a bucket's files; 0: it has none."""
        steps = [row.master, row.accumulate] if row.trains and row.states == NVME else []
        own = [rounded(record_nbytes(row.shard_numel, dtype)) for dtype in steps]
        own += [rounded(row.moments.nbytes(row.shard_numel))] if steps and self.setup.states else []
        return max([*own, self._read_nbytes(row)])

    def _read_nbytes(self, row: StoragePlan) -> int:
        """Bytes of the buffer from which a bucket is gathered whose weights are in a file; 0: they are not."""
        if row.weights != NVME:
            return 0
        dtype = row.dtype if row.copies_weights else row.precision
        return rounded(record_nbytes(row.shard_numel, dtype, row.codecs.rests))

    def gradients(self, waiting: bool = False) -> list[Part]:
        """The accumulators (``GradAccumulator.target``); without the fused step fp16 ones are unscaled in fp32.

        ``waiting``: those that there are in an accumulation window, beside ``local``.
        """
        total = [(NVME, GRADS, self._file(GRADS, dtype)) for dtype in {row.accumulate for row in self.stored}]
        for row in self.trained:
            if waiting and not (row.sharding.grads or self.exchange.reduces_each_backward):
                continue
            if row.states != NVME:
                unscaled = row.accumulate == torch.float16 and not self.setup.fused
                total.append((row.states, GRADS, row.shard_numel * (4 if unscaled else row.accumulate.itemsize)))
        return total

    def residuals(self) -> list[Part]:
        """Bytes that the exchange keeps from step to step, such as residuals."""
        return [(DEVICE, RESIDUALS, self.residual)]

    def exchanging(self) -> list[Part]:
        """Buffers of an exchange in a step."""
        return [(DEVICE, STEP, self.exchange.step_nbytes(self.trained))]

    def second_copies(self) -> list[Part]:
        """Copies of all parameters on the ranks of a node (``zero_hpz_partition_size``)."""
        rows = [(row, row.group.secondary_shards) for row in self.rows if row.sharding.params]
        return [(DEVICE, WEIGHTS, row.numel * row.dtype.itemsize // shares) for row, shares in rows if shares > 1]

    @property
    def accumulates(self) -> bool:
        """True if gradients wait for their reduction; the same on all ranks, whose phases are compared."""
        return self.setup.accumulates or self.exchange.waits_for_step

    def local(self) -> list[Part]:
        """Gradients of an accumulation window before they are reduced (``GradAccumulator.local``)."""
        waits = self.accumulates and not self.exchange.reduces_each_backward
        full = [row for row in self.trained if not row.sharding.grads] if waits else []
        return [(DEVICE, LOCAL, row.numel * row.accumulate.itemsize) for row in full]

    def transient_bytes(self) -> list[Part]:
        """``p.grad`` between autograd and the accumulator, flat storages of gathered buckets, and read buffers."""
        units, total = self.plan.units, list[Part]()
        if self.setup.training:  # p.grad of one unit, and of the root until backward ends
            fresh = [
                sum(
                    spec.local_box.numel * b.dtype.itemsize
                    for b in buckets
                    for (_, p), spec in zip(b.parameters, b.specs, strict=True)
                    if p.requires_grad
                )
                for buckets in (*(unit.buckets for unit in units), self.plan.rest)
            ]
            total.append((DEVICE, FRESH, max(fresh[:-2], default=0) + sum(fresh[-2:])))
        groups = {self.setup.group, *(row.group for row in self.rows)}
        inner = [self._gathered(unit.buckets, unit.needs_weights) for unit in units[:-1] if unit.buckets]
        root = self._gathered(units[-1].buckets, True)  # always stays gathered
        limits = Residency.of(self.options, groups)
        limits = limits if self.setup.training else limits.without_training()
        whole = root.numel + sum(unit.numel for unit in inner)
        peak = _peak_gathered(inner, limits, keeps_whole=self.setup.accumulates and limits.fits_whole(whole))
        # The root is gathered before all others, and stays.
        peak = peak.most(root.arrives._replace(flat=0))
        own = [row.codecs.rests.nbytes(row.shard_numel) for row in self.rows if row.codecs.rests is not None]
        total.append((DEVICE, GATHERED, root.arrives.flat + peak.flat + peak.codes + max(own, default=0)))
        return [*total, (self.memory, OFFLOAD, peak.files)]

    def _gathered(self, buckets: Iterable[BucketPlan], needs_weights: bool) -> Gathered:
        rows = [self.table[b] for b in buckets if b.sharding.params]
        ahead = Taken()
        arrives = Taken()
        turns = 0
        for row in rows:
            codec, shards = row.codecs.sent(row.trains), row.group.mesh.shards
            codes = shards * codec.nbytes(row.numel // shards) if codec is not None else 0
            found = Taken(row.numel * row.dtype.itemsize, codes, self._read_nbytes(row))
            # A gather from a file is launched when the file was read: one bucket after the other.
            late = row.weights == NVME and row.group.secondary_shards == 1
            ahead = ahead.plus(Taken(files=found.files) if late else found)
            arrives = arrives.plus(found._replace(codes=0) if late else found)
            turns = max(turns, codes if late else 0)
        return Gathered(
            sum(row.counted for row in rows), len(rows), needs_weights, ahead, arrives.plus(Taken(0, turns))
        )

    def reduce_buffers(self) -> list[Part]:
        """The buffers of ``GradReducer``: send buffers, and scratch of the same size where the collective needs it."""
        largest = largest_sends(self.rows, self.zero.reduce_bucket_size)
        sent = [(row, self._sends(row.group), row.send) for row in self.trained if row.send is not None]
        total, own = 0, list[int]()
        for group, dtype in {(row.group, dtype) for row, _, dtype in sent}:
            sizes = self._sends(group)
            total += sizes.turns * sizes.nbytes(largest[group].get(dtype, 0), dtype, reusable=True)
        for row, sizes, dtype in sent:
            if row.numel > largest[row.group].get(dtype, 0):
                own.append(sizes.nbytes(row.numel, dtype, reusable=False))
        return [(DEVICE, REDUCE, total + sum(sorted(own)[-IN_FLIGHT:]))]

    def _sends(self, group: GroupFacts) -> SendSizes:
        """The buffers that reductions over ``group`` need."""
        apart = self.options.adds_one_by_one and not group.alone
        return replace(group.sends, scratch=True) if apart else group.sends

    def encoding(self) -> list[Part]:
        """Codes and sums of one reduction in backward: ``Compressor`` runs them one after the other."""
        coded = self.trained if not self.exchange.waits_for_step else []
        sent = [(row, row.codecs.reductions, row.send) for row in coded]
        codes = [
            plan.scratch_nbytes(row.numel, dtype.itemsize)
            for row, plan, dtype in sent
            if plan is not None and dtype is not None
        ]
        return [(DEVICE, REDUCE, max(codes, default=0))]

    def offloading(self) -> list[Part]:
        """Accumulators that are moved off the device in backward, and steps that overlap (background_steps.py)."""
        files = sorted(rounded(row.shard_numel * row.accumulate.itemsize) for row in self.stored)
        landing = sorted(row.shard_numel * row.accumulate.itemsize for row in self.trained if row.states != DEVICE)
        total = [(DEVICE, OFFLOAD, sum(landing[-IN_FLIGHT:]))] if self.memory == HOST else []
        how = self.zero.offload_optimizer.overlap_step
        early = [row for row in self.stored if how is True or row.sharding.params]
        if how is False or not self.setup.fused or not early:
            return [*total, (self.memory, OFFLOAD, sum(files[-IN_FLIGHT - 2 :]))]  # two more are being written
        # Those of buckets that are stepped early are not written: they are among what the step reads.
        written = sorted(rounded(r.shard_numel * r.accumulate.itemsize) for r in self.stored if r not in early)[-2:]
        return [*total, (self.memory, OFFLOAD, sum(files[-IN_FLIGHT:]) + sum(written)), *self.stepping(early)]

    def stepping(self, trained: Sequence[StoragePlan]) -> list[Part]:
        """Buckets in memory for a step: read from files, or fp32 copies (core/step/, Note [Staged buckets])."""
        optim, sizes = self.zero.offload_optimizer, list[int]()
        for row in trained:
            if row.states == NVME:  # what is read, and the weights that are written to another file
                written = row.shard_numel * row.dtype.itemsize if row.copies_weights and row.weights == NVME else 0
                sizes.append(read_nbytes(row, self.setup) + rounded(written))
        leaving = max(0, min(1, optim.buffer_count - 2)) if optim.pipeline_write else 0
        ahead = 1 if optim.pipeline_read and 2 + leaving <= optim.buffer_count else 0
        window = 1 + leaving + ahead
        most = max((sum(sizes[i : i + window]) for i in range(len(sizes))), default=0)
        copies = [
            int(row.shard_numel * row.step.itemsize * self._copies_of(row))
            for row in trained
            if row.staged and not (self._is_fused(row) and row.suits_kernels)
        ]
        place = self.memory if any(row.states != DEVICE for row in trained) else DEVICE
        return [(self.memory, OFFLOAD, most), (place, STEP, max(copies, default=0))]

    def _is_fused(self, row: StoragePlan) -> bool:
        return self.setup.fused and all(row.moments.is_taken_by(kernel) for kernel in self.setup.kernels)

    def _copies_of(self, row: StoragePlan) -> float:
        """Copies of a bucket's weights, gradients and moments in which the optimizer steps it."""
        same = [dtype == row.step for dtype in (row.master, row.accumulate)]
        return same.count(False) + (0 if row.moments.dtype == row.step else self.setup.states)

    def building(self) -> list[Part]:
        """One bucket in full precision while its shard is built (``Bucket.load_initial``)."""
        most = 0
        for row in self.rows:
            flat = row.numel * row.dtype.itemsize if row.sharding.params else 0
            stored = rounded(row.shard_numel * row.master.itemsize) if NVME in (row.states, row.weights) else 0
            most = max(most, (row.numel * row.precision.itemsize if row.fills_apart else 0) + flat + stored)
        return [(DEVICE, BUILD, most)]

    def replacing(self) -> list[Part]:
        """Master weights that a load in training keeps (``MasterWeights.keep_replaced``).

        Files for them are made when they are needed.
        """
        rows = [row for row in self.trained if row.keeps_master and row.shows_less and row.states != NVME]
        return [(row.states, REPLACED, row.shard_numel * row.master.itemsize) for row in rows]

    def saving(self) -> list[Part]:
        """A save on every rank: its shards are copied or written, or one bucket is gathered from all ranks."""
        rows = self.rows
        trained = self.trained
        setup = self.setup
        files = max((read_nbytes(row, setup) for row in self.stored), default=0)
        if not self.config.sharded_checkpoints:  # full_values.gather_own
            widest = [
                max(
                    r.precision.itemsize,
                    r.moments.value_nbytes if r.trains and setup.states else 0,
                    _averages_in(r).itemsize if r.trains and setup.averages else 0,
                )
                for r in rows
            ]
            sizes = [r.numel * itemsize for r, itemsize in zip(rows, widest, strict=True) if r.shard_numel != r.numel]
            joined = max((math.prod(spec.global_shape) for spec in self.plan.parts), default=0)  # full_values.joined
            copied = max(sizes, default=0) + joined * torch.float32.itemsize
            return [(DEVICE, COPY, copied), (self.memory, OFFLOAD, files)]
        copy = 0
        if self.config.checkpoint.async_save:
            copy = sum(row.shard_numel * row.precision.itemsize for row in rows)
            copy += sum(int(row.shard_numel * _kept_nbytes(row, setup)) for row in trained)
            copy += self.residual * torch.float32.itemsize
        buffers = SAVE_BUFFERS + (2 * RING_BUFFER if self.memory == HOST else 0)
        return [(HOST, COPY, copy), (HOST, FILE, buffers), (self.memory, OFFLOAD, files)]

    def full_copy(self) -> list[Part]:
        """A full save: rank 0's copy, and the file, which Lightning builds in memory (``_atomic_save``)."""
        total = sum(row.whole * row.precision.itemsize for row in self.rows)
        total += sum(int(row.whole * _kept_nbytes(row, self.setup)) for row in self.trained)
        whole = sum(row.whole for row in self.rows)
        total += total * self.setup.elsewhere // max(1, whole)  # other stages are as this one
        return [(HOST, COPY, total), (HOST, FILE, total)]


@dataclass(frozen=True)
class Forecast:
    """The memory that a run needs.

    Attributes:
        setup: ranks, device, optimizer.
        parameters: elements of the model.
        local: those that a rank has of it, which ZeRO shards further; all of them without tensor and pipeline ranks.
        phases: (place, kind) -> bytes of one rank, in each phase. See Note [Phases].
        first: (place, kind) -> additional bytes of rank 0, in each phase.
    """

    setup: Setup
    parameters: int
    local: int
    phases: Mapping[str, Amounts]
    first: Mapping[str, Amounts]

    def __str__(self) -> str:
        """The table of the kinds, as ``lt-zero estimate`` prints it, with the bytes of a rank and of a node below."""
        out = io.StringIO()
        kinds_table(self, f"{self.parameters:,} parameters, {self.setup.world} rank(s)", Console(file=out, width=80))
        places = [place for place in PLACES if self.node(place)]
        of_rank = ", ".join(f"{place} {format_bytes(self.rank(place))}" for place in places)
        of_node = ", ".join(f"{place} {format_bytes(self.node(place))}" for place in places if place != DEVICE)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        lines.append(f"Peaks per rank: {of_rank}")
        if of_node:
            lines.append(f"Peaks per node: {of_node}")
        if self.communicators:
            lines.append(f"Beside these, NCCL: {self.of_nccl}")
        return "\n".join(lines)

    @property
    def communicators(self) -> int:
        """Bytes of a GPU that NCCL takes in all phases, about; they are not in ``phases``. See communicators.py."""
        return self.setup.communicators.nbytes

    @property
    def of_nccl(self) -> str:
        """The same in words."""
        made = self.setup.communicators
        return f"{made.number} communicators of about {format_bytes(made.nbytes // max(1, made.number))} on each GPU"

    def kinds(self, place: str) -> dict[str, int]:
        """Peak bytes of each kind on rank 0. The peaks may occur in different phases."""
        needs = [self.need_of_rank(phase, place, first=True) for phase in self.phases]
        peaks = {kind: max(need.get(kind, 0) for need in needs) for kind in KINDS}
        return {kind: nbytes for kind, nbytes in peaks.items() if nbytes}

    def rank(self, place: str) -> int:
        """Peak bytes of one rank, other than rank 0."""
        return max(sum(self.need_of_rank(phase, place).values()) for phase in self.phases)

    def node(self, place: str) -> int:
        """Peak bytes of the first node, which has rank 0."""
        return max(sum(self.need_of_node(phase, place).values()) for phase in self.phases)

    def model_states(self, place: str | None = None) -> int:
        """Peak bytes of one rank's weights, gradients, master weights and moments, as the ZeRO paper counts them.

        ``place``: those that are kept there; None: in all places.
        """
        phases = self.phases.values()
        return max(sum(n for (at, kind), n in p.items() if kind in STATES and place in (None, at)) for p in phases)

    def need_of_rank(self, phase: str, place: str, first: bool = False) -> dict[str, int]:
        """Bytes of one rank by kind, in one phase; ``first``: of rank 0."""
        more = self.first.get(phase, {}) if first else {}
        total = {kind: self.phases[phase].get((place, kind), 0) + more.get((place, kind), 0) for kind in KINDS}
        return {kind: nbytes for kind, nbytes in total.items() if nbytes}

    def need_of_node(self, phase: str, place: str) -> dict[str, int]:
        """Bytes of the first node by kind, in one phase."""
        first, others = self.need_of_rank(phase, place, first=True), self.need_of_rank(phase, place)
        return {kind: n + (self.setup.per_node - 1) * others.get(kind, 0) for kind, n in first.items()}


def kinds_table(cast: Forecast, title: str, console: Console | None = None) -> Table:
    """Print, and return, the bytes of rank 0 by kind. Kinds do not all exist at once."""
    table = Table(title=title, caption="Rank 0, each kind at its most; not all exist at once.", box=SIMPLE_HEAD)
    table.add_column("kind")
    for place in PLACES:
        table.add_column(place, justify="right")
    kinds = {place: cast.kinds(place) for place in PLACES}
    for kind in dict.fromkeys(kind for place in PLACES for kind in kinds[place]):
        table.add_row(kind, *[bytes_cell(kinds[place].get(kind, 0)) for place in PLACES])
    return show(table, console)


def forecast(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> Forecast:
    """Sum up a plan. Allocates nothing; ranks differ only by ``Forecast.first``."""
    sums = _Sums(plan, config, policy, setup)
    weights = sums.weights()
    buffers = sums.reduce_buffers()
    transient = [*sums.transient_bytes(), *sums.encoding()]
    states = [*weights, *sums.states(), *sums.residuals(), *sums.second_copies()]
    grads = [*states, *sums.gradients()]
    phases = {  # the same on all ranks, which compare them, also if only some stages of a pipeline have a window
        "build": [*weights, *sums.building()],
        "backward": [*grads, *buffers, *transient, *sums.offloading()],
        "step": [*grads, *buffers, *sums.stepping(sums.trained), *sums.exchanging()],
    }
    if setup.training:
        gathered = [part for part in transient if part[1] != FRESH]
        phases["swap"] = [*states, *buffers, *gathered, *sums.replacing()]
    if setup.saves:
        phases["checkpoint"] = [*grads, *buffers, *sums.saving()]
    if sums.accumulates:
        phases["accumulation"] = [*states, *buffers, *transient, *sums.gradients(waiting=True), *sums.local()]

    def added(parts: Iterable[Part]) -> Amounts:
        total: Counter[tuple[str, str]] = Counter()
        for place, kind, nbytes in parts:
            total[HOST if setup.device == "cpu" and place == DEVICE else place, kind] += nbytes
        return {key: nbytes for key, nbytes in total.items() if nbytes}

    return Forecast(
        setup=setup,
        parameters=sum(row.whole for row in sums.rows) + setup.elsewhere,
        local=sum(row.elements for row in sums.rows),
        phases={name: added(phases[name]) for name in PHASES if name in phases},
        first={"checkpoint": added([] if config.sharded_checkpoints else sums.full_copy())},
    )
