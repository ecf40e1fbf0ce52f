"""A unit of the model, and its connection to autograd: hooks on modules, output nodes and inputs.

Note [Aliases]
    The hook that ends a unit's backward is on a view of each input, not on the input: a tensor that feeds every block
    (a conditioning vector) gets its full gradient only at the very end, its alias when this block is done.
    Tensors in objects cannot be replaced, and the gradient of keys in a cache may need other layers' backward first.
    So these are hooked only if no other input needs a gradient.
    An alias that the module returns (T5's blocks pass on their relative bias) is not hooked as an output: its gradient
    is not the beginning of the module's backward, and comes after its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter

from lt_zero.common.compat import view_base
from lt_zero.common.module_hooks import Hook
from lt_zero.common.tensor_tree import ReplacedTensors, iter_tensors
from lt_zero.common.timing import NOTHING, Span
from lt_zero.engine.bucket import Bucket, State
from lt_zero.engine.guard import is_guarded

F = TypeVar("F", bound=Callable[..., Any])


def _uncompiled(hook: F) -> F:
    """Make torch.compile break the graph at a hook instead of tracing the engine."""
    disabled: F = torch.compiler.disable(hook)
    return disabled


class Unit:
    """A module whose buckets are gathered and released together."""

    def __init__(self, name: str, module: nn.Module, buckets: list[Bucket], needs_weights: bool) -> None:
        self.name, self.module, self.buckets = name, module, buckets
        self.sharded = [b for b in buckets if b.sharding.params]
        self.numel = sum(b.layout.numel for b in self.sharded)
        self.backward_needs_weights = needs_weights
        self.keep = False
        self.leases = 0
        self.awaited = 0  # forwards since the last step without a backward yet
        self.visited = False  # took a lease in this backward
        self.calls: list[Call] = []  # running forwards, innermost last

    @property
    def resident(self) -> bool:
        return all(b.state is not State.RELEASED for b in self.sharded)


class Call:
    """One forward of a unit, until its backward."""

    def __init__(self, range: Span = NOTHING) -> None:
        self.range = range  # in a profiler, while it runs
        self.inputs: ReplacedTensors | None = None  # the arguments with aliases, while it runs
        self.held = False  # it has a lease
        self.done = False  # its backward has ended


def hook_nodes(output: Any, fn: Callable[[], None], given: ReplacedTensors | None = None) -> None:
    """Call ``fn`` before autograd runs the nodes that made the tensors in ``output``.

    Unlike tensor hooks, node hooks survive a caller that adds to the output in place. The in-place history of a view is
    that of its base, so the base's node is hooked too. Aliases in ``given`` are not hooked, see Note [Aliases].
    """

    @_uncompiled
    def hook(grads: Any) -> None:
        fn()

    seen: set[Any] = set()
    for tensor in iter_tensors(output):
        if given is not None and given.is_unmodified(tensor):
            continue
        base = view_base(tensor)
        for node in (tensor.grad_fn, base.grad_fn if base is not None else None):
            if node is not None and node not in seen:
                seen.add(node)
                node.register_prehook(hook)


_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def side_outputs(module: nn.Module) -> list[Any]:
    """Values that the forward stored in attributes of the module or its children (auxiliary losses)."""
    return [value for m in module.modules() for key, value in vars(m).items() if key not in _MODULE_INTERNALS]


def shares_storage(tensor: Tensor, flat: Tensor) -> bool:
    """Whether ``tensor`` is a view of ``flat``."""
    if is_guarded(tensor) or tensor.layout is not torch.strided or tensor.device != flat.device:
        return False
    return tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def hook_inputs(args: Any, kwargs: Any, fn: Callable[[], None]) -> ReplacedTensors:
    """The arguments with aliases of inputs that need a gradient; ``fn`` runs when these gradients are there.

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
        inputs[0].register_hook(lambda grad: fn())
    elif inputs:
        register_multi_grad_hook(inputs, lambda grads: fn(), mode="all")
    return copied


def hook_bare_parameters(root: nn.Module, owned: Container[int], fn: Callable[[], None]) -> list[Any]:
    """Call ``fn`` before the gradient of a parameter that belongs to no layer is added to ``p.grad``.

    Used outside of every layer (in ``training_step``), it has no hooked output node before it: its gradient may be the
    first that ``loss.backward()`` computes. There are few of them, so there are O(units) hooks.
    """
    handles = []
    composite = [m for m in root.modules() if any(True for _ in m.children())]
    for parameter in dict.fromkeys(p for m in composite for p in m.parameters(recurse=False)):
        if id(parameter) in owned and parameter.is_floating_point():
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen parameter cannot be hooked, and may be unfrozen later
            handles.append(parameter.register_hook(lambda grad: fn()))
            parameter.requires_grad_(trainable)
    return handles


def install_unit_hooks(
    unit: Unit, before: Callable[[Unit, Any, Any], Any], after: Callable[[Unit, Any], None]
) -> list[Any]:
    """Call ``before(unit, args, kwargs)`` before the unit's forward, and ``after(unit, output)`` after it.

    A shallow copy of the module shares the hooks and ignores them.
    """

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return before(unit, args, kwargs) if module is unit.module else None

    def post(module: nn.Module, args: Any, output: Any) -> None:
        if module is unit.module:
            after(unit, output)

    handle = unit.module.register_forward_pre_hook(Hook(pre), prepend=True, with_kwargs=True)
    return [handle, unit.module.register_forward_hook(Hook(post))]


def install_root_hooks(root: nn.Module, enter: Callable[[], None], leave: Callable[[Any], None]) -> list[Any]:
    """Call ``enter()`` before a forward of ``root`` and ``leave(output)`` after it, also after a failed one."""

    def pre(module: nn.Module, args: Any) -> None:
        if module is root:
            enter()

    def post(module: nn.Module, args: Any, output: Any) -> None:
        if module is root:
            leave(output)

    handle = root.register_forward_pre_hook(Hook(pre), prepend=True)
    return [handle, root.register_forward_hook(Hook(post), always_call=True)]


def refuse_reentrant_checkpoint(unit: str) -> None:
    """Raise if the forward that is running inside backward belongs to a re-entrant activation checkpoint."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise RuntimeError(
                f"Module {unit!r} is recomputed by torch.utils.checkpoint with use_reentrant=True, which runs a "
                "backward inside backward and hides when gradients are complete. Pass use_reentrant=False."
            )
        frame = frame.f_back


def refuse_ungathered(unit: Unit, late: set[Bucket]) -> None:
    """Raise if gradients arrived while the unit's weights were released; ``late`` ones came in an earlier backward."""
    for bucket in unit.sharded:
        if bucket.state is State.RELEASED and bucket.has_grads() and bucket not in late:
            raise RuntimeError(
                f"Module {unit.name!r} ({type(unit.module).__name__}) received gradients through a tensor that no hook "
                "saw, so its weights were not gathered for backward. Return such tensors from forward (in tuples, "
                "lists, dicts, dataclasses or objects with attributes) or keep them as attributes of the module."
            )
