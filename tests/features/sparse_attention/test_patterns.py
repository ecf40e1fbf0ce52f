"""Layouts of sparse patterns: DeepSpeed's, and what holds for all of them."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lt_zero import attention
from lt_zero.attention import BigBird, BSLongformer, Dense, Fixed, LocalSlidingWindow, Pattern, Variable
from lt_zero.common.errors import ConfigError
from lt_zero.features.sparse_attention.patterns import PATTERNS
from tests.support.paths import DATA

LAYOUTS = json.loads((DATA / "sparse_layouts.json").read_text(encoding="utf-8"))
UNI = "unidirectional"


def drawing(pattern: Pattern, blocks: int, heads: int = 1, head: int = 0) -> list[str]:
    """The layout of a head, a text for each row."""
    return ["".join(".x"[bit] for bit in row) for row in pattern.layout(heads, blocks)[head].int().tolist()]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: f"{case['pattern']}-{case['shape']}")
def test_layouts_are_deepspeeds(case: dict[str, Any]) -> None:
    """50 random settings with the layouts that DeepSpeed makes of them.

    The data come from DeepSpeed 0.18.9: ``deepspeed/ops/sparse_attention/sparsity_config.py``, which needs only torch,
    was loaded as a module of its own. For each setting ``random.seed(seed)`` was called, then
    ``<pattern>SparsityConfig(heads, **settings).make_layout(blocks * block)``, with ``seed`` among our settings only.
    ``bits`` are ``np.packbits`` of the layout in hexadecimal. Of settings for which it raises others were drawn.
    """
    heads, blocks, _ = case["shape"]
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(case["bits"]), np.uint8), count=heads * blocks * blocks)
    pattern = getattr(attention, case["pattern"])(**case["settings"])
    layout = pattern.layout(heads, blocks)
    assert layout.dtype == torch.bool
    assert torch.equal(layout, torch.from_numpy(bits).bool().reshape(case["shape"]))


def test_what_patterns_look_like() -> None:
    two = Fixed(num_local_blocks=2, attention=UNI, num_different_global_patterns=2, different_layout_per_head=True)
    assert drawing(two, 5, heads=2, head=0) == ["x....", "xx...", ".xx..", ".xxx.", ".x.xx"]
    assert drawing(two, 5, heads=2, head=1) == ["x....", "xx...", "x.x..", "x.xx.", "x.x.x"]
    assert drawing(Variable(local_window_blocks=[1, 2], global_block_indices=[3, 9]), 5) == [
        *("x..x.", ".xxx.", ".xxx.", "...xx", "...xx")
    ]
    assert drawing(BSLongformer(num_sliding_window_blocks=1, global_block_indices=[2]), 4) == [
        *("x.x.", ".xx.", "xxxx", "..xx")
    ]
    assert drawing(LocalSlidingWindow(), 3) == ["x..", "xx.", ".xx"]


@pytest.mark.parametrize(
    "pattern",
    [
        Dense(attention=UNI),
        Fixed(num_local_blocks=4, num_global_blocks=2, attention=UNI),
        Variable(num_random_blocks=2, global_block_indices=[1], global_block_end_indices=[4], attention=UNI),
        BigBird(num_random_blocks=3, attention=UNI),
        BSLongformer(attention=UNI),
        LocalSlidingWindow(),
    ],
    ids=lambda pattern: pattern.mode,
)
@given(heads=st.integers(1, 3), blocks=st.integers(4, 20))
def test_nothing_above_the_diagonal_is_computed(pattern: Pattern, heads: int, blocks: int) -> None:
    assert pattern.causal
    computed = pattern.computed(heads, blocks)
    assert torch.equal(computed, pattern.layout(heads, blocks) & torch.ones(blocks, blocks).tril().bool())
    assert computed.diagonal(dim1=1, dim2=2).all(), "each token attends to itself at least"
    assert pattern.density(heads, blocks) == pytest.approx(computed.float().mean().item())


def test_without_a_direction_all_of_the_layout_is_computed() -> None:
    pattern = Variable(num_random_blocks=2, different_layout_per_head=True)
    assert not pattern.causal
    assert torch.equal(pattern.computed(3, 8), pattern.layout(3, 8))
    assert Dense().density(2, 8) == 1.0
    assert LocalSlidingWindow(attention="bidirectional").density(4, 10) == 0.28  # 10 + 2 * 9 of 100


@given(st.integers(0, 5), st.integers(5, 12), st.integers(0, 10**6))
def test_rows_with_fewer_blocks_than_are_drawn_take_all_of_them(count: int, blocks: int, seed: int) -> None:
    """DeepSpeed fails in them: "Sample larger than population"."""
    pattern = BigBird(
        num_random_blocks=count, num_sliding_window_blocks=1, num_global_blocks=0, attention=UNI, seed=seed
    )
    drawn = pattern.layout(1, blocks)[0].sum(1)
    least = torch.arange(1, blocks + 1).clamp(max=count)
    assert torch.all((drawn == least) | (drawn == least + 1)), "the block itself may have been drawn"
    assert torch.equal(drawn[:count], least[:count])


def test_more_random_blocks_than_a_row_has() -> None:
    for pattern in (Variable(num_random_blocks=5), BigBird(num_random_blocks=5)):
        assert pattern.layout(1, 5).all()
        with pytest.raises(ConfigError, match=r"num_random_blocks=5, but .* 4 blocks .* Write at most 4") as caught:
            pattern.layout(1, 4)
        assert [problem.key for problem in caught.value.problems] == ["sparse_attention.num_random_blocks"]


def test_windows_and_global_blocks_end_with_the_sequence() -> None:
    for pattern in (
        LocalSlidingWindow(num_sliding_window_blocks=9, attention="bidirectional"),
        BigBird(num_global_blocks=9),
        BSLongformer(global_block_indices=[0], global_block_end_indices=[9]),
        Fixed(num_local_blocks=9),
    ):
        assert pattern.layout(2, 3).all()


def test_seeds_and_heads_draw_other_blocks() -> None:
    one, other = (BigBird(seed=seed, different_layout_per_head=True).layout(2, 64) for seed in (0, 1))
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    shared = BigBird().layout(2, 64)
    assert torch.equal(shared[0], one[0])
    assert torch.equal(shared[0], shared[1])


def test_patterns_are_values() -> None:
    """Equal ones are one key of a cache, whatever types their values had."""
    made = Variable(local_window_blocks=[2, 3], block="32", global_block_indices=np.array([1, 4]))
    same = Variable(local_window_blocks=(2, 3), block=32, global_block_indices=(1, 4))
    assert made == same
    assert hash(made) == hash(same)
    assert made.layout(2, 8) is same.layout(2, 8)
    assert made.layout(2, 8).stride(0) == 0, "heads with one layout share its memory"
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert made != Variable(local_window_blocks=[2, 4], block=32, global_block_indices=(1, 4))
    assert Dense() != LocalSlidingWindow(attention="bidirectional")
    with pytest.raises(AttributeError):
        made.block = 8  # type: ignore[misc]


def test_layouts_outlive_the_modes_in_which_they_are_made() -> None:
    with torch.inference_mode(), torch.device("meta"):
        layouts = [kind(block=7).layout(2, 5) for kind in PATTERNS.values()]
    for layout in layouts:
        assert layout.device.type == "cpu"
        assert not layout.is_inference()


@pytest.mark.parametrize(("heads", "blocks"), [(0, 4), (4, 0)])
def test_a_layout_of_nothing(heads: int, blocks: int) -> None:
    with pytest.raises(ValueError, match=rf"heads={heads}, blocks={blocks}: a layout has at least one of both"):
        Dense().layout(heads, blocks)


def test_numbers_of_heads_are_no_parameter() -> None:
    """DeepSpeed's first argument is the number of heads: taken for a block it would be silently wrong."""
    with pytest.raises(TypeError, match="passed by name"):
        Fixed(8)  # type: ignore[misc]
    with pytest.raises(TypeError, match="num_heads"):
        Fixed(num_heads=8)  # type: ignore[call-arg]
