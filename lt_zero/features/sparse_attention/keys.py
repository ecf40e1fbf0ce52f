"""The block ``sparse_attention`` of a configuration."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_serializer
from typing_extensions import override

from lt_zero.common.errors import Problem
from lt_zero.common.fields import Block, Elements, IdleKeys, Positive, key

_KEY = "sparse_attention"
_CAUSAL = "unidirectional"
_none_if_false = BeforeValidator(lambda value: None if value is False else value)

# The keys that each pattern of ``lt_zero.attention`` has.
_HEADS = ("block", "different_layout_per_head", "attention")
SPARSE_MODES: Mapping[str, tuple[str, ...]] = {
    "dense": _HEADS,
    "fixed": (
        *(*_HEADS, "num_local_blocks", "num_global_blocks", "horizontal_global_attention"),
        "num_different_global_patterns",
    ),
    "variable": (
        *(*_HEADS, "num_random_blocks", "local_window_blocks", "global_block_indices", "global_block_end_indices"),
        *("horizontal_global_attention", "seed"),
    ),
    "bigbird": (*_HEADS, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "seed"),
    "bslongformer": (*_HEADS, "num_sliding_window_blocks", "global_block_indices", "global_block_end_indices"),
    "local_sliding_window": ("block", "attention", "num_sliding_window_blocks"),
}


def _sparse_mode(value: Any) -> Any:
    name = value.lower() if isinstance(value, str) else ""
    if name not in SPARSE_MODES:
        near = difflib.get_close_matches(name, SPARSE_MODES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"it is not a mode.{hint} Modes are {', '.join(SPARSE_MODES)}")
    return name


class SparseAttention(Block):
    """The ``sparse_attention`` block: which blocks of the attention matrix are computed."""

    mode: Annotated[
        Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"],
        BeforeValidator(_sparse_mode),
    ] = key("fixed", "the pattern; a key that it does not have is an error")
    block: Positive = key(16, "tokens of a block")
    different_layout_per_head: bool = key(False, "a layout for each head, where the mode has several")
    attention: Literal["unidirectional", "bidirectional"] | None = key(
        None,
        "unidirectional: no token attends to later ones; null: unidirectional with local_sliding_window, else "
        "bidirectional (DeepSpeed: bidirectional, and the mask is the model's)",
    )
    num_local_blocks: Positive = key(4, "blocks of a local window (fixed)")
    num_global_blocks: Elements = key(
        1, "blocks of each window that all blocks attend to (fixed); how many first blocks are global (bigbird)"
    )
    horizontal_global_attention: bool = key(
        False, "global blocks attend to all blocks, too (fixed, variable; bidirectional only)"
    )
    num_different_global_patterns: Positive = key(
        1, "in how many ways heads choose the global blocks of a window, from its end (fixed)"
    )
    num_random_blocks: Elements = key(0, "random blocks in each row of blocks (variable, bigbird)")
    local_window_blocks: tuple[Positive, ...] = key(
        (4,), "blocks of the first local windows; the last number repeats (variable)", min_length=1
    )
    global_block_indices: tuple[Elements, ...] = key(
        (0,), "global blocks, or with global_block_end_indices the first of each range (variable, bslongformer)"
    )
    global_block_end_indices: tuple[Elements, ...] | None = key(
        None, "the block after each range of global blocks; null: ranges of one block (variable, bslongformer)"
    )
    num_sliding_window_blocks: Positive = key(
        3,
        "width of the window around each block; an even number is one more (bigbird, bslongformer, "
        "local_sliding_window)",
    )
    seed: Elements = key(0, "where random blocks start from (variable, bigbird)")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the mode, without those that are null."""
        values = {name: getattr(self, name) for name in SPARSE_MODES[self.mode]}
        return {name: value for name, value in values.items() if value is not None}

    @model_serializer
    def _of_the_mode(self) -> dict[str, Any]:
        # The configuration is read again from what was dumped, and keys of other modes are errors there.
        return {"mode": self.mode, **self.settings}

    @classmethod
    @override
    def at_top(cls) -> tuple[Any, Any]:
        return Annotated[cls | None, _none_if_false], key(
            None, "block-sparse attention; null or false: the model's own"
        )

    @override
    def problems_in(self, config: Any) -> Iterator[Problem]:
        taken = SPARSE_MODES[self.mode]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in self.model_fields_set and name not in ("mode", *taken) and value is not None:
                modes = ", ".join(mode for mode, keys in SPARSE_MODES.items() if name in keys)
                text = f"{_KEY}.{name}={json.dumps(value)} is no key of {_KEY}.mode={self.mode!r}"
                text = f"{text}, which takes {', '.join(taken)}"
                yield Problem(f"{_KEY}.{name}", f"{text}. Remove it, or set a mode that has it: {modes}.")
        if "horizontal_global_attention" in taken and self.horizontal_global_attention and self.attention == _CAUSAL:
            text = f"{_KEY}.horizontal_global_attention=true lets global blocks attend to later ones"
            remedy = f"{_KEY}.attention={_CAUSAL!r} forbids. Remove one of them."
            yield Problem(f"{_KEY}.horizontal_global_attention", f"{text}, which {remedy}")
        if self.mode == "fixed":
            yield from self._problems_of_fixed()
        starts, ends = self.global_block_indices, self.global_block_end_indices
        if "global_block_end_indices" not in taken or ends is None:
            return
        key = f"{_KEY}.global_block_end_indices"
        both = f"{key}={json.dumps(ends)} and {_KEY}.global_block_indices={json.dumps(starts)}"
        if len(starts) != len(ends):
            yield Problem(key, f"{both} are not as many. Write one end for each start.")
        elif empty := [(start, end) for start, end in zip(starts, ends, strict=True) if start >= end]:
            text = f"{both} make a range from {empty[0][0]} to {empty[0][1]}, which is empty"
            yield Problem(key, f"{text}: an end is the block after the range. Write {empty[0][0] + 1} or more.")

    def _problems_of_fixed(self) -> Iterator[Problem]:
        window = self.num_local_blocks
        share = self.num_global_blocks
        patterns = self.num_different_global_patterns
        local, key = f"{_KEY}.num_local_blocks={window}", f"{_KEY}.num_different_global_patterns"
        if share == 0:
            text = f"{_KEY}.num_global_blocks=0, but with {_KEY}.mode='fixed' each window has global blocks"
            yield Problem(f"{_KEY}.num_global_blocks", f"{text}. Write 1 or more, or set mode to local_sliding_window.")
        elif window % share:
            fitting = window + share - window % share
            text = f"{local} is not divisible by {_KEY}.num_global_blocks={share}"
            yield Problem(f"{_KEY}.num_local_blocks", f"{text}. Write a multiple of it, such as {fitting}.")
        elif patterns > window // share:
            text = f"{key}={patterns}, but a window of {local} has {window // share} groups of "
            yield Problem(key, f"{text}{_KEY}.num_global_blocks={share}. Write at most {window // share}.")
        if patterns > 1 and not self.different_layout_per_head:
            text = f"{key}={patterns} needs {_KEY}.different_layout_per_head=true: all heads have one layout without it"
            yield Problem(key, f"{text}. Set it, or remove {key}.")

    @override
    def idle_in(self, config: Any) -> Iterator[IdleKeys]:
        drawn = self.num_random_blocks > 0 and self.mode in ("variable", "bigbird")
        yield IdleKeys(not drawn, _KEY, "seed", f"no block is random without {_KEY}.num_random_blocks")
        alike = not drawn and self.num_different_global_patterns == 1
        yield IdleKeys(
            self.different_layout_per_head and alike,
            _KEY,
            "different_layout_per_head",
            "all heads have the same layout without random blocks or num_different_global_patterns",
        )
