"""Content of checkpoints and exports of an engine: weights, averages, residuals, buffers of each rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lt_zero.checkpoint.live_weights import export_engine
from lt_zero.checkpoint.native.pieces import weight_fragments
from lt_zero.checkpoint.native.rank_buffers import KEY as RANK_BUFFERS
from lt_zero.checkpoint.native.rank_buffers import rank_buffers
from lt_zero.checkpoint.native.residuals import KEY as RESIDUALS
from lt_zero.checkpoint.native.residuals import residual_state
from lt_zero.checkpoint.native.save import TRAINED
from lt_zero.engine.engine import Engine
from lt_zero.engine.full_params import full_state_dict


def frozen_names(engine: Engine, leave_out: bool) -> list[str]:
    """The names of weights that a checkpoint leaves out, by all names of tied ones; [] unless ``leave_out``."""
    every = engine.root.named_parameters(remove_duplicate=False)
    return [name for name, p in every if leave_out and not p.requires_grad]


def weights_to_save(
    engine: Engine, left_out: Iterable[str] = (), averaged: bool = True, sharded: bool = True
) -> dict[str, Any]:
    """The state dict, without the names in ``left_out``. Collective.

    Args:
        averaged: with the averages of ``EMA`` where it has some, else with the trained weights.
        sharded: in fragments, for a directory; else full tensors on rank 0, and nothing elsewhere.
    """
    without = set(left_out)
    if sharded:
        state = weight_fragments(engine, averaged)
    else:
        with averages_shown(engine, averaged):
            state = full_state_dict(engine)
    return {name: value for name, value in state.items() if name not in without}


def averages_shown(engine: Engine, averaged: bool = True) -> AbstractContextManager[None]:
    """Context in which the model has the averages of ``EMA``, if there are some, or its trained weights. Collective."""
    return engine.average.showing(averaged) if engine.average is not None else nullcontext()


def whole_weights(engine: Engine, call: str, left_out: Iterable[str] = ()) -> dict[str, Any]:
    """The state dict with full tensors on the CPU of rank 0, {} elsewhere. Collective.

    With ``EMA`` it has the averages, as exports have. ``call``: what users call. ``left_out``: names that it has not.
    """
    engine.world.roll_call(call)
    return weights_to_save(engine, left_out, sharded=False)


def export_weights(engine: Engine, path: str | os.PathLike[str], call: str, **options: Any) -> None:
    """Write all weights to files, by default in fp16, rank 0 one bucket at a time. Collective.

    ``options`` and errors are those of ``lt_zero.export``.
    """
    engine.world.roll_call(call)
    with averages_shown(engine):
        export_engine(engine, path, **{"dtype": torch.float16, **options})


def trained_beside(engine: Engine, left_out: Iterable[str] = (), sharded: bool = True) -> dict[str, Any]:
    """The trained weights, by their key in a checkpoint; {} if its state dict has no averages. Collective."""
    average = engine.average
    if average is None or not average.updates:
        return {}
    places = {name: engine.owner.get(id(p)) for name, p in engine.root.named_parameters(remove_duplicate=False)}
    names = {name for name, place in places.items() if place is not None and place[0].average is not None}
    names |= dict(engine.root.named_buffers()).keys()
    state = weights_to_save(engine, left_out, averaged=False, sharded=sharded)
    weights = {name: value for name, value in state.items() if name in names}
    return {TRAINED: {"weights": weights, "updates": average.updates}}


def beside(engines: Mapping[str, Engine], sharded: bool = True) -> dict[str, Any]:
    """Content beside weights and optimizers' states, by its key in a checkpoint. Collective.

    Args:
        engines: by the prefix of their parameters' names in the checkpoint.
        sharded: with fragments, for a directory; else with full tensors on rank 0.
    """
    found: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for prefix, engine in engines.items():
        if (owed := residual_state(engine, sharded)) is not None:
            found[RESIDUALS] = owed  # of one engine only: session.py, ``Session.build``
        if (different := rank_buffers(engine, prefix)) is not None:
            buffers |= different["buffers"]
            found[RANK_BUFFERS] = {"ranks": engine.world.size, "buffers": buffers}
    return found
