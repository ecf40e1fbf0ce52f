"""Which parameters of a model Muon steps, and which Adam does.

The rule: Muon takes weights with two dimensions that are no embedding and no output layer. An embedding is a weight
of ``nn.Embedding`` or ``nn.EmbeddingBag`` (also one that is tied to an output layer), or has "embed" in its name. An
output layer has "lm_head" in its name, or is a module outside of all lists (no number in its name) that is called
``head``, ``output``, ``classifier``, ``score``, ``logits`` or ``fc``. DeepSpeed's rule is the names "embed" and
"lm_head" only, and it takes weights with more dimensions, too.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_OUTPUTS = {"head", "output", "classifier", "score", "logits", "fc"}


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of ``model`` that need gradients as groups for ``Muon``, by the rule above; no empty groups."""
    matrices, rest = divide(model)
    groups = [
        {"params": [p for _, p in matrices], "use_muon": True, "name": "muon"},
        {"params": [p for _, p in rest], "use_muon": False, "name": "adam"},
    ]
    return [group for group in groups if group["params"]]


def divide(model: nn.Module) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """(matrices of hidden layers, all others) of those that need gradients, with their names. See the rule above."""
    tables = {p for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    matrices: list[tuple[str, Parameter]] = []
    rest: list[tuple[str, Parameter]] = []
    for parameter, known in names.items():
        if parameter.requires_grad:
            hidden = parameter.dim() == 2 and parameter not in tables and not any(map(_is_outside, known))
            (matrices if hidden else rest).append((known[0], parameter))
    return matrices, rest


def _is_outside(name: str) -> bool:
    """Whether a weight of this name is an embedding or an output layer."""
    low = name.lower()
    *path, _ = low.split(".")
    listed = any(part.isdecimal() for part in path)
    return "embed" in low or "lm_head" in low or (not listed and bool(path) and path[-1] in _OUTPUTS)
