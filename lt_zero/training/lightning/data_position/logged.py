"""Logged values of an epoch: a resumed run adds to them what the run that was interrupted would have added.

Lightning saves neither what ``self.log`` has summed up in the epoch, nor the last values of metrics, which callbacks
and schedules follow. Both belong to one rank: values are reduced over the ranks when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lt_zero.common.compat.of_lightning_loops import (
    LoggedValue,
    count_of_updates,
    logged_values,
    metrics_of_training,
    metrics_of_validation,
    packed,
    set_count_of_updates,
    shown_metrics,
)
from lt_zero.common.tensor_tree import map_tensors

LARGEST = 1 << 20  # bytes of a torchmetrics.Metric that are saved: some keep all predictions
_NAMES = ("entries", "metrics", "shown", "lost")
_OF_PARTS = "turns of parts"  # of the other ranks of a data rank


class TurnValues(Protocol):
    """The values that micro-batches of rounds have logged, and the states of their metrics."""

    def values(self, copies: bool) -> dict[str, Any]:
        """Those of this rank; ``copies``: of what changes in place."""

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore those of all ranks."""


class EpochValues(NamedTuple):
    """The values that training has logged in an epoch, before one of its batches.

    ``batch``: the number of that batch in the epoch, from 1. ``metrics``: copies of the states of
    ``torchmetrics.Metric`` objects, with the number of their updates; None: they were not copied.
    """

    batch: int
    entries: list[LoggedValue]
    metrics: dict[str, tuple[int, dict[str, Any]]] | None
    turns: Any = None

    @classmethod
    def now(cls, trainer: pl.Trainer, copies: bool, turns: TurnValues | None) -> EpochValues:
        """Take them. ``copies``: also of metrics, which change in place. ``turns``: of rounds."""
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        of_turns = turns.values(copies) if turns is not None else None
        return cls(batch.ready, logged_values(trainer), _states(trainer, in_epoch=True) if copies else None, of_turns)


def saved_values(
    trainer: pl.Trainer, before: EpochValues | None, in_epoch: bool, cut: bool, turns: TurnValues | None
) -> dict[str, Any]:
    """This rank's logged values as plain containers and tensors. Exchanges nothing.

    Args:
        turns: of rounds, if there are any.
        before: those to save, where batches after them are repeated; None: the present ones.
        in_epoch: whether more batches of the epoch follow; else metrics that training does not log itself may have been
            read already, by a hook that a resumed run does not call.
        cut: whether Lightning has ended the epoch before its last batch, and has reset the values.
    """
    values = before.entries if before is not None else logged_values(trainer)
    entries, lost = packed(values)
    if cut:
        lost += [value.meta.name for value in values if value.reset and value.meta.on_epoch]
    states = before.metrics if before is not None else _states(trainer, in_epoch)
    if states is None:
        lost += sorted(metrics_of_training(trainer))
    metrics = {}
    on_host = _copied_to("cpu")
    for name, (count, state) in (states or {}).items():
        if sum(value.numel() * value.element_size() for value in _tensors(state)) > LARGEST:
            lost.append(name)
        else:
            metrics[name] = {"count": count, "states": map_tensors(state, on_host)}
    shown = {kind: map_tensors(dict(found), on_host) for kind, found in shown_metrics(trainer).items()}
    found = {"entries": entries, "metrics": metrics, "shown": shown, "lost": sorted(set(lost))}
    if turns is not None:
        found["turns"] = map_tensors(before.turns if before is not None else turns.values(copies=False), on_host)
    return found


def of_data_ranks(states: Sequence[dict[str, Any]], firsts: range) -> list[dict[str, Any]]:
    """The states of the first rank of each data rank, with what micro-batches have logged on the other ranks of it.

    These may have other parts of the same rows. ``states``: of all ranks; ``firsts``: as ``Division.firsts``.
    """
    found = []
    for first in firsts:
        state = states[first]
        others = [states[rank]["logged"] for rank in range(first + 1, first + firsts.step)]
        turns = [logged["turns"] for logged in others if logged is not None and "turns" in logged]
        if turns and state["logged"] is not None:
            state = {**state, "logged": {**state["logged"], _OF_PARTS: turns}}
        found.append(state)
    return found


def turns_of(states: Sequence[dict[str, Any]]) -> list[Any]:
    """The values that micro-batches have logged on all ranks; of the same micro-batch and rows the last one counts."""
    logged = [state["logged"] for state in states if state["logged"] and "turns" in state["logged"]]
    return [turns for values in logged for turns in (*values.get(_OF_PARTS, ()), values["turns"])]


def restore_values(trainer: pl.Trainer, saved: dict[str, Any], same_ranks: bool) -> list[str]:
    """Restore ``saved_values``; returns the names of values of the epoch that will cover the rest of it only.

    Args:
        same_ranks: whether the run has as many ranks as the one that has saved.
    """
    device = trainer.strategy.root_device
    on_device = _copied_to(device)
    for kind, values in shown_metrics(trainer).items():
        values.update(map_tensors(saved["shown"][kind], on_device))
    if not same_ranks:
        return [*saved["lost"], *(entry["name"] for entry in saved["entries"] if entry["on_epoch"])]
    from lt_zero.common.compat.of_lightning_results import restore_logged_values

    restore_logged_values(trainer, saved["entries"], device, trainer.strategy.reduce)
    for name, metric in _metrics(trainer.lightning_module):
        found = saved["metrics"].get(name)
        if found is None or found["states"].keys() != metric.metric_state.keys():
            continue
        for key, value in found["states"].items():
            setattr(metric, key, map_tensors(value, on_device))
        set_count_of_updates(metric, found["count"])
    return list(saved["lost"])


def are_values(saved: object) -> bool:
    """True if this is what ``saved_values`` returns, as far as that can be told without the module."""
    if not isinstance(saved, dict) or not saved.keys() >= set(_NAMES):
        return False
    kinds = {"callback", "logged", "bar"}
    fine = isinstance(saved["shown"], dict) and saved["shown"].keys() == kinds
    fine &= isinstance(saved["entries"], list) and all(isinstance(entry, dict) for entry in saved["entries"])
    return bool(fine and isinstance(saved["metrics"], dict) and isinstance(saved["lost"], list))


def _states(trainer: pl.Trainer, in_epoch: bool) -> dict[str, tuple[int, dict[str, Any]]]:
    """Copies of the states of metrics, and how often these were updated."""
    ours, others = metrics_of_training(trainer), metrics_of_validation(trainer)
    return {
        name: (count_of_updates(metric), map_tensors(dict(metric.metric_state), lambda state: state.detach().clone()))
        for name, metric in _metrics(trainer.lightning_module)
        # What validation logs is reset by Lightning when the validation ends.
        if metric.update_called and (name in ours or (in_epoch and name not in others))
    }


def _metrics(module: pl.LightningModule) -> Iterator[tuple[str, Metric]]:
    """All metrics of the module with their names."""
    for child in module.modules():
        if isinstance(child, MetricCollection):
            child.values(copy_state=False)  # lets metrics that share states see the present ones
    for name, child in module.named_modules():
        if isinstance(child, Metric):
            yield name, child


def _tensors(states: dict[str, Any]) -> Iterator[Tensor]:
    for value in states.values():
        yield from value if isinstance(value, list) else [value]


def _copied_to(device: torch.device | str) -> Callable[[Tensor], Tensor]:
    return lambda value: value.detach().to(device, copy=True)
