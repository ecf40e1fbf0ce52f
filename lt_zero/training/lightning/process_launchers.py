"""Starts of the ranks of a run as processes of multiprocessing; launchers.py chooses it.

Note [Interactive processes]
    A notebook or a Python prompt has no script that could be run for the other ranks, so they are forked. What a
    forked process inherits must not decide what it does: threads of OpenMP and process groups of the parent are left
    behind. The parent is no rank, and its Trainer knows of the run what rank 0 sends at its end.

    All that rank 0 sends travels as bytes. Tensors would travel through memory shared with a process that has ended by
    the time when the parent reads, and Lightning's own way back takes metrics only if they are tensors or plain values.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.launchers import multiprocessing as of_fabric
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies.launchers import multiprocessing as of_trainer
from typing_extensions import override

from lt_zero.common.compat.of_lightning_loops import progress_of, set_progress, shown_metrics
from lt_zero.common.forks import end_openmp_threads
from lt_zero.core.comm.process_groups import leave_inherited_groups
from lt_zero.core.health.ended_ranks import call_with_short_errors

_RUN = "lt_zero"  # the key of what rank 0 sends of its Trainer
# Callbacks whose state is the same on all ranks and needs no collective.
_SENT: tuple[type[Callback], ...] = (ModelCheckpoint, EarlyStopping)


def _run_as_rank(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes | None:
    """Call ``function`` in a process that was started as a rank; returns what ``_from_rank_0`` reads."""
    leave_inherited_groups()
    result = call_with_short_errors(function, *args, **kwargs)
    return _as_bytes(result) if os.environ["LOCAL_RANK"] == "0" else None  # Lightning drops those of the others


def _as_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_rank_0(sent: bytes) -> Any:
    """The value that the child of this process has passed to ``_as_bytes``, with all tensors on the CPU."""
    # From this process's own child, so that types of the user are safe.
    return torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)


def _sendable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that can be sent; the others are named in a warning, and do not end a run that is complete."""
    found = {}
    for name, value in metrics.items():
        try:
            _as_bytes(value)
        # Pickle raises what it likes, and so do classes of the user.
        except Exception as error:
            warnings.warn(
                f"The metric {name!r} of rank 0 is missing in the Trainer of this notebook: a {type(value).__name__} "
                f"cannot be sent to another process ({error}). Log a number or a tensor.",
                stacklevel=2,
            )
        else:
            found[name] = value
    return found


class FabricLauncher(of_fabric._MultiProcessingLauncher):
    """Starts ranks as processes of multiprocessing; their errors come without the frames of packages."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._start_method == "fork":
            end_openmp_threads()
        return _from_rank_0(super().launch(partial(_run_as_rank, function), *args, **kwargs))


class TrainerLauncher(of_trainer._MultiProcessingLauncher):
    """``FabricLauncher`` for a Trainer: afterwards the Trainer of this process knows how far the run has come.

    Lightning brings back the weights, the best path of the first ModelCheckpoint and the state.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if self._start_method == "fork":
            end_openmp_threads()
        return _from_rank_0(super().launch(partial(_run_as_rank, function), *args, trainer=trainer, **kwargs))

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        _ = trainer.callback_metrics  # reading it brings those that are shown up to date
        run = {
            "progress": progress_of(trainer),
            "metrics": {name: _sendable(values) for name, values in shown_metrics(trainer).items()},
            "callbacks": {callback.state_key: kind.state_dict(callback) for callback, kind in _sent(trainer)},
        }
        return {_RUN: _as_bytes(run)}

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        run = _from_rank_0(extra[_RUN])
        set_progress(trainer, run["progress"])
        for name, values in shown_metrics(trainer).items():
            values.update(run["metrics"][name])
        for callback, kind in _sent(trainer):
            state = run["callbacks"].get(callback.state_key)
            if state is None:
                continue
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = state["dirpath"]  # chosen on the ranks; with another one the state is not taken
            kind.load_state_dict(callback, state)


def _sent(trainer: pl.Trainer) -> list[tuple[Any, Any]]:
    """The callbacks whose state is sent, each with the class of Lightning that knows it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [(callback, kind) for callback in callbacks for kind in _SENT if isinstance(callback, kind)]
