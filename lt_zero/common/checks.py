"""Checks of configuration blocks that the configuration does not know itself: it imports no optimizers."""

from __future__ import annotations

from collections.abc import Callable

from lt_zero.common.errors import Problem

Check = Callable[..., list[Problem]]  # of a block's type, its params, and for optimizers its param_groups
BLOCK_CHECKS: dict[str, Check] = {}  # by the block's name; ``lt_zero/__init__`` provides them
