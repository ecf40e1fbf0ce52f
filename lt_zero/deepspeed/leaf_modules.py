"""Modules that are gathered as one unit at stage 3: marked in the model, as scripts for DeepSpeed do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

_MARK = "_z3_leaf"


def leaf_modules(model: Any) -> list[nn.Module]:
    """The marked modules of a model."""
    return [m for m in model.modules() if m.__dict__.get(_MARK)] if isinstance(model, nn.Module) else []


get_z3_leaf_modules = leaf_modules


def z3_leaf_module(module: nn.Module) -> bool:
    """True if a module is marked."""
    return bool(module.__dict__.get(_MARK))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module, or take its mark away."""
    object.__setattr__(model, _MARK, bool(flag))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their class, or its name; call it before ``initialize``. Returns them.

    Raises:
        ValueError: there are none.
    """
    wanted = _listed(leaf_module_classes, "leaf_module_classes")
    return _marked(model, lambda _, module: _is_of(module, wanted), True, wanted if raise_if_not_found else None)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of ``set_z3_leaf_modules`` away. Returns the modules.

    Raises:
        ValueError: there are none.
    """
    wanted = _listed(leaf_module_classes, "leaf_module_classes")
    return _marked(model, lambda _, module: _is_of(module, wanted), False, wanted if raise_if_not_found else None)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their full names. Returns them.

    Raises:
        ValueError: there are none.
    """
    wanted = _listed(module_names, "module_names")
    return _marked(model, lambda name, _: name in wanted, True, wanted if raise_if_not_found else None)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by the ends of their full names. Returns them.

    Raises:
        ValueError: there are none.
    """
    wanted = _listed(module_name_suffixes, "module_name_suffixes")
    return _marked(model, lambda name, _: name.endswith(tuple(wanted)), True, wanted if raise_if_not_found else None)


def _listed(values: Any, name: str) -> list[Any]:
    if isinstance(values, (str, type)) or not isinstance(values, Sequence):
        raise TypeError(f"{name}={values!r} is no list: pass [{getattr(values, '__name__', repr(values))}].")
    return list(values)


def _is_of(module: nn.Module, wanted: Sequence[type | str]) -> bool:
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return any(isinstance(module, one) if isinstance(one, type) else one in names for one in wanted)


def _marked(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], flag: bool, required: Sequence[Any] | None
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found and required is not None:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"No module of {type(model).__name__} is one of {list(required)}: it has modules of {', '.join(kinds)}. "
            "Name one of them, or pass raise_if_not_found=False."
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
