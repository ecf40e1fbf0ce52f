"""From a module to an engine: find units, lay out buckets, move the parameters in, install hooks.

Parameters arrive in one of three ways: whole (an ordinary module), on the meta device (values are made here, unit by
unit, so no rank ever holds the whole model), or already cut at construction (construct.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import ParametrizationList

from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy, dtype_policy, resolve_mode
from lt_zero.core.bucket import Bucket, Sharding, weak_owner
from lt_zero.core.comm import Comm
from lt_zero.core.construct import Materializer
from lt_zero.core.engine import Engine
from lt_zero.core.guard import Owner
from lt_zero.core.islands import (
    BATCH_NORMS,
    DEFAULT_ISLANDS_MIXED,
    Islands,
    find_islands,
    install_islands,
)
from lt_zero.core.layout import split_by_size
from lt_zero.core.reducer import Reducer
from lt_zero.core.schedule import Residency
from lt_zero.core.sequence import debug_enabled
from lt_zero.core.shelf import open_shelves
from lt_zero.core.unit import Unit
from lt_zero.core.units import UnitPlan, UnitRules, find_units
from lt_zero.core.values import install_load_hooks

_WEIGHTLESS_BACKWARD = (nn.Embedding, nn.EmbeddingBag)  # their backward needs indices only

Named = tuple[str, Parameter]


def shard(
    module: nn.Module,
    config: ZeroConfig,
    device: torch.device | None = None,
    policy: DtypePolicy | None = None,
    comm: Comm | None = None,
) -> Engine:
    """Shard ``module`` in place over all ranks of the default process group.

    Args:
        module: the model; its parameters keep identity, shape and names.
        config: which of optimizer, gradients and parameters are sharded, and the sizes.
        device: where to compute; default: where the first parameter lies.
        policy: dtypes of weights, gradients and master weights; default: what the configuration says.
        comm: the collectives; default: over all ranks.

    Raises:
        ValueError: a pattern of ``fp16_override_modules`` matches nothing.
    """
    device = device or _device_of(module)
    comm = comm or Comm.for_world(device, check=debug_enabled())
    policy = policy or dtype_policy(config, resolve_mode(config, "32-true", device.type))
    zero = config.zero_optimization
    _configure_reductions(comm, config)
    islands = _islands(module, policy)
    rules = UnitRules(zero.stage3_param_persistence_threshold, zero.reduce_bucket_size, zero.leaf_module.classes)
    plans = find_units(module, rules)
    engine_ref: list[weakref.ref[Owner]] = []

    def owner() -> Owner | None:
        return engine_ref[0]() if engine_ref else None

    factory = _BucketFactory(config, comm, policy, islands.parameters, owner)
    materializer = Materializer(module, comm)
    persistent: list[Named] = []
    parts: list[list[Bucket]] = []
    for plan in plans:
        small, large = factory.divide(plan)
        persistent += small
        parts.append(factory.buckets(plan.name or "the root module", large, factory.sharding))
    whole = Sharding(factory.sharding.optim, factory.sharding.grads, params=False)
    rest = factory.buckets("small parameters", persistent, whole)
    shelves = open_shelves([*itertools.chain(*parts), *rest], config, device)
    units: list[Unit] = []
    for plan, buckets in zip(plans, parts, strict=True):
        materializer.fill([p for _, p in plan.parameters])
        for bucket in buckets:
            bucket.adopt(materializer.fetch)
        if plan.name:
            units.append(Unit(plan.name, plan.module, buckets, not isinstance(plan.module, _WEIGHTLESS_BACKWARD)))
        else:
            root = Unit("", module, buckets, needs_weights=True)
    for bucket in rest:
        bucket.adopt(materializer.fetch)
        root.buckets.append(bucket)
    materializer.fill_buffers()
    if policy.buffers is not None:
        _cast_buffers(module, policy.buffers, islands)
    units = [u for u in units if u.buckets]
    buckets = [b for u in reversed(units) for b in u.buckets] + root.buckets
    reducer = Reducer(comm, buckets, zero.overlap_comm, zero.reduce_bucket_size)
    residency = Residency(
        zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size
    )
    engine = Engine(module, units, root, comm, reducer, residency, config, policy)
    engine.use_files(shelves)
    engine.kept = find_islands(module, policy.keep_fp32).parameters
    if policy.compute is not None:
        engine.handles += install_islands(islands, policy.compute, device.type, cast_back=not policy.autocast)
    engine_ref.append(weak_owner(engine))  # type: ignore[arg-type]
    install_load_hooks(engine)
    return engine


def _islands(root: nn.Module, policy: DtypePolicy) -> Islands:
    """What the user wants in fp32, and what cannot run with 16-bit weights."""
    if policy.compute is None:
        return Islands((), frozenset())
    if policy.autocast:
        found = find_islands(root, policy.keep_fp32, keep=DEFAULT_ISLANDS_MIXED)
        # Norms that users write: their functions take fp32 activations with fp32 weights only.
        own = [m for m in root.modules() if not type(m).__module__.startswith("torch.nn.")]
        vectors = {p for m in own for p in m.parameters(recurse=False) if p.dim() <= 1}
        return Islands(found.modules, found.parameters | vectors)
    return find_islands(root, policy.keep_fp32, classes=(ParametrizationList,), keep=BATCH_NORMS)


def _configure_reductions(comm: Comm, config: ZeroConfig) -> None:
    comm.use_reduce_scatter = config.zero_optimization.reduce_scatter
    comm.sum_gradients = config.gradient_allreduce_op == "sum"
    comm.predivide = float(comm.world) if config.prescale_gradients else None
    if "gradient_predivide_factor" in config.model_fields_set:
        comm.predivide = config.gradient_predivide_factor


def _cast_buffers(root: nn.Module, dtype: torch.dtype, islands: Islands) -> None:
    kept = {child for _, module in islands.modules for child in module.modules()}
    kept |= {m for m in root.modules() if any(p in islands.parameters for p in m.parameters(recurse=False))}
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and module not in kept:
                setattr(module, name, buffer.to(dtype))


class _BucketFactory:
    """Cuts the parameters of a unit into buckets of one dtype and one kind (trainable or frozen) each."""

    def __init__(
        self,
        config: ZeroConfig,
        comm: Comm,
        policy: DtypePolicy,
        kept: frozenset[Parameter],
        owner: Callable[[], Owner | None],
    ) -> None:
        zero = config.zero_optimization
        self.sharding = Sharding.of_stage(zero.stage)
        # A bucket is reduced as one, and below stage 3 gathered as one after the step.
        whole_after_step = self.sharding.optim and not self.sharding.params
        gather_limit = zero.allgather_bucket_size if whole_after_step else zero.reduce_bucket_size
        step_limit = zero.sub_group_size if zero.offload_optimizer.device != "none" else gather_limit
        self._limit = max(1, min(zero.reduce_bucket_size, gather_limit, step_limit))
        self._threshold = zero.stage3_param_persistence_threshold
        self._comm, self._policy, self._kept, self._owner = comm, policy, kept, owner

    def divide(self, plan: UnitPlan) -> tuple[list[Named], list[Named]]:
        """Small parameters, which stay whole, and the others."""
        small = [(n, p) for n, p in plan.parameters if p.numel() < self._threshold]
        return small, [(n, p) for n, p in plan.parameters if p.numel() >= self._threshold]

    def buckets(self, name: str, parameters: Iterable[Named], sharding: Sharding) -> list[Bucket]:
        kinds: dict[tuple[torch.dtype, bool], list[Named]] = {}
        for n, p in parameters:
            kinds.setdefault((self._policy.dtype_of(p, p in self._kept), p.requires_grad), []).append((n, p))
        found = []
        for (dtype, _), members in kinds.items():
            for group in split_by_size([p.numel() for _, p in members], self._limit):
                part = [members[i] for i in group]
                found.append(Bucket(name, part, dtype, sharding, self._comm, self._owner, self._policy))
        return found


def _device_of(module: nn.Module) -> torch.device:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
