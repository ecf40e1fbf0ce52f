"""``mode: selective``: keeps the outputs of matrix products and attention, and recomputes the cheap operators.

torch's ``create_selective_checkpoint_contexts`` counts every operator. It raises when the counts of forward and
recomputation differ (the autocast cache makes casts differ), when a kept output was changed in place
(``nn.ReLU(inplace=True)`` after a convolution), and in a second backward. Here only kept operators are counted, and one
whose output is gone or was changed is computed again. Inside torch.compile torch's contexts are used: the partitioner
supports them, and none of these cases occurs in a compiled graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from lt_zero.common.compat import version_of
from lt_zero.common.compat.of_dispatch import DispatchMode, alias_with_version
from lt_zero.common.tensor_tree import iter_tensors, map_tensors

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

KEPT = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv"),
    *("aten::matmul", "aten::linear", "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"),
    *("aten::convolution", "aten::convolution_overrideable", "aten::_trilinear"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
    *("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward"),
    *("aten::_efficient_attention_forward", "aten::_cudnn_attention_forward", "flex_attention"),
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "lt_zero::sparse_attention"),
)
"""Operators, by schema name without overload, whose outputs are kept."""


@functools.cache
def _is_kept(op: Any) -> tuple[bool, int | None]:
    """True if an operator's outputs are kept; and the index of the dropout probability among its arguments, if any."""
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    name = op.name().rsplit(".", 1)[0] if "::" in op.name() else op.name()
    return name in KEPT, names.index("dropout_p") if "dropout_p" in names else None


def keeps(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the output of this call is kept."""
    kept, index = _is_kept(op)
    if not kept or index is None:
        return kept
    # With dropout the call draws random numbers. If it were not recomputed, all later draws would differ from forward.
    return not kwargs.get("dropout_p", args[index] if index < len(args) else 0.0)


def _policy(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


traced_contexts: Contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
"""Contexts for code that torch.compile traces."""


class _Kept:
    """The output of one operator, until it is used or changed in place."""

    def __init__(self, op: Any, output: Any) -> None:
        self.op, self._output = op, map_tensors(output, alias_with_version)
        self._watched = [(tensor, version_of(tensor)) for tensor in iter_tensors(self._output)]
        self._addresses = {_address(tensor) for tensor, _ in self._watched} - {None}

    def follow(self, view: Tensor) -> bool:
        """Watch ``view``, too, if it is an unsafe view of this output; returns whether it is."""
        # ``matmul`` and ``linear`` of more than two dimensions return an ``_unsafe_view`` of their product: the same
        # memory with another version counter. In-place changes to it do not show in the kept output's version.
        found = _address(view) in self._addresses
        if found:
            self._watched.append((alias_with_version(view), version_of(view)))
        return found

    def take(self) -> Any:
        """The output; None if it was used or changed."""
        output, self._output = self._output, None
        intact = all(version_of(tensor) == version for tensor, version in self._watched)
        self._watched = []
        return output if intact else None


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if type(tensor) is Tensor and tensor.layout is torch.strided else None


class _Forward(DispatchMode):
    """Keeps outputs during forward."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = op(*args, **kwargs)
        if keeps(op, args, kwargs):
            self._kept.append(_Kept(op, output))
        elif op is torch.ops.aten._unsafe_view.default:
            any(kept.follow(output) for kept in reversed(self._kept))
        return output


class _Recompute(DispatchMode):
    """Reuses kept outputs. May be entered several times, because autograd may run through a graph again."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self._kept, self._next = kept, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if keeps(op, args, kwargs):
            number, self._next = self._next, self._next + 1
            if number >= len(self._kept) or self._kept[number].op is not op:
                raise RuntimeError(
                    f"The recomputation of a checkpointed module called {op} where its forward called another operator:"
                    " the module depends on state that has changed since. Set activation_checkpointing.mode='full' to "
                    "see where, or name other classes in activation_checkpointing.modules."
                )
            output = self._kept[number].take()
            if output is not None:
                return output
        return op(*args, **kwargs)


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts for one forward, and for its recomputations."""
    kept: list[_Kept] = []
    return _Forward(kept), _Recompute(kept)
