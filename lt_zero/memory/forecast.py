"""Bytes of one rank by place, kind and phase: the buckets of a plan as rows of numbers, and their sums.

Places are the ``device`` that computes, the ``host`` and ``nvme``. If the device is a CPU, the first two are the same,
and offloading to the CPU changes nothing. ``offload_optimizer`` moves master weights, moments and gradient accumulators
off the device, ``offload_param`` the shards that gathers read.

Note [Phases]
    Kinds that never exist together are not added: local gradients of an accumulation window give way to the
    accumulators, gathered weights are gone when the optimizer steps. A forecast therefore has phases:
      build         buckets are filled, one copy in full precision at a time
      accumulation  micro-batches before the last one: gradients that are not sharded (stages 0 and 1) are kept whole
      backward      reductions and gathers are under way
      step          one bucket after the other is brought from its file, or copied to fp32
      checkpoint    sharded: each rank writes its part, or (checkpoint.async) copies it first. Full: rank 0 collects
                    a full copy on its host, and Lightning makes the file's bytes in memory
    Activations, what libraries and the allocator keep for themselves, and the caller's data are not in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lt_zero.comm.shared_memory import SEND_BUFFERS
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.rules import one_bit
from lt_zero.engine.gather import Residency
from lt_zero.engine.layout import BucketLayout, Sharding
from lt_zero.engine.offload_manager import resting
from lt_zero.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.exchange.zero_plus_plus import GRADIENTS_INSIDE
from lt_zero.exchange.zero_plus_plus import WEIGHTS as QUANTIZED_WEIGHTS
from lt_zero.io.pinned import rounded
from lt_zero.memory.setup import Setup
from lt_zero.ops.codecs import INT8

DEVICE, HOST, NVME = "device", "host", "nvme"
PLACES = (DEVICE, HOST, NVME)
PHASES = ("build", "accumulation", "backward", "step", "checkpoint")
WEIGHTS, MASTER, MOMENTS = "weights", "master weights", "moments"
GRADS, LOCAL, FRESH = "gradients", "local gradients", "autograd's gradients"
RESIDUALS = "residuals"
GATHERED, REDUCE, OFFLOAD = "gathered weights", "reduce buffers", "offload buffers"
BUILD, STEP, COPY, FILE = "build buffers", "step copies", "checkpoint copy", "checkpoint file"
KINDS = (WEIGHTS, MASTER, GRADS, LOCAL, FRESH, MOMENTS, RESIDUALS, GATHERED, REDUCE, OFFLOAD, BUILD, STEP, COPY, FILE)
STATES = (WEIGHTS, MASTER, GRADS, LOCAL, MOMENTS)  # kept from step to step (LOCAL: within one step)

SAVE_BUFFERS = 2 * 4 * (4 << 20)  # bytes: buffers of the threads and those being filled (io/checked_file.py)

Part = tuple[str, str, int]  # place, kind, bytes
Amounts = Mapping[tuple[str, str], int]  # (place, kind) -> bytes


@dataclass(frozen=True)
class BucketRow:
    """One bucket in numbers."""

    group: GroupFacts  # over which it is sharded
    elements: int  # of its parameters, as this rank has them
    whole: int  # of the tensors of which these are parts
    numel: int  # of ``elements``, with padding
    counted: int  # those with which it counts in limits: as ``Bucket.counted``
    own: int  # elements of this rank's master weights or shard, with padding
    held: int  # of ``own`` without padding: the size of moments
    dtype: torch.dtype  # of the compute copy
    master: torch.dtype
    accum: torch.dtype  # of accumulators
    step: torch.dtype  # of what the optimizer sees
    send: torch.dtype | None  # of gradients on the wire; None: a single rank, which sends none (``Accumulator.direct``)
    sharding: Sharding
    trains: bool  # it has trainable parameters
    wide: bool  # it is frozen and kept in a higher precision than ``dtype``
    states: str  # place of master weights and moments
    weights: str  # place of what gathers read
    residual: int  # elements that compression, a 1-bit optimizer or late ranks keep in fp32
    rounded: bool  # gathers of updates round the compute copy

    @property
    def master_is_view(self) -> bool:
        """True if master weights are a view of the flat tensor (``Weights.master_is_view``)."""
        same = self.master == self.dtype and not self.rounded
        return not self.sharding.params and same and self.states == DEVICE

    @property
    def copies_weights(self) -> bool:
        """True if gathers read a copy instead of the master or wide frozen weights (``Weights.keep``)."""
        both = self.weights == self.states == NVME and self.master == self.dtype
        copied = self.states != DEVICE and not both if self.trains else self.wide and self.weights != DEVICE
        return self.sharding.params and copied

    @property
    def exact(self) -> torch.dtype:
        """The dtype in a checkpoint, and of a frozen bucket."""
        return self.master if self.trains or self.wide else self.dtype

    def read_nbytes(self, states: float) -> int:
        """Bytes that a step of this bucket reads from files: master weights, gradients, each state."""
        dtypes = [self.master, self.accum, *[self.step] * int(states)]
        partial = int(self.own * self.step.itemsize * (states - int(states)))
        return sum(rounded(self.own * dtype.itemsize) for dtype in dtypes) + rounded(partial)


def rows_of(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> list[BucketRow]:
    """The buckets as rows, in the plan's order."""
    zero, buckets, on_cpu, everyone = config.zero_optimization, plan.buckets, setup.device == "cpu", setup.group
    layouts = [bucket.layout_in(everyone.mesh.shards, everyone.size) for bucket in buckets]
    counted = [bucket.counted(layout) for bucket, layout in zip(buckets, layouts, strict=True)]
    places = resting(counted, [b.sharding.params for b in buckets], [b.is_wide for b in buckets], zero)
    optim, param = zero.offload_optimizer.device, zero.param_offload.device
    rows = []
    for bucket, layout, held, count, (moves, away) in zip(
        buckets, layouts, _held(plan, layouts), counted, places, strict=True
    ):
        group = bucket.group or everyone
        dtype, sharding = bucket.dtype, bucket.sharding
        master, accum, trains = policy.master_of(dtype), policy.accumulate_of(dtype), bucket.trains and setup.training
        sharded = sharding.optim or sharding.params
        states = weights = DEVICE
        if moves and not (optim == "cpu" and on_cpu):
            states = NVME if optim == "nvme" else HOST
        if sharding.params and param == "nvme" and away:
            weights = NVME
        elif sharding.params and param != "none" and not on_cpu:
            weights = HOST
        wire, shared = policy.wire_of(dtype), sharding.optim and group.sums_wide
        direct = group.alone and wire is None and (config.prescale_gradients or config.gradient_predivide_factor == 1)
        row = BucketRow(
            group=group,
            elements=layout.elements,
            whole=sum(math.prod(spec.global_shape) for spec in bucket.specs),
            numel=layout.numel,
            counted=count,
            own=layout.shard_numel if sharded else layout.numel,
            held=held if sharded else layout.numel,
            dtype=dtype,
            master=master,
            accum=accum,
            step=policy.step_of(dtype),
            send=None if direct else wire or (dtype if shared else accum),
            sharding=sharding,
            trains=trains,
            wide=bucket.narrows and not trains and master != dtype,
            states=states,
            weights=weights,
            residual=_residual(bucket, layout, config, policy) if trains and group.size > 1 else 0,
            rounded=zero.zero_quantized_weights and zero.stage < 3 and sharding.optim and group.size > 1,
        )
        rows.append(row)
    return rows


def _residual(bucket: BucketPlan, layout: BucketLayout, config: ZeroConfig, policy: DtypePolicy) -> int:
    """Elements of a bucket's residuals, and of their copies where steps may be skipped (gradient_compression.py).

    Or of gradients that are late (comm/tolerance.py): those that a rank adds up, and those that are under way.
    """
    if config.communication.slow_node_tolerance:
        return 2 * layout.numel
    sharded = (bucket.sharding.optim or bucket.sharding.params) and not one_bit(config)
    each = layout.numel + (0 if sharded else layout.shard_numel)
    return each * (2 if policy.check_overflow else 1) if bucket.compresses else 0


def _held(plan: EnginePlan, layouts: Sequence[BucketLayout]) -> list[int]:
    """Elements of each bucket on the rank of its group with most to step: ranks differ if parameters are not cut."""
    if all(bucket.owners is None for bucket in plan.buckets):
        return [layout.shard_numel for layout in layouts]
    shares = []
    for layout in layouts:
        shares.append([sum(p.numel for p in layout.pieces(*layout.shard(r))) for r in range(layout.world)])
    most: dict[GroupFacts | None, int] = {}  # the rank of each group
    for group in dict.fromkeys(bucket.group for bucket in plan.buckets):
        rows = zip(plan.buckets, shares, strict=True)
        trained = [share for bucket, share in rows if bucket.trains and bucket.group is group]
        totals = [sum(of_rank) for of_rank in zip(*trained, strict=True)]
        most[group] = totals.index(max(totals)) if totals else 0
    return [share[most[bucket.group]] for bucket, share in zip(plan.buckets, shares, strict=True)]


class Gathered(NamedTuple):
    """Elements, bytes and buckets that one unit gathers, and whether its backward needs them."""

    numel: int
    nbytes: int
    buckets: int
    needs_weights: bool


def _peak_gathered(units: Sequence[Gathered], limits: Residency, most_buckets: float, keeps_whole: bool) -> int:
    """Peak bytes of the micro-batches after the first one, which records the order, as ``Gatherer`` runs them.

    Args:
        units: all but the root, in forward order; small parameters, which are never released, are not counted.
        limits: on what stays gathered, and on prefetched elements (0: no prefetching).
        most_buckets: limit on prefetched buckets.
        keeps_whole: units stay gathered after backward.
    """
    stays = limits.keep_after_forward([unit.numel for unit in units])
    keep = {i for i, unit in enumerate(units) if stays[i] and unit.needs_weights}
    here = set(keep) if keeps_whole else set[int]()
    early = set[int]()  # prefetched, not visited yet
    live, nbytes = sum(units[i].numel for i in here), sum(units[i].nbytes for i in here)
    peak = nbytes
    forward = list(range(len(units)))
    # A unit is released when its inputs have gradients, before backward reaches the previous unit.
    backward = [i for i in reversed(forward) if units[i].needs_weights]
    for order, kept in ((forward, keep), (backward, set[int]())):
        flying = buckets = 0  # of ``early``
        # Index in ``order``: units before it were gathered, and stay so until they are visited.
        ahead = 0
        for position, index in enumerate(order):
            if index in early:
                early.remove(index)
                flying, buckets = flying - units[index].numel, buckets - units[index].buckets
            # Gather the unit, and prefetch those that ``Gatherer.visit`` would.
            ahead = max(ahead, position)
            while ahead < (len(order) if limits.prefetch > 0 else position + 1):
                other = order[ahead]
                unit = units[other]
                if other not in here:
                    if other != index:
                        large = flying + unit.numel > limits.prefetch and (bool(early) or most_buckets < float("inf"))
                        full = live + unit.numel > limits.max_live or buckets + unit.buckets > most_buckets
                        if len(early) >= limits.ahead or large or full:
                            break
                        early.add(other)
                        flying, buckets = flying + unit.numel, buckets + unit.buckets
                    here.add(other)
                    live, nbytes = live + unit.numel, nbytes + unit.nbytes
                ahead += 1
            peak = max(peak, nbytes)
            if index not in kept:
                here.remove(index)
                live, nbytes = live - units[index].numel, nbytes - units[index].nbytes
    return peak


class _Sums:
    """The bytes of each purpose, summed over the rows of a plan; ``forecast`` combines them into phases."""

    def __init__(self, plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> None:
        self.plan, self.config, self.zero, self.setup = plan, config, config.zero_optimization, setup
        self.table = dict(zip(plan.buckets, rows_of(plan, config, policy, setup), strict=True))
        self.rows = list(self.table.values())
        self.trained = [row for row in self.rows if row.trains]
        self.stored = [row for row in self.trained if row.states == NVME]  # in files between steps
        self.momenta = setup.world > 1 and one_bit(config) not in ("", "zerooneadam")
        self.exchanged = self.trained if self.momenta else []  # averaged in the step (compressed_momentum.py)
        self.memory = DEVICE if setup.device == "cpu" else HOST  # the place that files are read into

    def _file(self, dtype: torch.dtype) -> int:
        """Bytes of one NVMe file: a record of full blocks for every bucket, also for those that do not use it."""
        coded = dtype == torch.uint8
        return sum(rounded(INT8.nbytes(row.own) if coded else row.own * dtype.itemsize) for row in self.rows)

    def _is_coded(self, row: BucketRow) -> bool:
        """True if the weights of a bucket rest in 8 bits (exchange/quantized.py)."""
        return self.config.quantize is not None and row.sharding.params and row.dtype != torch.float64

    def weights(self) -> list[Part]:
        """Weights and master weights (``Bucket.adopt``)."""
        total: list[Part] = []
        files: set[tuple[str, torch.dtype]] = set()
        for row in self.rows:
            if not row.sharding.params:
                total.append((DEVICE, WEIGHTS, row.numel * row.dtype.itemsize))
            held = [(row.states, MASTER, row.master)] if row.trains and not row.master_is_view else []
            held += [(row.weights, WEIGHTS, row.dtype)] if row.copies_weights else []
            rests = not row.trains and (row.wide or row.sharding.params)
            if rests and self._is_coded(row):
                if row.weights == NVME:
                    files.add((WEIGHTS, torch.uint8))
                else:
                    total.append((row.weights, WEIGHTS, INT8.nbytes(row.own)))
            elif rests:
                held.append((row.weights, WEIGHTS, row.exact))
            for place, kind, dtype in held:
                if place == NVME:
                    files.add((kind, dtype))
                else:
                    total.append((place, kind, row.own * dtype.itemsize))
        return total + [(NVME, kind, self._file(dtype)) for kind, dtype in files]

    def states(self) -> list[Part]:
        """The optimizer's states, and the buffers that offloading keeps from step to step."""
        states, trained = self.setup.states, self.trained
        total = [(r.states, MOMENTS, int(r.held * r.step.itemsize * states)) for r in trained if r.states != NVME]
        total += [(NVME, MOMENTS, int(self._file(dtype) * states)) for dtype in {row.step for row in self.stored}]
        # Free buffers that are kept for the next stored tensor (io.pinned.BufferPool).
        sizes = [row.own * row.master.itemsize for row in self.rows if NVME in (row.states, row.weights)]
        pools = 1 if all(row.states == NVME for row in self.rows if row.weights == NVME) else 2
        total.append((self.memory, OFFLOAD, 2 * pools * rounded(max(sizes, default=0))))
        # Staging buffers for low-precision weights from host memory to the device (HostLink).
        cast = [r.own * r.dtype.itemsize for r in trained if r.states != DEVICE and r.dtype != r.master]
        return [*total, (HOST, OFFLOAD, 2 * max(cast, default=0) if self.memory == HOST else 0)]

    def gradients(self, waiting: bool = False) -> list[Part]:
        """The accumulators (``Accumulator.launch_reduce``); without the fused step fp16 ones are unscaled in fp32.

        ``waiting``: those that there are in an accumulation window, beside ``local``.
        """
        total = [(NVME, GRADS, self._file(dtype)) for dtype in {row.accum for row in self.stored}]
        for row in self.trained:
            if waiting and not row.sharding.grads:
                continue
            if row.states != NVME:
                unscaled = row.accum == torch.float16 and not self.setup.fused
                total.append((row.states, GRADS, row.own * (4 if unscaled else row.accum.itemsize)))
        return total

    def residuals(self) -> list[Part]:
        """Residuals of compressed reductions (``ErrorFeedback``), and full momenta (``MomentumFeedback``)."""
        full = [row.numel for row in self.exchanged if row.sharding.optim]
        kept = sum(row.residual for row in self.rows) * torch.float32.itemsize
        return [(DEVICE, RESIDUALS, kept + sum(full) * (torch.float32.itemsize + torch.bool.itemsize))]

    def exchanging(self) -> list[Part]:
        """Buffers of a step of a 1-bit optimizer: the next full momenta, bytes to send and bytes received."""
        full = [row.numel for row in self.exchanged if row.sharding.optim]
        most = sorted((row.numel for row in self.trained), reverse=True)[:2] if one_bit(self.config) else []
        buffers = 2 * sum(most) if self.exchanged else 3 * max(most, default=0)
        return [(DEVICE, STEP, (sum(full) + buffers * (self.setup.world > 1)) * torch.float32.itemsize)]

    def second_copies(self) -> list[Part]:
        """Copies of all parameters on the ranks of a node (``zero_hpz_partition_size``)."""
        rows = [(row, self.zero.secondary_shards(row.group.size)) for row in self.rows if row.sharding.params]
        return [(DEVICE, WEIGHTS, row.numel * row.dtype.itemsize // shares) for row, shares in rows if shares > 1]

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for their reduction. The same on all ranks, whose phases are compared."""
        return self.setup.accumulates or self.momenta

    def local(self) -> list[Part]:
        """Gradients of an accumulation window before they are reduced (``Accumulator.local``)."""
        full = [row for row in self.trained if not row.sharding.grads] if self.accumulates else []
        return [(DEVICE, LOCAL, row.numel * row.accum.itemsize) for row in full]

    def moving(self) -> list[Part]:
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
        zero, reads = self.zero, self.zero.param_offload.device == "nvme"
        groups = {self.setup.group, *(row.group for row in self.rows)}
        background, shards = all(g.gathers_in_background for g in groups), min(g.mesh.shards for g in groups)
        ahead, most_buckets = zero.stage3_prefetch_bucket_size if background or reads else 0, float("inf")
        if reads:
            ahead, most_buckets = min(ahead, zero.param_offload.buffer_size), zero.param_offload.buffer_count
        inner = [self._gathered(unit.buckets, unit.needs_weights) for unit in units[:-1] if unit.buckets]
        root = self._gathered(units[-1].buckets, True)  # always stays gathered
        limits = Residency(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, ahead)
        limits = limits if self.setup.training else limits.without_training()
        whole = root.numel + sum(unit.numel for unit in inner)
        fits = whole <= limits.max_live and whole < limits.max_reuse_distance  # as Gatherer.fits_whole
        peak = _peak_gathered(inner, limits, most_buckets, keeps_whole=self.setup.accumulates and fits)
        total.append((DEVICE, GATHERED, root.nbytes + peak))
        others = whole - root.numel if self.setup.training else max((unit.numel for unit in inner), default=0)
        most = min(ahead, others) + max(unit.numel for unit in [*inner, root])
        if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights:
            total.append((DEVICE, GATHERED, QUANTIZED_WEIGHTS.nbytes(most) if self.setup.world > 1 else 0))
        elif self.config.quantize is not None:
            total.append((DEVICE, GATHERED, INT8.nbytes(most) + INT8.nbytes(most) // shards))
        dtypes = [row.dtype if row.copies_weights else row.exact for row in self.rows if row.weights == NVME]
        if dtypes:
            total.append((self.memory, OFFLOAD, most // shards * max(dtype.itemsize for dtype in dtypes)))
        return total

    def _gathered(self, buckets: Iterable[BucketPlan], needs_weights: bool) -> Gathered:
        rows = [self.table[b] for b in buckets if b.sharding.params]
        nbytes = sum(row.numel * row.dtype.itemsize for row in rows)
        return Gathered(sum(row.counted for row in rows), nbytes, len(rows), needs_weights)

    def reduce_buffers(self) -> list[Part]:
        """The buffers of ``Reducer``: send buffers, and scratch of the same size where the collective needs it."""
        limit, total, own = self.zero.reduce_bucket_size, 0, list[int]()
        for group, dtype in {(row.group, row.send) for row in self.trained if row.send is not None}:
            each = dtype.itemsize * (2 if group.scratch_numel(1) else 1)
            alike = [row for row in self.rows if row.group == group and row.send == dtype]
            reusable = max((row.numel for row in alike if row.numel <= limit), default=0)
            total += reusable * (SEND_BUFFERS * dtype.itemsize if group.shares_memory else 2 * each)
            own += [row.numel * each for row in alike if row.trains and row.numel > limit]
        total += sum(sorted(own)[-2:])  # in flight, of all groups
        if self.zero.zero_quantized_gradients and self.setup.world > 1:  # Compressor._sum: by node, codes of both ways
            sent = [(row.numel, row.send) for row in self.trained if row.sharding.optim and row.send is not None]
            codes = [numel * dtype.itemsize + 2 * GRADIENTS_INSIDE.nbytes(numel) for numel, dtype in sent]
            total += max(codes, default=0)
        return [(DEVICE, REDUCE, total)]

    def offloading(self) -> list[Part]:
        """Accumulators that are moved off the device in backward, and steps that overlap (step/overlap.py)."""
        files = max((rounded(row.own * row.accum.itemsize) for row in self.stored), default=0)
        landing = max((row.own * row.accum.itemsize for row in self.trained if row.states != DEVICE), default=0)
        total = [(self.memory, OFFLOAD, 4 * files)]  # two in flight, two being written
        total += [(DEVICE, OFFLOAD, 2 * landing)] if self.memory == HOST else []
        how = self.zero.offload_optimizer.overlap_step
        if how is False or not self.setup.fused:
            return total
        return total + self.stepping([row for row in self.stored if how is True or row.sharding.params])

    def stepping(self, trained: Sequence[BucketRow]) -> list[Part]:
        """Buckets in memory for a step: read from files, or fp32 copies (step/, Note [Staged buckets])."""
        optim, sizes = self.zero.offload_optimizer, list[int]()
        for row in trained:
            if row.states == NVME:  # what is read, and the weights that are written to another file
                written = row.own * row.dtype.itemsize if row.copies_weights and row.weights == NVME else 0
                sizes.append(row.read_nbytes(self.setup.states) + rounded(written))
        leaving = max(0, min(1, optim.buffer_count - 2)) if optim.pipeline_write else 0
        ahead = 1 if optim.pipeline_read and 2 + leaving <= optim.buffer_count else 0
        window = 1 + leaving + ahead
        most = max((sum(sizes[i : i + window]) for i in range(len(sizes))), default=0)
        copies = [
            row.own * row.step.itemsize * (1 + (row.accum != row.step))
            for row in trained
            if not row.step == row.master == row.accum
            and not (self.setup.fused and row.step == row.master == torch.float32)
        ]
        place = self.memory if any(row.states != DEVICE for row in trained) else DEVICE
        return [(self.memory, OFFLOAD, most), (place, STEP, max(copies, default=0))]

    def building(self) -> list[Part]:
        """One bucket in full precision while its shard is built (``Bucket.adopt``)."""
        most = 0
        for row in self.rows:
            apart = row.wide or (row.trains and not row.master_is_view)
            flat = row.numel * row.dtype.itemsize if row.sharding.params else 0
            stored = rounded(row.own * row.master.itemsize) if NVME in (row.states, row.weights) else 0
            most = max(most, (row.numel * row.master.itemsize if apart else 0) + flat + stored)
        return [(DEVICE, BUILD, most)]

    def saving(self) -> list[Part]:
        """A save on every rank: its shards are copied or written, or one bucket is gathered from all ranks."""
        rows, trained, states = self.rows, self.trained, self.setup.states
        files = max((row.read_nbytes(states) for row in self.stored), default=0)
        if not self.config.sharded_checkpoints:  # full_params.gather_own
            widest = [max(r.exact.itemsize, r.step.itemsize if r.trains and states else 0) for r in rows]
            sizes = [r.numel * itemsize for r, itemsize in zip(rows, widest, strict=True) if r.own != r.numel]
            joined = max((math.prod(spec.global_shape) for spec in self.plan.parts), default=0)  # full_params.joined
            copied = max(sizes, default=0) + joined * torch.float32.itemsize
            return [(DEVICE, COPY, copied), (self.memory, OFFLOAD, files)]
        copy = 0
        if self.config.checkpoint.async_save:
            copy = sum(row.own * row.exact.itemsize for row in rows)
            copy += sum(int(row.own * row.step.itemsize * states) for row in trained)
            copy += sum(row.residual for row in rows) * torch.float32.itemsize
        return [(HOST, COPY, copy), (HOST, FILE, SAVE_BUFFERS), (self.memory, OFFLOAD, files)]

    def full_copy(self) -> list[Part]:
        """A full save: rank 0's copy, and the file, which Lightning builds in memory (``_atomic_save``)."""
        total = sum(row.whole * row.exact.itemsize for row in self.rows)
        total += sum(int(row.whole * row.step.itemsize * self.setup.states) for row in self.trained)
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

    def model_states(self) -> int:
        """Peak bytes of one rank's weights, gradients, master weights and moments, as the ZeRO paper counts them."""
        return max(sum(n for (_, kind), n in phase.items() if kind in STATES) for phase in self.phases.values())

    def need_of_rank(self, phase: str, place: str, first: bool = False) -> dict[str, int]:
        """Bytes of one rank by kind, in one phase; ``first``: of rank 0."""
        more = self.first.get(phase, {}) if first else {}
        total = {kind: self.phases[phase].get((place, kind), 0) + more.get((place, kind), 0) for kind in KINDS}
        return {kind: nbytes for kind, nbytes in total.items() if nbytes}

    def need_of_node(self, phase: str, place: str) -> dict[str, int]:
        """Bytes of the first node by kind, in one phase."""
        first, others = self.need_of_rank(phase, place, first=True), self.need_of_rank(phase, place)
        return {kind: n + (self.setup.per_node - 1) * others.get(kind, 0) for kind, n in first.items()}


def forecast(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> Forecast:
    """Sum up a plan. Allocates nothing; ranks differ only by ``Forecast.first``."""
    sums = _Sums(plan, config, policy, setup)
    weights, buffers, moving = sums.weights(), sums.reduce_buffers(), sums.moving()
    states = [*weights, *sums.states(), *sums.residuals(), *sums.second_copies()]
    grads = [*states, *sums.gradients()]
    phases = {  # the same on all ranks, which compare them, also if only some stages of a pipeline have a window
        "build": [*weights, *sums.building()],
        "backward": [*grads, *buffers, *moving, *sums.offloading()],
        "step": [*grads, *buffers, *sums.stepping(sums.trained), *sums.exchanging()],
    }
    if setup.saves:
        phases["checkpoint"] = [*grads, *buffers, *sums.saving()]
    if sums.accumulates:
        phases["accumulation"] = [*states, *buffers, *moving, *sums.gradients(waiting=True), *sums.local()]

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
