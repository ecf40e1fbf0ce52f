"""Hooks on modules, which are not copied with these, and on the autograd nodes of their inputs and outputs.

Note [Aliases]
    The hook that ends a unit's backward is on a view of each input, not on the input: a tensor that feeds every block
    (a conditioning vector) gets its full gradient only at the very end, its alias when this block is done.
    Tensors in objects cannot be replaced, and the gradient of keys in a cache may need other layers' backward first.
    So these are hooked only if no other input needs a gradient.
    An alias that the module returns (T5's blocks pass on their relative bias) is not hooked as an output: its gradient
    is not the beginning of the module's backward, and comes after its end. If a call returns nothing else (no expert
    had a token), ranks whose calls used weights gather in backward, so this one does when that gradient is there.

Note [Hooks and torch.compile]
    ``block.compile()`` and ``torch.compile(block)`` compile the forward: torch calls the hooks of that block outside of
    the graph, and Dynamo would make graphs of the hooks themselves, which ``never_a_graph`` prevents. The hooks of
    modules inside of what is compiled are traced with it. A ``Hook`` breaks the graph there, as it has to run. One with
    a ``Preparation`` is left out of graphs once that is made: all that the hook does is done before the forward, or at
    the end of backward, for all modules at once. Then a graph need not end at every module. Whether it is made is an
    attribute that the trace reads, so torch compiles the code again where it is not.
    A hook on all modules of the process concerns few of them: graphs leave it out for those that have no mark.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter

from lt_zero.common.compat import evaluated_in_tracing, never_a_graph, view_base
from lt_zero.common.tensor_tree import ReplacedTensors, iter_tensors


class Preparation:
    """Work of a model's hooks before the forwards of its modules, done for all of them at once.

    Graphs of torch.compile leave out these hooks while it is made. See Note [Hooks and torch.compile].

    Args:
        call: does it. It is only called in processes that have such graphs.

    Attributes:
        made: it is done, for the weights that there are.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.made = False
        self._call = call
        _preparations.add(self)

    def make(self) -> None:
        """Do it, at the beginning of a forward of the model."""
        self.made = True
        if _leaves_out:
            self._call()

    def forget(self) -> None:
        """Modules that are called from here on may find other weights."""
        self.made = False


_preparations: WeakSet[Preparation] = WeakSet()
_leaves_out: list[bool] = []  # not empty: a graph of this process leaves out a hook


@evaluated_in_tracing
def _leave_out() -> bool:
    """Note that a graph leaves out a hook; always True.

    Graphs run again where nothing is traced, also for other models with the same code. So from now on every preparation
    is done when it is made; those that count as made already are done here.
    """
    if not _leaves_out:
        _leaves_out.append(True)
        for preparation in list(_preparations):
            if preparation.made:
                preparation.make()
    return True


# Torch's error says it where a graph has to be whole: in a strict export, and with fullgraph=True.
_NO_GRAPH = (
    "it is a hook of lt_zero, and gathers weights. To export the module, call `torch.export.export(module, ..., "
    "strict=False)` inside of `with lt_zero.gathered(module):` on every rank, or load what "
    "`trainer.strategy.export(path)` writes into a new module. To compile it, leave out `fullgraph=True`"
)


class Hook:
    """A function that is called as a hook of a module.

    In a pickled or deep-copied module it is a no-op, as it refers to the engine of the original. For torch.compile see
    Note [Hooks and torch.compile].

    Args:
        call: the function.
        preparation: does the same, so that graphs leave the hook out; None: graphs break at it.
        mark: an attribute that only modules for which the hook does something have, or have as not None; None: the hook
            is for all.
    """

    __slots__ = ("__weakref__", "_call", "_mark", "_preparation")

    def __init__(
        self, call: Callable[..., Any], preparation: Preparation | None = None, mark: str | None = None
    ) -> None:
        self._call: Callable[..., Any] = torch.compiler.disable(call, reason=_NO_GRAPH)
        self._preparation = preparation
        self._mark = mark

    @never_a_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # False where this is not inside of a graph
            # What the trace reads of the module is a guard: with an attribute, equal modules still share a graph.
            if self._mark is not None and getattr(args[0], self._mark, None) is None:
                return None
            prepared = self._preparation is not None and self._preparation.made
            if prepared and _leave_out():
                return None
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # torch.jit.script is the only one that needs it
            raise AttributeError(
                "torch.jit.script cannot compile a module that lt_zero has sharded, as it has hooks. Script a new "
                "module with the weights that `lt_zero.export` writes, or use torch.compile."
            )
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        return operator.getitem, ((no_hook,), 0)


def no_hook(*args: Any, **kwargs: Any) -> None:
    """The no-op that replaces a hook in a copy of its module."""


def hookable_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside of ``root``, itself included, with their names, except those that torch.jit has compiled.

    Compiled modules take no hooks, and call each other in C++. Python code calls the outermost one only.
    """
    return ((name, module) for name, module in root.named_modules() if module is root or not is_compiled_by_jit(module))


def own_parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """The parameters for which ``module`` is the innermost one that takes hooks, under each of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, child in module.named_children():
        if is_compiled_by_jit(child):
            yield from child.named_parameters(name, remove_duplicate=False)


def is_compiled_by_jit(module: nn.Module) -> bool:
    """True if torch.jit has scripted or traced ``module``, or its class is a ``torch.jit.ScriptModule``."""
    return isinstance(module, torch.jit.ScriptModule)


def buffer_of(module: nn.Module, name: str) -> Tensor | None:
    """The own buffer ``name`` of a module; None if there is none. The tables of compiled modules are no dicts."""
    return module._buffers[name] if name in module._buffers else None  # noqa: SIM401


class ProcessLocal:
    """Mixin for objects bound to this process: copies contain None in their place."""

    def __reduce__(self) -> Any:
        return type(None), ()


def hook_forward(
    module: nn.Module,
    before: Callable[[nn.Module, Any, Any], Any],
    after: Callable[[nn.Module, Any, Any], None],
    preparation: Preparation | None = None,
) -> list[Any]:
    """Call ``before(called, args, kwargs)`` before the module's forward, and ``after(called, args, output)`` after it.

    ``after`` is called after an exception, too: a caller may catch it and take an output from it. ``called`` is another
    module than this in a shallow copy of it, which shares the hooks. ``preparation``: as for ``Hook``.
    """
    handle = module.register_forward_pre_hook(Hook(before, preparation), prepend=True, with_kwargs=True)
    return [handle, module.register_forward_hook(Hook(after, preparation), always_call=True)]


def hook_nodes(outputs: Iterable[Tensor], fn: Callable[[Any], None], given: ReplacedTensors | None = None) -> bool:
    """Call ``fn(grads)`` before autograd runs the nodes that made ``outputs``; returns whether there are any.

    Unlike tensor hooks, node hooks survive a caller that adds to the output in place. The in-place history of a view is
    that of its base, so the base's node is hooked too. Aliases in ``given`` are not hooked, see Note [Aliases].
    """
    seen: set[Any] = set()
    for tensor in outputs:
        if given is not None and given.is_unmodified(tensor):
            continue
        base = view_base(tensor)
        for node in (tensor.grad_fn, base.grad_fn if base is not None else None):
            if node is not None and node not in seen:
                seen.add(node)
                node.register_prehook(fn)
    return bool(seen)


def hook_inputs(args: Any, kwargs: Any, fn: Callable[[Any], None]) -> ReplacedTensors:
    """The arguments with aliases of inputs that need a gradient; ``fn(grads)`` runs when these gradients are there.

    See Note [Aliases].
    """
    aliases: list[Tensor] = []

    def alias(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or tensor.layout is not torch.strided or isinstance(tensor, Parameter):
            return tensor
        aliases.append(tensor.view_as(tensor))
        return aliases[-1]

    copied = ReplacedTensors((args, kwargs), alias)
    inputs = aliases or [t for t in iter_tensors(copied.value) if t.requires_grad and not isinstance(t, Parameter)]
    # A multi-grad hook refers to the nodes that hold it. The garbage collector finds such a cycle only when nothing
    # else holds the node, so it would free a model's graph by one layer per collection. One input needs none.
    if len(inputs) == 1:
        inputs[0].register_hook(fn)
    elif inputs:
        register_multi_grad_hook(inputs, fn, mode="all")
    return copied


def hook_parameters(parameters: Iterable[Parameter], fn: Callable[[Any], None]) -> list[Any]:
    """Call ``fn(grad)`` before the gradient of a parameter is added to ``p.grad``; returns the handles."""
    handles = []
    for parameter in parameters:
        if parameter.is_floating_point():
            trainable = parameter.requires_grad
            # A frozen parameter cannot be hooked, and may be unfrozen later.
            parameter.requires_grad_(True)
            handles.append(parameter.register_hook(fn))
            parameter.requires_grad_(trainable)
    return handles
