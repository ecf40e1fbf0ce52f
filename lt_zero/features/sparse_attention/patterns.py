"""Patterns of block-sparse attention, as data: which blocks of queries attend to which blocks of keys.

Parameters and layouts are those of DeepSpeed's sparse attention (``SparsityConfig``, up to 0.19.6), without its
``num_heads``, which ``layout`` is given. The rules for values are in ``lt_zero.config``: a pattern takes what the block
``sparse_attention`` of a configuration takes.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import random
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from lt_zero.common.arguments import expect, expect_number
from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import Schema
from lt_zero.config.load import examine

Attention = Literal["unidirectional", "bidirectional"]
_BLOCK = "sparse_attention"


class _ByName(ABCMeta):
    """Makes patterns from settings that they have, passed by name; DeepSpeed's come after the number of heads."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            text = f"{cls.__name__}({args[0]!r}): settings are passed by name, such as {cls.__name__}(block=16)"
            raise TypeError(f"{text}; the number of heads is none of them, layouts are made for any.")
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := next((name for name in kwargs if name not in known), None):
            near = difflib.get_close_matches(unknown, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
            hint = "remove it, layouts are made for any number of heads." if unknown == "num_heads" else hint
            raise TypeError(f"{cls.__name__}({unknown}={kwargs[unknown]!r}) is no setting of this pattern: {hint}")
        return super().__call__(**kwargs)


@dataclass(frozen=True, kw_only=True)
class Pattern(metaclass=_ByName):
    """Base class of patterns. Values are checked, numbers may be text, and lists become tuples.

    Attributes:
        block: tokens of a block; a sequence is cut into blocks of so many.
        attention: ``"unidirectional"``: no token attends to a later one.

    Raises:
        ConfigError: values that no layout can have, with their keys ``sparse_attention.<name>``.
    """

    mode: ClassVar[str]  # its name in the configuration
    if TYPE_CHECKING:
        text: str  # all settings: an argument of an operator, which torch.compile keeps as a constant

    block: int = 16
    attention: Attention = "bidirectional"

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        checked = examine({_BLOCK: {"mode": self.mode, **given}}).usable().sparse_attention
        assert checked is not None
        for name, value in checked.settings.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "text", json.dumps(settings_of(self)))

    @property
    def causal(self) -> bool:
        """True if elements above the diagonal are masked, also inside the blocks of the layout."""
        return self.attention == "unidirectional"

    def layout(self, heads: int, blocks: int) -> Tensor:
        """The blocks that this pattern names, as DeepSpeed's ``make_layout`` has them.

        Made once for the same arguments: do not write to it. Where all heads have one layout, they share its memory.
        Like DeepSpeed's, a unidirectional layout may have blocks above the diagonal (``Fixed`` with several global
        blocks, ``Variable`` with random blocks or ranges); all their elements are masked, see ``computed``.

        Args:
            heads: number of attention heads.
            blocks: length of the sequence in blocks.

        Returns:
            Of shape [heads, blocks of queries, blocks of keys], bool, on the CPU.

        Raises:
            ConfigError: a row has fewer blocks than ``num_random_blocks``.
        """
        expect_number(heads, "layout(heads=...)", whole=True)
        expect_number(blocks, "layout(blocks=...)", whole=True)
        if heads < 1 or blocks < 1:
            raise ValueError(f"heads={heads}, blocks={blocks}: a layout has at least one of both.")
        return _layout(self, heads, blocks)

    def computed(self, heads: int, blocks: int) -> Tensor:
        """The layout without blocks that are above the diagonal of a unidirectional pattern; else the layout."""
        layout = self.layout(heads, blocks)
        return _layout(self, heads, blocks, below=True) if self.causal else layout

    def density(self, heads: int, blocks: int) -> float:
        """The computed share of the attention matrix, over all heads."""
        computed = self.computed(heads, blocks)
        return computed.sum().item() / computed.numel()

    @abstractmethod
    def _draw(self, heads: int, blocks: int) -> Tensor:
        """The layout, of shape [heads or 1, blocks, blocks]."""


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """All blocks: dense attention, to compare with.

    Attributes:
        different_layout_per_head: no effect, all heads have all blocks.
    """

    mode = "dense"

    different_layout_per_head: bool = False

    def _draw(self, heads: int, blocks: int) -> Tensor:
        return torch.ones(1, blocks, blocks, dtype=torch.bool, device="cpu")


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Local windows side by side; some blocks at the end of each are attended to by all (arXiv:1904.10509).

    Attributes:
        different_layout_per_head: heads take turns with the ``num_different_global_patterns``.
        num_local_blocks: blocks of a window.
        num_global_blocks: global blocks of each window; divides ``num_local_blocks``.
        horizontal_global_attention: global blocks also attend to all blocks; bidirectional only.
        num_different_global_patterns: the global blocks of a window are its last ones, those before, and so on.
    """

    mode = "fixed"

    different_layout_per_head: bool = False
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def _draw(self, heads: int, blocks: int) -> Tensor:
        count = min(self.num_different_global_patterns, heads)
        local = _same(torch.arange(blocks, device="cpu") // self.num_local_blocks)
        local = local.tril() if self.causal else local
        layouts = torch.stack([self._with_global(local, pattern) for pattern in range(count)])
        return layouts[torch.arange(heads, device="cpu") % count] if count > 1 else layouts

    def _with_global(self, local: Tensor, pattern: int) -> Tensor:
        """One layout: windows, and the global blocks that are ``pattern`` groups before the end of each."""
        layout, window, group = local.clone(), self.num_local_blocks, self.num_global_blocks
        whole = len(layout) - len(layout) % window  # blocks in whole windows
        first = window - (1 + pattern) * group
        starts = list(range(first, whole, window))
        if whole < len(layout):
            # A short window has its global blocks earlier, if it has to. In a sequence that is shorter than they are
            # the start is negative and counts from the end, as in DeepSpeed; the window has all that is not masked.
            starts.append(min(whole + first, len(layout) - group))
        for start in starts:
            _add_global(layout, start, start + group, self.causal, self.horizontal_global_attention)
        return layout


@dataclass(frozen=True, kw_only=True)
class Variable(Pattern):
    """``Fixed`` with windows of several sizes, global blocks of one's choice, and random blocks.

    Attributes:
        different_layout_per_head: each head draws its own random blocks.
        num_random_blocks: random blocks in each row.
        local_window_blocks: blocks of the first windows; the last number repeats.
        global_block_indices: global blocks; those past the end of a sequence do not count.
        global_block_end_indices: ranges from each of ``global_block_indices`` up to, without, these are global.
        horizontal_global_attention: global blocks also attend to all blocks; bidirectional only.
        seed: where random blocks start from.
    """

    mode = "variable"

    different_layout_per_head: bool = False
    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    horizontal_global_attention: bool = False
    seed: int = 0

    def _draw(self, heads: int, blocks: int) -> Tensor:
        sizes = (*self.local_window_blocks, *itertools.repeat(self.local_window_blocks[-1], blocks))
        ends = torch.tensor([*itertools.accumulate(min(size, blocks) for size in sizes)], device="cpu")
        local = _same(torch.bucketize(torch.arange(blocks, device="cpu"), ends, right=True))
        distinct = heads if self.different_layout_per_head else 1
        layout = _random_blocks(self.seed, self.num_random_blocks, distinct, blocks)
        layout |= local.tril() if self.causal else local
        for start, end in _global_ranges(self, blocks):
            _add_global(layout, start, end, self.causal, self.horizontal_global_attention)
        return layout


@dataclass(frozen=True, kw_only=True)
class BigBird(Pattern):
    """A sliding window, the first blocks as global ones, and random blocks (arXiv:2007.14062).

    Attributes:
        different_layout_per_head: each head draws its own random blocks.
        num_random_blocks: random blocks in each row; unidirectional ones are drawn up to the diagonal, as many as there
            are (DeepSpeed fails in such rows).
        num_sliding_window_blocks: width of the window around each block; an even number is one more.
        num_global_blocks: how many first blocks attend to all, and all to them.
        seed: where random blocks start from.
    """

    mode = "bigbird"

    different_layout_per_head: bool = False
    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    seed: int = 0

    def _draw(self, heads: int, blocks: int) -> Tensor:
        distinct = heads if self.different_layout_per_head else 1
        layout = _random_blocks(self.seed, self.num_random_blocks, distinct, blocks, self.causal)
        layout |= _window(blocks, self.num_sliding_window_blocks)
        _add_global(layout, 0, self.num_global_blocks)
        return layout.tril() if self.causal else layout


@dataclass(frozen=True, kw_only=True)
class BSLongformer(Pattern):
    """A sliding window and global blocks of one's choice: Longformer (arXiv:2004.05150) in blocks.

    Attributes:
        different_layout_per_head: no effect, all heads have one layout.
        num_sliding_window_blocks: width of the window around each block; an even number is one more.
        global_block_indices: blocks that attend to all, and all to them; those past the end of a sequence do not count.
        global_block_end_indices: ranges from each of ``global_block_indices`` up to, without, these are global.
    """

    mode = "bslongformer"

    different_layout_per_head: bool = False
    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None

    def _draw(self, heads: int, blocks: int) -> Tensor:
        layout = _window(blocks, self.num_sliding_window_blocks)
        for start, end in _global_ranges(self, blocks):
            _add_global(layout, start, end)
        return (layout.tril() if self.causal else layout)[None]


@dataclass(frozen=True, kw_only=True)
class LocalSlidingWindow(Pattern):
    """A sliding window, and nothing else.

    Attributes:
        num_sliding_window_blocks: width of the window around each block; an even number is one more. A unidirectional
            one has the half up to the block itself.
    """

    mode = "local_sliding_window"

    attention: Attention = "unidirectional"
    num_sliding_window_blocks: int = 3

    def _draw(self, heads: int, blocks: int) -> Tensor:
        layout = _window(blocks, self.num_sliding_window_blocks)
        return (layout.tril() if self.causal else layout)[None]


PATTERNS: Mapping[str, type[Pattern]] = {
    pattern.mode: pattern for pattern in (Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow)
}
"""Classes by their modes."""


def pattern_of(config: Schema) -> Pattern | None:
    """The pattern of a configuration's ``sparse_attention`` block; None without one."""
    remedy = "pass a ZeroConfig, as ZeroConfig.of makes it of a file or a mapping; or make a pattern, such as Fixed()"
    expect(config, Schema, "The configuration of pattern_of", remedy)
    block = config.sparse_attention
    return None if block is None else PATTERNS[block.mode](**block.settings)


def distinct_layouts(pattern: Pattern, heads: int, blocks: int, first: int = 0, here: int | None = None) -> Tensor:
    """``computed`` of heads ``first`` to ``first + here`` (default: all): [1 if all heads have one, blocks, blocks]."""
    layout = pattern.layout(heads, blocks)
    layout = layout[:1] if layout.stride(0) == 0 else layout[first : first + (here or heads)]
    return layout.tril() if pattern.causal else layout


def settings_of(pattern: Pattern) -> dict[str, Any]:
    """The pattern as a configuration's ``sparse_attention`` block has it."""
    return {"mode": pattern.mode, **asdict(pattern)}


def pattern_from(settings: Mapping[str, Any]) -> Pattern:
    """The pattern of a block like that of ``settings_of``.

    Raises:
        ConfigError: the block is wrong.
    """
    return pattern_from_text(json.dumps(dict(settings)))


@functools.lru_cache(maxsize=64)
def pattern_from_text(text: str) -> Pattern:
    """``pattern_from`` of settings as JSON: models ask for it in every layer and step, and checks take 0.4 ms."""
    found = pattern_of(examine({_BLOCK: json.loads(text)}).usable())
    assert found is not None
    return found


# ---- layouts ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _layout(pattern: Pattern, heads: int, blocks: int, below: bool = False) -> Tensor:
    # The layout outlives the mode that it is made in.
    with torch.inference_mode(False):
        layout = pattern._draw(heads, blocks)
        return (layout.tril() if below else layout).expand(heads, -1, -1)


def _same(groups: Tensor) -> Tensor:
    """True for pairs of blocks of the same group: [blocks, blocks]."""
    return groups[:, None] == groups[None, :]


def _window(blocks: int, width: int) -> Tensor:
    """True for pairs of blocks at most half a window apart: [blocks, blocks]."""
    places = torch.arange(blocks, device="cpu")
    return (places[:, None] - places[None, :]).abs() <= width // 2


def _add_global(
    layout: Tensor,  # [..., blocks, blocks], is written to
    start: int,
    end: int,
    causal: bool = False,
    horizontal: bool = True,
) -> None:
    """Let all blocks attend to those from ``start`` to ``end``, or where ``causal`` those from ``start`` on."""
    layout[..., start if causal else 0 :, start:end] = True
    if horizontal:
        layout[..., start:end, :] = True


def _global_ranges(pattern: Variable | BSLongformer, blocks: int) -> Iterator[tuple[int, int]]:
    starts = pattern.global_block_indices
    ends = pattern.global_block_end_indices or [start + 1 for start in starts]
    return ((start, end) for start, end in zip(starts, ends, strict=True) if start < blocks)


def _random_blocks(seed: int, count: int, layouts: int, blocks: int, causal: bool = False) -> Tensor:
    """Random blocks of each row, of shape [layouts, blocks, blocks]; where ``causal``, only up to the diagonal.

    They are those of DeepSpeed after ``random.seed(seed)``: layout by layout, row by row, one ``sample`` each.
    """
    if count > blocks:
        key = f"{_BLOCK}.num_random_blocks"
        text = f"{key}={count}, but a sequence of {blocks} blocks has only {blocks} in a row. Write at most {blocks}"
        raise ConfigError.about(key, f"{text}, choose a smaller {_BLOCK}.block, or pad to longer sequences.")
    found = torch.zeros(layouts, blocks, blocks, dtype=torch.bool, device="cpu")
    source, chosen = random.Random(seed), list[int]()
    for row in range(layouts * blocks if count else 0):
        below = row % blocks + 1 if causal else blocks
        chosen += [row * blocks + column for column in source.sample(range(below), min(count, below))]
    found.view(-1)[torch.tensor(chosen, dtype=torch.long, device="cpu")] = True
    return found
