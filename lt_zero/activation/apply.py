"""Activation checkpointing of modules: forward saves only its inputs, and backward runs it again.

``forward`` is replaced on the module itself, so names, classes, state dicts and hooks stay as they are. The engine's
hooks run around it: weights are gathered when backward reaches the module's output, before the recomputation, and the
graph is the one that forward built, so leases and gradients work as without checkpointing (engine.py, Notes [Leases]
and [Recomputation]). Units inside a checkpointed module gather during its recomputation. A module that is pickled or
deep-copied while it trains gets its original forward.

A module that is traced (``block.compile()``, or part of something compiled) leaves the recomputation to the compiler.
The compiler then also keeps the saved inputs, so neither the store nor ``around`` sees them. A block that was replaced
by ``torch.compile(block)`` is checkpointed from outside in mode full: its compiled forward is called again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lt_zero.activation import selective
from lt_zero.activation.find import Found, find_modules
from lt_zero.activation.state import Caches, Objects, State
from lt_zero.activation.stores import Store
from lt_zero.common.compat import compiled_module
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.config.blocks import ActivationCheckpointing

Around = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class How:
    """Settings that all checkpointed modules of a model share.

    Attributes:
        keeps_products: outputs of matrix products and attention are not recomputed.
        store: stores saved inputs; None: they stay on the device.
        around: context entered around each forward, with the module's name.
        recompute: the same for each recomputation, which may end by an exception.
        caches: removes key-value caches from the arguments.
    """

    keeps_products: bool
    store: Store | None
    around: Around
    recompute: Around
    caches: Caches


class Checkpointing:
    """The checkpointed modules of one model.

    Attributes:
        kind: ``full`` or ``selective``.
        found: the modules.
        store: stores their saved inputs; None: they stay on the device.
    """

    def __init__(self, kind: str, found: Found, how: How) -> None:
        self.kind, self.found, self.store = kind, found, how.store
        for _, module in found.chosen:
            if isinstance(vars(module).get("forward"), _Checkpointed):
                raise RuntimeError(f"A {type(module).__name__} is checkpointed already. Detach its engine first.")
        self._forwards = [_Checkpointed(name, module, how) for name, module in found.chosen]

    def __str__(self) -> str:
        return f"activation checkpointing: {self.kind}, {self.found}"

    def remove(self) -> None:
        """Restore the original forward of all modules."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def apply(
    root: nn.Module,
    block: ActivationCheckpointing,
    store: Store | None = None,
    around: Around | None = None,
    recompute: Around | None = None,
    tells: bool = True,
) -> Checkpointing:
    """Checkpoint modules of ``root`` until ``remove`` is called on the returned handle.

    Args:
        root: the model.
        block: the configuration; its ``mode`` is not none.
        store: stores inputs between forward and backward.
        around: context entered around each forward and each recomputation, with the module's name.
        recompute: replaces ``around`` for recomputations.
        tells: whether this rank warns.

    Raises:
        ConfigError: a name matches no module, or there is nothing to checkpoint.
    """
    first = around or (lambda name: nullcontext())
    how = How(block.mode == "selective", store, first, recompute or first, Caches(tells))
    found = find_modules(root, block)
    if how.keeps_products:  # trace compiled modules, so that the policy applies inside their graphs
        found = Found(tuple((name, compiled_module(module)) for name, module in found.modules), found.every)
    return Checkpointing(block.mode, found, how)


class _Checkpointed:
    """Replaces the forward of one module. It has no ``__dict__``, since module attributes are searched for tensors."""

    __slots__ = ("__wrapped__", "_active", "_how", "_module", "_name", "_state", "_theirs")

    def __init__(self, name: str, module: nn.Module, how: How) -> None:
        self.__wrapped__: Callable[..., Any] = module.forward
        self._name, self._module, self._how, self._active = name, module, how, True
        self._state = State(module)
        self._theirs = vars(module).get("forward")  # an instance attribute, as torch.compile sets one
        vars(module)["forward"] = self

    def remove(self) -> None:
        self._active = False  # a wrapper that was installed later keeps calling this object
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._theirs is not None:
                vars(self._module)["forward"] = self._theirs

    def __reduce__(self) -> Any:  # also used by deepcopy
        return operator.getitem, ((self.__wrapped__,), 0)  # copied as the plain method of the copied module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        args, kwargs = self._how.caches.without(self.__wrapped__, args, kwargs)
        inputs = _Inputs(args, kwargs)
        if not inputs.need_grad and not any(p.requires_grad for p in self._module.parameters()):
            return self.__wrapped__(*args, **kwargs)  # frozen layers before the first trainable one
        run = _Run(self, inputs, args, kwargs)
        contexts = selective.contexts if self._how.keeps_products else noop_context_fn
        store = self._how.store
        with saved_tensors_hooks(store.pack, store.unpack) if store is not None else nullcontext():
            return checkpoint(run, *inputs.take(), use_reentrant=False, preserve_rng_state=True, context_fn=contexts)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(*values: Any) -> Any:
            return self.__wrapped__(*values, **kwargs)

        if self._how.keeps_products:
            return checkpoint(run, *args, use_reentrant=False, context_fn=selective.traced_contexts)
        return checkpoint(run, *args, use_reentrant=False)


class _Inputs:
    """Arguments of one call without the saved tensors, each of which is saved once, so identities are preserved."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors: list[Tensor] = []
        self._order: list[int] = []
        indices: dict[int, int] = {}

        def take(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Parameter):
                return tensor  # never saved: the engine may release and gather it
            index = indices.setdefault(id(tensor), len(self._tensors))
            if index == len(self._tensors):
                self._tensors.append(tensor)
            self._order.append(index)
            return _NOTHING

        self._args, self._kwargs = map_tensors(args, take), map_tensors(kwargs, take)
        self.need_grad = any(tensor.requires_grad for tensor in self._tensors)

    def take(self) -> list[Tensor]:
        """The saved tensors; this object drops its references."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def fill(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors put back."""
        indices = iter(self._order)

        def put(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, Parameter) else tensors[next(indices)]

        return map_tensors(self._args, put), map_tensors(self._kwargs, put)


_NOTHING = torch.empty(0)


class _Run:
    """The function that torch calls in forward and again in backward; restores what torch's checkpoint does not."""

    def __init__(self, forward: _Checkpointed, inputs: _Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward, self._inputs = forward, inputs
        self._first: list[Any] = [args, kwargs]  # the caller's own containers: forward may write to them
        self._state, self._objects = forward._state.before_forward(), Objects((args, kwargs))
        self._dtype = torch.get_default_dtype()  # precision plugins and fp32 modules set it around forward only

    def __call__(self, *tensors: Tensor) -> Any:
        forward = self._forward
        if self._first:
            args, kwargs = self._first
            self._first.clear()
            with forward._how.around(forward._name):
                output = forward.__wrapped__(*args, **kwargs)
            self._state.after_forward()
            self._objects.after_forward()
            return output
        args, kwargs = self._inputs.fill(tensors)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with self._state.again(), self._objects.again(), forward._how.recompute(forward._name):
                return forward.__wrapped__(*args, **kwargs)
        finally:
            torch.set_default_dtype(dtype)
