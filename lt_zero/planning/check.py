"""Checks before allocating whether the machines have enough memory. The ranks decide together, so all of them raise.

There are two checks, because the optimizer is not known when a model is sharded. ``check_build`` runs before the first
bucket is allocated and covers everything but the optimizer. ``check_optimizers`` runs before the first step and adds
optimizer states and copies for checkpoints.
"""

from __future__ import annotations

import gc
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.common.compat import without_torch_function
from lt_zero.common.host_memory import Available, host_memory
from lt_zero.common.moment_form import stored_part
from lt_zero.common.places import is_there, load_if_installed
from lt_zero.common.units import GB
from lt_zero.config import ZeroConfig
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.shared_memory import host_identity
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import is_guarded
from lt_zero.core.engine.partition import EnginePlan
from lt_zero.core.engine.storage_plan import DEVICE, HOST
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.core.stores.pinned import return_freed_memory, return_large_blocks, rounded
from lt_zero.planning import limits
from lt_zero.planning.forecast import (
    GATHERED,
    GRADS,
    LOCAL,
    MASTER,
    MOMENTS,
    OFFLOAD,
    REDUCE,
    REPLACED,
    RESIDUALS,
    WEIGHTS,
    Forecast,
    forecast,
)
from lt_zero.planning.limits import NotEnoughMemory, check_host_memory, shortage
from lt_zero.planning.setup import Setup, kind_of, states_and_kernel

RESTING = "in files"  # bytes of files, of all kinds


def measured(engine: Engine, optimizers: Iterable[ShardedOptimizer] = ()) -> dict[str, int]:
    """Bytes by kind. Views of one storage count once; streamed stores count while they are in memory."""
    total: Counter[str] = Counter()
    for bucket in engine.buckets:
        total.update(_of_bucket(bucket))
    stored = [store for bucket in engine.buckets for store in bucket.stores() if store.streamed]
    values = [v for s in optimizers for p in s.parameters() for v in s.optimizer.state.get(p, {}).values()]
    held = [stored_part(v) for v in values if isinstance(v, Tensor) and v.dim() > 0]
    states = {v.untyped_storage().data_ptr(): v for v in held if not any(store.owns(v) for store in stored)}
    beside = sum(s.nbytes for bucket in engine.buckets for s in bucket.states.beside.values() if not s.streamed)
    total[MOMENTS] = sum(v.untyped_storage().nbytes() for v in states.values()) + beside
    offload = engine.offload_manager
    total[OFFLOAD] = sum(rounded(store.nbytes) for store in stored) + offload.buffer_nbytes
    total[REDUCE] = engine.reducer.buffer_bytes
    total[RESIDUALS] = engine.exchange.nbytes
    total[RESTING] = offload.file_nbytes
    return {kind: nbytes for kind, nbytes in total.items() if nbytes}


def _of_bucket(bucket: Bucket) -> dict[str, int]:
    """Bytes of a bucket in memory, without its streamed stores."""
    sharded = bucket.sharding.params
    weights = bucket.weights
    grads = bucket.grads
    held = {
        GATHERED if sharded else WEIGHTS: bucket.compute.flat.nbytes if bucket.allocated else 0,
        GRADS: grads.nbytes if not grads.streamed else 0,
        LOCAL: grads.local.nbytes if grads.local is not None else 0,
    }
    master = weights.master if weights.has_master else None
    kinds = {MASTER: master, REPLACED: weights.replaced, WEIGHTS: weights.frozen}
    for kind, store in kinds.items():
        held[kind] = held.get(kind, 0) + (store.nbytes if store is not None and not store.streamed else 0)
    if sharded and weights.copy.nbytes and not weights.copy.streamed:
        held[WEIGHTS] = held.get(WEIGHTS, 0) + weights.copy.nbytes
    held[WEIGHTS] = held.get(WEIGHTS, 0) + bucket.gathers.nbytes
    return held


_PLANNER = "lt_zero.planning.estimate"  # imported when a check has failed


class CheckedRun(NamedTuple):
    """A run whose memory is checked. ``optimizer``: as for ``estimate``, which is asked for a setting that fits."""

    root: nn.Module
    config: ZeroConfig
    policy: DtypePolicy
    setup: Setup
    optimizer: str | float

    def forecast(self, plan: EnginePlan) -> Forecast:
        return forecast(plan, self.config, self.policy, self.setup)

    def remedy(self, host: int, ranks: int) -> str:
        """Tell what to do about so many ``ranks`` that need more than the ``host`` bytes of their host."""
        advise = load_if_installed(f"{_PLANNER}:advice")
        skipping = "LT_ZERO_MEMORY_CHECK=0 skips this check."
        return f"{advise(self, host, ranks)} {skipping}" if advise else skipping


def check_build(
    plan: EnginePlan, config: ZeroConfig, policy: DtypePolicy, group: ShardGroup, training: bool = True
) -> None:
    """Check everything but the optimizer, before the first bucket is allocated. Collective.

    Raises:
        NotEnoughMemory: on all ranks, if a machine has too little memory.
    """
    if not limits.checks_wanted():
        return
    setup = Setup(
        group, group.size, kind_of(group.device), states=0.0, kernels=frozenset(), training=training, saves=False
    )
    run = CheckedRun(plan.root, config, policy, setup, "adam")
    cast = run.forecast(plan)
    taken: Counter[str] = Counter()  # bytes that parameters take now, by the kind of device
    for bucket in plan.buckets:
        for _, parameter in bucket.parameters:
            if parameter.is_meta:
                continue
            parts = group.mesh.shards if is_guarded(parameter) else 1  # guarded: sharded at construction
            taken[kind_of(parameter.device)] += parameter.data.numel() * parameter.dtype.itemsize // parts
    _check(run, cast, list(cast.phases), taken, group.world)


def check_optimizers(
    engine: Engine,
    config: ZeroConfig,
    optimizers: Iterable[Optimizer],
    accumulates: bool = False,
    saves: bool = True,
    averages: int = 0,
) -> None:
    """Check the memory that training needs beyond the weights, before the first step. Collective.

    Args:
        engine: of the model.
        config: by which the engine was built.
        optimizers: the optimizers of the run.
        accumulates: several micro-batches per step.
        saves: whether checkpoints will be saved, which need buffers or copies.
        averages: so many averages of the weights are kept beside the states.

    Raises:
        NotEnoughMemory: on all ranks, if a machine has too little memory.
    """
    if not limits.checks_wanted():
        return
    # Guards would intercept each access.
    with without_torch_function():
        # A pipeline cuts batches into micro-batches.
        setup = setup_of(engine, optimizers, accumulates or config.micro_batches > 1, saves, averages)
        run = CheckedRun(engine.root, config, engine.policy, setup, setup.states * torch.float32.itemsize)
        cast = run.forecast(engine.plan)
    phases = [phase for phase in cast.phases if phase != "build"]
    held = sum(nbytes for kind, nbytes in measured(engine).items() if kind != RESTING)
    _check(run, cast, phases, {kind_of(engine.device): held}, engine.world)


def setup_of(
    engine: Engine, optimizers: Iterable[Optimizer], accumulates: bool = False, saves: bool = True, averages: int = 0
) -> Setup:
    """Facts of a run for its forecast; arguments as for ``check_optimizers``."""
    known = [states_and_kernel(optimizer) for optimizer in optimizers]
    states = max((count for count, _ in known), default=0.0)
    fused = engine.options.fused_step and all(kernel for _, kernel in known)
    kernels = frozenset(kernel for _, kernel in known) if fused else frozenset[str]()
    of_device = kind_of(engine.device)
    group, per_node = engine.groups[0], engine.world.size
    return Setup(group, per_node, of_device, states, kernels, accumulates, saves=saves, averages=averages)


def _check(run: CheckedRun, cast: Forecast, phases: Sequence[str], taken: Mapping[str, int], world: World) -> None:
    """Compare needs and available memory per host, and again without garbage if they do not fit. Collective."""
    with suppress(NotEnoughMemory):
        _compare(run, cast, phases, taken, world)
        return
    # A model of an earlier run may still be alive in the reference cycles of its Trainer.
    gc.collect()
    return_freed_memory()
    _compare(run, cast, phases, taken, world)


def _compare(run: CheckedRun, cast: Forecast, phases: Sequence[str], taken: Mapping[str, int], world: World) -> None:
    max_cpu_gb = run.config.max_cpu_gb
    # Each rank reads the available memory before the gather and allocates only after it, so no rank's memory counts
    # both as needed and as taken.
    needs = {phase: cast.need_of_rank(phase, HOST, first=world.rank == 0) for phase in phases}
    problem = _gpu_problem(cast, phases, taken.get("cuda", 0), world)
    mine = _Rank(needs, taken.get("cpu", 0), host_memory(), problem)
    try:
        here = host_identity()
    except OSError:  # not Linux
        here = socket.gethostname()
    hosts: dict[str, list[_Rank]] = {}
    for host, rank in world.host_gather((here, mine), "memory"):
        hosts.setdefault(host, []).append(rank)
    for ranks in hosts.values():
        named = dict.fromkeys(phase for rank in ranks for phase in rank.needs)  # a stage may train nothing
        sums = [sum((Counter(rank.needs.get(phase, {})) for rank in ranks), Counter[str]()) for phase in named]
        need = max(sums, key=lambda kinds: sum(kinds.values()))
        free = min((rank.free for rank in ranks), key=lambda free: free.nbytes)
        # Memory that the model has already is part of the need: parameters are freed when they move into a bucket.
        # ``max_cpu_gb`` limits the total, so nothing is added to it.
        have = Available(free.nbytes + sum(rank.taken for rank in ranks), f"{free.source}, plus what the model has")
        if max_cpu_gb is not None and max_cpu_gb * GB < have.nbytes:
            have = Available(int(max_cpu_gb * GB), f"max_cpu_gb={max_cpu_gb:g}")
        # The remedy is looked for only if it is needed.
        if sum(need.values()) > have.nbytes:
            check_host_memory(need, have, ranks=len(ranks), remedy=run.remedy(have.nbytes, len(ranks)))
        gaps = len(ranks) * cast.local * torch.float32.itemsize if cast.setup.training else 0
        if world.device.type == "cpu" and sum(need.values()) + gaps > have.nbytes and ranks is hosts[here]:
            # Freed gradients leave gaps in the heap, up to those of a whole backward (glibc's memalign seldom uses them
            # again). Without gaps steps take 1.2 times as long.
            return_large_blocks()
        for rank in ranks:
            if rank.problem:
                raise NotEnoughMemory(rank.problem, need, have.nbytes)


class _Rank(NamedTuple):
    """Sent to all ranks: needs by phase and kind, bytes taken, memory available, and the GPU's shortage or ""."""

    needs: dict[str, dict[str, int]]
    taken: int
    free: Available
    problem: str


def _gpu_problem(cast: Forecast, phases: Sequence[str], taken: int, world: World) -> str:
    """The error message if this rank's GPU is too small, else ""."""
    there = limits.device_memory(world.device)
    need = max((cast.need_of_rank(phase, DEVICE) for phase in phases), key=lambda need: sum(need.values()))
    if there is None or sum(need.values()) <= there.nbytes + taken:
        return ""
    made = world.communicators
    have = Available(there.nbytes + taken, f"{there.source}{f', without {made}' if made.nbytes else ''}")
    remedy = "Take a higher stage, more ranks or offload_optimizer"
    remedy += "; `lt-zero estimate` shows what each needs." if is_there(_PLANNER) else "."
    return shortage(need, have, f"The GPU memory of rank {world.rank}", remedy)
