"""Block-sparse attention: the public names of ``lt_zero.features.sparse_attention``."""

from lt_zero.features.sparse_attention.huggingface import register
from lt_zero.features.sparse_attention.patterns import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Pattern,
    Variable,
    pattern_of,
)
from lt_zero.features.sparse_attention.sparse import SparseSelfAttention, sparse_attention

__all__ = [
    "BSLongformer",
    "BigBird",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "Pattern",
    "SparseSelfAttention",
    "Variable",
    "pattern_of",
    "register",
    "sparse_attention",
]
