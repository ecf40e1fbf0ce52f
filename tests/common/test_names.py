"""Names that modules have together are in the order of the module that has all."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lt_zero.common.names import merged

LAYERS = [f"pipe.layers.{number}.{name}" for number in range(12) for name in ("weight", "bias")]
WHOLE = ["scale", *LAYERS, "pipe.tied.embed.weight", "pipe.tied.head.weight", "after.weight"]


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.sets(st.integers(0, 3)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_stages_have_the_order_of_the_whole_model(stages: list[int], shared: set[int], beside: bool) -> None:
    """Wherever layers are, whichever stages have tied ones, and whether all have parameters beside the pipeline."""
    assume(shared <= set(stages))

    def on(rank: int, name: str) -> bool:
        if name.startswith("pipe.layers"):
            return stages[int(name.split(".")[2])] == rank
        return rank in shared if name.startswith("pipe.tied") else beside

    orders = [[name for name in WHOLE if on(rank, name)] for rank in range(4)]
    expected = [name for name in WHOLE if any(name in order for order in orders)]
    assert merged(orders) == expected


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([], []),
        ([["a", "b"], []], ["a", "b"]),
        ([["a", "a"], ["b"]], ["a", "b"]),
        ([["layers.10.w"], ["layers.9.w"]], ["layers.9.w", "layers.10.w"]),
        ([["b", "a"], ["a", "b"]], ["b", "a"]),
        ([["b", "a", "c"], ["a", "b", "d"]], ["b", "a", "c", "d"]),
    ],
)
def test_what_orders_leave_open(orders: list[list[str]], expected: list[str]) -> None:
    assert merged(orders) == expected
