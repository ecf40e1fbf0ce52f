"""``sparse_attention`` beside full matrices in fp64; under autocast, checkpointing, compilation; over ranks; errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lt_zero.attention import BigBird, Dense, Fixed, Pattern, SparseSelfAttention, sparse_attention
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.features.sparse_attention.sparse import allowed_elements, dense
from lt_zero.kernels import library
from tests.support.pool import Pool

CAUSAL = Fixed(block=16, num_local_blocks=2, attention="unidirectional")
PER_HEAD = Fixed(block=16, num_local_blocks=4, different_layout_per_head=True, num_different_global_patterns=4)


def _inputs(length: int, heads: int = 4, shared: int = 1, dim: int = 24, dtype: Any = torch.float32) -> list[Tensor]:
    """Queries, keys and values as a projection leaves them: views of [batch, length, heads, dim]."""
    torch.manual_seed(0)
    sizes = (heads, heads // shared, heads // shared)
    return [torch.randn(2, length, n, dim, dtype=dtype).transpose(1, 2).requires_grad_() for n in sizes]


def _results(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    weights = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def _exact(inputs: list[Tensor], pattern: Pattern, mask: Tensor | None = None) -> list[Tensor]:
    """In fp64, from the definition."""
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    length = inputs[0].shape[2]
    allowed = allowed_elements(pattern, inputs[0].shape[1], length, length)[None]
    if mask is not None:
        allowed = allowed & ~mask[:, None, None]
    return _results(dense(*doubles, allowed, None, 0.0, inputs[0].shape[-1] ** -0.5), doubles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("pattern", "length", "shared"), [(CAUSAL, 100, 1), (PER_HEAD, 128, 2), (BigBird(), 96, 4)])
def test_outputs_and_gradients(dtype: torch.dtype, pattern: Pattern, length: int, shared: int) -> None:
    inputs = _inputs(length, shared=shared, dtype=dtype)
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = True
    out = sparse_attention(*inputs, pattern, mask)
    assert out.dtype == dtype
    found, wanted = _results(out, inputs), _exact(inputs, pattern, mask)
    allowed = (allowed_elements(pattern, 4, length, length)[None] & ~mask[:, None, None]).expand(2, 4, -1, -1)
    plain = _results(dense(*inputs, allowed, None, 0.0, 24**-0.5), inputs)  # torch, in this dtype
    for ours, theirs, exact in zip(found, plain, wanted, strict=True):
        error, allowance = (x.double().sub(exact).abs().max() for x in (ours, theirs))
        assert error <= 2 * allowance + 1e-6 * exact.abs().max()


def test_floating_point_masks_are_added_to_the_scores() -> None:
    inputs = _inputs(64)
    mask = torch.zeros(2, 64)
    mask[0, 50:] = -torch.inf
    torch.testing.assert_close(
        sparse_attention(*inputs, CAUSAL, mask), sparse_attention(*inputs, CAUSAL, mask == -torch.inf)
    )
    soft = torch.randn(2, 64)
    found = sparse_attention(*inputs, CAUSAL, soft)
    wanted = sparse_attention(*(x.double() for x in inputs), CAUSAL, soft)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_and_device_do_not_matter(dtype: torch.dtype) -> None:
    inputs, mask = _inputs(52), torch.zeros(2, 52, dtype=torch.bool)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as Lightning does in forward with precision="bf16-true"
    try:
        with torch.device("meta"):
            found = sparse_attention(*inputs, CAUSAL, mask)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, sparse_attention(*inputs, CAUSAL, mask))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask = _inputs(52, shared=2), torch.zeros(2, 52, dtype=torch.bool)
    wanted = _exact(inputs, CAUSAL, mask)
    monkeypatch.setattr(library, "cpu", lambda: None)

    def run(*tensors: Tensor) -> Tensor:  # fails if memory has another order than the operator says
        return sparse_attention(*tensors, CAUSAL, mask).transpose(1, 2).view(2, 52, -1)

    for attend in (run, torch.compile(run, backend="aot_eager")):
        out = attend(*inputs).unflatten(2, (4, -1)).transpose(1, 2)
        for ours, exact in zip(_results(out, inputs), wanted, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_an_empty_batch() -> None:
    inputs = [x.detach()[:0].requires_grad_() for x in _inputs(32)]
    out, *grads = _results(sparse_attention(*inputs, CAUSAL), inputs)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (inputs[0], *inputs)]


def test_what_would_silently_have_no_gradient_is_refused() -> None:
    inputs, bias = _inputs(32), torch.zeros(2, 32, requires_grad=True)
    with pytest.raises(ValueError, match="key_padding_mask requires a gradient"):
        sparse_attention(*inputs, CAUSAL, bias)
    with torch.no_grad():
        sparse_attention(*inputs, CAUSAL, bias)
    learned: Any = torch.tensor(0.2, requires_grad=True)
    with pytest.raises(ValueError, match="scale requires a gradient"):
        sparse_attention(*inputs, CAUSAL, scale=learned)


def test_the_last_queries_of_a_sequence() -> None:
    inputs = _inputs(70)
    whole = sparse_attention(*inputs, CAUSAL)
    last = sparse_attention(inputs[0][:, :, -3:], *inputs[1:], CAUSAL)
    torch.testing.assert_close(last, whole[:, :, -3:], rtol=1e-5, atol=1e-5)


def test_dropout_has_the_mean_of_no_dropout_and_is_recomputed() -> None:
    query, key, value = _inputs(64)
    ones = torch.ones_like(value)
    out = sparse_attention(query, key, ones, Dense(), dropout=0.25)  # sums of the weights that are kept, / 0.75
    assert out.std() > 0.01
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)

    def run(query: Tensor) -> Tensor:
        return sparse_attention(query, key, value, CAUSAL, dropout=0.25)

    torch.manual_seed(3)
    plain = _results(run(query), [query])
    torch.manual_seed(3)
    again = _results(checkpoint(run, query, use_reentrant=False), [query])
    assert all(map(torch.equal, plain, again))


def test_autocast_computes_in_its_dtype() -> None:
    inputs = _inputs(64)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(*inputs, CAUSAL)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, sparse_attention(*(x.bfloat16() for x in inputs), CAUSAL))


def test_it_is_compiled_without_a_break() -> None:
    inputs = _inputs(64)

    def run(*inputs: Tensor) -> Tensor:
        return sparse_attention(*inputs, CAUSAL, dropout=0.0).square()

    found = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    for ours, wanted in zip(_results(found, inputs), _results(run(*inputs), inputs), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_its_operations_are_counted() -> None:
    inputs = _inputs(128)
    with FlopCounterMode(display=False) as counter:
        sparse_attention(*inputs, CAUSAL).sum().backward()
    computed = 2 * 4 * int(CAUSAL.computed(1, 8).sum()) * 16 * 16
    assert counter.get_total_flops() == 7 * 2 * 24 * computed


def _over_ranks(shared: int) -> Any:
    pattern, rank, world = PER_HEAD, dist.get_rank(), dist.get_world_size()
    inputs = _inputs(96, heads=4 * world, shared=shared)
    mask = torch.zeros(2, 96, dtype=torch.bool)
    mask[0, 80:] = True
    part = slice(rank * 96 // world, (rank + 1) * 96 // world)
    mine = [x.detach()[:, :, part].requires_grad_() for x in inputs]
    out = sparse_attention(*mine, pattern, mask[:, part], group=dist.group.WORLD)
    torch.manual_seed(1)
    weights = torch.randn(inputs[0].shape, dtype=torch.float64).float()
    grads = torch.autograd.grad((out * weights[:, :, part]).sum(), mine)
    wanted = _results(sparse_attention(*inputs, pattern, mask), inputs)
    for ours, exact in zip([out, *grads], wanted, strict=True):
        torch.testing.assert_close(ours, exact[:, :, part], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ranks", "shared"), [(2, 1), (3, 2)])
def test_sequences_cut_over_ranks(pool: Pool, ranks: int, shared: int) -> None:
    pool.run(ranks, _over_ranks, shared)


def _drops_over_ranks() -> Any:
    torch.manual_seed(5)  # the same on each rank
    x = torch.ones(1, 2, 16, 32)
    kept = sparse_attention(torch.zeros_like(x), torch.zeros_like(x), x, Dense(), dropout=0.5, group=dist.group.WORLD)
    return kept[0, :, :, 0].tolist()


def test_heads_of_ranks_with_one_seed_drop_other_elements(pool: Pool) -> None:
    first, second = torch.cat([torch.tensor(part) for part in pool.run(2, _drops_over_ranks)], 1)
    assert (first != second).float().mean() > 0.5


def _twice_over_ranks() -> None:
    rank, inputs = dist.get_rank(), _inputs(32, heads=2, dtype=torch.float64)

    def second(tensors: list[Tensor], part: slice, **options: Any) -> Tensor:
        mine = [x.detach()[:, :, part].requires_grad_() for x in tensors]
        (grad,) = torch.autograd.grad(
            sparse_attention(*mine, CAUSAL, **options).square().sum(), mine[:1], create_graph=True
        )
        found: Tensor = torch.autograd.grad(grad.square().sum(), mine[1])[0]
        return found

    part = slice(16 * rank, 16 * rank + 16)
    found = second(inputs, part, group=dist.group.WORLD)
    torch.testing.assert_close(found, second(inputs, slice(None))[:, :, part])


def test_second_derivatives_over_ranks(pool: Pool) -> None:
    pool.run(2, _twice_over_ranks)


def test_the_module_has_the_masks_of_deepspeeds() -> None:
    inputs = _inputs(64)
    keep = torch.ones(2, 64)
    keep[1, 40:] = 0
    wanted = sparse_attention(*inputs, CAUSAL, keep == 0)
    assert torch.equal(SparseSelfAttention(CAUSAL, key_padding_mask_mode="mul")(*inputs, None, keep), wanted)
    added = torch.zeros(2, 64).masked_fill(keep == 0, -torch.inf)
    assert torch.equal(SparseSelfAttention(CAUSAL)(*inputs, key_padding_mask=added), wanted)


def test_the_module_takes_masks_of_elements(caplog: pytest.LogCaptureFixture) -> None:
    inputs = _inputs(64)
    whole = SparseSelfAttention(Dense(), attn_mask_mode="mul")
    tril = torch.ones(64, 64).tril()
    causal = sparse_attention(*inputs, Dense(attention="unidirectional"))
    torch.testing.assert_close(whole(*inputs, attn_mask=tril), causal, rtol=1e-5, atol=1e-6)
    assert "full matrices, since it got attn_mask" in caplog.text
    added = SparseSelfAttention(Dense(), attn_mask_mode="add")
    found = added(*inputs, attn_mask=tril.log())
    torch.testing.assert_close(found, causal, rtol=1e-5, atol=1e-6)
    bias = torch.randn(4, 64, 64)
    found = SparseSelfAttention(CAUSAL)(*inputs, rpe=bias)
    allowed = allowed_elements(CAUSAL, 4, 64, 64)[None]
    torch.testing.assert_close(found, dense(*inputs, allowed, bias[None], 0.0, 24**-0.5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(2, 4, 8)}, r"each must be \[batch, heads, length, dim\]"),
        ({"key": torch.zeros(2, 3, 8, 16), "value": torch.zeros(2, 3, 8, 16)}, "a multiple of the key's"),
        ({"query": torch.zeros(2, 4, 9, 16)}, "no more queries than keys"),
        ({"query": torch.zeros(2, 4, 8, 16).double()}, "one floating-point dtype"),
        ({"key_padding_mask": torch.zeros(2, 7)}, r"must be \[batch, length\]: \[2, 8\]"),
        ({"key_padding_mask": torch.ones(2, 8, dtype=torch.long)}, "key_padding_mask int64 must be bool"),
        ({"query": torch.zeros(2, 4, 8, 0), "key": (empty := torch.zeros(2, 4, 8, 0)), "value": empty}, "at least 1"),
        ({"key": (none := torch.zeros(2, 0, 8, 16)), "value": none}, "at least 1"),
        ({"dropout": 1.0}, r"must be in \[0, 1\)"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), torch.zeros(2, 4, 8, 16))
    with pytest.raises(ValueError, match=words):
        sparse_attention(**{**given, **change}, pattern=Dense())


def test_modules_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="attn_mask_mode='plus' is unknown"):
        SparseSelfAttention(CAUSAL, attn_mask_mode="plus")
    with pytest.raises(ValueError, match="has no pattern. Pass one"):
        SparseSelfAttention()(*_inputs(16))
    with pytest.raises(ValueError, match="max_seq_length=32, but the sequence has 64 tokens"):
        SparseSelfAttention(CAUSAL, max_seq_length=32)(*_inputs(64))


def test_derivatives_in_forward_mode_and_by_transforms_are_those_of_full_matrices() -> None:
    pattern = Fixed(block=16, num_local_blocks=2)
    q, k, v, t = (torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(n)) for n in range(4))
    allowed = allowed_elements(pattern, 2, 40, 40)

    def sparse(q: Tensor, k: Tensor = k, v: Tensor = v) -> Tensor:
        return sparse_attention(q, k, v, pattern)

    def full(q: Tensor, k: Tensor = k, v: Tensor = v) -> Tensor:
        return dense(q, k, v, allowed, None, 0.0, 8**-0.5)

    def per_sample(attend: Any) -> Any:
        one = torch.func.grad(lambda *x: attend(*(y[None] for y in x)).square().sum(), argnums=(0, 1, 2))
        return torch.func.vmap(one)(q, k, v)

    def in_forward_mode(attend: Any) -> Any:
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(attend(q, forward_ad.make_dual(k, t))))

    derivatives: list[Any] = [
        lambda attend: torch.func.jvp(attend, (q, k, v), (t, t, t)),
        in_forward_mode,
        per_sample,
        lambda attend: torch.func.jvp(torch.func.grad(lambda x: attend(x).square().sum()), (q,), (t,)),
        lambda attend: torch.func.vmap(lambda x: torch.func.jvp(attend, (x,), (t,))[1])(torch.stack([q, k])),
    ]
    for derive in derivatives:
        for found, wanted in zip(iter_tensors(derive(sparse)), iter_tensors(derive(full)), strict=True):
            assert wanted.abs().max() > 0
            torch.testing.assert_close(found, wanted)
