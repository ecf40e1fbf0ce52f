"""Floating-point operations of one micro-batch by module, counted with torch's ``FlopCounterMode``.

Note [Attribution to modules]
    ``FlopCounterMode`` keeps a module open in backward until its inputs have their gradients. A module whose inputs
    need none stays open and gets the operations of others, and so does one that activation checkpointing left early.
    So only its totals are used, read before and after each operation. In forward an operation belongs to the innermost
    running module. In backward it belongs to the module that owns the running autograd node; nodes are assigned in
    forward: whenever a module is entered or left, new nodes behind its arguments or results belong to the innermost
    module.

Note [Recomputation]
    Backward runs with gradients disabled. Operations in it with gradients enabled, or in a module's forward, are
    recomputation (activation checkpointing), which is counted separately. A backward that builds a graph has gradients
    enabled from its first operation.

Note [The first micro-batch]
    The first micro-batch is not counted: under a dispatch mode torch.compile permanently falls back to eager mode for
    the code it is called with, which would change results. It is only watched for compiled code; if something was
    compiled, or the graph of the loss has compiled nodes, nothing is ever counted.
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

ROOT = ""  # name of the trained module, as in ``named_modules``
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
    """The operations of a micro-batch on this rank.

    Attributes:
        own: by module name, without the operations of submodules.
        unseen: calls of operators without a formula.
    """

    own: dict[str, Flops] = field(default_factory=dict)
    unseen: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> Flops:
        return self.of(ROOT)

    def of(self, name: str) -> Flops:
        """The operations of a module and its submodules."""
        total = Flops()
        for other, flops in self.own.items():
            if name in (ROOT, other) or other.startswith(f"{name}."):
                total.add(flops)
        return total


class FlopCount:
    """Counts a micro-batch on request, and costs nothing otherwise.

    ``forward()`` wraps the training step and ``backward()`` wraps backward, which may also run inside the first. See
    Note [The first micro-batch].

    Attributes:
        flops_per_micro_batch: of forward and backward on this rank, without recomputation; None until known, or if it
            cannot be counted.
        counted: the operations by module.
        problem: why nothing can be counted.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.flops_per_micro_batch: float | None = None
        self.counted: Counted | None = None
        self.problem: str | None = None
        self.rows: int | None = None  # of the counted micro-batch
        self._requested = self._past_first = self._observes = False
        self._compiles = False  # whether something was compiled before or in the first micro-batch
        self._running: Counted | None = None
        self._counter: _Counter | None = None
        self._names: Mapping[nn.Module, str] = {}

    def start(self, new: bool) -> None:
        """A fit begins; ``new``: of another model, so that former counts are invalid."""
        if new:
            self._reset()

    def request(self) -> None:
        """Count the next micro-batch."""
        self._requested = True

    @property
    def requested(self) -> bool:
        return self._requested

    def flops_of(self, rows: int) -> float | None:
        """The operations of a micro-batch of ``rows`` rows, in proportion; None if unknown."""
        if self.flops_per_micro_batch is None or not self.rows:
            return None
        return self.flops_per_micro_batch * rows / self.rows

    @property
    def flops_per_sample(self) -> float | None:
        return self.flops_of(1)

    def forward(self, root: nn.Module, rows: int | None = None, manual: bool = False) -> AbstractContextManager[object]:
        """Context of a training step.

        Args:
            root: the module whose names are used.
            rows: of the micro-batch.
            manual: backward runs inside (manual optimization).
        """
        self._running = None
        if not self._past_first:
            self._past_first, self._observes, self._compiles = True, True, False
            return self._observing()
        self._observes = False
        if not self._requested:
            return nullcontext()
        self.problem = self._problem(root)
        if self.problem is not None:
            self._requested = False
            return nullcontext()
        return self._forward(root, rows, manual)

    @contextmanager
    def _forward(self, root: nn.Module, rows: int | None, manual: bool) -> Iterator[None]:
        self._names = {module: name for name, module in root.named_modules()}
        counted = Counted()
        with self._counting(counted):
            yield
        self._running, self.rows = counted, rows
        if manual:
            self._finish()

    def backward(self, loss: Tensor) -> AbstractContextManager[object]:
        """Context of a backward from ``loss``; a backward inside ``forward`` is counted there."""
        if self._running is not None and self._counter is None:
            return self._backward(self._running)
        if not self._observes:
            return nullcontext()
        self._compiles = self._compiles or has_compiled_nodes(loss)
        return self._observing()

    @contextmanager
    def _observing(self) -> Iterator[None]:
        before = compiled_frames()
        yield
        self._compiles = self._compiles or compiled_frames() > before

    @contextmanager
    def _backward(self, counted: Counted) -> Iterator[None]:
        with self._counting(counted):
            yield
        self._finish()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context that is not counted, for optimizer steps inside a training step."""
        counter = self._counter
        if counter is not None:
            counter.counting = False
        try:
            yield
        finally:
            if counter is not None:
                counter.counting = True

    @contextmanager
    def _counting(self, counted: Counted) -> Iterator[None]:
        with _Counter(counted, self._names) as self._counter:
            try:
                yield
            finally:
                self._counter = None

    def _finish(self) -> None:
        assert self._running is not None
        self.counted, self._running, self._requested, self._names = self._running, None, False, {}
        flops, unseen = self.counted.total.model, self.counted.unseen
        if unseen:
            self.problem = f"{', '.join(sorted(unseen))}: no formula for floating-point operations"
        self.flops_per_micro_batch = float(flops) if flops and not unseen else None

    def _problem(self, root: nn.Module) -> str | None:
        names = [name or type(root).__name__ for name, module in root.named_modules() if is_compiled(module)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"{', '.join(names[:3])}{more}: compiled by torch.compile, whose graphs cannot be counted"
        if self._compiles:
            return "the model calls functions compiled by torch.compile, whose graphs cannot be counted"
        return None


class _Counter(DispatchMode):
    """Dispatch mode that attributes each operation to a module. See Note [Attribution to modules].

    Args:
        counted: receives the operations.
        names: of the modules.
    """

    def __init__(self, counted: Counted, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.counting = True
        self._counted, self._names = counted, names
        self._stack: list[tuple[str, bool]] = []  # running modules: name, whether in backward
        self._builds_graph: dict[int, bool] = {}  # by ID of the backward
        self._mode = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        vars(self._mode)["mod_tracker"] = _NoModules()
        registry: dict[Any, Any] = vars(self._mode)["flop_registry"]
        registry.update({packet: partial(self._safely, str(packet), formula) for packet, formula in registry.items()})
        self._exit = ExitStack()

    def __enter__(self) -> _Counter:
        for module, name in self._names.items():
            entering = module.register_forward_pre_hook(Hook(partial(self._enter, name)), with_kwargs=True)
            leaving = module.register_forward_hook(Hook(self._leave), always_call=True)
            self._exit.callback(entering.remove)
            self._exit.callback(leaving.remove)
        self._exit.enter_context(self._mode)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exit.close()

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._mode.get_total_flops()
        out = op(*args, **kwargs)
        if self.counting:
            flops = self._mode.get_total_flops() - before
            owner, kind = self._owner()
            if flops:
                found = self._counted.own.setdefault(owner, Flops())
                setattr(found, kind, getattr(found, kind) + flops)
            elif is_unseen(op):
                self._counted.unseen[str(op).removesuffix(".default")] += 1
        return out

    def _safely(self, name: str, formula: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Evaluate a formula; one that fails on unknown arguments must not end the training."""
        try:
            return formula(*args, **kwargs)
        except Exception:
            if self.counting:
                self._counted.unseen[name] += 1
            return 0

    def _owner(self) -> tuple[str, str]:
        """The module of the running operation, and whether it is forward, backward or recomputed."""
        innermost, in_backward = self._stack[-1] if self._stack else (ROOT, False)
        number = backward_id()
        if number == -1:
            return innermost, "forward"
        builds_graph = self._builds_graph.setdefault(number, torch.is_grad_enabled())  # see Note [Recomputation]
        if in_backward:
            return innermost, "recomputed"
        node = current_node()
        owner = node.metadata.get(_OWNER, ROOT) if node is not None else ROOT
        return owner, "recomputed" if torch.is_grad_enabled() and not builds_graph else "backward"

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._claim((args, kwargs))
        self._stack.append((name, backward_id() != -1))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._claim(output)
        if self._stack:
            self._stack.pop()

    def _claim(self, value: Any) -> None:
        """Assign the unassigned autograd nodes behind tensors to the innermost module."""
        owner = self._stack[-1][0] if self._stack else ROOT
        nodes: list[Any] = [tensor.grad_fn for tensor in iter_tensors(value) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node is not None and _OWNER not in node.metadata:
                node.metadata[_OWNER] = owner
                nodes += [following for following, _ in node.next_functions]


class _NoModules:
    """Replaces torch's module tracker, whose hooks make ``autograd.grad`` fail for leaves."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...
