"""Block-sparse attention: softmax(QK^T) V on the blocks of a pattern only.

On a CPU a kernel of our own computes it, forward and backward (kernel.py); on a GPU torch's FlexAttention does
(flex.py). ``dense`` computes the same with full matrices: it is the reference, and serves what the kernels do not:
float64, masks and biases of single elements, queries that are the last ones of a longer sequence, and derivatives in
forward mode and by transforms of torch.func.

Sequences that are cut over ranks (DeepSpeed-Ulysses, arXiv:2309.14509) are exchanged for heads before, and back after.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from lt_zero.common.arguments import expect, expect_number
from lt_zero.common.compat import asks_for_tangents
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.sequence import ProcessGroup, SequenceGroup, whole_heads
from lt_zero.core.division import current_row_ranks
from lt_zero.features.sparse_attention import kernel as ops
from lt_zero.features.sparse_attention.flex import flex
from lt_zero.features.sparse_attention.patterns import Pattern, distinct_layouts, pattern_from_text

log = logging.getLogger("lt_zero")


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attention within the blocks of ``pattern``; elements above the diagonal are masked if it is unidirectional.

    Extra memory is linear in the length. A token that sees nothing gets zeros.

    Args:
        query: of shape [batch, heads, length, dim]; any length, the last block may be shorter. Fewer queries than keys
            are the last ones of the sequence.
        key, value: of shape [batch, heads, length, dim]; or with fewer heads, each for several of the query.
        key_padding_mask: of shape [batch, length]: bool, True where a key is padding, as in torch's
            ``MultiheadAttention``; or floating-point, added to the scores.
        dropout: probability with which attention weights are dropped.
        scale: of the scores; default: 1 / sqrt(dim).
        group: each rank of it has a part of the sequence, in order and of one length, and all heads. Heads of the query
            are a multiple of its ranks. Default: the sequence ranks of the run, if it has any.

    Returns:
        Of the shape, dtype and memory layout of ``query``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_types(query, key, value, pattern, key_padding_mask, dropout)
    query, key, value = _for_autocast(query, key, value)
    within = _group_of(group, query.device)
    rank, ranks = (within.rank, within.size) if within is not None else (0, 1)
    heads = query.shape[1] if query.dim() == 4 else 0
    _check(query, key, value, key_padding_mask, dropout, ranks)
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError(
            "scale requires a gradient, which is not computed. Multiply the queries with it, and pass 1.0."
        )
    if within is None or ranks == 1:
        return _attend(query, key, value, pattern, _bias(key_padding_mask, query), dropout, scale, heads, 0)
    _check_constant(key_padding_mask)
    query, key, value = within.to_heads((query, whole_heads(key, ranks), whole_heads(value, ranks)))
    mask = within.gather_tokens(key_padding_mask) if key_padding_mask is not None else None
    out = _attend(query, key, value, pattern, _bias(mask, query), dropout, scale, heads, rank * query.shape[1])
    return within.to_tokens(out)


def _group_of(group: ProcessGroup | None, device: torch.device) -> SequenceGroup | None:
    """The ranks that have parts of whole sequences of tensors on ``device``; None if this one has all of them.

    ``group``: what a user has asked for; None: the ranks of the run.

    Raises:
        ConfigError: ranks of the run gather keys, so that none has whole sequences.
    """
    ranks = current_row_ranks()
    if group is not None and (ranks is None or group is not ranks.group.process_group):
        made: SequenceGroup = SequenceGroup.of(group, device)
        return made
    if ranks is not None and ranks.parts > 1:
        raise ConfigError.about(
            "sequence_parallel.method",
            f'method="{ranks.method}" with gather={ranks.parts} does not give sparse attention whole sequences. Use '
            'method="ulysses" with gather=1.',
        )
    return ranks.group if ranks is not None else None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, bias: Tensor | None, dropout: float,
    scale: float | None, heads: int, first: int,
) -> Tensor:  # fmt: skip
    """Attention of ``query``'s heads, which are number ``first`` and following of the ``heads``."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dense_only = query.shape[2] != key.shape[2] or query.dtype == torch.float64 or query.shape[0] == 0
    # The kernels have no derivatives in forward mode.
    if dense_only or asks_for_tangents():
        allowed = allowed_elements(pattern, heads, query.shape[2], key.shape[2], query.device, first, query.shape[1])
        return dense(query, key, value, allowed, bias, dropout, scale)
    if query.device.type != "cpu":
        return flex(query, key, value, pattern, bias, dropout, scale, heads, first)
    _check_constant(bias)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    # Ranks of a group often have one state of the generator, and their heads must not drop the same elements.
    if dropout:
        seed = torch.randint(1 << 62, (), device=query.device) + first
    wanted = query.dtype
    if wanted == torch.float16:  # a CPU multiplies in fp32
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out: Tensor
    out, _ = _forward(query, key, value, bias, seed, pattern.text, heads, first, scale, dropout)
    return out.to(wanted)


# ---- the CPU's operator ------------------------------------------------------------------------------------------


@functools.lru_cache(64)
def _index(text: str, heads: int, first: int, here: int, length: int) -> tuple[ops.BlockIndex, bool]:
    pattern = pattern_from_text(text)
    layout = distinct_layouts(pattern, heads, -(-length // pattern.block), first, here)
    return ops.BlockIndex.of(layout, pattern.block), pattern.causal


@torch.library.custom_op("lt_zero::sparse_attention", mutates_args=(), device_types="cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    pattern: str,
    heads: int,
    first: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    index, causal = _index(pattern, heads, first, query.shape[1], query.shape[2])
    return ops.attention_forward(query, key, value, index, ops.Terms(causal, scale, bias, dropout, int(seed)))


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("lt_zero::sparse_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    pattern: str,
    heads: int,
    first: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    index, causal = _index(pattern, heads, first, query.shape[1], query.shape[2])
    terms = ops.Terms(causal, scale, bias, dropout, int(seed))
    return ops.attention_backward(grad, query, key, value, out, lse, index, terms)


@_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias, seed, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, bias, seed)


def _differentiate(context: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = _backward(grad, *context.saved_tensors, *context.settings)
    return (*grads, *(None for _ in range(7)))


_forward.register_autograd(_differentiate, setup_context=_keep)


def _products(query: Any, pattern: str, heads: int) -> int:
    """Floating-point operations of one product of queries and keys within the pattern."""
    made = pattern_from_text(pattern)
    return int(2 * prod(query) * query[2] * made.density(heads, -(-query[2] // made.block)))


@register_flop_formula(torch.ops.lt_zero.sparse_attention)
def _flops(query: Any, key: Any, value: Any, bias: Any, seed: Any, pattern: str, heads: int, *_: Any, **__: Any) -> int:
    return 2 * _products(query, pattern, heads)


@register_flop_formula(torch.ops.lt_zero.sparse_attention_backward)
def _flops_of_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, bias: Any, seed: Any, pattern: str, heads: int,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    return 5 * _products(query, pattern, heads)  # scores again, and gradients of four


# ---- full matrices -------------------------------------------------------------------------------------------------


def allowed_elements(
    pattern: Pattern, heads: int, queries: int, keys: int, device: torch.device | None = None, first: int = 0,
    here: int | None = None,
) -> Tensor:  # fmt: skip
    """The mask of the last ``queries`` of ``keys`` tokens, True where one attends: [heads or 1, queries, keys].

    ``first``, ``here``: only heads ``first`` to ``first + here``.
    """
    layout = distinct_layouts(pattern, heads, -(-keys // pattern.block), first, here)
    at = torch.arange(keys, device="cpu")
    rows = at[keys - queries :]
    allowed = layout[:, rows // pattern.block][:, :, at // pattern.block]
    return (allowed & (rows[:, None] >= at) if pattern.causal else allowed).to(device)


def dense(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """Attention with full matrices.

    Args:
        allowed: broadcast to [batch, heads, queries, keys], bool.
        bias: added to the scores; of shape [batch, keys], or broadcast to that of the scores.
        dropout: as in ``sparse_attention``, with other random numbers.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + (bias[:, None, None] if bias.dim() == 2 else bias).to(scores.dtype)
    scores = scores.masked_fill(~allowed, float("-inf"))
    empty = scores.detach().amax(-1, keepdim=True) == float("-inf")  # no key at all
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return F.dropout(weights, dropout) @ value


# ---- the module ------------------------------------------------------------------------------------------------------


class SparseSelfAttention(nn.Module):
    """Attention of queries, keys and values that are there already, with DeepSpeed's signature.

    Args:
        sparsity_config: the pattern; default: that of the block ``sparse_attention``, once the model is sharded.
        key_padding_mask_mode: ``"add"``: the mask is added to the scores; ``"mul"``: 0 where a key is padding.
        attn_mask_mode: the same for the mask of single elements.
        max_seq_length: longer sequences are an error; default: none.
        dropout: of attention weights, in training.
        group: see ``sparse_attention``.
    """

    def __init__(
        self,
        sparsity_config: Pattern | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int | None = None,
        dropout: float = 0.0,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ValueError(f'{name}={mode!r} is unknown. Write "add" or "mul".')
        if sparsity_config is not None:
            expect(sparsity_config, Pattern, "SparseSelfAttention(sparsity_config=...)", _A_PATTERN)
        expect_number(dropout, "SparseSelfAttention(dropout=...)")
        if max_seq_length is not None:
            expect_number(max_seq_length, "SparseSelfAttention(max_seq_length=...)", whole=True)
        self.pattern, self.dropout, self.group = sparsity_config, dropout, group
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.max_seq_length = max_seq_length
        self._told = False
        self._configured: Pattern | None = None

    def configure(self, pattern: Pattern) -> Callable[[], None]:
        """Take the pattern of a configuration, also after that of another one, unless the module has its own.

        Returns:
            What takes it back.
        """
        before = self.pattern
        configured = self._configured

        def take_back() -> None:
            self.pattern = before
            self._configured = configured

        if before is None or before is configured:
            self.pattern = self._configured = pattern
        return take_back

    def extra_repr(self) -> str:
        return f"{self.pattern}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention's output, of the shape of ``query``: [batch, heads, length, dim].

        Args:
            rpe: relative position embedding, added to the scores; broadcast to [batch, heads, length, length].
            key_padding_mask: [batch, length]; bool: True where a key is padding.
            attn_mask: [length, length]; with ``rpe`` or ``attn_mask`` full matrices are computed.

        Raises:
            ValueError: there is no pattern, or shapes do not fit.
        """
        if self.pattern is None:
            raise ValueError(
                "SparseSelfAttention has no pattern. Pass one (SparseSelfAttention(Fixed(...))), or write the block "
                "sparse_attention into the configuration and let the strategy shard the model."
            )
        _check_types(query, key, value, self.pattern, key_padding_mask, self.dropout)
        for name, mask in (("rpe", rpe), ("attn_mask", attn_mask)):
            if mask is not None:
                expect(mask, Tensor, name, "pass a tensor")
        if self.max_seq_length is not None and query.shape[2] > self.max_seq_length:
            raise ValueError(f"max_seq_length={self.max_seq_length}, but the sequence has {query.shape[2]} tokens.")
        padding = key_padding_mask
        if padding is not None and self.key_padding_mask_mode == "mul" and padding.dtype != torch.bool:
            padding = padding == 0
        dropout = self.dropout if self.training else 0.0
        if rpe is None and attn_mask is None:
            return sparse_attention(query, key, value, self.pattern, padding, dropout, group=self.group)
        return self._dense(query, key, value, rpe, padding, attn_mask, dropout)

    def _dense(
        self, query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None, padding: Tensor | None,
        attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        if self.group is not None or current_row_ranks() is not None:
            raise ValueError("rpe and attn_mask are of full sequences, which no sequence rank has. Leave them out.")
        if not self._told:
            self._told = True
            log.warning(
                "SparseSelfAttention computes full matrices, since it got %s, which no block-sparse kernel takes.",
                "rpe" if rpe is not None else "attn_mask",
            )
        pattern: Any = self.pattern
        query, key, value = _for_autocast(query, key, value)
        _check(query, key, value, padding, dropout, 1)
        length, bias = query.shape[2], _bias(padding, query)
        allowed = allowed_elements(pattern, query.shape[1], length, key.shape[2], query.device)[None]
        total = query.new_zeros(1, 1, 1, 1) if bias is None else bias[:, None, None]
        if rpe is not None:
            total = total + rpe
        if attn_mask is not None and (self.attn_mask_mode == "mul" or attn_mask.dtype == torch.bool):
            allowed = allowed & (attn_mask != 0)
        elif attn_mask is not None:
            total = total + attn_mask
        return dense(query, key, value, allowed, total, dropout, query.shape[-1] ** -0.5)


# ---- arguments -----------------------------------------------------------------------------------------------------


_A_PATTERN = "pass a pattern, such as lt_zero.attention.Fixed(block=16)"


def _check_types(query: Any, key: Any, value: Any, pattern: Any, mask: Any, dropout: Any) -> None:
    # torch.compile cannot trace the classes of patterns.
    if torch.compiler.is_compiling():
        return
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expect(tensor, Tensor, name, "pass query, key and value as tensors, then the pattern")
    expect(pattern, Pattern, "pattern", _A_PATTERN)
    if mask is not None:
        expect(mask, Tensor, "key_padding_mask", "pass a tensor of shape [batch, length]")
    expect_number(dropout, "dropout")


def _for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the dtype of a running autocast, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The bias of the scores of each key: fp32, [batch, length]."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32, device=query.device).masked_fill_(mask, float("-inf"))
    return mask.to(torch.float64 if query.dtype == torch.float64 else torch.float32).contiguous()


def _check_constant(mask: Tensor | None) -> None:
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "key_padding_mask requires a gradient, which is not computed. Pass mask.detach(); a learned bias can be "
            "the rpe of SparseSelfAttention, which computes full matrices."
        )


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, ranks: int) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or query.shape[0] != key.shape[0]:
        raise ValueError(f"{shapes}: each must be [batch, heads, length, dim], key and value of one shape.")
    if 0 in (query.shape[1], *key.shape[1:]):
        raise ValueError(f"{shapes}: heads, length and dim must be at least 1.")
    if query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1] or query.shape[2] > key.shape[2]:
        raise ValueError(
            f"{shapes}: one dim is needed, heads of the query that are a multiple of the key's, and no more queries "
            "than keys."
        )
    if len({x.dtype for x in (query, key, value)}) > 1 or not query.is_floating_point():
        raise ValueError(f"query {query.dtype}, key {key.dtype}, value {value.dtype}: one floating-point dtype.")
    if mask is not None and tuple(mask.shape) != (key.shape[0], key.shape[2]):
        raise ValueError(f"key_padding_mask {list(mask.shape)} must be [batch, length]: {[key.shape[0], key.shape[2]]}")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        kind = str(mask.dtype).removeprefix("torch.")
        raise ValueError(
            f"key_padding_mask {kind} must be bool, True where a key is padding (mask == 0, if it is 0 there), or "
            "floating-point, which is added to the scores."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be in [0, 1).")
    if ranks > 1 and query.shape[2] != key.shape[2]:
        raise ValueError(f"{shapes}: on sequence ranks each has as many queries as keys.")
    if query.shape[1] % ranks:
        raise ValueError(f"{shapes}: heads of the query must be a multiple of the {ranks} sequence ranks.")
