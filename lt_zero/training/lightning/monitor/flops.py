"""Floating-point operations of one micro-batch by module, counted with torch's ``FlopCounterMode``.

Note [Attribution to modules]
    ``FlopCounterMode`` keeps a module open in backward until its inputs have their gradients. If they
    need none, the module stays open and gets the operations of others; so does one that activation checkpointing left
    early.
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

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lt_zero.common.compat import backward_id
from lt_zero.common.compat.of_compile import compiled_frames, has_compiled_nodes, is_compiled
from lt_zero.common.compat.of_dispatch import DispatchMode, current_node, is_higher_order
from lt_zero.common.module_hooks import Hook, hookable_modules
from lt_zero.common.tensor_tree import iter_tensors

ROOT = ""  # name of the trained module, as in ``named_modules``
_OWNER = "lt_zero.module"
_OWN_NAMESPACES = {"aten", "prim", "prims", "c10d", "_c10d_functional", "lt_zero", "profiler"}
# Prefixes of torch's operators that multiply matrices and have no formula.
# fmt: off
_HEAVY = (
    "_scaled_dot_product", "_fused_sdp", "_native_multi_head", "_transformer_encoder", "_triton_", "_flash",
    "_efficient", "_trilinear", "mkldnn_", "_mkldnn_", "_cudnn_rnn", "miopen_", "_thnn_differentiable", "_sparse_",
    "_cdist", "_fft_", "linalg_", "_linalg_", "_int_mm", "_weight_int", "_scaled_grouped_mm", "_grouped_mm",
    "_scaled_mm_v2", "_addmm_activation", "linear_backward", "_nested_",
)
# fmt: on


@dataclass
class Flops:
    """Floating-point operations; a multiplication and an addition are two."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0  # in backward, once more

    @property
    def model(self) -> int:
        """Operations without recomputation."""
        return self.forward + self.backward


@dataclass
class Counted:
    """The operations of a micro-batch on this rank."""

    own: dict[str, Flops] = field(default_factory=dict)  # by module name, without those of submodules
    unseen: Counter[str] = field(default_factory=Counter)  # calls of operators without a formula

    @property
    def total(self) -> Flops:
        return self.by_module()[ROOT]

    def by_module(self) -> defaultdict[str, Flops]:
        """The operations of each module and its submodules."""
        found: defaultdict[str, Flops] = defaultdict(Flops)
        for name, flops in self.own.items():
            parts = name.split(".") if name else []
            for end in range(len(parts) + 1):
                total = found[".".join(parts[:end])]
                total.forward += flops.forward
                total.backward += flops.backward
                total.recomputed += flops.recomputed
        return found


class FlopCount:
    """Counts a micro-batch on request, and costs nothing otherwise.

    ``forward()`` wraps the training step and ``backward()`` wraps backward, which may also run inside the first. See
    Note [The first micro-batch].
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the counts: another model follows."""
        # Of forward and backward on this rank, without recomputation; None until known, or if it cannot be counted.
        self.flops_per_micro_batch: float | None = None
        self.counted: Counted | None = None
        self.problem: str | None = None  # why nothing can be counted
        self.requested = False
        self.rows: int | None = None  # of the counted micro-batch
        self._batches = 0
        self._compiles = False  # whether something was compiled before or in the first micro-batch
        self._counter: _Counter | None = None  # of the micro-batch that is counted

    def request(self) -> None:
        """Count the next micro-batch."""
        self.requested = True

    def flops_of(self, rows: int) -> float | None:
        """The operations of a micro-batch of ``rows`` rows, in proportion; None if unknown."""
        if self.flops_per_micro_batch is None or not self.rows:
            return None
        return self.flops_per_micro_batch * rows / self.rows

    @contextmanager
    def forward(self, root: nn.Module, rows: int | None = None, manual: bool = False) -> Iterator[None]:
        """Context of a training step of ``rows`` rows; ``manual``: backward runs inside (manual optimization)."""
        self._counter, self._batches = None, self._batches + 1
        if self.requested and self._batches > 1:
            self.problem = self._problem(root)
            self.requested = self.problem is None
        if self._batches == 1:
            with self._watching_compiler():
                yield
        elif not self.requested:
            yield
        else:
            self._counter = _Counter(root)
            with self._counter:
                yield
            self.rows = rows
            if manual:
                self._finish(self._counter.counted)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Context of a backward from ``loss``; a backward inside ``forward`` is counted there."""
        counter = self._counter
        if counter is not None and not counter.entered:
            with counter:
                yield
            self._finish(counter.counted)
        elif self._batches == 1:
            self._compiles = self._compiles or has_compiled_nodes(loss)
            with self._watching_compiler():
                yield
        else:
            yield

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
    def _watching_compiler(self) -> Iterator[None]:
        before = compiled_frames()
        yield
        self._compiles = self._compiles or compiled_frames() > before

    def _finish(self, counted: Counted) -> None:
        self.counted, self._counter, self.requested = counted, None, False
        flops, unseen = counted.total.model, counted.unseen
        if unseen:
            self.problem = f"{', '.join(sorted(unseen))}: no formula for floating-point operations"
        self.flops_per_micro_batch = float(flops) if flops and not unseen else None

    def _problem(self, root: nn.Module) -> str | None:
        names = [name or type(root).__name__ for name, module in root.named_modules() if is_compiled(module)]
        if not names and not self._compiles:
            return None
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = f"{', '.join(names[:3])}{more}:" if names else "the model calls functions"
        return f"{what} compiled by torch.compile, whose graphs cannot be counted"


class _Counter(DispatchMode):
    """Dispatch mode that attributes each operation to a module of ``root``. See Note [Attribution to modules]."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.counted, self.counting, self.entered = Counted(), True, False
        self._root = root
        self._stack: list[tuple[str, bool]] = []  # running modules: name, whether in backward
        self._builds_graph: dict[int, bool] = {}  # by ID of the backward
        self._mode = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        vars(self._mode)["mod_tracker"] = _NoModules()
        registry: dict[Any, Any] = vars(self._mode)["flop_registry"]
        registry.update({packet: partial(self._safely, str(packet), formula) for packet, formula in registry.items()})
        self._exit = ExitStack()

    def __enter__(self) -> _Counter:
        for name, module in hookable_modules(self._root):
            entering = Hook(partial(self._enter, name))
            self._exit.callback(module.register_forward_pre_hook(entering, with_kwargs=True).remove)
            self._exit.callback(module.register_forward_hook(Hook(self._leave), always_call=True).remove)
        self._exit.enter_context(self._mode)
        super().__enter__()
        self.entered = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.entered = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exit.close()

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._mode.get_total_flops()
        out = op(*args, **kwargs)
        if self.counting:
            flops = self._mode.get_total_flops() - before
            owner, kind = self._owner()
            namespace, _, name = str(op).partition(".")
            if flops:
                found = self.counted.own.setdefault(owner, Flops())
                setattr(found, kind, getattr(found, kind) + flops)
            elif is_higher_order(op) or namespace not in _OWN_NAMESPACES or name.startswith(_HEAVY):
                self.counted.unseen[str(op).removesuffix(".default")] += 1  # it may have multiplied matrices
        return out

    def _safely(self, name: str, formula: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Evaluate a formula; one that fails on unknown arguments must not end the training."""
        try:
            return formula(*args, **kwargs)
        except Exception:
            if self.counting:
                self.counted.unseen[name] += 1
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


def _dot(first: Any, *_: Any, **__: Any) -> int:
    return int(2 * prod(first))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two matrix products per head; a causal mask saves nothing, as in torch's own formula."""
    return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Five matrix products per head: scores again, and gradients of scores, values, queries and keys."""
    return int(2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1]))


# Formulas that torch lacks; their arguments are the shapes of tensors.
FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((torch.ops.aten.mv, torch.ops.aten.dot, torch.ops.aten.vdot), _dot),
    torch.ops.aten.addmv: lambda bias, matrix, vector, *_, **__: 2 * prod(matrix),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
