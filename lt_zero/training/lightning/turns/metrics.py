"""Metrics of torchmetrics in rounds: each micro-batch has its own states, which are reduced in the order of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lt_zero.common.errors import ConfigError
from lt_zero.common.held import held
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.rounds import Rounds

_KEY = "reproducible.virtual_ranks"
_COUNTERS = ("_update_count", "_computed", "_forward_cache")
States = dict[str, Any]  # of one metric


class MetricTurns:
    """The states that the metrics of ``module`` have in each turn; those of the first turn are there between rounds."""

    def __init__(self, module: nn.Module, rounds: Rounds) -> None:
        self._rounds = rounds
        self._module = module
        named = [(name, child) for name, child in module.named_modules() if isinstance(child, Metric)]
        self._names = [name for name, _ in named]
        self._metrics = [child for _, child in named]
        self._states: list[list[States] | None] = [None] * rounds.turns  # of turns that are not there now
        self._turn = 0
        self.running = False  # whether a turn is
        for metric in self._metrics:
            _set_class(metric, _kind_of(type(metric), self))

    def refuse_unknown(self) -> None:
        """Refuse metrics that the module did not have when the run began, or has where it does not find them.

        Raises:
            ConfigError: names one.
        """
        known = {id(metric) for metric in self._metrics}
        root = type(self._module).__name__
        for path, child in self._module.named_modules():
            name = f"{root}.{path}" if path else root
            found = [(name, child)] if isinstance(child, Metric) else list(held(child, (Metric,), name))
            for where, metric in found:
                if id(metric) not in known:
                    raise ConfigError.about(
                        _KEY,
                        f"{_KEY}={self._rounds.count}: {where} is a {type(metric).__name__}, whose states are kept for "
                        "each virtual rank only if it is a child of the module when the run begins. Make it in "
                        "__init__, as an attribute or in a torch.nn.ModuleList, ModuleDict or MetricCollection.",
                    )

    def leave(self) -> None:
        """Let the metrics be what they were, with the states of the first turn."""
        self.switch(0)
        for metric in self._metrics:
            _set_class(metric, type(metric).__mro__[1])

    def switch(self, turn: int) -> None:
        """Let the metrics have the states of a turn."""
        if turn == self._turn or not self._metrics:
            return
        now = [_taken(metric) for metric in self._metrics]
        then = self._states[turn]
        self._states[self._turn], self._states[turn], self._turn = now, None, turn
        _put(self._metrics, then if then is not None else self._fresh())

    def _fresh(self) -> list[States]:
        """States of metrics that have seen nothing. Metrics of a collection that share states share these, too."""
        made: dict[int, Any] = {}
        found = []
        for metric in self._metrics:
            state: States = {"_update_count": 0, "_computed": None, "_forward_cache": None}
            for name, default in metric._defaults.items():
                now = getattr(metric, name)
                if id(now) not in made:
                    made[id(now)] = _default(default, metric.device)
                state[name] = made[id(now)]
            found.append(state)
        return found

    def values(self, copies: bool) -> dict[int, dict[str, Any]]:
        """By number of the micro-batch and name of the metric: how often it was updated, and its states.

        ``copies``: of the states, which change in place.
        """
        found: dict[int, dict[str, Any]] = {}
        for turn, states in enumerate(self._states):
            now = [_taken(metric) for metric in self._metrics] if turn == self._turn else states or []
            found[self._rounds.place(turn)] = {
                name: (state["_update_count"], {key: _copied(state[key], copies) for key in metric._defaults})
                for name, metric, state in zip(self._names, self._metrics, now, strict=False)
                if state["_update_count"]
            }
        return found

    def restore(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore ``values`` of all micro-batches. Between rounds."""
        for turn in range(self._rounds.turns):
            of_turn = saved.get(self._rounds.place(turn), {})
            states = self._fresh()
            for name, metric, state in zip(self._names, self._metrics, states, strict=True):
                count, values = of_turn.get(name, (0, {}))
                if values.keys() == metric._defaults.keys():
                    move = partial(Tensor.to, device=metric.device)
                    on_device = {key: map_tensors(value, move) for key, value in values.items()}
                    state.update(on_device, _update_count=count)
            if turn == self._turn:
                _put(self._metrics, states)
            else:
                self._states[turn] = states

    def forget(self, metric: Metric) -> None:
        """A metric is reset. Between rounds it is, for all turns."""
        if self.running:
            return
        number = next(number for number, known in enumerate(self._metrics) if known is metric)
        for states in self._states:
            if states is not None:
                state = states[number]
                state.update(_update_count=0, _computed=None, _forward_cache=None)
                for name, default in metric._defaults.items():
                    state[name] = _default(default, metric.device)

    def reduce(self, metric: Metric) -> None:
        """Let a metric have the states of all micro-batches, reduced. Collective.

        Raises:
            ConfigError: a turn is running, and later micro-batches have not been run.
        """
        name = type(metric).__name__
        if self.running:
            raise ConfigError.about(
                _KEY,
                f"{_KEY}={self._rounds.count}: {name} would be computed over all virtual ranks inside of a step, when "
                "some of them have not run theirs. Log the metric (self.log), compute it at the end of the epoch, or "
                "leave out dist_sync_on_step.",
            )
        number = next(number for number, known in enumerate(self._metrics) if known is metric)
        mine = []
        for turn, states in enumerate(self._states):
            state = _taken(metric) if turn == self._turn else states[number] if states is not None else {}
            mine.append({key: _packed(state.get(key, default)) for key, default in metric._defaults.items()})
        values = self._rounds.in_order(mine, f"states of {name}")
        for key, reduction in metric._reductions.items():
            setattr(metric, key, _reduced([of_one[key] for of_one in values], reduction, metric.device))


def _put(metrics: Sequence[Metric], states: Sequence[States]) -> None:
    for metric, state in zip(metrics, states, strict=True):
        for name, value in state.items():
            setattr(metric, name, value)


def _copied(value: Any, copies: bool) -> Any:
    """The value of a state: a list as another one; ``copies``: with other tensors."""
    return map_tensors(value, lambda tensor: tensor.detach().clone()) if copies else copy.copy(value)


def _default(default: Any, device: torch.device) -> Any:
    """The value of a state of a metric that has seen nothing."""
    return default.detach().clone().to(device) if isinstance(default, Tensor) else []


def _taken(metric: Metric) -> States:
    return {name: getattr(metric, name) for name in (*metric._defaults, *_COUNTERS)}


def _packed(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.detach()


def _reduced(values: list[Any], reduction: Any, device: torch.device) -> Any:
    """The states of all micro-batches as torchmetrics reduces those of ranks."""
    if isinstance(values[0], list):
        entries = [entry.to(device) for value in values for entry in value]
        if reduction is None or not entries:
            return entries
        return reduction([dim_zero_cat(entries)] if reduction is dim_zero_cat else entries)
    stacked = torch.stack([value.to(device) for value in values])
    return stacked if reduction is None else reduction(stacked)


def _kind_of(kind: type[Metric], turns: MetricTurns) -> type[Metric]:
    """A subclass of a metric's class that reduces over micro-batches; copies are of the user's class."""

    def _sync_dist(self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        turns.reduce(self)

    def reset(self: Any) -> None:
        kind.reset(self)
        turns.forget(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        watched = type(self)
        _set_class(self, kind)
        try:
            return self.__reduce_ex__(protocol)
        finally:
            _set_class(self, watched)

    methods: dict[str, Callable[..., Any]] = {"_sync_dist": _sync_dist, "reset": reset, "__reduce_ex__": __reduce_ex__}
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    make: Any = type(kind)
    made: type[Metric] = make(kind.__name__, (kind,), {**named, **methods})
    return made


def _set_class(metric: Metric, kind: type[Metric]) -> None:
    object.__setattr__(metric, "__class__", kind)
