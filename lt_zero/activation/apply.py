"""Checkpointed modules: their forward saves its inputs, and runs again in backward for all else that backward needs.

Note [Where it sits]
    ``forward`` is replaced on the module itself, so names, classes, state dicts and hooks stay as they are. The
    engine's hooks run around it: weights are gathered when backward reaches the module's output, before anything is
    recomputed, and the graph is the one that forward made, so leases and gradients come as without checkpointing
    (engine.py, Notes [Leases] and [Recomputation]). Units inside of a checkpointed module gather in its recomputation.

Note [Copies]
    A module that is pickled or deep-copied while it trains gets the ordinary forward.

Note [torch.compile]
    A module that is traced (``block.compile()``, or part of something compiled) hands the recomputation to the
    compiler, which recomputes within its graphs: saved inputs are the compiler's, so neither the store nor ``around``
    see them. ``torch.compile(block)`` in place of the block is checkpointed from outside in mode full: its compiled
    forward is called again.
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
from lt_zero.config.blocks.activation import ActivationCheckpointing

Around = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class How:
    """What all checkpointed modules of a model share.

    Attributes:
        keeps_products: outputs of matrix products and attention are not recomputed.
        store: takes saved inputs; None: they stay where they are.
        around: entered around each forward, with the module's name; recomputation may leave by an exception.
        recompute: the same around each recomputation.
        caches: are kept from them.
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
        found: which they are.
        store: where their saved inputs rest, None: where they were.
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
        """Give all modules their own forward back."""
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
    """Checkpoint modules of ``root`` until the handle that is returned is removed.

    Args:
        root: the model.
        block: which modules, and how; its ``kind`` is not none.
        store: where inputs rest between forward and backward.
        around: entered around each checkpointed forward (and each recomputation) with the module's name.
        recompute: entered around recomputations in place of ``around``.
        tells: this rank warns.

    Raises:
        ConfigError: a name matches nothing, or there is nothing to checkpoint.
    """
    first = around or (lambda name: nullcontext())
    how = How(block.mode == "selective", store, first, recompute or first, Caches(tells))
    found = find_modules(root, block)
    if how.keeps_products:  # what is compiled is traced: the compiler knows what to keep
        found = Found(tuple((name, compiled_module(module)) for name, module in found.modules), found.every)
    return Checkpointing(block.mode, found, how)


class _Checkpointed:
    """Stands in for the forward of one module. Without a ``__dict__``: what modules hold is searched for tensors."""

    __slots__ = ("__wrapped__", "_active", "_how", "_module", "_name", "_state", "_theirs")

    def __init__(self, name: str, module: nn.Module, how: How) -> None:
        self.__wrapped__: Callable[..., Any] = module.forward
        self._name, self._module, self._how, self._active = name, module, how, True
        self._state = State(module)
        self._theirs = vars(module).get("forward")  # what was set on the module itself, as torch.compile does
        vars(module)["forward"] = self

    def remove(self) -> None:
        self._active = False  # whoever replaced forward since keeps calling this
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._theirs is not None:
                vars(self._module)["forward"] = self._theirs

    def __reduce__(self) -> Any:  # for deepcopy, too
        return operator.getitem, ((self.__wrapped__,), 0)  # becomes the method of the copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        args, kwargs = self._how.caches.without(self.__wrapped__, args, kwargs)
        inputs = _Inputs(args, kwargs)
        if not inputs.need_grad and not any(p.requires_grad for p in self._module.parameters()):
            return self.__wrapped__(*args, **kwargs)  # frozen layers before the first that trains
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
    """Arguments of one call, without the tensors that are saved: each once, so what was one object is one again."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors: list[Tensor] = []
        self._order: list[int] = []
        places: dict[int, int] = {}

        def take(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Parameter):
                return tensor  # stays where it is, and may be gathered anew
            place = places.setdefault(id(tensor), len(self._tensors))
            if place == len(self._tensors):
                self._tensors.append(tensor)
            self._order.append(place)
            return _NOTHING

        self._args, self._kwargs = map_tensors(args, take), map_tensors(kwargs, take)
        self.need_grad = any(tensor.requires_grad for tensor in self._tensors)

    def take(self) -> list[Tensor]:
        """The tensors; they are not referred to from here any more."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def fill(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors."""
        places = iter(self._order)

        def put(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, Parameter) else tensors[next(places)]

        return map_tensors(self._args, put), map_tensors(self._kwargs, put)


_NOTHING = torch.empty(0)


class _Run:
    """What torch calls in forward and again in backward, with what its checkpoints do not restore."""

    def __init__(self, forward: _Checkpointed, inputs: _Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward, self._inputs = forward, inputs
        self._first: list[Any] = [args, kwargs]  # the caller's own lists and dicts: he sees what forward puts in there
        self._state, self._objects = forward._state.before_forward(), Objects((args, kwargs))
        self._dtype = torch.get_default_dtype()  # precision plugins and islands set it around forward only

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
