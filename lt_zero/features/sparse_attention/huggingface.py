"""Sparse attention in models of Hugging Face's transformers, as ``attn_implementation="lt_zero_sparse"``.

A model keeps its pattern in its own configuration (``model.config.sparse_attention``, with our keys): it is saved and
loaded with the model. transformers is imported when ``register`` is called.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import Schema
from lt_zero.core.feature import Undo
from lt_zero.features.sparse_attention.patterns import Pattern, pattern_from, pattern_of, settings_of
from lt_zero.features.sparse_attention.sparse import SparseSelfAttention, sparse_attention

log = logging.getLogger("lt_zero")
NAME = "lt_zero_sparse"
BLOCK = "sparse_attention"


@functools.cache
def register() -> None:
    """Let models of transformers be built and loaded with ``attn_implementation="lt_zero_sparse"``.

    Raises:
        ImportError: transformers is missing, or too old.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
        interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(f'attn_implementation="{NAME}" needs transformers >= 4.53: {error}.') from error
    for interface, function in zip(interfaces, (attention, padding_mask), strict=True):
        interface.register(NAME, function)


def install(module: nn.Module, config: Schema, rank: int) -> Undo:
    """Let a model's attention be that of the configuration's ``sparse_attention`` block, and log which.

    That of models of transformers, and of each ``SparseSelfAttention`` without a pattern of its own.

    Raises:
        ConfigError: there is neither, or transformers cannot switch the model's attention. Nothing is changed then.
    """
    installed = Undo()
    pattern = pattern_of(config)
    if pattern is None:
        return installed
    modules = [m for m in module.modules() if isinstance(m, SparseSelfAttention)]
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    outermost = _outermost(module, base) if base is not None else []
    if not modules and not outermost:
        text = (
            f"sparse_attention: {type(module).__name__} has no lt_zero.attention.SparseSelfAttention and no model of "
        )
        raise ConfigError.about(BLOCK, f"{text}transformers. Use the module in it, or remove the block.")
    try:
        for own in modules:
            installed.also(own.configure(pattern))
        for model in outermost:
            installed.also(_restoring(model))
            switch(model, pattern)
    except BaseException:
        installed.remove()
        raise
    if rank == 0:
        names = [*dict.fromkeys(type(m).__name__ for m in outermost), *(["SparseSelfAttention"] if modules else [])]
        log.info("sparse_attention: %s computes %s.", ", ".join(names), pattern)
    return installed


def _restoring(model: Any) -> Callable[[], None]:
    """Returns what gives the configurations of a model and of its parts the values that they have now."""
    todo = [m.config for m in model.modules() if hasattr(m, "config")]
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    seen = set[int]()
    while todo:
        config = todo.pop()
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            found.append((vars(config), dict(vars(config))))
            todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]

    def restore() -> None:
        for values, before in found:
            values.clear()
            values.update(before)

    return restore


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[Any]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def switch(model: Any, pattern: Pattern) -> None:
    """Let a model of transformers compute its self-attention with ``pattern``.

    Raises:
        ConfigError: it cannot be switched, or it is causal and the pattern is not, or only parts of it are causal.
    """
    register()
    name = type(model).__name__
    if _crosses(model):
        raise ConfigError.about(
            BLOCK, f"sparse_attention: {name} has cross-attention, which has no pattern. Remove the block."
        )
    causal = [m for m in model.modules() if getattr(m, "is_causal", None) is True]
    both = [type(m).__name__ for m in model.modules() if getattr(m, "is_causal", None) is False]
    if causal and both:
        text = (
            f"sparse_attention: {type(causal[0]).__name__} of {name} is causal, but {both[0]} is not, and one pattern "
        )
        remedy = "Remove the block, set sparse_attention in one part's own config, and set_attn_implementation"
        raise ConfigError.about(BLOCK, f'{text}cannot be for both. {remedy}("{NAME}") of that part.')
    if causal and not pattern.causal:
        key = "sparse_attention.attention"
        raise ConfigError.about(key, f'{key}="bidirectional", but {name} is causal. Write "unidirectional".')
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        text = f"sparse_attention: transformers cannot switch the attention of {name}"
        raise ConfigError.about(BLOCK, f"{text}, which does not use its AttentionInterface. Remove the block.")
    for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        setattr(part, BLOCK, settings_of(pattern))


def _crosses(module: Any) -> bool:
    """True if a model, or a part of it, attends to keys of another sequence."""
    config = getattr(module, "config", None)
    return any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))


# ---- what transformers calls ---------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in the form of transformers' ``AttentionInterface``: the output is [batch, length, heads, dim]."""
    settings: Any = getattr(getattr(module, "config", None), BLOCK, None)
    if settings is None:
        raise ValueError(
            f'{type(module).__name__} was built with attn_implementation="{NAME}", but has no pattern. Write the block '
            "sparse_attention into the configuration of lt_zero, or set model.config.sparse_attention = "
            '{"mode": "fixed", ...}.'
        )
    _refuse(module, attention_mask, scaling, options)
    padding = None if attention_mask is None else attention_mask == 0
    pattern = pattern_from(settings)
    _check_direction(pattern, options.get("is_causal", getattr(module, "is_causal", False)))
    out = sparse_attention(query, key, value, pattern, padding, dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: Any, mask: Tensor | None, scaling: float | None, options: dict[str, Any]) -> None:
    """Raise ValueError for arguments that would be ignored."""
    name = type(module).__name__
    given = [
        key
        for key in ("head_mask", "sliding_window", "softcap", "s_aux", "position_bias", "output_attentions")
        if options.get(key) is not None and options[key] is not False
    ]
    if _crosses(module) or "CrossAttention" in name:
        given.append("cross-attention")
    if scaling is None:  # GPT-2's up to version 4 scales by itself, in its own attention only
        given += [key for key in ("scale_attn_by_inverse_layer_idx",) if getattr(module, key, False)]
        given += [f"{key}=False" for key in ("scale_attn_weights",) if not getattr(module, key, True)]
    if given:
        raise ValueError(f"{name} asks for {', '.join(given)}, which sparse attention has not. Choose another model.")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask {list(mask.shape)}: sparse attention takes padding only, [batch, length].")


def _check_direction(pattern: Pattern, causal: bool) -> None:
    if causal and not pattern.causal:
        key = "sparse_attention.attention"
        raise ValueError(f'{key}="bidirectional", but the model is causal. Write "unidirectional".')


def padding_mask(
    *_: Any,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **place: Any,
) -> Tensor | None:
    """The mask in the form of transformers' ``AttentionMaskInterface``: which keys are no padding, or None.

    Raises:
        ValueError: the model wants another mask than a causal or a full one, or has a cache with empty places.
    """
    known: Any = importlib.import_module("transformers.masking_utils")
    causal, full = (getattr(known, f"{kind}_mask_function", None) for kind in ("causal", "bidirectional"))
    settings = getattr(config, BLOCK, None)
    if settings is not None and mask_function is causal:
        _check_direction(pattern_from(settings), True)
    there = _tokens(place, kv_length)
    if there != kv_length:
        raise ValueError(
            f"The cache has places for {kv_length} tokens, of which {there} are there: sparse attention takes "
            'caches that grow. Remove cache_implementation="static", or use DynamicCache.'
        )
    if mask_function not in (None, causal, full) and not _is_one_sequence(
        mask_function, kv_length, attention_mask, place
    ):
        raise ValueError(
            "The model has a mask of its own (sliding windows, or several sequences in one row by position_ids), which "
            "sparse attention has not. Give each sequence a row, or choose another attn_implementation."
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].to(torch.bool)
    return None if bool(mask.all()) else mask


def _tokens(place: dict[str, Any], length: int) -> int:
    """The number of keys among ``length`` that exist, with those of the queries."""
    at: Tensor | None = place.get("cache_position")  # up to version 4
    if at is not None:
        end = int(at[-1]) + 1 if len(at) != length else length  # the number is on the device
    elif "q_length" in place:
        end = int(place.get("q_offset", 0)) + int(place["q_length"])
    else:
        return length
    return end - int(place.get("kv_offset", 0))


def _is_one_sequence(function: Any, length: int, attention_mask: Tensor | None, place: dict[str, Any]) -> bool:
    """True if rows have one sequence each: a mask that could separate several sequences is then a causal one.

    transformers 4 gives such a mask to each model without an ``attention_mask`` and a cache.
    """
    at: Tensor | None = place.get("cache_position")
    if at is None or attention_mask is not None or len(at) != length or getattr(function, "__name__", "") != "and_mask":
        return False
    rows = torch.arange(place["batch_size"], device=at.device)[:, None]
    here, before, first = at[None, 1:], at[None, :-1], torch.zeros_like(at[None, 1:])
    seen = function(rows, first, here, before) & function(rows, first, here, first)
    return bool((seen & ~function(rows, first, before, here)).all())
