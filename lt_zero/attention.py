"""Block-sparse attention: the public names of ``lt_zero.features.sparse_attention``."""

from lt_zero.features.sparse_attention import *  # noqa: F403
from lt_zero.features.sparse_attention import __all__ as __all__
