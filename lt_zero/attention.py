"""Block-sparse attention: the public names of ``lt_zero.features.sparse_attention``."""

from lt_zero.common.places import import_public

import_public("lt_zero.features.sparse_attention", __name__)  # the error says what is not installed

from lt_zero.features.sparse_attention.huggingface import register  # noqa: E402
from lt_zero.features.sparse_attention.patterns import (  # noqa: E402
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Pattern,
    Variable,
    pattern_of,
)
from lt_zero.features.sparse_attention.sparse import SparseSelfAttention, sparse_attention  # noqa: E402

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
