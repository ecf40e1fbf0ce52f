"""The buckets of a plan as numbers: sizes, dtypes, and where their parts are stored.

Places are the ``device`` that computes, the ``host`` and ``nvme``. If the device is a CPU, the first two are the same,
and offloading to the CPU changes nothing. ``offload_optimizer`` moves master weights, moments and gradient accumulators
off the device, ``offload_param`` the shards that gathers read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lt_zero.comm.communicator import Comm
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.config.schema import ZeroOptimization
from lt_zero.engine.layout import BucketLayout, Sharding
from lt_zero.engine.offload_manager import resting
from lt_zero.engine.partition import EnginePlan
from lt_zero.io.pinned import rounded

DEVICE, HOST, NVME = "device", "host", "nvme"
PLACES = (DEVICE, HOST, NVME)


@dataclass(frozen=True)
class Setup:
    """Facts of a run that a forecast needs beside the configuration.

    Attributes:
        world: ranks.
        per_node: ranks on one node, which share its host memory and NVMe.
        device: type, "cpu" or "cuda".
        windows: ranks read each other's memory (comm/shared_memory.py).
        sums_wide: gradients are summed in the accumulators' dtype, whatever dtype is sent (comm/communicator.py).
        background: gathers overlap with compute, so units are prefetched.
        states: element-wise states of the optimizer; 2 for Adam.
        fused: the optimizer is stepped by the native kernel, which takes any dtype of gradients.
        accumulates: several micro-batches per step.
        training: whether there are gradients at all.
        saves: whether there are checkpoints.
    """

    world: int
    per_node: int
    device: str = "cuda"
    windows: bool = False
    sums_wide: bool = False
    background: bool = True
    states: float = 2.0
    fused: bool = True
    accumulates: bool = False
    training: bool = True
    saves: bool = True

    @classmethod
    def of_comm(cls, comm: Comm, states: float, training: bool, fused: bool = False) -> Setup:
        """The setup of a running process group."""
        return cls(
            world=comm.world,
            per_node=comm.world,
            device=comm.device.type,
            windows=comm.shares_memory,
            sums_wide=comm.sums_wide,
            background=comm.gathers_in_background,
            states=states,
            fused=fused,
            training=training,
        )

    @classmethod
    def imagined(cls, config: ZeroConfig, world: int, per_node: int, device: str) -> Setup:
        """An assumed setup: NCCL on GPUs; on CPUs shared memory within a node, else gloo."""
        one_cpu_node = device == "cpu" and world == per_node > 1
        gloo = device == "cpu" and config.zero_optimization.reduce_scatter
        return cls(
            world=world,
            per_node=per_node,
            device=device,
            windows=one_cpu_node,
            sums_wide=world == 1 or one_cpu_node or gloo,
            background=world > 1 and not one_cpu_node,
        )


@dataclass(frozen=True)
class Row:
    """One bucket.

    Attributes:
        elements: of its parameters.
        numel: with padding.
        own: of this rank's master weights or shard, with padding.
        held: of ``own`` without padding, which is the size of moments.
        dtype, master, accum, step, send: of the compute copy, master weights, accumulators, what the optimizer sees,
            and gradients on the wire.
        sharding: what a rank holds only a shard of.
        trains: whether it has trainable parameters.
        wide: it is frozen and kept in a higher precision than ``dtype``.
        states, weights: places of master weights and moments, and of what gathers read.
    """

    elements: int
    numel: int
    own: int
    held: int
    dtype: torch.dtype
    master: torch.dtype
    accum: torch.dtype
    step: torch.dtype
    send: torch.dtype
    sharding: Sharding
    trains: bool
    wide: bool
    states: str
    weights: str

    @property
    def moved(self) -> bool:
        return self.states != DEVICE

    @property
    def master_is_view(self) -> bool:
        """See ``Weights.master_is_view``."""
        return not self.sharding.params and self.master == self.dtype and not self.moved

    @property
    def copies_weights(self) -> bool:
        """Whether gathers read a copy instead of the master weights (engine/bucket.py)."""
        both = self.weights == self.states == NVME and self.master == self.dtype
        return self.trains and self.sharding.params and self.moved and not both

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype in which a frozen bucket is kept."""
        return self.master if self.wide else self.dtype

    @property
    def exact(self) -> torch.dtype:
        """The dtype in a checkpoint."""
        return self.master if self.trains else self.kept_dtype

    def step_sizes(self, states: float) -> list[int]:
        """Bytes that a step of this bucket reads from files: master weights, gradients, each state."""
        whole, part = int(states), states - int(states)
        dtypes = [self.master, self.accum, *[self.step] * whole]
        sizes = [self.own * dtype.itemsize for dtype in dtypes] + [int(self.own * self.step.itemsize * part)]
        return [rounded(size) for size in sizes]


def rows_of(plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, setup: Setup) -> list[Row]:
    """The buckets as rows, in the plan's order."""
    zero, buckets = config.zero_optimization, plan.buckets
    layouts = [bucket.layout(setup.world) for bucket in buckets]
    places = resting([layout.numel for layout in layouts], [b.sharding.params for b in buckets], zero)
    rows = []
    for bucket, layout, held, (moves, away) in zip(buckets, layouts, _held(plan, layouts), places, strict=True):
        dtype, sharding = bucket.dtype, bucket.sharding
        master, trains = policy.master_of(dtype), bucket.trains and setup.training
        accum = policy.accumulate_of(dtype)
        originals = [p.dtype for _, p in bucket.parameters]
        lossless = dtype if sharding.optim and setup.sums_wide else accum
        row = Row(
            elements=sum(p.numel() for _, p in bucket.parameters),
            numel=layout.numel,
            own=layout.shard_numel if sharding.optim or sharding.params else layout.numel,
            held=held if sharding.optim or sharding.params else layout.numel,
            dtype=dtype,
            master=master,
            accum=accum,
            step=policy.step_of(dtype),
            send=policy.wire_of(dtype) or lossless,
            sharding=sharding,
            trains=trains,
            wide=not trains and master != dtype and any(d.itemsize > dtype.itemsize for d in originals),
            states=_states_place(zero, setup, moves),
            weights=_weights_place(zero, setup, away, sharding.params),
        )
        rows.append(row)
    return rows


def _held(plan: EnginePlan, layouts: Sequence[BucketLayout]) -> list[int]:
    """Elements of each bucket on the rank with the most to step; if parameters are not cut, ranks differ."""
    if all(bucket.owners is None for bucket in plan.buckets):
        return [layout.shard_numel for layout in layouts]
    shares = []
    for layout in layouts:
        shares.append([sum(p.numel for p in layout.pieces(*layout.shard(r))) for r in range(layout.world)])
    trained = [share for bucket, share in zip(plan.buckets, shares, strict=True) if bucket.trains]
    totals = [sum(of_rank) for of_rank in zip(*trained, strict=True)]
    most = totals.index(max(totals)) if totals else 0
    return [share[most] for share in shares]


def _states_place(zero: ZeroOptimization, setup: Setup, moves: bool) -> str:
    device = zero.offload_optimizer.device
    if not moves or (device == "cpu" and setup.device == "cpu"):
        return DEVICE
    return NVME if device == "nvme" else HOST


def _weights_place(zero: ZeroOptimization, setup: Setup, away: bool, sharded: bool) -> str:
    device = zero.param_offload.device
    if not sharded or device == "none" or setup.device == "cpu" and not (device == "nvme" and away):
        return DEVICE
    return NVME if device == "nvme" and away else HOST
