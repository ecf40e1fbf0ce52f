"""Options of a step: the hyper-parameters and the parameters of an optimizer's groups, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lt_zero.common.compat import version_of
from lt_zero.common.errors import differences
from lt_zero.engine.engine import Engine
from lt_zero.engine.same_on_ranks import Snapshot, compare, digest_of
from lt_zero.step.fragments import Fragments

_MEMBERS = ("params", "param_names")
_PLAIN = frozenset((float, bool, str, type(None)))


class StepOptions:
    """The snapshots of one optimizer, made anew only when something has changed.

    Args:
        fragments: of the optimizer. Trainable parameters that their engine does not own are a problem.
    """

    def __init__(self, fragments: Fragments) -> None:
        self._fragments, self._engine, self._optimizer = fragments, fragments.engine, fragments.optimizer
        self._members: list[list[int]] = []  # ids of the parameters, by group
        self._member_names: list[tuple[str, ...]] = []
        self._members_digest = b""
        self._foreign: list[Any] = []  # parameters that the engine does not own
        self._raw: list[tuple[Any, ...] | None] = []  # the values of each group; None: some may change in place
        self._values: list[dict[str, Any]] = []
        self._last: Snapshot | None = None
        self._read: dict[int, tuple[Tensor, int, Any]] = {}  # tensors on a GPU, at the version that was read

    def snapshot(self) -> Snapshot:
        """A snapshot of the options and members that the optimizer's groups have now."""
        groups, params = self._optimizer.param_groups, self._fragments.groups()
        members = [list(map(id, some)) for some in params]
        if members != self._members:
            self._see_members(members, params)
        unfrozen = any(p.requires_grad for p in self._foreign)
        if self._last is not None and unfrozen == bool(self._last.problem) and self._has_same(groups):
            return self._last
        values = self.values()
        if self._last is None or unfrozen != bool(self._last.problem) or values != self._values:
            digest = digest_of((self._members_digest, [sorted(some.items()) for some in values]))
            names, kind = self._member_names, type(self._optimizer).__name__
            self._last = Snapshot(digest, lambda: _facts(kind, values, names), self._problem() if unfrozen else "")
            self._values = values
        fixed = [all(_is_fixed(v) for k, v in group.items() if k not in _MEMBERS) for group in groups]
        self._raw = [tuple(group.values()) if kept else None for group, kept in zip(groups, fixed, strict=True)]
        return self._last

    def values(self) -> list[dict[str, Any]]:
        """The options of each group, in plain types."""
        groups = self._optimizer.param_groups
        return [{k: self._plain(v) for k, v in group.items() if k not in _MEMBERS} for group in groups]

    def _has_same(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """True if the groups have the very objects of the last snapshot, none of which can change in place."""
        if len(groups) != len(self._raw):
            return False
        pairs = zip(groups, self._raw, strict=True)
        return all(raw is not None and len(raw) == len(g) and all(map(is_, g.values(), raw)) for g, raw in pairs)

    def _see_members(self, members: list[list[int]], params: Sequence[Sequence[Any]]) -> None:
        self._foreign = [p for some in params for p in some if id(p) not in self._engine.owner]
        known, kind = self._names(), type(self._optimizer).__name__
        self._members, self._last = members, None
        self._member_names = [tuple(repr(known.get(key, f"#{n}")) for n, key in enumerate(ids)) for ids in members]
        self._members_digest = digest_of((kind, self._member_names))

    def _names(self) -> dict[int, str]:
        owned = {key: bucket.layout.spans[index].name for key, (bucket, index) in self._engine.owner.items()}
        if not self._foreign:
            return owned
        return {id(p): name for name, p in self._engine.root.named_parameters()} | owned

    def _problem(self) -> str:
        known = self._names()
        parameter = next(p for p in self._foreign if p.requires_grad)
        group, place = next(
            (number, ids.index(id(parameter))) for number, ids in enumerate(self._members) if id(parameter) in ids
        )
        name = repr(known[id(parameter)]) if id(parameter) in known else f"number {place}"
        whose = "the model got it after set-up" if id(parameter) in known else "it is not one of the model"
        return (
            f"{type(self._optimizer).__name__}, group {group}, has parameter {name} {tuple(parameter.shape)}, which "
            f"the engine does not know: {whose}. No rank would get the others' gradients for it. Make it a parameter "
            "of the model before set-up (in __init__, or configure_model of a LightningModule)."
        )

    def _plain(self, value: Any) -> Any:
        """Convert ``value`` to a form that ``==`` compares and whose ``repr`` is the same on all ranks."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Real):
            return float(value)
        if isinstance(value, Tensor):
            return self._number(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._plain, value))
        if isinstance(value, Mapping):
            return tuple((str(key), self._plain(item)) for key, item in value.items())
        return type(value).__qualname__

    def _number(self, value: Tensor) -> Any:
        """The value of a tensor of one element. One on a GPU is waited for only if it has changed."""
        if value.numel() != 1:
            return tuple(value.shape)
        if value.device.type == "cpu":
            return value.item()
        known, version, read = self._read.get(id(value), (None, 0, None))
        if known is not value or version != version_of(value):
            read = value.item()
            self._read[id(value)] = value, version_of(value), read
        return read


def _is_fixed(value: Any) -> bool:
    """True if a value cannot change in place."""
    return type(value) in _PLAIN or type(value) is int or (type(value) is tuple and all(map(_is_fixed, value)))


def _facts(kind: str, values: Sequence[Mapping[str, Any]], members: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"the optimizer": kind, "the number of parameter groups": len(values)}
    for number, (group, names) in enumerate(zip(values, members, strict=True)):
        place = f"{kind}, group {number}" + (f" ({group['name']})" if group.get("name") else "")
        facts |= {f"{place}, {key}": value for key, value in group.items()}
        facts[f"{place}, the number of parameters"] = names
    return facts


def compare_optimizers(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Compare all optimizers of a run before the first of them is sharded. Collective.

    Raises:
        RuntimeError: on all ranks, if they differ, or have parameters that the engine does not own.
    """
    if engine.peers.alone:
        return
    found = [StepOptions(Fragments(engine, optimizer)).snapshot() for optimizer in optimizers]
    facts: dict[str, Any] = {"the number of optimizers": len(optimizers)}
    for number, snapshot in enumerate(found):
        place = f"optimizer {number}: " if len(found) > 1 else ""
        facts |= {f"{place}{key}": value for key, value in snapshot.facts().items()}
    problem = next((snapshot.problem for snapshot in found if snapshot.problem), "")
    compare(engine.peers, Snapshot(digest_of([s.digest for s in found]), lambda: facts, problem), "optimizers")


def compare_options(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Compare the options of groups between ranks that have other parts of a model. Collective if there are any.

    A checkpoint has each group once, so that the stages of a pipeline may not differ in them.

    Raises:
        RuntimeError: on all ranks, if they differ.
    """
    mine: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        place = f"{kind} (optimizer {number})" if len(optimizers) > 1 else kind
        mine[f"optimizer {number}"] = kind
        for index, options in enumerate(StepOptions(Fragments(engine, optimizer)).values()):
            mine |= {f"{place}, group {index}, {key}": value for key, value in options.items()}
    told = engine.peers.ask_all(mine, "options of optimizers")
    found: dict[str, list[Any]] = {}
    for theirs in told:
        for key, value in theirs.items():
            found.setdefault(key, []).append(value)
    wrong = [key for key, values in found.items() if any(value != values[0] for value in values)]
    if wrong:
        differ = {rank: {key: theirs[key] for key in wrong if key in theirs} for rank, theirs in enumerate(told)}
        raise RuntimeError(
            f"The stages of a pipeline differ: {differences(differ)}. They need the same parameter groups, with the "
            "same options: make all groups on each rank; one may be without parameters ({'params': []})."
        )
