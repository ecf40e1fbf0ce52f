"""``activation_checkpointing.memory_budget``: which checkpointed modules are recomputed, so that a peak is met.

In the first optimizer steps all modules are recomputed, and measured: the bytes that each keeps for backward in either
case, and the time of its forward. Then the modules of least time are chosen whose recomputation meets the budget, and
the others keep their activations from there on. Gradients do not depend on the choice.

Note [Peak]
    Activations add up in forward, and are freed in backward from the last module to the first. In the backward of
    module ``j``, also if it is recomputed there, all that modules before it keep is still in memory, and so is
    everything that ``j`` computes:

        peak = max over j of  sum(kept by i < j) + inputs of j + all activations of j

    A module whose forward runs again before its backward, as with several micro-batches of a pipeline under way, keeps
    its activations as often: all that is kept then counts so many times. What is computed outside of the modules, such
    as logits and the loss, is the same for each choice, and is not counted.

Note [Ranks]
    A recomputation may contain collectives (gathers of nested units, tensor parallelism), so ranks with the same
    modules have to make the same choice. They exchange what they measured; each module counts with the most that a
    rank has, and each rank computes the same plan from it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from lt_zero.common import accelerator
from lt_zero.common.compat.of_dispatch import DispatchMode
from lt_zero.common.errors import ConfigError
from lt_zero.common.tables import bytes_cell
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.common.units import format_bytes
from lt_zero.features.activation_checkpointing.profile import Boundary
from lt_zero.features.activation_checkpointing.selective import keeps

KEY = "activation_checkpointing.memory_budget"
_STATES = 4096  # of the search; beyond, states in between are dropped

Budget = float | int  # a share (float) of the peak without recomputation, or bytes (int)


@dataclass(frozen=True)
class ModuleCost:
    """Costs of one checkpointed module on one rank; sizes in bytes.

    Attributes:
        name, kind: of the module, and of its class.
        inputs: its saved inputs, without those that earlier modules have, too.
        fixed: what it keeps beside its inputs if it is recomputed (``mode: selective``).
        inner: what it keeps beside its inputs if it is not.
        working: all that it has in memory at most while it computes, without its inputs, and the output's gradient.
        nanoseconds: of its forward.
        passes: forwards that wait for their backward, at most.
    """

    name: str
    kind: str
    inputs: int = 0
    fixed: int = 0
    inner: int = 0
    working: int = 0
    nanoseconds: int = 0
    passes: int = 0

    def most(self, other: ModuleCost) -> ModuleCost:
        """The larger of each figure."""
        names = ("inputs", "fixed", "inner", "working", "nanoseconds", "passes")
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True)
class BudgetPlan:
    """A choice of modules.

    Attributes:
        costs: of the modules, in the order of their forwards.
        recomputed: names of those that are recomputed.
        aside: saved inputs of recomputed modules leave the device.
        allowed: the budget in bytes.
    """

    costs: tuple[ModuleCost, ...]
    recomputed: frozenset[str]
    aside: bool
    allowed: int

    @property
    def peak(self) -> int:
        """Bytes of the modules' activations at most: see Note [Peak]."""
        return peak_of(self.costs, self.recomputed, self.aside)

    def table(self) -> Table:
        """A row for each run of modules that are alike."""
        whole = peak_of(self.costs, frozenset(), self.aside)
        title = (
            f"Recomputation for {KEY}: {format_bytes(self.allowed)} allowed, {format_bytes(self.peak)} expected, "
            f"{format_bytes(whole)} without"
        )
        table = Table(title=title)
        for column in ("modules", "class", "recomputed", "kept", "if recomputed", "forward, ms"):
            text = column in ("modules", "class", "recomputed")
            table.add_column(
                column, justify="left" if text else "right", overflow="fold" if column == "modules" else "ellipsis"
            )
        for (kind, again, inner), run in groupby(self.costs, lambda c: (c.kind, c.name in self.recomputed, c.inner)):
            found = list(run)
            first, last = found[0].name, found[-1].name
            name = first if len(found) == 1 else f"{first} to {last} ({len(found)})"
            least = max(_kept(cost, True, self.aside) for cost in found)
            full = max(_kept(cost, False, self.aside) for cost in found) if inner else 0
            milliseconds = sum(cost.nanoseconds for cost in found) / len(found) / 1e6
            answer = ("yes" if again else "no") if inner or full else "yes (not measured)"
            table.add_row(name, kind, answer, bytes_cell(full), bytes_cell(least), f"{milliseconds:.2f}")
        return table


def _kept(cost: ModuleCost, recomputed: bool, aside: bool) -> int:
    """Bytes that a module keeps from its forward to its backward."""
    if not recomputed:
        return cost.inputs + cost.inner
    return cost.fixed + (0 if aside else cost.inputs)


def _needed(cost: ModuleCost) -> int:
    """Bytes that a module has in memory in its backward."""
    return cost.inputs + max(cost.working, cost.inner)


def peak_of(costs: Sequence[ModuleCost], recomputed: frozenset[str], aside: bool) -> int:
    """The peak of a choice, in bytes: see Note [Peak]."""
    passes = max((cost.passes for cost in costs), default=1)
    peak = before = 0
    for cost in costs:
        peak = max(peak, before + _needed(cost))
        before += _kept(cost, cost.name in recomputed, aside)
    return peak + max(0, passes - 1) * before


def plan_budget(costs: Sequence[ModuleCost], budget: Budget, aside: bool = False) -> BudgetPlan:
    """Choose modules of least time whose recomputation meets the budget.

    Args:
        costs: of all modules, in the order of their forwards. One without ``passes`` was not measured, and is
            recomputed.
        budget: a share (float) of the peak without recomputation, or bytes (int).
        aside: saved inputs of recomputed modules leave the device.

    Raises:
        ConfigError: no choice meets it; has the least that one does.
    """
    costs = _evened(costs)
    everything = frozenset(cost.name for cost in costs)
    least, whole = peak_of(costs, everything, aside), peak_of(costs, frozenset(), aside)
    allowed = math.floor(budget * whole) if isinstance(budget, float) else budget
    if allowed < least:
        share = math.ceil(1000 * least / whole) / 1000
        deeper = "mode 'full', " if any(cost.fixed for cost in costs) else ""
        given = f"{budget:g}" if isinstance(budget, float) else format_bytes(budget)
        raise ConfigError.about(
            KEY,
            f"{KEY}={given} allows {format_bytes(allowed)} of activations, but the checkpointed modules need "
            f"{format_bytes(least)} if all of them are recomputed, and {format_bytes(whole)} if none is. The least "
            f"that can be met is {share:g} of the memory without recomputation: write {KEY}={share:g}, or choose "
            f"{deeper}smaller micro-batches, or smaller modules (activation_checkpointing.modules).",
        )
    recomputed = _search(costs, allowed, aside)
    return BudgetPlan(tuple(costs), recomputed, aside, allowed)


def _evened(costs: Sequence[ModuleCost]) -> list[ModuleCost]:
    """Costs in which modules of one class and about one size have the same time: noise does not choose among them."""
    alike: list[list[ModuleCost]] = []
    for cost in sorted(costs, key=lambda cost: (cost.kind, cost.inner)):
        known = alike[-1][0] if alike else None
        if known is not None and cost.kind == known.kind and cost.inner <= 1.1 * known.inner:
            alike[-1].append(cost)
        else:
            alike.append([cost])
    means = {cost.name: sum(c.nanoseconds for c in group) // len(group) for group in alike for cost in group}
    return [replace(cost, nanoseconds=means[cost.name]) for cost in costs]


def _search(costs: Sequence[ModuleCost], allowed: int, aside: bool) -> frozenset[str]:
    """Names of the modules to recompute, of least time in total: a knapsack, filled module by module."""
    passes = max((cost.passes for cost in costs), default=1)
    needed = max((_needed(cost) for cost in costs), default=0)
    # Bytes kept so far -> (time of recomputations, names as a linked list).
    states: dict[int, tuple[int, Any]] = {0: (0, None)}
    for cost in costs:
        # With several passes under way, all that is kept counts, also what later modules keep: bound it by the largest.
        room = allowed - _needed(cost) if passes <= 1 else (allowed - needed) // passes
        states = {kept: state for kept, state in states.items() if kept <= room}
        found: dict[int, tuple[int, Any]] = {}
        # Of equal choices the one that keeps later modules is left: they are the first to be freed.
        for again in (False, True) if cost.passes else (True,):
            for kept, (spent, names) in states.items():
                total = kept + _kept(cost, again, aside)
                state = (spent + cost.nanoseconds, (cost.name, names)) if again else (spent, names)
                if total not in found or state[0] < found[total][0]:
                    found[total] = state
        states = _thinned(found)
    if passes > 1:
        states = {kept: state for kept, state in states.items() if passes * kept + needed <= allowed}
    # A peak within the budget exists, but with several passes the bound above may exclude all choices but one.
    if not states:
        return frozenset(cost.name for cost in costs)
    _, names = min(states.values(), key=lambda state: state[0])
    chosen = set[str]()
    while names is not None:
        name, names = names
        chosen.add(name)
    return frozenset(chosen)


def _thinned(states: Mapping[int, tuple[int, Any]]) -> dict[int, tuple[int, Any]]:
    """The states that no other one beats in both bytes and time; of too many, some in between are dropped."""
    best: list[tuple[int, tuple[int, Any]]] = []
    for kept in sorted(states):
        if not best or states[kept][0] < best[-1][1][0]:
            best.append((kept, states[kept]))
    return dict([*best[:: -(-len(best) // _STATES) or 1], *best[-1:]])


# ---- measurement ---------------------------------------------------------------------------------------------------


class _Alive(DispatchMode):
    """Follows the storages that operators make while it is entered.

    Attributes:
        storages: that are in memory, in the order in which they were made, and their bytes.
        most: their bytes at most.
        fixed: bytes of outputs that ``mode: selective`` keeps.
    """

    def __init__(self, selective: bool, ignored: set[torch.UntypedStorage]) -> None:
        super().__init__()
        self.storages: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self.most = self.fixed = self._now = 0
        self._selective, self._ignored = selective, ignored

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        fixed = self._selective and keeps(op, args, kwargs)
        for storage in storages_of(result):
            if storage not in self.storages and storage not in self._ignored:
                nbytes = storage.nbytes()
                self.storages[storage] = nbytes
                self._now += nbytes
                self.fixed += nbytes if fixed else 0
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._freed, nbytes).atexit = False
        return result

    def _freed(self, nbytes: int) -> None:
        self._now -= nbytes


def storages_of(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in ``tree``; of a subclass that wraps tensors those of the inner ones."""
    for tensor in iter_tensors(tree):
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from storages_of([getattr(tensor, name) for name in names])
        elif tensor.layout is torch.strided:
            yield tensor.untyped_storage()


@dataclass
class _Measured:
    """Figures of one module so far, as in ``ModuleCost``."""

    cost: ModuleCost
    under_way: int = 0


class Meter:
    """Measures checkpointed modules while all of them are recomputed.

    Args:
        modules: by name.
        device: of the model.
        selective: the mode.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device, selective: bool) -> None:
        self._modules, self._device, self._selective = modules, device, selective
        self._measured: dict[str, _Measured] = {}
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        self._timer: Boundary | None = None

    def measure_times(self) -> None:
        """From here on times are measured, and no bytes: modules are warm by now, and operators run undisturbed."""
        self._timer = Boundary(self._device, profile=True, synchronize=False)

    @contextmanager
    def forward(self, name: str, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context for a module's forward, of which ``tensors`` are saved."""
        known = self._measured.setdefault(name, _Measured(ModuleCost(name, type(self._modules[name]).__name__)))
        known.under_way += 1
        inputs = 0
        for storage in storages_of(tensors):
            if self._seen.setdefault(storage, name) == name:
                inputs += storage.nbytes()
        cost = known.cost
        known.cost = replace(cost, inputs=max(cost.inputs, inputs), passes=max(cost.passes, known.under_way))
        if self._timer is not None:
            with self._timer.around(name):
                yield
        else:
            # Recompute to the end, so that the outputs are known, which are not part of what the module keeps.
            with set_checkpoint_early_stop(False):
                yield

    def again(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``run``, which is a module's recomputation."""
        known = self._measured[name]
        known.under_way -= 1
        if self._timer is not None:
            return run(*args, **kwargs)
        module = self._modules[name]
        with _Alive(self._selective, {*storages_of((_state(module), args, kwargs))}) as alive:
            output = run(*args, **kwargs)
        # Ask for the parameters again: they may have been gathered into other memory meanwhile.
        returned, others = {*storages_of(output)}, {*storages_of(_state(module))}
        inner = backward = 0
        for storage, nbytes in alive.storages.items():
            if storage not in returned and storage not in others:
                # Backward frees the last ones first, and makes a gradient of the size of each.
                inner, backward = inner + nbytes, max(backward, inner + 2 * nbytes)
        working = max(alive.most, backward) + sum(storage.nbytes() for storage in returned)
        known.cost = known.cost.most(ModuleCost(name, "", fixed=alive.fixed, inner=inner, working=working))
        return output

    def end_step(self) -> None:
        """Forget forwards that had no backward."""
        for each in self._measured.values():
            each.under_way = 0

    def costs(self) -> list[ModuleCost]:
        """The figures of all modules, in the order of their first forwards, then the others. Waits for the device.

        Those that were not recomputed while bytes were measured have no ``passes``.
        """
        times = {}
        if self._timer is not None:
            accelerator.synchronize(self._device)
            self._timer.end_step()
            times = {
                name: round(1e6 * found.milliseconds[0] / max(1, found.calls[0]))
                for name, found in self._timer.times.items()
            }
        found = [
            replace(each.cost, nanoseconds=times.get(name, 0), passes=each.cost.passes if each.cost.working else 0)
            for name, each in self._measured.items()
        ]
        others = {name: module for name, module in self._modules.items() if name not in self._measured}
        return found + [ModuleCost(name, type(module).__name__) for name, module in others.items()]


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


# ---- ranks ---------------------------------------------------------------------------------------------------------


@dataclass
class BudgetTrial:
    """The steps in which modules are measured, and the choice after them.

    Attributes:
        budget: see ``plan_budget``.
        meter: of this rank.
        names: of all modules, in the order of their registration.
        aside: saved inputs of recomputed modules leave the device.
        gather: returns a value of each rank. Collective.
        follow: is given the plan of this rank; None: nothing can be chosen.
    """

    budget: Budget
    meter: Meter
    names: tuple[str, ...]
    aside: bool
    gather: Callable[[Any], list[Any]]
    follow: Callable[[BudgetPlan | None], None]
    steps: int = field(default=0, init=False)

    def end_step(self) -> None:
        """Count an optimizer step. After the second one the choice is made. Collective then.

        Raises:
            ConfigError: on all ranks: the budget of a rank cannot be met.
        """
        self.steps += 1
        self.meter.end_step()
        if self.steps == 1:
            self.meter.measure_times()
        elif self.steps == 2:
            costs = {cost.name: cost for cost in self.meter.costs()}
            # Plans of other ranks are made, too, so that all ranks raise.
            told = self.gather((self.names, costs))
            plans = {names: self._plan(names, told) for names in dict.fromkeys(names for names, _ in told)}
            self.follow(plans[self.names])

    def _plan(self, names: tuple[str, ...], told: Sequence[tuple[tuple[str, ...], Any]]) -> BudgetPlan | None:
        """The plan of the ranks that have the modules ``names``."""
        merged: dict[str, ModuleCost] = {}
        for theirs, costs in told:
            for name, cost in costs.items() if theirs == names else ():
                merged[name] = merged[name].most(cost) if name in merged else cost
        if not any(cost.passes for cost in merged.values()):
            return None
        return plan_budget(list(merged.values()), self.budget, self.aside)
