"""Where the values of ``sparse_attention`` are looked for: in the pattern that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lt_zero.config import ZeroConfig
from tests.support.reach_engine import Config, Lab, nested

_S = "sparse_attention."
_FIXED: Config = {_S + "mode": "fixed"}
_RANGES: Config = {_S + "mode": "variable", _S + "global_block_indices": [2]}

# Keys with a value and the default, by what else is written.
VALUES: tuple[tuple[Config, dict[str, tuple[Any, Any]]], ...] = (
    (
        _FIXED,
        {
            "block": (64, 16),
            "different_layout_per_head": (True, False),
            "attention": ("unidirectional", "bidirectional"),
            "num_local_blocks": (8, 4),
            "num_global_blocks": (2, 1),
            "horizontal_global_attention": (True, False),
        },
    ),
    ({**_FIXED, _S + "different_layout_per_head": True}, {"num_different_global_patterns": (3, 1)}),
    (
        {_S + "mode": "variable"},
        {"num_random_blocks": (2, 0), "local_window_blocks": ([2, 3], (4,)), "global_block_indices": ([1, 5], (0,))},
    ),
    (_RANGES, {"global_block_end_indices": ([4], None)}),
    ({_S + "mode": "bigbird"}, {"num_sliding_window_blocks": (5, 3)}),
    ({_S + "mode": "bigbird", _S + "num_random_blocks": 2}, {"seed": (7, 0)}),
)


def _made(lab: Lab, config: Config) -> Any:
    from lt_zero.attention import pattern_of  # here: without sparse attention other keys are looked for all the same

    return pattern_of(ZeroConfig.of(nested(config, lab.folder)))


def mode(lab: Lab, config: Config) -> Any:
    found = _made(lab, config)
    return found.mode if found is not None else None


def pattern(name: str) -> Callable[[Lab, Config], Any]:
    """The value of one of its parameters."""
    return lambda lab, config: getattr(_made(lab, config), name)
