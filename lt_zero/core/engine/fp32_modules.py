"""Modules and parameters that stay in fp32 while the rest of the model runs in 16 bits (``fp16_override_modules``).

An fp32 module casts its inputs and, where the model's activations are 16-bit, its outputs; autocast is off inside.
Parameters of a larger module stay fp32 without casts: the module decides what is computed with them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.torch_version import TorchVersion

from lt_zero.core.engine.find_units import class_matches, clean_name

_LOW = (torch.float16, torch.bfloat16)

# Standard modules that raise if only their weights are 16-bit (checked on torch 2.13, CPU). In the true modes: those
# that compute with weights and buffers together, and buffers are fp32. Under autocast: those that neither cast their
# weights nor accept fp32 activations with them; fp32 weights are enough there, so they can also be passed as `keep`.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# torch 2.10 refuses 16-bit weights beside fp32 statistics in instance norms, 2.13 does not.
_REFUSED_BY_TORCH = () if TorchVersion(torch.__version__) >= "2.13" else INSTANCE_NORMS
DEFAULT_ISLANDS_TRUE: tuple[type, ...] = (*BATCH_NORMS, ParametrizationList, *_REFUSED_BY_TORCH)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.Bilinear)
DEFAULT_ISLANDS_MIXED: tuple[type, ...] = (*BATCH_NORMS, ParametrizationList, *INSTANCE_NORMS, *_NORMS)


@dataclass(frozen=True)
class Fp32Modules:
    """The modules and parameters that stay in fp32."""

    modules: tuple[tuple[str, nn.Module], ...]  # with names, in registration order, without modules inside others
    parameters: frozenset[Parameter]  # all that stay in fp32, including those of ``modules``


def find_fp32_modules(
    root: nn.Module, patterns: Sequence[str], classes: tuple[type, ...] = (), keep: tuple[type, ...] = ()
) -> Fp32Modules:
    """The fp32 modules of ``root``, which is never one itself.

    Args:
        root: the model.
        patterns: each a class name (bare or dotted), or a pattern of module paths or parameter names (``blocks.0.*``).
            A matched parameter makes its owner an fp32 module, unless that has children with parameters.
        classes: classes whose instances are fp32 modules; there may be none.
        keep: classes whose parameters stay fp32, without casts of inputs and outputs; there may be no instances, and
            ties are not followed.

    Raises:
        ValueError: a pattern matches nothing, or the root.
    """
    if not (patterns or classes or keep):
        return Fp32Modules((), frozenset())
    search = _Search(root)
    for module, paths in search.paths.items():
        if isinstance(module, classes) and "" not in paths:
            search.add(module)
    for pattern in patterns:
        by_path = {m for m, paths in search.paths.items() if any(fnmatchcase(path, pattern) for path in paths)}
        modules = [m for m in search.paths if m in by_path or class_matches(m, [pattern])]
        parameters = [p for p, names in search.names.items() if any(fnmatchcase(n, pattern) for n in names)]
        if not modules and not parameters:
            known = {type(m).__name__ for m in search.paths}.union(*search.paths.values(), *search.names.values())
            close = difflib.get_close_matches(pattern, sorted(known), n=4, cutoff=0.5)
            hint = f" Close names: {', '.join(close)}." if close else ""
            raise ValueError(f"fp16_override_modules: {pattern!r} matches no class, module or parameter.{hint}")
        for module in modules:
            search.add(module, pattern)
        search.grow(parameters, pattern)
    kept = {p for module in root.modules() if isinstance(module, keep) for p in module.parameters()}
    inside = tuple(f"{place}." for module in search.fp32_modules for place in search.places[module])
    outermost = [
        (search.paths[module][0], module)
        for module, places in search.places.items()
        if module in search.fp32_modules and not all(place.startswith(inside) for place in places)
    ]
    return Fp32Modules(tuple(outermost), frozenset(search.kept | kept))


class _Search:
    """Adds fp32 modules until the owners of each kept parameter are fp32 modules, where they can be."""

    def __init__(self, root: nn.Module) -> None:
        self.fp32_modules, self.kept = set[nn.Module](), set[Parameter]()
        self.places: dict[nn.Module, list[str]] = {}  # a module that is registered twice has several
        for name, module in root.named_modules(remove_duplicate=False):
            self.places.setdefault(module, []).append(name)
        self.paths = {m: [clean_name(f"{place}.")[:-1] for place in places] for m, places in self.places.items()}
        self.names: dict[Parameter, list[str]] = {}  # tied weights have several
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter, []).append(clean_name(name))
        self.owners: dict[Parameter, list[nn.Module]] = {}
        self.readers: dict[nn.Module, nn.Module] = {}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(parameter, []).append(module)
            if isinstance(module, nn.MultiheadAttention):
                self.readers[module.out_proj] = module  # out_proj is never called, its weights are read

    def add(self, module: nn.Module, pattern: str = "") -> None:
        """Make ``module`` an fp32 module, or its children if it is a container that is never called."""
        module = self.readers.get(module, module)
        # The path is empty for the root, and for the module inside a wrapper.
        if "" in self.paths[module]:
            raise ValueError(
                f"fp16_override_modules: {pattern!r} matches the whole model. Use Trainer(precision='32-true')."
            )
        if module in self.fp32_modules:
            return
        if type(module).forward is nn.Module.forward:
            for child in module.children():
                self.add(child, pattern)
        else:
            self.fp32_modules.add(module)
        self.grow(module.parameters(), pattern)

    def grow(self, parameters: Iterable[Parameter], pattern: str) -> None:
        """Keep ``parameters``; their owners become fp32 modules unless they call modules with parameters."""
        for parameter in parameters:
            if parameter in self.kept:
                continue
            self.kept.add(parameter)
            for owner in self.owners[parameter]:
                called = [c for n, c in owner.named_children() if n != "parametrizations"]
                called = [c for c in called if self.readers.get(c) is not owner]
                if not any(True for child in called for _ in child.parameters()):
                    self.add(owner, pattern)
