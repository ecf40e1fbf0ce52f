"""Where the values of ``activation_checkpointing`` are looked for: in an engine's modules, and in a backward."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lt_zero.activation.install import installed
from lt_zero.compat import DispatchMode
from tests.models import tokens
from tests.reach_engine import Config, Lab, backward, engine_of


class Operators(DispatchMode):
    """Counts the operators that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts[op.name()] = self.counts.get(op.name(), 0) + 1
        return op(*args, **kwargs)


def recomputed(loss: torch.Tensor) -> list[str]:
    """Which kinds of forward operators run in the backward of ``loss``: products of linear layers, activations."""
    with Operators() as seen:
        loss.backward()
    return [kind for kind, name in (("products", "aten::addmm"), ("cheap", "aten::gelu")) if name in seen.counts]


def again(lab: Lab, config: Config) -> Any:
    return recomputed(engine_of(lab, config).root(tokens(0, 0, 0)).square().mean())


def checkpointed(lab: Lab, config: Config) -> Any:
    """Names of the modules."""
    found = installed(engine_of(lab, config))
    return [name for name, _ in found.found.chosen] if found else []


def told(lab: Lab, config: Config) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(engine_of(lab, config))
    text = "no tensor- or sequence-parallel group"
    return [text for entry in caught if text in str(entry.message)]
