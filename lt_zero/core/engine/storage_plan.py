"""The plan of what one rank keeps of each bucket: sizes, dtypes and places of tensors. Pure data: no tensors, no ranks.

``MasterWeights`` (bucket_weights.py) and ``GradAccumulator`` (grad_accumulator.py) are made from it, and memory
planning adds it up: what is decided here is decided nowhere else.

Places are the ``DEVICE`` that computes, the ``HOST`` and ``NVME``. If the device is a CPU, the first two are the same,
and offloading to the CPU changes nothing. ``offload_optimizer`` moves master weights, states and accumulators off the
device, ``offload_param`` the shards that gathers read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from lt_zero.common.codec import Codec
from lt_zero.common.moment_form import MomentForm, PlainMoments
from lt_zero.core.engine.layout import Sharding
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts
from lt_zero.core.engine.weight_rounding import NEAREST, WeightRounding
from lt_zero.kernels.dispatch import MASTERS

DEVICE = "device"
HOST = "host"
NVME = "nvme"


class EncodedReduction(Protocol):
    """The plan of a reduction that sends codes, as forecasts read it."""

    def crossing_nbytes(self, numel: int, everywhere: bool) -> float:
        """Bytes that a node sends to others for ``numel`` elements; ``everywhere``: all ranks need all sums."""

    def scratch_nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of copies, codes and sums for ``numel`` elements, at most."""


class Codecs(NamedTuple):
    """Codecs of one bucket; None: values are as they are.

    Attributes:
        updates: gathers of updated weights that are not sharded.
        gathers: gathers of sharded weights from their owners.
        gathers_frozen: the same while the bucket is frozen.
        rests: what gathers of sharded weights read.
        reductions: gradients, where the exchange compresses them.
    """

    updates: Codec | None = None
    gathers: Codec | None = None
    gathers_frozen: Codec | None = None
    rests: Codec | None = None
    reductions: EncodedReduction | None = None

    def sent(self, trains: bool) -> Codec | None:
        """The codec of gathers of sharded weights from their owners; None: they are sent as they are."""
        return self.rests or (self.gathers if trains else self.gathers_frozen)


CodecsOf = Callable[[BucketPlan, GroupFacts], Codecs]


@dataclass(frozen=True)
class StoragePlan:
    """One bucket on one rank. Elements are those of the layout, with padding, unless it says otherwise.

    Attributes:
        group: over which it is sharded.
        elements: of its parameters, as this rank has them, without padding.
        whole: elements of the tensors of which these are parts.
        numel: elements of the flat tensor.
        counted: elements with which it counts in limits, the same on all ranks.
        shard_numel: elements of this rank's shard, or of its master weights: all, where neither is sharded.
        sharding: what is sharded.
        dtype: of the compute copy.
        master: dtype of the master weights.
        accumulate: dtype of the accumulator.
        step: dtype of what the optimizer sees.
        moments: how its states are kept between steps.
        rounding: how the weights of a step become master weights, if these have another dtype.
        wire: dtype in which gradients have to be sent; None: any.
        trains: it has master weights and gradients.
        narrows: parameters come in a wider dtype than ``dtype``.
        codecs: what is encoded.
        skips_collective: gradients go to the accumulator without a reduction: one rank, no other dtype on the wire.
        sums_wide: a reduction adds in the dtype of the accumulator, whatever is sent.
        states: place of master weights, optimizer states and accumulator.
        weights: place of what gathers read.
    """

    group: GroupFacts
    elements: int
    whole: int
    numel: int
    counted: int
    shard_numel: int
    sharding: Sharding
    dtype: torch.dtype
    master: torch.dtype
    accumulate: torch.dtype
    step: torch.dtype
    moments: MomentForm
    rounding: WeightRounding
    wire: torch.dtype | None
    trains: bool
    narrows: bool
    codecs: Codecs
    skips_collective: bool
    sums_wide: bool
    states: str
    weights: str

    @cached_property
    def is_cut(self) -> bool:
        """True if each rank steps, and gets the gradients of, a shard."""
        return self.sharding.optim or self.sharding.params

    @cached_property
    def is_whole(self) -> bool:
        """True if this rank steps all elements: they are not cut, or there is one shard."""
        return self.shard_numel == self.numel

    @property
    def master_is_view(self) -> bool:
        """True if master weights, if there are any, are a slice of the compute copy, which stays in memory."""
        same = self.master == self.dtype and self.codecs.updates is None
        return not self.sharding.params and same and self.states == DEVICE

    @property
    def freezes_wide(self) -> bool:
        """True if the bucket is frozen, and its values are kept in a wider dtype than the compute copy."""
        encoded = self.codecs.rests is not None  # nothing is kept beside the codes
        return self.narrows and not self.trains and self.master != self.dtype and not encoded

    @property
    def encodes_wide(self) -> bool:
        """True if the bucket rests encoded, and its values come in a wider dtype than the compute copy.

        They are encoded as they come: after rounding to the compute dtype many codes would be others.
        """
        return self.codecs.rests is not None and self.narrows and not self.trains

    @property
    def precision(self) -> torch.dtype:
        """Dtype of the master or frozen weights, and of both in checkpoints; encoded ones are decoded in it.

        These are wide if they were encoded so: in fewer bits the scales would change, and with them the codes of
        weights that are saved and loaded.
        """
        if self.encodes_wide:
            return torch.float32
        return self.master if self.trains or self.freezes_wide else self.dtype

    @property
    def keeps_master(self) -> bool:
        """True if master weights are stored apart from the compute copy."""
        return self.trains and not self.master_is_view

    @property
    def shows_less(self) -> bool:
        """True if the compute copy does not show all of the precision of the master or frozen weights."""
        return self.codecs.updates is not None or self.precision != self.dtype

    @property
    def keeps_frozen(self) -> bool:
        """True if frozen weights are stored apart from the flat tensor: wider values, or a shard that gathers read."""
        return self.freezes_wide or (not self.trains and self.sharding.params)

    @property
    def fills_apart(self) -> bool:
        """True if full values arrive in ``precision``, in a tensor of their own, before this rank's are kept."""
        return self.freezes_wide or self.keeps_master or self.encodes_wide

    @property
    def copies_weights(self) -> bool:
        """True if gathers read a copy of the master, or wide frozen, weights.

        Gathers must not wait until offloaded master weights are read, nor move wide values.
        """
        serves = self.weights == self.states == NVME and self.master == self.dtype
        if self.trains:
            return self.sharding.params and self.states != DEVICE and not serves
        return self.sharding.params and self.freezes_wide and self.weights != DEVICE

    @property
    def staged(self) -> bool:
        """True if the optimizer steps copies in another dtype. See sharded_optimizer.py, Note [Staged buckets]."""
        return not self.step == self.master == self.accumulate == self.moments.dtype

    @property
    def suits_kernels(self) -> bool:
        """True if the kernels' steps can update the master weights: they compute in fp32, and round to these."""
        return self.step == torch.float32 and self.master in MASTERS

    @property
    def cast_nbytes(self) -> int:
        """Bytes of weights that are cast to the compute dtype on their way from the host to the device."""
        if self.states == DEVICE or self.dtype == self.master or self.codecs.rests is not None:
            return 0
        return self.shard_numel * self.dtype.itemsize

    def send_dtype(self, have: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of dtype ``have`` are sent: as configured, else ``have`` if that is as precise."""
        if self.wire is not None:
            return self.wire
        return have if self.sharding.optim and self.sums_wide else self.accumulate

    @property
    def send(self) -> torch.dtype | None:
        """Dtype in which the gradients of one backward are sent; None: they are not."""
        return None if self.skips_collective else self.send_dtype(self.dtype)


def plan_storage(
    plan: EnginePlan,
    options: EngineOptions,
    everyone: GroupFacts,
    apart: bool,
    codecs_of: CodecsOf,
    training: bool = True,
    rounding: WeightRounding = NEAREST,
) -> dict[BucketPlan, StoragePlan]:
    """Plan what one rank keeps of each bucket, in the plan's order. Ranks of a group have equal plans.

    Args:
        plan: of the engine.
        options: say the dtypes, and what is offloaded.
        everyone: shards the buckets without a group of their own.
        apart: the device has memory of its own.
        codecs_of: returns ``StoragePlan.codecs`` of a bucket, which is in the group.
        training: there are gradients.
        rounding: of the weights of a step.
    """
    dtypes = options.dtypes
    buckets = plan.buckets
    layouts = [bucket.layout_in(everyone.mesh.shards, everyone.size) for bucket in buckets]
    counted = [bucket.counted(layout) for bucket, layout in zip(buckets, layouts, strict=True)]
    # Decide by ``counted``: it is the same on all ranks, so they offload the same buckets.
    offloaded = choose_offloaded(counted, buckets, options)
    found = {}
    for bucket, layout, count, moved in zip(buckets, layouts, counted, offloaded, strict=True):
        group = bucket.group or everyone
        dtype = bucket.dtype
        sharding = bucket.sharding
        states, weights = _places(options, sharding, moved, apart)
        wire = dtypes.wire_of(dtype)
        found[bucket] = StoragePlan(
            group=group,
            elements=layout.elements,
            whole=sum(math.prod(spec.global_shape) for spec in bucket.specs),
            numel=layout.numel,
            counted=count,
            shard_numel=layout.shard_numel if sharding.optim or sharding.params else layout.numel,
            sharding=sharding,
            dtype=dtype,
            master=dtypes.master_of(dtype),
            accumulate=dtypes.accumulate_of(dtype),
            step=dtypes.step_of(dtype),
            moments=bucket.moments or PlainMoments(dtypes.step_of(dtype)),
            rounding=rounding,
            wire=wire,
            trains=bucket.trains and training,
            narrows=bucket.narrows,
            codecs=codecs_of(bucket, group),
            skips_collective=(group.alone and wire is None and not (options.predivides or options.adds_one_by_one)),
            sums_wide=group.sums_wide or options.adds_one_by_one,
            states=states,
            weights=weights,
        )
    return found


def _places(options: EngineOptions, sharding: Sharding, moved: tuple[bool, bool], apart: bool) -> tuple[str, str]:
    """The places of states, and of the weights that gathers read, of a bucket of which ``choose_offloaded`` says this.

    ``apart``: the device has memory of its own.
    """
    optim = options.offload_states.device
    param = options.offload_params.device
    states = weights = DEVICE
    if moved[0] and (optim == "nvme" or apart):
        states = NVME if optim == "nvme" else HOST
    if sharding.params and param == "nvme" and moved[1]:
        weights = NVME
    elif sharding.params and param != "none" and apart:
        weights = HOST
    return states, weights


def largest_sends(rows: Iterable[StoragePlan], limit: int) -> dict[GroupFacts, dict[torch.dtype, int]]:
    """Elements of the reusable send buffers of each group, by dtype; buckets above ``limit`` have their own."""
    found: dict[GroupFacts, dict[torch.dtype, int]] = {}
    for row in rows:
        known = found.setdefault(row.group, {})
        # Codes are never trained; other frozen weights may be, later.
        if row.numel <= limit and row.codecs.rests is None:
            dtype = row.send_dtype(row.dtype)
            known[dtype] = max(row.numel, known.get(dtype, 0))
    return found


def choose_offloaded(
    numels: Sequence[int], buckets: Sequence[BucketPlan], options: EngineOptions
) -> list[tuple[bool, bool]]:
    """Choose the buckets (of ``numels`` elements) that are offloaded: (states, weights that gathers read) of each.

    ``offload_optimizer.ratio`` and ``offload_param.max_in_cpu`` (for nvme only) limit what is offloaded. A bucket that
    ranks with other models have, too, is offloaded on all of them or on none: with all others only.
    """
    optim = options.offload_states
    params = options.offload_params
    room = optim.ratio * sum(numels) if optim.device != "none" else -1.0
    stays = params.max_in_cpu if params.device == "nvme" else 0
    found = []
    moved = 0
    kept = 0
    for numel, bucket in zip(numels, buckets, strict=True):
        moves = moved + numel <= room and (optim.ratio == 1 or not bucket.is_wide)
        moved += numel if moves else 0
        kept += numel
        found.append((moves, params.device != "none" and bucket.sharding.params and kept > stays))
    return found
