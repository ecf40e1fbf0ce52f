"""``load_state_dict`` of a sharded model, by hooks on its modules.

Where parameters are not sharded, torch copies the values to the compute copy, which may have less precision than they
have. The hooks then give the values themselves to the master weights. The guard of a sharded parameter turns the copy
into ``Bucket.write`` (full_params.py), which gives master weights the values as they are.

Note [Rounded values]
    Values that were taken from the compute copy may come back (bucket_weights.py, Note [Replaced weights]), others are
    meant as they are: all weights of 1 in an fp32 checkpoint set master weights to 1, not to what is rounded to it.
    Values in the compute dtype may have been taken from it. In a wider dtype they may if all values of the state dict
    that are loaded together are values of the compute dtype, too. Weights of a checkpoint of this package
    are always meant as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common.module_hooks import Hook, hookable_modules, own_parameters
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.lazy_tensor import LazyTensor, part_of

_FIRST = 1024  # elements that are looked at first: one of them shows the precision of most tensors


def install_load_hooks(engine: Engine) -> None:
    """Make ``load_state_dict`` take parts of tensors, and write master weights that the compute copy does not show."""
    if engine.plan.parts:
        _install_cutting(engine)
    loads = Loads(engine)
    if any(_differs(bucket) for bucket in engine.buckets):
        engine.handles += loads.hook()
    engine.is_rounded = loads.is_rounded


def _differs(bucket: Bucket) -> bool:
    """True if master weights, if there are any, are not what the (unsharded) compute copy, or a write, shows."""
    plan = bucket.weights.plan
    return plan.master != plan.dtype if bucket.sharding.params else not plan.master_is_view


class Loads:
    """The loads of state dicts into the modules of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[nn.Module, tuple[dict[str, Any], str]] = {}  # -> state dict and prefix of names in it
        # Modules whose ``load_state_dict`` is running, one inside of the other, and whether wide values are rounded.
        self._called: list[tuple[nn.Module, bool]] = []

    def hook(self) -> list[Any]:
        """Hook all modules; returns the handles."""
        handles: list[Any] = []
        for _, module in hookable_modules(self._engine.root):
            handles.append(module.register_load_state_dict_pre_hook(Hook(self._begin)))
            handles.append(module.register_load_state_dict_post_hook(Hook(self._end)))
        return handles

    def is_rounded(self, bucket: Bucket, value: Tensor) -> bool:
        """True if ``value``, for a parameter of ``bucket``, may be rounded. See Note [Rounded values]."""
        if isinstance(value, LazyTensor) or not (self._engine.replaced.keeps and bucket.weights.is_rounded_in_copy):
            return False
        if value.dtype == bucket.dtype:
            return True
        return self._called[-1][1] if self._called else _has_values_of(value, bucket.dtype)

    def _places(self, module: nn.Module) -> Iterator[tuple[str, Bucket, int]]:
        for name, parameter in own_parameters(module):
            if (place := self._engine.owner.get(id(parameter))) is not None:
                yield name, *place

    def _begin(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if not prefix or not self._called:
            # An error may have ended an earlier load of this module.
            self._called = list(takewhile(lambda known: known[0] is not module, self._called))
            self._called.append((module, self._are_rounded(module, state, prefix)))
        self._running[module] = state, prefix
        for name, bucket, index in self._places(module):
            value = state.get(prefix + name)
            if value is not None and not isinstance(value, Tensor) and torch.overrides.is_tensor_like(value):
                state[prefix + name] = read_into(value, bucket, index)

    def _are_rounded(self, module: nn.Module, state: dict[str, Any], prefix: str) -> bool:
        """True if all wide values of a state dict for ``module`` are values of the compute dtype."""
        found = False
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value: Any = state.get(prefix + name)
            place = self._engine.owner.get(id(parameter))
            # Others than plain tensors may be distributed, or read from a file.
            if place is None or type(value) not in (Tensor, nn.Parameter) or value.dtype == place[0].dtype:
                continue
            if place[0].weights.is_rounded_in_copy:
                found = True
                if not _has_values_of(value, place[0].dtype):
                    return False
        return found

    def _end(self, module: nn.Module, incompatible: Any) -> None:
        state, prefix = self._running.pop(module, ({}, "no load has begun"))
        changed = set[Bucket]()
        for name, bucket, index in self._places(module):
            value, parameter = state.get(prefix + name), bucket.params[index]
            if not isinstance(value, Tensor) or bucket.sharding.params or bucket.weights.plan.master_is_view:
                continue
            if bucket.edits.are_adopted and bucket.storage.is_cut and bucket.group.mesh.shards < bucket.group.size:
                # Only rank 0 may load, and other ranks repeat its shard: they get what the compute copy shows.
                continue
            if not parameter.shape and value.shape == (1,):
                value = value[0]
            if value.shape == parameter.shape:
                rounded = self.is_rounded(bucket, value)
                bucket.take_loaded(index, self._engine.parts.cut(parameter, value), rounded)
                changed.add(bucket)
        for bucket in changed:
            bucket.put_away()
        self._called = list(takewhile(lambda known: known[0] is not module, self._called))
        if not self._called:
            self._running.clear()  # of loads that an error has ended


def read_into(value: Any, bucket: Bucket, index: int) -> Tensor:
    """The tensor for which ``value`` stands, an object with ``__torch_function__`` that reads it when it is used.

    Its shape is that of parameter ``index``, to which it is copied.
    """
    dtype = getattr(value, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else bucket.weights.precision
    with torch.no_grad():
        return torch.empty(bucket.params[index].shape, dtype=dtype, device=bucket.group.device).copy_(value)


def _has_values_of(value: Tensor, dtype: torch.dtype) -> bool:
    """True if all elements of ``value`` are values of ``dtype``, which has less precision."""
    if not value.is_floating_point() or not dtype.is_floating_point:
        return False
    flat = value.detach().reshape(-1)
    return all(bool((part == part.to(dtype)).all()) for part in (flat[:_FIRST], flat[_FIRST:]))


def _install_cutting(engine: Engine) -> None:
    """Make ``load_state_dict`` take the parameters' parts of full tensors."""
    every = ((p, span.spec) for b in engine.buckets for p, span in zip(b.params, b.layout.spans, strict=True))
    specs = {id(p): spec for p, spec in every if p.shape == torch.Size(spec.shape)}  # others cut by themselves
    for _, module in hookable_modules(engine.root):
        owned = {name: specs[id(p)] for name, p in own_parameters(module) if id(p) in specs}
        if not (parts := {name: spec for name, spec in owned.items() if not spec.is_whole}):
            continue

        def cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, parts: Any = parts) -> None:
            for name, spec in parts.items():
                value = state.get(prefix + name)
                if isinstance(value, Tensor) and tuple(value.shape) == spec.global_shape:
                    state[prefix + name] = part_of(value, spec.local_box)

        engine.handles.append(module.register_load_state_dict_pre_hook(Hook(cut)))
