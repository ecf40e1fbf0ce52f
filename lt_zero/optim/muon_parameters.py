"""Divides the parameters of a model between Muon and Adam.

Muon steps 2D weights that are neither embeddings nor output layers. An embedding is a weight of ``nn.Embedding`` or
``nn.EmbeddingBag`` (also if tied to an output layer), or has "embed" in its name. An output layer has "lm_head" in its
name, or is a module outside of all lists (no number in its name) called ``head``, ``output``, ``classifier``,
``score``, ``logits`` or ``fc``. DeepSpeed only tests for the names "embed" and "lm_head", and also takes weights with
more dimensions.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_OUTPUTS = {"head", "output", "classifier", "score", "logits", "fc"}


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` as groups for ``Muon``, by the rule above; without empty groups."""
    matrices, rest = divide(model)
    groups = [
        {"params": [p for _, p in matrices], "use_muon": True, "name": "muon"},
        {"params": [p for _, p in rest], "use_muon": False, "name": "adam"},
    ]
    return [group for group in groups if group["params"]]


def divide(model: nn.Module) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """The named trainable parameters that Muon steps, and those that Adam steps, by the rule above."""
    embeddings = {p for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    matrices: list[tuple[str, Parameter]] = []
    rest: list[tuple[str, Parameter]] = []
    for parameter, aliases in names.items():
        if parameter.requires_grad:
            is_hidden = parameter.dim() == 2 and parameter not in embeddings and not any(map(_is_by_name, aliases))
            (matrices if is_hidden else rest).append((aliases[0], parameter))
    return matrices, rest


def _is_by_name(name: str) -> bool:
    """Whether a weight of this name is an embedding or an output layer."""
    low = name.lower()
    *path, _ = low.split(".")
    listed = any(part.isdecimal() for part in path)
    return "embed" in low or "lm_head" in low or (not listed and bool(path) and path[-1] in _OUTPUTS)
