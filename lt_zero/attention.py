"""Block-sparse attention: the public names of ``lt_zero.features.sparse_attention``."""

from lt_zero.common.places import import_public

import_public("lt_zero.features.sparse_attention", __name__)  # the error says what is not installed

from lt_zero.features.sparse_attention import *  # noqa: E402, F403
from lt_zero.features.sparse_attention import __all__ as __all__  # noqa: E402
