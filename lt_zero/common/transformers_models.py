"""Models of Hugging Face's transformers in modules. It is not imported here: who has a model has done so."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common.module_hooks import Hook, ProcessLocal
from lt_zero.common.users_code import warn

# Returns how a cache mixes up the rows that a model is called with, for a warning; "": it does not.
Mixes = Callable[[Mapping[str, Any]], str]


def models_of(module: nn.Module) -> list[Any]:
    """The models of transformers in a module, without those that are inside of others."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None:
        return []
    if isinstance(module, base):
        return [module]
    return [found for child in module.children() for found in models_of(child)]


def attentions(module: nn.Module) -> dict[str, str]:
    """The implementations of attention of the models of transformers in a module, which may depend on the machine."""
    found = [(type(model).__name__, getattr(model.config, "_attn_implementation", None)) for model in models_of(module)]
    return {f"attn_implementation of {kind} {number}": str(chosen) for number, (kind, chosen) in enumerate(found)}


def sequences_of(positions: Any) -> Tensor | None:
    """The numbers of sequences in rows, [batch, length], by positions that begin anew; None: a row is one sequence."""
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    starts = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return starts.cumsum(-1) if bool(starts.any()) else None


def mixes_whole_rows(inputs: Mapping[str, Any]) -> str:
    """Tell how a cache mixes up whole rows: packed ones, if positions begin anew and no mask keeps sequences apart."""
    packed = inputs.get("attention_mask") is None and sequences_of(inputs.get("position_ids")) is not None
    return "lets the sequences of a row see each other" if packed else ""


def warn_of_caches(module: nn.Module, mixes: Mixes = mixes_whole_rows) -> None:
    """Let models of transformers warn at their first forward of training if a cache mixes up sequences in a row."""
    for model in models_of(module):
        if "position_ids" in inspect.signature(model.forward).parameters:
            _CacheWarning(model, mixes)


class _CacheWarning(ProcessLocal):
    """Warns of packed rows and a cache, with which transformers makes no mask that keeps their sequences apart."""

    def __init__(self, model: nn.Module, mixes: Mixes) -> None:
        self._mixes = mixes
        self._handle = model.register_forward_pre_hook(Hook(self.examine), with_kwargs=True)

    def examine(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        self._handle.remove()
        cached = kwargs.get("use_cache")
        cached = getattr(model.config, "use_cache", False) if cached is None else cached
        if not cached or getattr(model, "is_gradient_checkpointing", False):  # which turns caches off
            return
        if what := self._mixes(kwargs):
            warn(
                f"Rows hold several sequences (position_ids begin anew), and {type(model).__name__} has a cache "
                f"(use_cache=True, transformers' default), with which it {what}. Set model.config.use_cache=False for "
                "training: each sequence then sees itself only, with any number of ranks."
            )
