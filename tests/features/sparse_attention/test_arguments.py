"""Wrong arguments of public names: the error names the argument and its value, and says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lt_zero import attention
from lt_zero.attention import Fixed, SparseSelfAttention, pattern_of, sparse_attention

QUERY = torch.ones(1, 2, 32, 8)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: sparse_attention(QUERY, QUERY, QUERY, "fixed"), r"pattern is 'fixed' \(str\): pass a pattern, such as"),
    (lambda: sparse_attention(QUERY, QUERY, QUERY, Fixed), "pattern is the class Fixed: pass a pattern"),
    (lambda: sparse_attention(Fixed(), QUERY, QUERY, QUERY), "query is Fixed.*: pass query, key and value as"),
    (lambda: sparse_attention(QUERY, QUERY, QUERY, Fixed(), [1]), r"key_padding_mask is \[1\] \(list\)"),
    (lambda: sparse_attention(QUERY, QUERY, QUERY, Fixed(), dropout=".1"), r"dropout is '.1' \(str\): pass a number"),
    (lambda: SparseSelfAttention("fixed"), r"sparsity_config=\.\.\.\) is 'fixed'"),
    (lambda: SparseSelfAttention(Fixed())(QUERY, QUERY, QUERY, rpe="a"), "rpe is 'a'"),
    (lambda: pattern_of({"mode": "fixed"}), r"pattern_of is \{'mode': 'fixed'\} \(dict\): pass a ZeroConfig"),
    (lambda: Fixed(num_heads=4), r"Fixed\(num_heads=4\) is no setting .* remove it"),
    (lambda: Fixed(4), r"Fixed\(4\): settings are passed by name"),
    (lambda: attention.BigBird(num_randm_blocks=1), "did you mean num_random_blocks?"),
    (lambda: Fixed().layout("4", 8), r"layout\(heads=\.\.\.\) is '4'"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
