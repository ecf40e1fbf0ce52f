"""Initialization of modules that were built on the meta device.

Note [Who initializes a module]
    A module on the meta device is initialized by its ``reset_parameters()``, as by torch's and Lightning's FSDP. If the
    script has set it on the object, or a class outside of torch.nn defines it, that is all. Otherwise, of Linear for
    example, ``_init_weights(module)`` of the module itself or of the nearest parent that has it follows, as in nanoGPT
    and transformers: a model that calls ``self.apply(self._init_weights)`` in its constructor has lost the effect.

    Only what is on the meta device gets values. What has some already (a parameter whose module has a meta buffer
    beside it, modules inside of the module) is set aside meanwhile: it may be loaded, or in a bucket.

    What counts is what the module has afterwards: a tensor that was written to, or another one that was assigned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lt_zero.common.compat import is_wrapper, replace_tensor, version_of
from lt_zero.common.module_hooks import is_compiled_by_jit
from lt_zero.core.engine.guard import is_guarded
from lt_zero.core.engine.parts import Parts


class ModuleInitializer:
    """Initializes modules on the meta device, one by one. See Note [Who initializes a module].

    Args:
        modules: all of the model, by path.
        device: of the values.
        saved: the parameters whose values are read.
        parts: as for ``lt_zero.shard``.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[Parameter, Callable[[], Tensor]],
        parts: Parts,
    ) -> None:
        self._modules = modules
        self._device = device
        self._saved = saved
        self._parts = parts

    @torch.no_grad()
    def fill(self, path: str, module: nn.Module, fresh: Collection[Parameter]) -> None:
        """Initialize the own meta buffers of ``module``, and those of its own parameters that are in ``fresh``.

        Raises:
            RuntimeError: its parameters or buffers were not filled, or its parameters are others afterwards.
        """
        parameters = dict(module._parameters)
        buffers = dict(module._buffers)
        children = list(module._modules.values())
        told = f"{path or 'the root module'} ({type(module).__name__})"
        unset: dict[str, _Placeholder] = {}
        stand_ins: dict[Parameter, Parameter] = {}
        if is_compiled_by_jit(module):
            raise RuntimeError(
                f"{told} was built on the meta device and is compiled by torch.jit, whose code refers to its tensors, "
                "so they cannot be replaced. Build it without `empty_init=True`."
            )
        with _children_aside(module):
            for name, parameter in parameters.items():
                if parameter is None or is_lazy(parameter):
                    continue
                is_part = self._parts.joins and is_wrapper(parameter) and not is_guarded(parameter)
                if parameter not in fresh or is_part:
                    if parameter not in stand_ins:
                        stand_ins[parameter] = self._stand_in(parameter, is_part)
                    module._parameters[name] = stand_ins[parameter]
                    if parameter in fresh and parameter.is_meta:
                        unset[name] = _Placeholder(stand_ins[parameter])
                elif parameter.is_meta:
                    replace_tensor(parameter, Parameter(self._unset_like(parameter), parameter.requires_grad))
                    unset[name] = _Placeholder(parameter)
            for name, buffer in buffers.items():
                if buffer is None or is_lazy(buffer):
                    continue
                if buffer.is_meta:
                    replace_tensor(buffer, self._unset_like(buffer))
                    unset[name] = _Placeholder(buffer)
                else:
                    module._buffers[name] = buffer.clone()
            try:
                self._initialize(path, module)
            finally:
                found = {**module._parameters, **module._buffers}
                given = dict(module._parameters)
                module._parameters.clear()
                module._parameters.update(parameters)
                had_values = ((name, buffer) for name, buffer in buffers.items() if name not in unset)
                module._buffers.update((name, buffer) for name, buffer in had_values if buffer is not None)
        if left := [name for name, placeholder in unset.items() if not placeholder.is_filled(found.get(name))]:
            raise RuntimeError(
                f"{told} was built on the meta device and {', '.join(map(repr, left))} got no values: give the class a "
                "`reset_parameters()` that fills its parameters and buffers, or build it without `empty_init=True`."
            )
        _check_same_parameters(told, parameters, given, children, module)
        for name, parameter in parameters.items():
            now = given.get(name)
            if parameter is None or now is None or parameter not in fresh:
                continue
            if parameter in stand_ins:  # this rank has a part of it
                # A module that shares it may have filled it already, and this one may leave that.
                if name in unset or _has_values(now):
                    replace_tensor(parameter, self._parts.place(parameter, now))
            elif now is not parameter:
                parameter.data = now.detach().to(parameter.device, parameter.dtype)
                vars(parameter).update(vars(now))
        for name in unset.keys() - parameters.keys():
            buffer = module._buffers[name]
            before = buffers[name]
            if buffer is not None and buffer.device != self._device:
                module._buffers[name] = buffer.to(self._device)
            if before is not None and buffer is not before:
                # Nobody has set the values of the old one, and another module may share it: it has its own turn.
                replace_tensor(before, torch.empty_like(before, device="meta"))

    def _initialize(self, path: str, module: nn.Module) -> None:
        """Call what initializes ``module``. See Note [Who initializes a module]."""
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
            if _resets_itself(module):
                return
        parents = ["", *accumulate(path.split("."), "{}.{}".format)]
        # Ask the module itself, then its parents from the nearest to the root.
        for parent in reversed(parents):
            initializer = getattr(self._modules[parent], "_init_weights", None)
            if callable(initializer):
                initializer(module)
                return

    def _unset_like(self, like: Tensor) -> Tensor:
        """A tensor of the shape and dtype of ``like``, filled with a sentinel that marks elements as uninitialized."""
        if like.dtype == torch.bool:  # a byte that no operation writes
            return torch.full(like.shape, 0xFF, dtype=torch.uint8, device=self._device).view(torch.bool)
        return torch.full(like.shape, _unset_value(like.dtype), dtype=like.dtype, device=self._device)

    def _stand_in(self, parameter: Parameter, is_part: bool) -> Parameter:
        """A parameter of the shape of all of ``parameter``, with its values where it has them in memory."""
        readable = not (is_part or parameter.is_meta or is_guarded(parameter) or parameter in self._saved)
        value = parameter.detach().clone() if readable else self._unset_like(parameter)
        made = Parameter(value, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        return made


class _Placeholder:
    """A tensor in the place of one on the meta device, before its module is initialized."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def is_filled(self, now: Tensor | None) -> bool:
        """True if ``now``, which the module has in this place, is another tensor with values, or was written to."""
        if now is None or now.is_meta:
            return False
        if now is not self._tensor or _has_values(now):
            return True
        # Any integer may be wanted. NaN that a function has multiplied was written to as well, and is no value.
        return not (now.is_floating_point() or now.is_complex()) and version_of(now) != self._version


def _unset_value(dtype: torch.dtype) -> float:
    """The value of elements that were not initialized; NaN if there is one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max


def _has_values(tensor: Tensor | None) -> bool:
    """True if ``tensor`` has an element that is not as ``_unset_like`` made it, or no elements."""
    if tensor is None:
        return False
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.bool:
        return not bool((tensor.detach().contiguous().view(torch.uint8) == 0xFF).all())
    unset = _unset_value(tensor.dtype)
    return not bool((tensor.isnan() if math.isnan(unset) else tensor == unset).all())


def _resets_itself(module: nn.Module) -> bool:
    """True if a script says what ``reset_parameters`` of ``module`` does, and not torch."""
    if "reset_parameters" in vars(module):
        return True
    defining = next((cls for cls in type(module).__mro__ if "reset_parameters" in vars(cls)), None)
    return defining is not None and not defining.__module__.startswith(("torch.nn.", "torch.ao."))


@contextmanager
def _children_aside(module: nn.Module) -> Iterator[None]:
    """Context in which the modules inside of ``module`` have tensors on the meta device in the place of their values.

    So a function that initializes ``module`` changes nothing that has values already, or is in a bucket.
    """
    own = {*module._parameters.values(), *module._buffers.values()}
    empty: dict[Tensor, Tensor] = {}
    aside: list[tuple[dict[str, Any], str, Tensor]] = []
    inside = module.modules()
    next(inside)
    for sub in inside:
        tables: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or is_lazy(tensor) or tensor.is_meta or tensor in own:
                    continue
                if tensor not in empty:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, Parameter)
                    empty[tensor] = Parameter(made, tensor.requires_grad) if is_parameter else made
                aside.append((table, name, tensor))
                table[name] = empty[tensor]
    try:
        yield
    finally:
        for table, name, tensor in aside:
            table[name] = tensor


def _check_same_parameters(
    told: str,
    before: Mapping[str, Parameter | None],
    after: Mapping[str, Parameter | None],
    children: Sequence[nn.Module | None],
    module: nn.Module,
) -> None:
    """Raise RuntimeError if an initializer has made parameters for which no bucket was planned, or of other shapes."""
    added = [name for name, parameter in after.items() if parameter is not None and before.get(name) is None]
    known = set(children)
    replaced = [(n, m) for n, m in module._modules.items() if m is not None and m not in known]
    added += [f"{name}.{own}" for name, child in replaced for own, _ in child.named_parameters()]
    if added:
        raise RuntimeError(
            f"{told}: its initialization registers {', '.join(map(repr, added))}, which the module did not have when "
            "it was sharded. Register parameters and modules in the constructor, and fill or assign them in "
            "`reset_parameters()`."
        )
    for name, parameter in before.items():
        now = after.get(name)
        if parameter is not None and now is not None and now.shape != parameter.shape:
            raise RuntimeError(
                f"{told}: its initialization assigns {name!r} the shape {tuple(now.shape)}, and the module was built "
                f"with {tuple(parameter.shape)}. Give it that shape in the constructor, too."
            )
