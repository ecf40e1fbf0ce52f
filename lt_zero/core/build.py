"""From a module to an engine: find units, lay out buckets, move the parameters in, install hooks.

Parameters arrive in one of three ways: whole (an ordinary module), on the meta device (values are made here, unit by
unit, so no rank ever holds the whole model), or already cut at construction (construct.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.config import ZeroConfig
from lt_zero.core.bucket import Bucket, Sharding, weak_owner
from lt_zero.core.comm import Comm
from lt_zero.core.construct import Materializer
from lt_zero.core.engine import Engine
from lt_zero.core.guard import Owner
from lt_zero.core.layout import split_by_size
from lt_zero.core.reducer import Reducer
from lt_zero.core.schedule import Residency
from lt_zero.core.sequence import debug_enabled
from lt_zero.core.unit import Unit
from lt_zero.core.units import UnitPlan, UnitRules, find_units
from lt_zero.core.values import install_load_hooks

_WEIGHTLESS_BACKWARD = (nn.Embedding, nn.EmbeddingBag)  # their backward needs indices only

Named = tuple[str, Parameter]


def shard(
    module: nn.Module,
    config: ZeroConfig,
    device: torch.device | None = None,
    compute_dtype: torch.dtype | None = None,
    comm: Comm | None = None,
) -> Engine:
    """Shard ``module`` in place over all ranks of the default process group.

    Args:
        module: the model; its parameters keep identity, shape and names.
        config: which of optimizer, gradients and parameters are sharded, and the sizes.
        device: where to compute; default: where the first parameter lies.
        compute_dtype: dtype of the gathered weights for fp32 parameters (master weights stay fp32); default: theirs.
        comm: the collectives; default: over all ranks.
    """
    device = device or _device_of(module)
    comm = comm or Comm.for_world(device, check=debug_enabled())
    zero = config.zero_optimization
    comm.use_reduce_scatter = zero.reduce_scatter
    rules = UnitRules(zero.stage3_param_persistence_threshold, zero.reduce_bucket_size, zero.leaf_module.classes)
    plans = find_units(module, rules)
    engine_ref: list[weakref.ref[Owner]] = []

    def owner() -> Owner | None:
        return engine_ref[0]() if engine_ref else None

    factory = _BucketFactory(config, comm, compute_dtype, owner)
    materializer = Materializer(module, comm)
    units: list[Unit] = []
    persistent: list[Named] = []
    for plan in plans:
        small, large = factory.divide(plan)
        persistent += small
        materializer.fill([p for _, p in plan.parameters])
        buckets = factory.buckets(plan.name or "the root module", large, factory.sharding)
        for bucket in buckets:
            bucket.adopt(materializer.fetch)
        if plan.name:
            units.append(Unit(plan.name, plan.module, buckets, not isinstance(plan.module, _WEIGHTLESS_BACKWARD)))
        else:
            root = Unit("", module, buckets, needs_weights=True)
    whole = Sharding(factory.sharding.optim, factory.sharding.grads, params=False)
    for bucket in factory.buckets("small parameters", persistent, whole):
        bucket.adopt(materializer.fetch)
        root.buckets.append(bucket)
    materializer.fill_buffers()
    units = [u for u in units if u.buckets]
    buckets = [b for u in reversed(units) for b in u.buckets] + root.buckets
    reducer = Reducer(comm, buckets, zero.overlap_comm, zero.reduce_bucket_size)
    residency = Residency(
        zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size
    )
    engine = Engine(module, units, root, comm, reducer, residency, config)
    engine_ref.append(weak_owner(engine))  # type: ignore[arg-type]
    install_load_hooks(engine)
    return engine


class _BucketFactory:
    """Cuts the parameters of a unit into buckets of one dtype and one kind (trainable or frozen) each."""

    def __init__(
        self,
        config: ZeroConfig,
        comm: Comm,
        compute_dtype: torch.dtype | None,
        owner: Callable[[], Owner | None],
    ) -> None:
        zero = config.zero_optimization
        self.sharding = Sharding.of_stage(zero.stage)
        # A bucket is reduced as one, and below stage 3 gathered as one after the step.
        whole_after_step = self.sharding.optim and not self.sharding.params
        gather_limit = zero.allgather_bucket_size if whole_after_step else zero.reduce_bucket_size
        self._limit = max(1, min(zero.reduce_bucket_size, gather_limit))
        self._threshold = zero.stage3_param_persistence_threshold
        self._comm, self._compute_dtype, self._owner = comm, compute_dtype, owner

    def divide(self, plan: UnitPlan) -> tuple[list[Named], list[Named]]:
        """Small parameters, which stay whole, and the others."""
        small = [(n, p) for n, p in plan.parameters if p.numel() < self._threshold]
        return small, [(n, p) for n, p in plan.parameters if p.numel() >= self._threshold]

    def buckets(self, name: str, parameters: Iterable[Named], sharding: Sharding) -> list[Bucket]:
        kinds: dict[tuple[torch.dtype, bool], list[Named]] = {}
        for n, p in parameters:
            kinds.setdefault((self._dtype(p), p.requires_grad), []).append((n, p))
        found = []
        for (dtype, _), members in kinds.items():
            for group in split_by_size([p.numel() for _, p in members], self._limit):
                part = [members[i] for i in group]
                found.append(Bucket(name, part, dtype, sharding, self._comm, self._owner))
        return found

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        if self._compute_dtype is not None and parameter.dtype == torch.float32:
            return self._compute_dtype
        return parameter.dtype


def _device_of(module: nn.Module) -> torch.device:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
