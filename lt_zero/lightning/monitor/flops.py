"""Floating-point operations of one micro-batch, counted by torch's ``FlopCounterMode`` and told apart by module.

Note [Whose operation it is]
    ``FlopCounterMode`` keeps a module open in backward until its inputs have their gradients. One whose inputs need
    none stays open and is charged with what others do; so is one that activation checkpointing left in the middle. Here
    only its totals are read, before and after each operation. In forward an operation belongs to the innermost module
    that runs. In backward it belongs to the autograd node that runs, and nodes are given to modules in forward:
    whenever a module is entered or left, what is new behind the tensors at hand was made by the innermost module.

Note [Recomputation]
    Backward runs with gradients switched off. What runs in it with gradients switched on, or in a module's forward, is
    recomputation (activation checkpointing), which is counted apart. A backward that builds a graph has gradients
    switched on from its first operation.

Note [The first micro-batch]
    is not counted. Under a dispatch mode torch.compile gives up on the code that it is called with, for good, and
    results would be those of eager kernels. Whether there is such code shows in the first micro-batch, so it only is
    watched; if something was compiled, or the graph of the loss has nodes of what was compiled before, nothing is
    counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lt_zero.common.compat import (
    DispatchMode,
    backward_id,
    compiled_frames,
    current_node,
    has_compiled_nodes,
    is_compiled,
)
from lt_zero.common.module_hooks import Hook
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.lightning.monitor.flops_formulas import FORMULAS, is_unseen

ROOT = ""  # the module that is trained, as in ``named_modules``
_OWNER = "lt_zero.module"


@dataclass
class Flops:
    """Floating-point operations; a multiplication and an addition are two."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0  # in backward, once more

    @property
    def model(self) -> int:
        """Without recomputation."""
        return self.forward + self.backward

    def add(self, other: Flops) -> None:
        self.forward += other.forward
        self.backward += other.backward
        self.recomputed += other.recomputed


@dataclass
class Counted:
    """What a micro-batch came to on this rank.

    Attributes:
        own: by the name of a module, without what its children do.
        unseen: operations without a formula, with how often they ran.
    """

    own: dict[str, Flops] = field(default_factory=dict)
    unseen: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> Flops:
        return self.of(ROOT)

    def of(self, name: str) -> Flops:
        """A module with all that is in it."""
        sum_ = Flops()
        for other, flops in self.own.items():
            if name in (ROOT, other) or other.startswith(f"{name}."):
                sum_.add(flops)
        return sum_


class FlopCount:
    """Counts a micro-batch when it is asked to, and costs nothing otherwise.

    ``forward()`` goes around the training step and ``backward()`` around backward, which may also run inside the first.
    See Note [The first micro-batch].

    Attributes:
        flops_per_micro_batch: forward and backward on this rank, without recomputation; None until known, or if it
            cannot be counted.
        counted: more of the same.
        problem: why nothing can be counted.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.flops_per_micro_batch: float | None = None
        self.counted: Counted | None = None
        self.problem: str | None = None
        self.rows: int | None = None  # of the micro-batch that was counted
        self._wanted = self._first_is_over = self._observes = False
        self._compiles = False  # something was compiled before, or in, the first micro-batch
        self._running: Counted | None = None
        self._watch: _Watch | None = None
        self._names: Mapping[nn.Module, str] = {}

    def start(self, new: bool) -> None:
        """A fit begins; ``new``: of another model, for which nothing holds that is known of the last one."""
        if new:
            self._forget()

    def want(self) -> None:
        """Count the next micro-batch."""
        self._wanted = True

    @property
    def wanted(self) -> bool:
        return self._wanted

    def flops_of(self, rows: int) -> float | None:
        """A micro-batch of so many rows, in proportion; None if that is not known."""
        if self.flops_per_micro_batch is None or not self.rows:
            return None
        return self.flops_per_micro_batch * rows / self.rows

    @property
    def flops_per_sample(self) -> float | None:
        return self.flops_of(1)

    def forward(self, root: nn.Module, rows: int | None = None, whole: bool = False) -> AbstractContextManager[object]:
        """Around a training step.

        Args:
            root: the module whose names are used.
            rows: of the micro-batch.
            whole: backward runs inside (manual optimization).
        """
        self._running = None
        if not self._first_is_over:
            self._first_is_over, self._observes, self._compiles = True, True, False
            return self._observed()
        self._observes = False
        if not self._wanted:
            return nullcontext()
        self.problem = self._problem(root)
        if self.problem is not None:
            self._wanted = False
            return nullcontext()
        return self._forward(root, rows, whole)

    @contextmanager
    def _forward(self, root: nn.Module, rows: int | None, whole: bool) -> Iterator[None]:
        self._names = {module: name for name, module in root.named_modules()}
        counted = Counted()
        with self._watched(counted):
            yield
        self._running, self.rows = counted, rows
        if whole:
            self._conclude()

    def backward(self, loss: Tensor) -> AbstractContextManager[object]:
        """Around a backward from ``loss``; one inside of ``forward`` is seen there."""
        if self._running is not None and self._watch is None:
            return self._backward(self._running)
        if not self._observes:
            return nullcontext()
        self._compiles = self._compiles or has_compiled_nodes(loss)
        return self._observed()

    @contextmanager
    def _observed(self) -> Iterator[None]:
        before = compiled_frames()
        yield
        self._compiles = self._compiles or compiled_frames() > before

    @contextmanager
    def _backward(self, counted: Counted) -> Iterator[None]:
        with self._watched(counted):
            yield
        self._conclude()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no part of the model inside of a training step: an optimizer's step."""
        watch = self._watch
        if watch is not None:
            watch.counting = False
        try:
            yield
        finally:
            if watch is not None:
                watch.counting = True

    @contextmanager
    def _watched(self, counted: Counted) -> Iterator[None]:
        with _Watch(counted, self._names) as self._watch:
            try:
                yield
            finally:
                self._watch = None

    def _conclude(self) -> None:
        assert self._running is not None
        self.counted, self._running, self._wanted, self._names = self._running, None, False, {}
        flops, unseen = self.counted.total.model, self.counted.unseen
        if unseen:
            self.problem = f"{', '.join(sorted(unseen))}: without a formula for floating-point operations"
        self.flops_per_micro_batch = float(flops) if flops and not unseen else None

    def _problem(self, root: nn.Module) -> str | None:
        names = [name or type(root).__name__ for name, module in root.named_modules() if is_compiled(module)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"{', '.join(names[:3])}{more}: compiled by torch.compile, whose graphs cannot be looked into"
        if self._compiles:
            return "the model calls functions compiled by torch.compile, whose graphs cannot be looked into"
        return None


class _Watch(DispatchMode):
    """Adds each operation to a module while it is entered. See Note [Whose operation it is].

    Args:
        counted: what to add to.
        names: of the modules.
    """

    def __init__(self, counted: Counted, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.counting = True
        self._counted, self._names = counted, names
        self._stack: list[tuple[str, bool]] = []  # modules that run: name, whether in backward
        self._grows_graph: dict[int, bool] = {}  # by backward
        self._counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        vars(self._counter)["mod_tracker"] = _NoModules()
        registry: dict[Any, Any] = vars(self._counter)["flop_registry"]
        registry.update({packet: partial(self._safely, str(packet), formula) for packet, formula in registry.items()})
        self._open = ExitStack()

    def __enter__(self) -> _Watch:
        for module, name in self._names.items():
            entering = module.register_forward_pre_hook(Hook(partial(self._enter, name)), with_kwargs=True)
            leaving = module.register_forward_hook(Hook(self._leave), always_call=True)
            self._open.callback(entering.remove)
            self._open.callback(leaving.remove)
        self._open.enter_context(self._counter)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._open.close()

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._counter.get_total_flops()
        out = op(*args, **kwargs)
        if self.counting:
            flops = self._counter.get_total_flops() - before
            owner, kind = self._owner()
            if flops:
                found = self._counted.own.setdefault(owner, Flops())
                setattr(found, kind, getattr(found, kind) + flops)
            elif is_unseen(op):
                self._counted.unseen[str(op).removesuffix(".default")] += 1
        return out

    def _safely(self, name: str, formula: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """A formula that does not know such arguments must not end the training."""
        try:
            return formula(*args, **kwargs)
        except Exception:
            if self.counting:
                self._counted.unseen[name] += 1
            return 0

    def _owner(self) -> tuple[str, str]:
        """Whose operation this is, and whether it is forward, backward or recomputed."""
        innermost, in_backward = self._stack[-1] if self._stack else (ROOT, False)
        number = backward_id()
        if number == -1:
            return innermost, "forward"
        grows = self._grows_graph.setdefault(number, torch.is_grad_enabled())  # see Note [Recomputation]
        if in_backward:
            return innermost, "recomputed"
        node = current_node()
        owner = node.metadata.get(_OWNER, ROOT) if node is not None else ROOT
        return owner, "recomputed" if torch.is_grad_enabled() and not grows else "backward"

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._claim((args, kwargs))
        self._stack.append((name, backward_id() != -1))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._claim(output)
        if self._stack:
            self._stack.pop()

    def _claim(self, value: Any) -> None:
        """Give the nodes behind tensors to the innermost module, up to those that belong to one."""
        owner = self._stack[-1][0] if self._stack else ROOT
        nodes: list[Any] = [tensor.grad_fn for tensor in iter_tensors(value) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node is not None and _OWNER not in node.metadata:
                node.metadata[_OWNER] = owner
                nodes += [behind for behind, _ in node.next_functions]


class _NoModules:
    """In place of torch's tracker of modules, whose hooks make ``autograd.grad`` fail for leaves."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...
