"""Block-sparse attention on the CPU: ``softmax(scale * q k^T + key_bias) v`` on some blocks of the scores.

Forward and backward are two plain functions; sparse.py makes an operator of them. Softmax is computed while
the blocks pass by (Dao, FlashAttention-2, 2023, arXiv:2307.08691): beside the results, memory grows with the length,
not with the number of blocks.

Dropout drops an element of the softmax by a hash of (seed, batch and head, row, column), so that the backward pass
computes it again; see ``dropout_mask``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lt_zero.kernels import library
from lt_zero.kernels.dispatch import DTYPES, address, call
from lt_zero.kernels.header import STRUCTS

LARGEST_DIM = 256  # of a head
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: made once for a layout, then kept
class BlockIndex:
    """The blocks of a layout, listed by rows and by columns.

    Attributes:
        block: rows and columns of a block.
        layouts: 1, or one for each head.
        blocks: blocks of a row, and of a column.
        row_begin: [layouts * blocks + 1] int64; the blocks of row r of layout n are
            ``row_index[row_begin[n * blocks + r] : row_begin[n * blocks + r + 1]]``.
        row_index: [number of blocks] int32, rising within a row.
        column_begin: as ``row_begin``, for columns.
        column_index: as ``row_index``, for columns.
    """

    block: int
    layouts: int
    blocks: int
    row_begin: Tensor
    row_index: Tensor
    column_begin: Tensor
    column_index: Tensor

    @classmethod
    def of(cls, layout: Tensor, block: int) -> BlockIndex:
        """List the blocks of a layout.

        Args:
            layout: [heads or 1, blocks, blocks], rows before columns; blocks other than 0 are computed.
            block: rows and columns of a block.

        Raises:
            ValueError: the layout has another shape, or ``block`` is below 1.
        """
        if layout.dim() != 3 or layout.shape[1] != layout.shape[2] or layout.shape[0] < 1 or layout.shape[1] < 1:
            raise ValueError(f"layout has shape {tuple(layout.shape)}; [heads or 1, blocks, blocks] is needed.")
        if block < 1:
            raise ValueError(f"block is {block}; 1 or more is needed.")
        there = layout.detach().cpu() != 0
        return cls(block, there.shape[0], there.shape[1], *_lists(there), *_lists(there.transpose(1, 2)))

    def dense(self, length: int) -> Tensor:
        """The mask of all elements, [layouts, length, length] bool: True where a score is computed."""
        there = torch.zeros(self.layouts * self.blocks, self.blocks, dtype=torch.bool, device="cpu")
        rows = torch.arange(self.layouts * self.blocks, device="cpu").repeat_interleave(self.row_begin.diff())
        there[rows, self.row_index.long()] = True
        there = there.view(self.layouts, self.blocks, self.blocks)
        return there.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)[:, :length, :length]


def _lists(there: Tensor) -> tuple[Tensor, Tensor]:
    begin = torch.zeros(there.shape[0] * there.shape[1] + 1, dtype=torch.int64, device="cpu")
    begin[1:] = there.sum(2).view(-1).cumsum(0)
    return begin, there.nonzero()[:, 2].int()


@dataclass(frozen=True, eq=False)
class Terms:
    """Parameters of the weights of attention besides queries, keys and the layout.

    Attributes:
        causal: keys after a row are not seen, also within a block.
        scale: of the scores; None: ``1 / sqrt(dim)``.
        key_bias: [batch, length] fp32, added to the scores of each key; -inf: the key is not seen.
        dropout: the share of elements of the softmax that is dropped, from 0 to below 1.
        seed: of dropout, from 0 to 2^63 - 1.
    """

    causal: bool = False
    scale: float | None = None
    key_bias: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0

    def scale_of(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale


PLAIN = Terms()


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Attention on the blocks of ``index``.

    Args:
        q: [batch, heads, length, dim] in fp32 or bf16, any strides, but the last dimension contiguous.
        k: [batch, kv_heads, length, dim], likewise; ``heads`` is a multiple of ``kv_heads``, whose heads are shared by
            neighbouring ones of q.
        v: as k.
        index: of a layout with ``heads`` layouts or one, of ``ceil(length / block)`` blocks.
        terms: further parameters of the weights.

    Returns:
        The result, of q's shape, dtype and order of dimensions in memory, and [batch, heads, length] fp32, the
        logarithms of the sums of exponentials. A row that sees no key has the results 0 and -inf.

    Raises:
        ValueError: an argument is something else.
    """
    lib = _check(q, k, v, index, terms)
    if lib is None:
        out, lse = attention_forward_reference(q, k, v, index, terms)
        return torch.empty_like(q).copy_(out), lse.contiguous()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    # The bias has to live until the kernel has run: `problem` has its address only.
    bias = terms.key_bias.contiguous() if terms.key_bias is not None else None
    tensors = {"q": q, "k": k, "v": v, "out": out}
    problem = _problem(tensors, index, lse, bias, terms)
    call(lib, "attention_forward", q.device, ctypes.byref(problem))
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: BlockIndex,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``attention_forward`` with respect to q, k and v, in their dtype.

    Args:
        dout: of q's shape and dtype: the gradient of ``out``.
        q, k, v, index, terms: as in the forward pass.
        out: what it returned.
        lse: what it returned.

    Raises:
        ValueError: an argument is something else.
    """
    lib = _check(q, k, v, index, terms)
    for name, tensor in (("dout", dout), ("out", out)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name} is {_described(tensor)}; q is {_described(q)}.")
    if lse.shape != q.shape[:3] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse is {_described(lse)}; {tuple(q.shape[:3])}, float32, contiguous is needed.")
    if lib is None:
        dq, dk, dv = attention_backward_reference(dout, q, k, v, index, terms)
        return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)
    bias = terms.key_bias.contiguous() if terms.key_bias is not None else None
    # An expanded gradient has strides of 0.
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    out = out if out.stride(3) == 1 else out.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    problem = _problem(tensors, index, lse, bias, terms)
    call(lib, "attention_backward", q.device, ctypes.byref(problem))
    return dq, dk, dv


# ---- references ------------------------------------------------------------------------------------------------------


def attention_forward_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor]:
    """``attention_forward`` in torch operations, with all scores in memory; in fp64 if q is."""
    k, v = (_wide(t).repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    weights, kept, lse = _weights(_wide(q), k, index, terms)
    return ((weights * kept if kept is not None else weights) @ v).to(q.dtype), lse


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _weights(q: Tensor, k: Tensor, index: BlockIndex, terms: Terms) -> tuple[Tensor, Tensor | None, Tensor]:
    """Softmax of the scores; the factors of dropout, or None; and the logarithms of the sums."""
    batch, heads, length, _ = q.shape
    scores = terms.scale_of(q) * (q @ k.transpose(2, 3))
    if terms.key_bias is not None:
        scores = scores + terms.key_bias[:, None, None].to(q.dtype)
    seen = index.dense(length)
    scores = scores.masked_fill(~(seen.tril() if terms.causal else seen), -math.inf)
    lse = scores.logsumexp(3)
    # A row without keys has a softmax of NaN. Give it any finite scores, and no weights.
    blind = (lse == -math.inf)[..., None]
    weights = scores.masked_fill(blind, 0.0).softmax(3).masked_fill(blind, 0.0)  # neither NaN, nor in the gradients
    if not terms.dropout:
        return weights, None, lse
    kept = [dropout_mask(terms.seed, number, length, length, terms.dropout) for number in range(batch * heads)]
    return weights, torch.stack(kept).view(batch, heads, length, length).to(q.dtype) / (1 - terms.dropout), lse


def attention_backward_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attention_backward`` in torch operations; without autograd, which does not run inside of an operator."""
    shape, group = k.shape, q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v, dout = map(_wide, (q, k, v, dout))
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (wide_k, wide_v))
    weights, kept, _ = _weights(wide_q, wide_k, index, terms)
    dweights = dout @ wide_v.transpose(2, 3)
    used = weights if kept is None else weights * kept
    dweights = dweights if kept is None else dweights * kept
    # The gradient of softmax: of each row's gradients, their weighted mean is taken off.
    dscores = terms.scale_of(q) * weights * (dweights - (weights * dweights).sum(3, keepdim=True))
    dk, dv = dscores.transpose(2, 3) @ wide_q, used.transpose(2, 3) @ dout
    # Heads of q that share one of k add up in it.
    dk, dv = (t.unflatten(1, (shape[1], group)).sum(2) for t in (dk, dv))
    return (dscores @ wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def dropout_mask(seed: int, number: int, rows: int, columns: int, dropout: float) -> Tensor:
    """The mask of the softmax elements of head ``number`` (``batch * heads + head``) that are kept: [rows, columns].

    Rows and columns are hashed with a key each, then the hashes of both together; an element is dropped if the result
    is below ``dropout * 2^32``. Hashes are lowbias32 (C. Wellons, Hash Prospector, 2018), keys come from SplitMix64
    (Steele, Lea and Flood, 2014).
    """
    z = (seed + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    # Rows and columns get different halves of the key: with one key the mask would be symmetric.
    row = _mix(torch.arange(rows, device="cpu") ^ z % 2**32)
    column = _mix(torch.arange(columns, device="cpu") ^ z >> 32)
    return _mix(row[:, None] ^ column) >= int(dropout * 2**32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, in int64: products that overflow keep their lower bits."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


# ---- checks and addresses --------------------------------------------------------------------------------------------


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, on {tensor.device}"


def _check(q: Tensor, k: Tensor, v: Tensor, index: BlockIndex, terms: Terms) -> ctypes.CDLL | None:
    """Check the arguments; the library of kernels, or None."""
    if q.dim() != 4 or q.dtype not in _DTYPES or q.device.type != "cpu" or not 1 <= q.shape[3] <= LARGEST_DIM:
        raise ValueError(
            f"q is {_described(q)}; [batch, heads, length, dim up to {LARGEST_DIM}], float32 or bfloat16, on the CPU "
            "is needed."
        )
    batch, heads, length, dim = q.shape
    for name, tensor in (("k", k), ("v", v)):
        fits = tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2], tensor.shape[3]) == (batch, length, dim)
        if not fits or tensor.dtype != q.dtype or tensor.device != q.device or tensor.shape != k.shape:
            raise ValueError(f"{name} is {_described(tensor)}; q is {_described(q)}, k is {_described(k)}.")
    if min(q.numel(), k.numel()) == 0 or heads % k.shape[1] != 0:
        raise ValueError(f"q has {heads} heads and {q.numel()} elements, k has {k.shape[1]} heads: no multiple of it.")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(3) != 1 and dim > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous.")
    if index.layouts not in (1, heads) or index.blocks != -(-length // index.block):
        raise ValueError(
            f"The layout is of {index.layouts} heads and {index.blocks} blocks of {index.block}; "
            f"1 or {heads} heads and {-(-length // index.block)} blocks for {length} positions are needed."
        )
    bias = terms.key_bias
    if bias is not None and (bias.shape != (batch, length) or bias.dtype != torch.float32):
        raise ValueError(f"key_bias is {_described(bias)}; {(batch, length)}, float32 is needed.")
    if not 0 <= terms.dropout < 1:
        raise ValueError(f"dropout is {terms.dropout}; from 0 to below 1 is possible.")
    if not 0 <= terms.seed < 2**63:
        raise ValueError(f"seed is {terms.seed}; from 0 to 2^63 - 1 is possible.")
    return library.cpu()


def _problem(
    tensors: dict[str, Tensor], index: BlockIndex, lse: Tensor, key_bias: Tensor | None, terms: Terms
) -> ctypes.Structure:
    """``lt_attention``; it does not keep the tensors alive."""
    q, k = tensors["q"], tensors["k"]
    rows = {name: STRUCTS["lt_rows"](address(t), *t.stride()[:3]) for name, t in tensors.items()}
    return STRUCTS["lt_attention"](
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        length=q.shape[2],
        dim=q.shape[3],
        block=index.block,
        layouts=index.layouts,
        rows=_native_lists(index.row_begin, index.row_index),
        columns=_native_lists(index.column_begin, index.column_index),
        lse=address(lse),
        key_bias=address(key_bias),
        scale=terms.scale_of(q),
        dropout=terms.dropout,
        seed=terms.seed,
        dtype=DTYPES[q.dtype],
        causal=terms.causal,
        **rows,
    )


def _native_lists(begin: Tensor, index: Tensor) -> ctypes.Structure:
    """``lt_lists`` of int64 and int32 tensors; it does not keep them alive."""
    return STRUCTS["lt_lists"](
        ctypes.pointer(ctypes.c_int64.from_address(begin.data_ptr())),
        ctypes.pointer(ctypes.c_int32.from_address(index.data_ptr())),
    )
