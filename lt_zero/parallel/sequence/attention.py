"""Attention of sequences that are cut over ranks.

Note [Ulysses]
    DeepSpeed-Ulysses, arXiv:2309.14509: ranks exchange their parts of all heads for whole sequences of some heads,
    compute these as one process would, and exchange the outputs back. Keys and values with fewer heads than there are
    ranks are repeated first, as often as whole heads need; grouped queries stay grouped, and autograd sums the
    gradients of the copies. The exchanged tensors are written in the order [length, batch, heads, dim], so that what a
    rank receives is one tensor of the whole length without a copy.

Note [Gathered keys]
    Queries stay, and keys and values of the whole sequence are gathered; in backward their gradients are summed and
    scattered. Any number of heads will do. A rank's queries are one run of positions, or two in zigzag order
    (ranks.py, Note [Order of tokens]), and each run is computed with the keys up to its end. Torch's ``is_causal``
    aligns its triangle with the first key, which is right for as many queries as keys only. So the mask is given: on an
    accelerator as ``causal_lower_right``, for which torch has kernels; elsewhere for ``_ROWS`` queries at a time, whose
    masks are parts of one, as backward needs all of them. So memory stays linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.sequence import ProcessGroup, SequenceGroup, place_in, whole_heads
from lt_zero.parallel.random import draw_seed, seed_of, seeded
from lt_zero.parallel.sequence.ranks import check_method, current, from_zigzag, parts_of

Attention = Callable[..., Tensor]
_ROWS = 256


def sequence_attention(
    function: Attention = F.scaled_dot_product_attention,
    group: ProcessGroup | None = None,
    *,
    method: str = "ulysses",
    gather: int = 1,
    zigzag: bool = False,
) -> Attention:
    """Let ``function`` compute attention of sequences that are cut over ranks.

    Args:
        function: takes query, key and value of shape [batch, heads, length, dim] and keyword arguments, which are those
            of ``scaled_dot_product_attention``. With gathered keys there are fewer queries than keys, and a causal mask
            comes as ``attn_mask``.
        group: its ranks have equal parts of the sequence, in rank order. Default: the sequence ranks of the run, with
            the method of its configuration; ``function`` itself where there are none.
        method: with ``group``: "ulysses" exchanges heads for tokens, "gather" gathers keys and values.
        gather: with ``group``: in how many parts the keys are gathered; the others exchange heads. For more ranks than
            heads.
        zigzag: with ``group``: tokens are in zigzag order.

    Returns:
        A function with the arguments of ``function``, for parts of sequences; its output is the part of the output. It
        takes: ``attn_mask`` of the whole sequence, [..., length, length] in the order of positions; ``is_causal``, of
        the whole sequence; ``dropout_p``, with other masks on each rank; ``scale``, ``enable_gqa`` and other arguments
        as they are. Collective.

    Raises:
        ConfigError: method or gather do not fit the ranks; when called, heads do not.
        ValueError: when called, an argument would be wrong for a part of the sequence.
    """
    if group is not None:
        check_method(method, gather, place_in(group)[1])
    return SequenceAttention(function, group, method, gather, zigzag)


@dataclass(frozen=True)
class SequenceAttention:
    """Attention function of parts of sequences; see ``sequence_attention``."""

    function: Attention
    group: ProcessGroup | None
    method: str
    gather: int
    zigzag: bool

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention of this rank's part: see ``sequence_attention``."""
        ranks, group = current(), self.group
        if group is not None:
            known = ranks is not None and group is ranks.group.process_group
            within = ranks.group if known and ranks is not None else SequenceGroup.of(group, query.device)
            cut = _CutSequence(within, parts_of(self.method, self.gather, within.size), self.zigzag)
        elif ranks is not None:
            cut = _CutSequence(ranks.group, ranks.parts, ranks.zigzag)
        if (group is None and ranks is None) or cut.group.size == 1:
            return self.function(query, key, value, **options)
        return cut.attend(self.function, query, key, value, options)

    def __deepcopy__(self, memo: Any) -> SequenceAttention:
        return self  # copies of a module share its group, which cannot be copied


@dataclass(frozen=True)
class _CutSequence:
    """Sequence ranks, in groups of neighbours that exchange heads; keys are gathered from ``parts`` such groups."""

    group: SequenceGroup
    parts: int
    zigzag: bool

    def attend(self, function: Attention, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute this rank's part of the output. Collective."""
        group, size = self.group, self.group.size
        options = _checked(options, query, key, value, self)
        near = size // self.parts
        neighbours = range(group.rank // near * near, group.rank // near * near + near)
        if near > 1:
            key, value = (whole_heads(x, near) for x in (key, value))
            query, key, value = group.to_heads((query, key, value), neighbours)
            options = _of_heads(options, query.shape[1], group.rank % near, near)
        if self.parts > 1:
            key, value = group.gather_parts((key, value), range(group.rank % near, size, near))
            if self.zigzag:
                key, value = (from_zigzag(x, 2, self.parts) for x in (key, value))
        with self._numbers(options, query.device):
            out = self._computed(function, query, key, value, options)
        return group.to_tokens(out, neighbours) if near > 1 else out

    def _numbers(self, options: dict[str, Any], device: torch.device) -> AbstractContextManager[None]:
        """Context with random numbers of this rank: parts of a sequence must not drop the same elements."""
        if not options.get("dropout_p"):
            return nullcontext()
        return seeded(seed_of(draw_seed(), self.group.rank), device.type)

    def _computed(
        self, function: Attention, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Attention of the queries of this rank to the keys of the whole sequence."""
        if self.parts == 1:
            return function(query, key, value, **options)
        causal = options.pop("is_causal", False)
        mask: Any = options.get("attn_mask")
        if not causal and (mask is None or mask.shape[-2] == 1):
            return function(query, key, value, **options)
        options.pop("attn_mask", None)
        count, number = query.shape[2], self.group.rank // (self.group.size // self.parts)
        firsts = [number * count]
        if self.zigzag:
            count //= 2
            firsts = [number * count, (2 * self.parts - 1 - number) * count]
        outs = []
        for first, part in zip(firsts, query.split(count, 2), strict=True):
            if causal:
                outs += _causal(function, part, key, value, first, options)
            else:
                rows = mask[..., first : first + count, :]
                outs.append(function(part, key, value, attn_mask=rows, **options))
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]


def _causal(
    function: Attention, query: Tensor, key: Tensor, value: Tensor, first: int, options: dict[str, Any]
) -> list[Tensor]:
    """Attention of queries from position ``first`` on to keys that do not come later, in one or several parts."""
    count, end = query.shape[2], first + query.shape[2]
    if first == 0:
        return [function(query, key[:, :, :end], value[:, :, :end], is_causal=True, **options)]
    if accelerator.is_accelerator(query.device) and function is F.scaled_dot_product_attention:
        mask: Any = causal_lower_right(count, end)
        return [function(query, key[:, :, :end], value[:, :, :end], attn_mask=mask, **options)]
    outs, length = [], key.shape[2]
    kind = query.device.type
    cast = torch.is_autocast_enabled(kind) and query.dtype != torch.float64
    bias = _lower_right(length, torch.get_autocast_dtype(kind) if cast else query.dtype, query.device)
    for part in query.split(_ROWS, 2):
        first += part.shape[2]
        # A row of ``bias`` is that of the query at its place from the end.
        mask = bias[_ROWS - part.shape[2] :, length - first :]
        outs.append(function(part, key[:, :, :first], value[:, :, :first], attn_mask=mask, **options))
    return outs


@functools.lru_cache(1)
def _lower_right(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bias of the last ``_ROWS`` queries of ``length`` keys: -inf for later keys."""
    # Made in inference mode, it could not be saved for backward later.
    with torch.inference_mode(False):
        bias = torch.full((_ROWS, length), float("-inf"), dtype=dtype, device=device)
        return bias.triu_(length - _ROWS + 1)


def _of_heads(options: dict[str, Any], heads: int, number: int, ranks: int) -> dict[str, Any]:
    """Arguments for the ``number``-th group of ``heads``, of ``ranks`` groups."""
    mask = options.get("attn_mask")
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return options
    return {**options, "attn_mask": mask.narrow(-3, number * heads, heads)}


def _checked(options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, cut: _CutSequence) -> dict[str, Any]:
    """A copy of the arguments.

    Raises:
        ValueError: one of them would be wrong for parts of sequences.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"{shapes}: each must be [batch, heads, length, dim], key and value of the same heads and length."
        )
    heads, near = query.shape[1], cut.group.size // cut.parts
    if heads % key.shape[1]:
        raise ValueError(f"{shapes}: the heads of the query must be a multiple of those of the key.")
    if heads % near:
        raise ConfigError.about(
            "sequence_parallel.method",
            f"{heads} heads cannot be exchanged over {near} ranks: they are no multiple. Use "
            'method="gather", which takes any number of heads, or more parts of it ("gather").',
        )
    if cut.zigzag and (query.shape[2] * near % 2 or key.shape[2] * near % 2):
        raise ValueError(
            f"{shapes}: zigzag order needs lengths of whole sequences that are multiples of {2 * cut.parts}."
        )
    if options.get("is_causal") and cut.parts > 1 and query.shape[2] != key.shape[2]:
        raise ValueError(f"{shapes}: is_causal=True with gathered keys needs as many queries as keys.")
    if options.get("is_causal") and options.get("attn_mask") is not None:
        raise ValueError(
            "is_causal=True and attn_mask exclude each other. Make the mask causal, and leave is_causal out."
        )
    for name, option in options.items():
        if name == "attn_mask" and option is not None:
            _check_mask(option, query, key, cut.group.size)
        elif name == "score_mod" and option is not None:
            raise ValueError(
                "score_mod would get the numbers of heads and tokens of this rank. Pass attn_mask instead."
            )
        elif name == "block_mask" and option is not None and (cut.parts > 1 or option.shape[1] > 1):
            raise ValueError(
                'block_mask has to be of the whole sequence and of no single heads (H=None), for the method "ulysses".'
            )
        elif isinstance(option, Tensor) and name != "attn_mask" and option.numel() > 1:
            raise ValueError(
                f"{name} is a tensor of shape {list(option.shape)}, which may be of parts or of whole sequences. "
                "Express it by attn_mask, or bind it with functools.partial if it is right for all heads and tokens."
            )
    return dict(options)


def _check_mask(mask: Any, query: Tensor, key: Tensor, ranks: int) -> None:
    if isinstance(mask, CausalBias):
        raise ValueError(f"attn_mask is a {type(mask).__name__}. Pass is_causal=True instead.")
    whole = query.shape[1], ranks * query.shape[2], ranks * key.shape[2]
    sizes = (1, 1, *mask.shape)[-3:] if isinstance(mask, Tensor) and mask.dim() > 1 else ()
    if not sizes or any(size not in (1, wanted) for size, wanted in zip(sizes, whole, strict=True)):
        found = list(mask.shape) if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"attn_mask {found} has to broadcast to [batch, heads, length, length] of the whole sequence: the "
            f"last three are {list(whole)} here."
        )
