"""Units: the modules that are gathered and reduced together, found from the module tree without user input.

A unit is a repeated block, such as a transformer's: a member of a ModuleList, Sequential or ModuleDict with members of
one class, at least two of them of equal size. So the search enters the stages of a pyramid but not its blocks, and the
experts of a mixture stay inside their block, where routing cannot change which collectives run. Large leaf modules
outside of blocks (embeddings, heads) are units of their own. The remaining parameters, and those that several units
share, belong to the root and stay gathered during forward and backward.

Note [Experts]
    Each rank calls the experts that its own tokens are sent to, so an expert cannot be a unit: ranks would gather
    different ones. The module tree does not show which modules are experts, but their list is nearly always called so.
    So members of a list named ``experts`` (``expert_layers``, ...), or of one that ``leaf_module`` names, are no units.
    The module that has the list is one, unless it is the root, is never called (a list of lists), or has other blocks
    and is no block itself; then the root has the experts. A list with a forward is none, as it may use no expert, and
    so no weight, on some ranks: a rank notices the backward of a unit by its outputs.
    Members that ``leaf_module`` names are units all the same: all ranks call them, say one after the other.
    Ranks that meet in different members of another list get an error that says to name it (hang_detection.py).

Note [Wishes of modules]
    A module whose attribute ``one_unit`` is true is a unit, unless it is inside of one: what it computes needs all of
    its parameters together. One whose attribute ``unit_apart`` is true is a unit even inside of a block, whose unit has
    the other parameters: it is so large that the block should not be gathered with it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter

from lt_zero.common.compat import clean_name as clean_name
from lt_zero.common.compat import compiled_module
from lt_zero.common.module_hooks import is_compiled_by_jit
from lt_zero.core.comm.world import World
from lt_zero.core.engine.guard import is_guarded

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class FoundUnit(NamedTuple):
    """A module and the parameters that no other unit has; the root's name is ''."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, Parameter]]


@dataclass(frozen=True)
class UnitRules:
    """Bounds of the search, in elements."""

    min_numel: int = 100_000  # a leaf module below this size is left to the root
    max_numel: int = 500_000_000  # a repeated module above this size is entered if it has repeated modules inside
    leaf_classes: tuple[str, ...] = ()  # classes (bare or dotted names) whose instances are always units
    leaf_names: tuple[str, ...] = ()  # full names of modules that are always units
    leaf_suffixes: tuple[str, ...] = ()  # suffixes of such names
    alike: bool = False  # blocks of unequal size count as repeated if they are similar (the first has a relative bias)
    joins_experts: bool = True  # experts are no units: see Note [Experts]
    asks_modules: bool = True  # see Note [Wishes of modules]
    sizes: Mapping[Parameter, int] = field(
        default_factory=dict
    )  # elements that parameters count with, if not their own

    def numel(self, module: nn.Module) -> int:
        """The elements of a module, as they are counted."""
        return sum([self.sizes[p] if p in self.sizes else p.numel() for p in module.parameters()])

    def forces(self, name: str, module: nn.Module) -> bool:
        """True if the user, or the module itself, asks for this module to be a unit."""
        plain = clean_name(f"{name}.").removesuffix(".")
        by_suffix = plain != "" and plain.endswith(self.leaf_suffixes)
        asks = self.asks_modules and (getattr(module, "one_unit", False) or getattr(module, "unit_apart", False))
        return by_suffix or plain in self.leaf_names or asks or class_matches(module, self.leaf_classes)


_ALIKE = UnitRules(alike=True)


def class_matches(module: nn.Module, names: Iterable[str]) -> bool:
    """True if the module's class, or a base of it, has one of the names (``Block`` or ``pkg.module.Block``)."""
    wanted = set(names)
    return any(c.__name__ in wanted or f"{c.__module__}.{c.__qualname__}" in wanted for c in type(module).__mro__)


def find_units(root: nn.Module, rules: UnitRules) -> list[FoundUnit]:
    """The units of ``root`` in registration order; the last is the root with the remaining parameters (maybe none).

    A parameter that appears in several units belongs to the root.

    Raises:
        TypeError: a lazy parameter has no shape yet.
    """
    names: dict[Parameter, list[str]] = {}  # tied weights have several
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    _check_values(names)
    places: dict[nn.Module, list[str]] = {}  # a module that is registered twice has several, too
    for name, module in root.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(f"{name}.")
    units, owned = [], set[Parameter]()
    for name, module in _search(root, "", rules):
        inside = tuple(places[module])
        own = [p for p in module.parameters() if p not in owned and all([n.startswith(inside) for n in names[p]])]
        if own and module is not root:
            owned.update(own)
            units.append(FoundUnit(clean_name(name), module, [(clean_name(names[p][0]), p) for p in own]))
    rest = [(clean_name(known[0]), p) for p, known in names.items() if p not in owned]
    return [*units, FoundUnit("", root, rest)]


def _check_values(names: Mapping[Parameter, Sequence[str]]) -> None:
    """Raise TypeError if a parameter has no shape yet, ValueError if two share memory."""
    located: dict[int, str] = {}
    for parameter, (name, *_) in names.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TypeError(
                f"Parameter {name!r} of a lazy module has no shape yet. Run one forward on a small batch (for example "
                "in `configure_model`) before training."
            )
        if parameter.is_meta or parameter.numel() == 0 or is_guarded(parameter):
            continue
        address = parameter.data_ptr()
        other = located.setdefault(address, name)
        # Address 0 says nothing: a DTensor that no engine has yet has no memory of its own.
        if other != name and address:
            raise ValueError(
                f"Parameters {other!r} and {name!r} share memory but are two objects, so they would be trained apart. "
                "Tie them by assigning the parameter itself (`b.weight = a.weight`, not `b.weight.data = ...`)."
            )


def find_repeated(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of ``root``, whatever their size, in registration order; none inside another."""
    rules = UnitRules(min_numel=sys.maxsize, max_numel=sys.maxsize, alike=True, joins_experts=False, asks_modules=False)
    found = {module: clean_name(f"{name}.")[:-1] for name, module in _search(root, "", rules)}
    return [(name, module) for module, name in found.items()]


def class_name(module: nn.Module) -> str:
    """The name of the module's class; of a compiled module that of the one inside."""
    return type(compiled_module(module)).__name__


def count_in_lists(root: nn.Module) -> Counter[str]:
    """Count the modules with children in the lists of ``root``, by class."""
    lists = [m for m in root.modules() if isinstance(m, _LISTS)]
    return Counter(class_name(c) for m in lists for c in m.children() if any(True for _ in c.children()))


def repeated_classes(root: nn.Module, world: World) -> set[str]:
    """Names of the classes of repeated blocks of a model of which ranks have different parts. Collective.

    What is a repeated block on one rank is one on all. If no rank has two alike, each may have one.
    """
    here = sorted({class_name(module) for _, module in find_repeated(root)})
    told = world.host_gather((here, count_in_lists(root)), "repeated blocks")
    found = set[str]().union(*(names for names, _ in told))
    total = sum((counts for _, counts in told), Counter[str]())
    return found or {name for name, count in total.items() if count > 1}


def _search(
    module: nn.Module, name: str, rules: UnitRules, repeated: int | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of units inside ``module``, or itself; ``repeated``: its elements if it is a repeated block."""
    # What is inside of a module that torch.jit has compiled is called in C++, where no hook runs: its parameters belong
    # to the module that calls it.
    if not rules.numel(module) or is_compiled_by_jit(module):
        return
    children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
    small = repeated is not None and repeated <= rules.max_numel
    if small or rules.forces(name, module) or (repeated is not None and not _has_repeats(module, rules)):
        # They come first: each parameter belongs to the first unit that has it.
        parts = module.named_modules() if rules.asks_modules else ()
        yield from ((f"{name}.{n}", part) for n, part in parts if n and getattr(part, "unit_apart", False))
        yield name, module
        return
    if not children:
        if rules.numel(module) >= rules.min_numel and _has_forward(module):
            yield name, module
        return
    paths = {n: f"{name}.{n}" if name else n for n, _ in children}
    experts = {n for n, c in children if _are_experts(paths[n], c, rules)}
    has_blocks = any(_has_repeats(c, rules) for n, c in children if n not in experts)
    if experts and name and (repeated is not None or (_has_forward(module) and not has_blocks)):
        yield name, module
        return
    repeats = _repeated_children(module, rules)
    for child_name, child in children:
        if child_name not in experts:
            yield from _search(child, paths[child_name], rules, repeats.get(child_name))


def _repeated_children(module: nn.Module, rules: UnitRules) -> dict[str, int]:
    """The children of a list-like container that are repeated blocks, and the elements of each."""
    if not isinstance(module, _LISTS):
        return {}
    composite = {n: c for n, c in module.named_children() if any(True for _ in c.children())}
    numels = {n: rules.numel(c) for n, c in composite.items()}
    sizes = Counter((type(c), numels[n]) for n, c in composite.items())
    repeated = any(count >= 2 and numel > 0 for (_, numel), count in sizes.items())
    if rules.alike and not repeated:
        rows = [[c for c in composite.values() if type(c) is cls] for cls in {cls for cls, _ in sizes}]
        repeated = any(_are_alike(one, other) for row in rows for one, other in pairwise(row))
    # If some members are blocks, all are: the first of a ResNet stage differs from the others.
    return numels if repeated else {}


def _are_experts(name: str, module: nn.Module, rules: UnitRules) -> bool:
    """True if ``module`` is a list from which each rank calls only some modules. See Note [Experts]."""
    if not rules.joins_experts or not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    if rules.forces(name, module):
        # A list with a forward is a unit itself.
        return not _has_forward(module)
    named = "expert" in name.rpartition(".")[2].lower()
    return named and not any(rules.forces(f"{name}.{n}", c) for n, c in module.named_children())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """True if the two share a quarter of the smaller one. Modules that both contain blocks (stages) are not alike."""
    held, theirs = ({(n, p.shape): p.numel() for n, p in m.named_parameters()} for m in (one, other))
    common = sum(numel for place, numel in held.items() if place in theirs)
    similar = common > 0 and 4 * common >= min(sum(held.values()), sum(theirs.values()))
    return similar and not (_has_repeats(one, _ALIKE) and _has_repeats(other, _ALIKE))


def _has_repeats(module: nn.Module, rules: UnitRules) -> bool:
    return any(_repeated_children(m, rules) for m in module.modules())
