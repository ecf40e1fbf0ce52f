"""What one optimizer steps with: the hyper-parameters and the parameters of its groups, as all ranks must have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lt_zero.common.compat import version_of
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
        self._values: list[dict[str, Any]] = []
        self._members: list[list[int]] = []  # ids of the parameters
        self._foreign: list[Any] = []  # parameters that the engine does not own
        self._last: Snapshot | None = None
        self._read: dict[int, tuple[Tensor, int, Any]] = {}  # tensors on a GPU, at the version that was read

    def snapshot(self) -> Snapshot:
        """What the optimizer's groups have now."""
        groups, params = self._optimizer.param_groups, self._fragments.groups()
        members = [list(map(id, some)) for some in params]
        values = [{k: self._plain(v) for k, v in group.items() if k not in _MEMBERS} for group in groups]
        if changed := members != self._members:
            self._foreign = [p for some in params for p in some if id(p) not in self._engine.owner]
        unfrozen = any(p.requires_grad for p in self._foreign)
        if self._last is None or changed or values != self._values or unfrozen != bool(self._last.problem):
            self._members, self._values = members, values
            self._last = self._make(unfrozen)
        return self._last

    def _make(self, unfrozen: bool) -> Snapshot:
        kind, facts = type(self._optimizer).__name__, dict[str, Any]()
        facts["the optimizer"] = kind
        facts["the number of parameter groups"] = len(self._values)
        known = self._names()
        for number, (values, ids) in enumerate(zip(self._values, self._members, strict=True)):
            named = f" ({values['name']})" if values.get("name") else ""
            for key, value in values.items():
                facts[f"{kind}, group {number}{named}, {key}"] = value
            names = tuple(repr(known.get(key, f"#{place}")) for place, key in enumerate(ids))
            facts[f"{kind}, group {number}{named}, the number of parameters"] = names
        return Snapshot(digest_of(sorted(facts.items())), lambda: facts, self._problem(known) if unfrozen else "")

    def _names(self) -> dict[int, str]:
        owned = {key: bucket.layout.spans[index].name for key, (bucket, index) in self._engine.owner.items()}
        if not self._foreign:
            return owned
        return {id(p): name for name, p in self._engine.root.named_parameters()} | owned

    def _problem(self, known: Mapping[int, str]) -> str:
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
        """``value`` as something that is compared by ``==`` and has the same ``repr`` on all ranks."""
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


def compare_optimizers(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Compare all optimizers of a run before the first of them is sharded. Collective.

    Raises:
        RuntimeError: on all ranks, if they differ, or have parameters that the engine does not own.
    """
    if engine.comm.alone:
        return
    found = [StepOptions(Fragments(engine, optimizer)).snapshot() for optimizer in optimizers]
    facts: dict[str, Any] = {"the number of optimizers": len(optimizers)}
    for number, snapshot in enumerate(found):
        place = f"optimizer {number}: " if len(found) > 1 else ""
        facts |= {f"{place}{key}": value for key, value in snapshot.facts().items()}
    problem = next((snapshot.problem for snapshot in found if snapshot.problem), "")
    compare(engine.comm, Snapshot(digest_of([s.digest for s in found]), lambda: facts, problem), "optimizers")
