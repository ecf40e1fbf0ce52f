"""Block-sparse attention against dense attention with a mask in fp64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lt_zero.features.sparse_attention.kernel import (
    BlockIndex,
    Terms,
    attention_backward,
    attention_backward_reference,
    attention_forward,
    attention_forward_reference,
    dropout_mask,
)
from lt_zero.kernels import library


@dataclass
class Case:
    """A problem; ``masked``: keys that a bias of -inf hides, in all but one sequence."""

    length: int
    block: int
    dim: int
    heads: int = 2
    kv_heads: int = 2
    layouts: int = 1
    causal: bool = False
    masked: int = 0
    dropout: float = 0.0
    size: float = 1.0  # of the queries
    views: bool = False  # tensors that are views of one [batch, length, 3, heads, dim]
    density: float = 0.4

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(self.length + self.dim)
        if self.views:
            qkv = torch.randn(2, self.length, 3, self.heads, self.dim).to(dtype)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        else:
            q = torch.randn(2, self.heads, self.length, self.dim).to(dtype)
            k, v = torch.randn(2, 2, self.kv_heads, self.length, self.dim).to(dtype).unbind()
        return [q * self.size if self.size != 1 else q, k, v]

    def index(self) -> BlockIndex:
        torch.manual_seed(3)
        blocks = -(-self.length // self.block)
        layout = torch.rand(self.layouts, blocks, blocks) < self.density
        layout[:, :, 0] = torch.rand(blocks) < 0.8
        layout[0, blocks // 2] = False  # rows that see nothing
        layout[-1, :, blocks // 3] = False  # and a column that nobody sees
        return BlockIndex.of(layout, self.block)

    def options(self) -> dict[str, Any]:
        bias = None
        if self.masked:
            bias = torch.randn(2, self.length)
            bias[0, -self.masked :] = -math.inf
        return {"causal": self.causal, "key_bias": bias, "dropout": self.dropout, "seed": 2**62 + 7}


CASES = {
    "blocks of 16": Case(128, 16, 64),
    "blocks of 32, causal": Case(160, 32, 64, causal=True, layouts=2),
    "blocks of 64, longer than a chunk": Case(640, 64, 32, density=0.9),
    "a cut block, grouped heads": Case(300, 64, 128, heads=4, kv_heads=2, layouts=4, causal=True),
    "odd sizes": Case(77, 24, 24, heads=3, kv_heads=1, causal=True, masked=20),
    "neighbouring halves of tiles": Case(333, 48, 40, masked=100, density=0.7),
    "a block of one element": Case(50, 1, 3, causal=True),
    "wide heads": Case(70, 16, 256, heads=1, kv_heads=1),
    "views, dim 80": Case(100, 16, 80, causal=True, views=True),
    "all keys of a sequence masked": Case(96, 32, 16, masked=96),
    "dropout": Case(200, 16, 64, heads=4, kv_heads=2, causal=True, dropout=0.3),
    "dropout, masked": Case(90, 32, 40, masked=30, dropout=0.6),
    "big scores": Case(128, 16, 64, size=1000.0),
}
DTYPES = [torch.float32, torch.bfloat16]


@functools.cache  # for all instruction sets
def problem(name: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor], list[Tensor]]:
    """The inputs and the gradient of the result; in fp64 the sums, and result and gradients; torch's error of each.

    The errors are those of torch's attention with a mask, in ``dtype``, largest element.
    """
    case = CASES[name]
    inputs, index, options = case.tensors(dtype), case.index(), case.options()
    dout, wide = torch.randn_like(inputs[0]), [t.double() for t in inputs]
    out, sums = attention_forward_reference(*wide, index, Terms(**options))
    exact = [out, *attention_backward_reference(dout.double(), *wide, index, Terms(**options))]
    mask = index.dense(case.length)
    mask = torch.where(mask.tril() if case.causal else mask, 0.0, -math.inf)[None]
    if options["key_bias"] is not None:
        mask = mask + options["key_bias"][:, None, None]
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], k, v, attn_mask=mask.to(k.dtype))
    plain = [out, *torch.autograd.grad(out, leaves, dout)]
    kept = exact
    if case.dropout:  # torch would draw another mask: its errors without dropout count, which only scales them
        options = options | {"dropout": 0.0}
        out, _ = attention_forward_reference(*wide, index, Terms(**options))
        kept = [out, *attention_backward_reference(dout.double(), *wide, index, Terms(**options))]
    errors = [(a - b).abs().nan_to_num(0.0).max() for a, b in zip(plain, kept, strict=True)]
    return inputs, dout, sums, exact, [error / (1 - case.dropout) for error in errors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_as_exact_as_torchs(matrix_isa: str, name: str, dtype: torch.dtype) -> None:
    index, options = CASES[name].index(), CASES[name].options()
    inputs, dout, sums, exact, errors = problem(name, dtype)
    out, lse = attention_forward(*inputs, index, Terms(**options))
    grads = attention_backward(dout, *inputs, out, lse, index, Terms(**options))
    assert (out.dtype, out.shape, lse.dtype) == (dtype, inputs[0].shape, torch.float32)
    for what, found, value, error in zip(("out", "dq", "dk", "dv"), (out, *grads), exact, errors, strict=True):
        assert found.isfinite().all(), what
        assert found.shape == value.shape
        difference, allowed = (found - value).abs(), 2 * error + 1e-6 * value.abs().max()
        assert (difference <= allowed).all(), (what, difference.max(), allowed)
    assert torch.equal(lse == -math.inf, sums == -math.inf)
    torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=1e-5)


def test_what_is_not_seen_has_no_part(matrix_isa: str) -> None:
    for dtype in DTYPES:
        case = Case(64, 16, 32, masked=20)
        (q, k, v), options = case.tensors(dtype), case.options()
        layout = torch.ones(1, 4, 4, dtype=torch.bool)
        layout[:, 1], layout[:, :, 2] = False, False
        index = BlockIndex.of(layout, 16)
        out, lse = attention_forward(q, k, v, index, Terms(**options))
        dq, dk, dv = attention_backward(torch.randn_like(out), q, k, v, out, lse, index, Terms(**options))
        blind = slice(16, 32)
        assert not out[:, :, blind].any()
        assert (lse[:, :, blind] == -math.inf).all()
        assert lse[:, :, 32:].isfinite().all()
        assert not dq[:, :, blind].any()
        for grad in (dk, dv):  # of the column that no row sees, and of the masked keys
            assert not grad[:, :, 32:48].any()
            assert not grad[0, :, -20:].any()
            assert grad[1, :, -16:].any()


def test_a_nan_that_is_seen_is_not_hidden(matrix_isa: str) -> None:
    for dtype in DTYPES:
        q, k, v = Case(64, 16, 32).tensors(dtype)
        k[0, 0, 40, 3] = math.nan
        k[0, 1, 60, 3] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # all bits are set
        index = BlockIndex.of(torch.eye(4)[None], 16)
        out, _ = attention_forward(q, k, v, index)
        assert out[0, 0, 32:48].isnan().all()
        assert out[0, 0, :32].isfinite().all()
        assert out[0, 1, 48:].isnan().all()
        assert out[0, 1, :48].isfinite().all()


@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, 1e9])
def test_gradients_where_all_keys_have_one_large_bias(matrix_isa: str, masked: float) -> None:
    q, k, v = Case(64, 16, 32).tensors(torch.float32)
    q, bias = 20 * q, torch.full((2, 64), masked)  # scores above 100, which such a bias rounds off
    index, dout = BlockIndex.of(torch.ones(1, 4, 4), 16), torch.randn_like(q)
    out, lse = attention_forward(q, k, v, index, Terms(key_bias=bias))
    _, _, dv = attention_backward(dout, q, k, v, out, lse, index, Terms(key_bias=bias))
    assert dv.abs().max() <= dout.abs().sum(2).max()  # no row has a weight above 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(matrix_isa: str, dtype: torch.dtype) -> None:
    case = Case(400, 16, 64, heads=4, kv_heads=2, layouts=4, causal=True, masked=50, dropout=0.2)
    inputs, index, options = case.tensors(dtype), case.index(), case.options()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, lse = attention_forward(*inputs, index, Terms(**options))
            results.append((out, lse, *attention_backward(out, *inputs, out, lse, index, Terms(**options))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_heads_are_computed_apart_also_when_they_are_packed_in_turns() -> None:
    q, k, v = (torch.randn(3, 2, 4000, 200) for _ in range(3))  # 8 MB of packed keys and values for each head
    index = BlockIndex.of(torch.eye(63)[None], 64)
    out, lse = attention_forward(q, k, v, index)
    grads = attention_backward(out, q, k, v, out, lse, index)
    for batch in range(3):
        for head in range(2):
            one = [t[batch : batch + 1, head : head + 1] for t in (q, k, v)]
            alone, sums = attention_forward(*one, index)
            assert torch.equal(alone[0, 0], out[batch, head])
            found = attention_backward(alone, *one, alone, sums, index)
            assert all(torch.equal(a[0, 0], b[batch, head]) for a, b in zip(found, grads, strict=True))


def test_results_have_the_order_of_dimensions_of_their_inputs() -> None:
    q, k, v = (torch.randn(2, 64, 3, 32).transpose(1, 2) for _ in range(3))
    index = BlockIndex.of(torch.ones(1, 4, 4), 16)
    out, lse = attention_forward(q, k, v, index)
    wide = torch.ones(1, 1, 1, 1).expand_as(out)  # as of a sum
    grads = attention_backward(wide, q, k, v, out, lse, index)
    assert all(t.transpose(1, 2).is_contiguous() for t in (out, *grads))
    same = attention_backward(wide.contiguous(), q, k, v, out.contiguous(), lse, index)
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))


def test_a_bias_that_is_no_contiguous_tensor() -> None:
    q, k, v = Case(64, 16, 32).tensors(torch.float32)
    index, bias = BlockIndex.of(torch.ones(1, 4, 4), 16), torch.randn(1, 64).expand(2, -1)
    whole = bias.contiguous()
    wanted, lse = attention_forward(q, k, v, index, Terms(key_bias=whole))
    grads = attention_backward(q, q, k, v, wanted, lse, index, Terms(key_bias=whole))
    out, _ = attention_forward(q, k, v, index, Terms(key_bias=bias))
    assert torch.equal(out, wanted)
    again = attention_backward(q, q, k, v, wanted, lse, index, Terms(key_bias=bias))
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


def test_dropout_drops_its_share_of_each_head_independently() -> None:
    masks = torch.stack([dropout_mask(7, head, 512, 768, 0.3) for head in range(4)]).double()
    count = masks[0].numel()
    assert ((masks.mean((1, 2)) - 0.7).abs() < 5 * math.sqrt(0.21 / count)).all()
    centred = (masks - 0.7) / math.sqrt(0.21)
    limit = 5 / math.sqrt(count)
    for a, b in ((0, 1), (1, 2), (0, 3)):
        assert (centred[a] * centred[b]).mean().abs() < limit
    one = centred[0]
    for shift in (1, 2, 16):  # neighbours, and the corners of rectangles: rows and columns are hashed before
        assert (one[shift:] * one[:-shift]).mean().abs() < 1.1 * limit
        assert (one[:, shift:] * one[:, :-shift]).mean().abs() < 1.1 * limit
        corners = one[shift:, shift:] * one[:-shift, :-shift] * one[shift:, :-shift] * one[:-shift, shift:]
        assert corners.mean().abs() < 1.1 * limit
    assert not torch.equal(masks[0], dropout_mask(8, 0, 512, 768, 0.3).double())


def test_an_index_lists_the_blocks_of_its_layout() -> None:
    layout = torch.rand(3, 5, 5) < 0.5
    index = BlockIndex.of(layout, 4)
    dense = layout.repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert torch.equal(index.dense(18), dense[:, :18, :18])
    columns = [
        index.column_index[a:b].tolist() for a, b in zip(index.column_begin, index.column_begin[1:], strict=False)
    ]
    assert columns == [layout[head, :, column].nonzero().view(-1).tolist() for head in range(3) for column in range(5)]


def test_without_a_compiler_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["dropout"]
    inputs, index, options = case.tensors(torch.float32), case.index(), case.options()
    out, lse = attention_forward(*inputs, index, Terms(**options))
    grads = attention_backward(out, *inputs, out, lse, index, Terms(**options))
    monkeypatch.setattr(library, "cpu", lambda: None)
    other, sums = attention_forward(*inputs, index, Terms(**options))
    others = attention_backward(other, *inputs, other, sums, index, Terms(**options))
    for a, b in zip((out, lse, *grads), (other, sums, *others), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_bad_arguments_are_named() -> None:
    q, k, v = Case(64, 16, 32).tensors(torch.float32)
    index = BlockIndex.of(torch.ones(1, 4, 4), 16)
    out, lse = attention_forward(q, k, v, index)
    for message, run in {
        "q is .*float64": lambda: attention_forward(q.double(), k, v, index),
        "k is .*63": lambda: attention_forward(q, k[:, :, 1:], v, index),
        "v is .*bfloat16": lambda: attention_forward(q, k, v.bfloat16(), index),
        "q has 2 heads .* k has 0": lambda: attention_forward(q, k[:, :0], v[:, :0], index),
        "k has strides": lambda: attention_forward(q, torch.randn(2, 2, 32, 64).transpose(2, 3), v, index),
        "1 heads and 4 blocks of 16; 1 or 2 heads and 3 blocks for 48": lambda: attention_forward(
            q[:, :, :48], k[:, :, :48], v[:, :, :48], index
        ),
        "key_bias is .*float64": lambda: attention_forward(q, k, v, index, Terms(key_bias=torch.zeros(2, 64).double())),
        "dropout is 1.0": lambda: attention_forward(q, k, v, index, Terms(dropout=1.0)),
        "seed is -1": lambda: attention_forward(q, k, v, index, Terms(seed=-1)),
        "dout is": lambda: attention_backward(out[:1], q, k, v, out, lse, index),
        "lse is": lambda: attention_backward(out, q, k, v, out, lse[:1], index),
        "layout has shape": lambda: BlockIndex.of(torch.ones(4, 4), 16),
        "block is 0": lambda: BlockIndex.of(torch.ones(1, 4, 4), 0),
    }.items():
        with pytest.raises(ValueError, match=message):
            run()


@pytest.mark.parametrize("causal", [False, True])
def test_with_all_blocks_it_is_torchs(causal: bool) -> None:
    q, k, v = Case(64, 16, 32).tensors(torch.float32)
    out, _ = attention_forward(q, k, v, BlockIndex.of(torch.ones(1, 4, 4), 16), Terms(causal))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal))
