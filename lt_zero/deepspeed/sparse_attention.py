"""Patterns of ``deepspeed.ops.sparse_attention``: those of ``lt_zero.attention``, for any number of heads."""

from __future__ import annotations

from typing import Any

from lt_zero import attention
from lt_zero.attention import Pattern


def FixedSparsityConfig(num_heads: int, block: int = 16, **settings: Any) -> Pattern:  # noqa: N802
    """``lt_zero.attention.Fixed``."""
    return attention.Fixed(block=block, **settings)


def DenseSparsityConfig(num_heads: int, block: int = 16, **settings: Any) -> Pattern:  # noqa: N802
    """``lt_zero.attention.Dense``."""
    return attention.Dense(block=block, **settings)


def VariableSparsityConfig(num_heads: int, block: int = 16, **settings: Any) -> Pattern:  # noqa: N802
    """``lt_zero.attention.Variable``."""
    return attention.Variable(block=block, **settings)


def BigBirdSparsityConfig(num_heads: int, block: int = 16, **settings: Any) -> Pattern:  # noqa: N802
    """``lt_zero.attention.BigBird``."""
    return attention.BigBird(block=block, **settings)


def BSLongformerSparsityConfig(num_heads: int, block: int = 16, **settings: Any) -> Pattern:  # noqa: N802
    """``lt_zero.attention.BSLongformer``."""
    return attention.BSLongformer(block=block, **settings)


def LocalSlidingWindowSparsityConfig(num_heads: int, block: int = 16, **settings: Any) -> Pattern:  # noqa: N802
    """``lt_zero.attention.LocalSlidingWindow``."""
    return attention.LocalSlidingWindow(block=block, **settings)
