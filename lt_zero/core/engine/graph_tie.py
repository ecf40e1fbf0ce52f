"""The reference from hooks in the graph of a forward to their engine.

Note [Graphs that are kept]
    Hooks of autograd's nodes need the engine until the backward has run, also if the model is out of scope by then. But
    the garbage collector cannot look into a graph. If the model keeps a tensor of it (``self.loss = loss``, auxiliary
    losses), then model -> tensor -> graph -> hook -> engine -> model is a cycle that it never frees, with the process
    groups and threads of the run. So hooks refer to a ``Tie``, which holds the engine until the end of the backward
    that ran them, and from then on only knows it. If that backward retained its graph, the tie goes on to hold: another
    one may come. Parts of a graph that no backward has run, such as an output that is stored and not in the loss, hold
    the engine as long as they are there.

    Every graph refers to the parameters, so their hooks only know the engine. It lives as long as a module with
    parameters of its own does: ``held_by_modules``.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from lt_zero.common.module_hooks import Hook, hookable_modules, no_hook, own_parameters

T = TypeVar("T")


class Tie(Generic[T]):
    """A reference to an engine. See Note [Graphs that are kept].

    Attributes:
        held: the engine, until ``loosen``.
    """

    __slots__ = ("_known", "held")

    def __init__(self, engine: T) -> None:
        self.held: T | None = engine
        self._known = weakref.ref(engine)

    def get(self) -> T:
        """The engine. Errors are those of ``still_there``."""
        return still_there(self._known)

    def loosen(self) -> None:
        """Hold the engine no longer."""
        self.held = None


def still_there(known: weakref.ref[T]) -> T:
    """The object that a weak reference to an engine refers to.

    Raises:
        RuntimeError: it is gone.
    """
    if (engine := known()) is None:
        raise RuntimeError(
            "A backward has reached parameters of a sharded model that is gone, so nothing would reduce their "
            "gradients over the ranks. Keep the model, or what `lt_zero.shard` returned, until it is over."
        )
    return engine


def held_by_modules(engine: object, root: nn.Module) -> list[Any]:
    """Let each module inside of ``root`` that has parameters hold the engine, by a hook that does nothing.

    Returns the handles.
    """
    hook = Hook(partial(no_hook, engine))
    modules = (module for _, module in hookable_modules(root) if any(True for _ in own_parameters(module)))
    return [module.register_load_state_dict_pre_hook(hook) for module in modules]
