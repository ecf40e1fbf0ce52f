"""Finds the modules to checkpoint: the repeated blocks of a model, or modules of configured classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lt_zero.common.compat import compiled_module
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.engine.find_units import class_matches, clean_name, find_repeated
from lt_zero.engine.partition import refuse_name

_BLOCK = "activation_checkpointing"


@dataclass(frozen=True)
class Found:
    """The modules that a configuration selects.

    Attributes:
        modules: (name, module) in registration order; none inside another.
        every: each n-th of them is checkpointed.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    every: int

    @property
    def chosen(self) -> tuple[tuple[str, nn.Module], ...]:
        return self.modules[:: self.every]

    def __str__(self) -> str:
        total = Counter(class_name(module) for _, module in self.modules)
        some = Counter(class_name(module) for _, module in self.chosen)
        return " and ".join(f"{some[name]} of {count} {name}" for name, count in total.items()) + " modules"


def class_name(module: nn.Module) -> str:
    """The class name of a module, or of the module inside torch.compile's wrapper."""
    return type(compiled_module(module)).__name__


def find_modules(root: nn.Module, block: ActivationCheckpointing) -> Found:
    """The modules inside ``root`` to checkpoint. Changes nothing.

    Raises:
        ConfigError: a name matches nothing, or no blocks are found.
    """
    found = _named(root, block.modules) if block.modules else find_repeated(root)
    if not found:
        key = f"{_BLOCK}.modules"
        raise ConfigError(
            [
                Problem(
                    key,
                    f"{_BLOCK}.mode={block.mode!r}, and {type(root).__name__} has no repeated blocks to checkpoint. "
                    f"Name classes of its modules: {key}=[{_example(root)}], or set {_BLOCK}.mode='none'.",
                )
            ]
        )
    return Found(tuple(found), block.every)


def _callable_modules(root: nn.Module) -> dict[str, nn.Module]:
    """All modules with a forward, by name; for a compiled module the wrapper."""
    wrapped = {inner for m in root.modules() if (inner := compiled_module(m)) is not m}
    return {
        clean_name(f"{name}.")[:-1]: module
        for name, module in root.named_modules()
        if module is not root
        and module not in wrapped
        and type(compiled_module(module)).forward is not nn.Module.forward
    }


def _named(root: nn.Module, classes: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = _callable_modules(root)
    for wanted in classes:
        if not any(class_matches(compiled_module(m), (wanted,)) for m in modules.values()):
            known = sorted({class_name(m) for m in modules.values()})
            refuse_name(f"{_BLOCK}.modules", wanted, "no module inside the model is of this class", known)
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in modules.items():  # parents come before their children
        if class_matches(compiled_module(module), classes) and module not in inside:
            inside.update(module.modules())
            found.append((name, module))
    return found


def _example(root: nn.Module) -> str:
    """The class with the most elements, preferably one inside a module list: an example for the error message."""
    modules = _callable_modules(root).values()
    lists = [m for m in root.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    listed = {c for m in lists for c in m.children() if c in modules and any(True for _ in c.children())}
    sizes: Counter[str] = Counter()
    for module in listed or modules:
        sizes[class_name(module)] += sum(p.numel() for p in module.parameters())
    return sizes.most_common(1)[0][0] if sizes else "Block"
