"""Names of parameters and buffers without those of wrappers, under which they are saved, exported and compared.

``torch.compile(block)`` is a module with the block inside, so torch's names of what is in the block contain
``_orig_mod``. Files have the plain names: whether a model, or a part of it, is compiled is no property of its weights.
``state_dict()`` of a module keeps torch's names. What goes from a module to a file, or back, takes names from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.common.compat import clean_name


def named_parameters(module: nn.Module, remove_duplicate: bool = False) -> Iterator[tuple[str, Parameter]]:
    """``module.named_parameters`` by plain names; tied ones by all of theirs, unless ``remove_duplicate``."""
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield clean_name(name), parameter


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``module.named_buffers`` by plain names."""
    for name, buffer in module.named_buffers():
        yield clean_name(name), buffer


def state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict(keep_vars=True)`` by plain names."""
    return _renamed(module.state_dict(keep_vars=True), _NamesOfModule({}))


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """A state dict by other names, as ``names_of`` maps them; itself if they are the same."""
    return _renamed(state, names) if any(names[name] != name for name in state) else state


def names_of(module: nn.Module) -> Mapping[str, str]:
    """The module's names by plain names, or by those of a module that was compiled in another way.

    Where the module has no such entry, the name is the one that it would have.
    """
    own = {clean_name(path): path for path, _ in module.named_modules(remove_duplicate=False)}
    every = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return _NamesOfModule(
        {f"{plain}.": path for plain, path in own.items()} | {clean_name(name): name for name, _ in every}
    )


class _NamesOfModule(dict[str, str]):
    """Names by plain names; those of modules end with a dot. Other entries get the name that begins as their module's.

    Without modules all names become plain.
    """

    def __missing__(self, name: str) -> str:
        plain = clean_name(name)
        if plain in self:
            return self[plain]
        place, rest = plain, ""
        while place:
            place, _, last = place.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
            if f"{place}." in self:
                return f"{self[f'{place}.']}.{rest}".lstrip(".")
        return plain


def _renamed(state: Mapping[str, Any], names: _NamesOfModule | Mapping[str, str]) -> dict[str, Any]:
    """A state dict by other names, with torch's versions of modules."""
    made: Any = OrderedDict((names[name], value) for name, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        made._metadata = OrderedDict((names[f"{path}."].rstrip("."), value) for path, value in versions.items())
    renamed: dict[str, Any] = made
    return renamed
