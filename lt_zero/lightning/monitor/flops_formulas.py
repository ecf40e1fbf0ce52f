"""FLOP formulas that torch's ``FlopCounterMode`` lacks, and a list of operators that still have none."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from lt_zero.common.compat import is_higher_order

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


def is_unseen(func: Any) -> bool:
    """Whether an operator without a count may have multiplied matrices."""
    namespace, _, name = str(func).partition(".")
    if is_higher_order(func):
        return True
    return namespace not in _OWN_NAMESPACES or name.startswith(_HEAVY)


# ---- formulas, whose arguments are the shapes of tensors ----


def _matrix_vector(matrix: Any, vector: Any, *_: Any, **__: Any) -> int:
    return int(2 * prod(matrix))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two matrix products per head; a causal mask saves nothing, as in torch's own formula."""
    *batch, rows, width = query
    return int(2 * prod(batch) * rows * key[-2] * (width + value[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Five matrix products per head: scores again, and gradients of scores, values, queries and keys."""
    *batch, rows, width = query
    return int(2 * prod(batch) * rows * key[-2] * (3 * width + 2 * value[-1]))


FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mv: _matrix_vector,
    torch.ops.aten.addmv: lambda bias, matrix, vector, *_, **__: 2 * prod(matrix),
    torch.ops.aten.dot: lambda a, b, *_, **__: 2 * prod(a),
    torch.ops.aten.vdot: lambda a, b, *_, **__: 2 * prod(a),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
