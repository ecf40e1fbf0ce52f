"""The parameters whose gradients ``gradient_compression`` sends as they are."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter

from lt_zero.core.engine.find_units import class_matches, clean_name
from lt_zero.core.engine.partition import refuse_name


def tables_and_vectors(root: nn.Module) -> set[Parameter]:
    """The parameters of embeddings, and those with one dimension."""
    tables = [m for m in root.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return {p for p in root.parameters() if p.dim() <= 1} | {p for m in tables for p in m.parameters()}


def matching_parameters(root: nn.Module, patterns: Collection[str]) -> set[Parameter]:
    """The parameters that a pattern of ``gradient_compression.exclude`` matches, or whose module it does.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    found: set[Parameter] = set()
    modules = [(clean_name(f"{name}.").removesuffix("."), module) for name, module in root.named_modules()]
    named = [(clean_name(name), p) for name, p in root.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        hit = [m for name, m in modules if fnmatchcase(name, pattern) or class_matches(m, (pattern,))]
        parameters = {p for name, p in named if fnmatchcase(name, pattern)}
        if not hit and not parameters:
            known = [name for name, _ in named]
            refuse_name("gradient_compression.exclude", pattern, "no class, module or parameter matches it", known)
        found |= parameters | {p for module in hit for p in module.parameters()}
    return found
