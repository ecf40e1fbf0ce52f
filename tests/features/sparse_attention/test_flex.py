"""What a GPU computes with FlexAttention, here by torch's reference of it."""

from __future__ import annotations

import pytest
import torch

from lt_zero.attention import BigBird, Fixed, LocalSlidingWindow, Pattern
from lt_zero.features.sparse_attention.flex import block_mask, flex
from lt_zero.features.sparse_attention.sparse import allowed_elements, dense

PER_HEAD = Fixed(num_local_blocks=8, different_layout_per_head=True, num_different_global_patterns=4)


@pytest.mark.parametrize("length", [128, 300])
@pytest.mark.parametrize(
    "pattern",
    [PER_HEAD, BigBird(block=64), LocalSlidingWindow(), Fixed(num_local_blocks=32, attention="unidirectional")],
)
def test_it_is_the_same_attention(pattern: Pattern, length: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, length, 16) for heads in (4, 2, 2))
    bias = torch.zeros(2, length)
    bias[0, length - 20 :] = -torch.inf
    allowed = allowed_elements(pattern, 8, length, length, first=4, here=4)
    wanted = dense(query, key, value, allowed[None], bias, 0.0, 0.25)
    found = flex(query, key, value, pattern, bias, 0.0, 0.25, heads=8, first=4)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_only_tiles_with_elements_are_computed() -> None:
    mask = block_mask(LocalSlidingWindow(block=128), 2, 0, 2, 1024, torch.device("cpu"))
    assert mask.kv_num_blocks.tolist() == [[[1] * 8]]  # those of the diagonal
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[0] + [1] * 7]]


def test_a_mask_that_a_validation_made_serves_training() -> None:
    with torch.inference_mode():
        mask = block_mask(LocalSlidingWindow(block=32), 1, 0, 1, 416, torch.device("cpu"))
    assert not mask.kv_indices.is_inference()  # else autograd could not save it
    assert not mask.kv_num_blocks.is_inference()


def test_dropout_is_refused() -> None:
    x = torch.zeros(1, 1, 16, 16)
    with pytest.raises(ValueError, match=r"dropout=0.1: FlexAttention.*Set it to 0"):
        flex(x, x, x, LocalSlidingWindow(), None, 0.1, 1.0, 1, 0)
