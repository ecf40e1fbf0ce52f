"""Loads the state of each rank of a checkpoint: see rank_state.py, which saves it, with its notes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from lt_zero.checkpoint.native.values_of_ranks import OF_RANKS, own_values
from lt_zero.common import plain_names
from lt_zero.common.compat import clean_name
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.lazy_tensor import whole
from lt_zero.core.followers import OfAllRanks, states_of

log = logging.getLogger("lt_zero")


@torch.no_grad()
def load_rank_buffers(engine: Engine, state: Mapping[str, Any], prefix: str = "") -> None:
    """Load this rank's buffers of a checkpoint, after its state dict. Not collective."""
    # Earlier versions saved the names of wrappers, too.
    mine = {clean_name(k.removeprefix(prefix)): v for k, v in state["buffers"].items() if k.startswith(prefix)}
    if not mine:
        return
    if state["ranks"] != engine.world.size or engine.buffers.enabled:
        if engine.world.rank == 0:
            why = "broadcast_buffers is on" if engine.buffers.enabled else f"here are {engine.world.size} ranks"
            log.warning(
                "The checkpoint has other buffers on each of %d ranks, and %s: all go on with those of rank 0.",
                state["ranks"],
                why,
            )
        return
    for name, buffer in plain_names.named_buffers(engine.root):
        if (value := mine.get(name, {}).get(str(engine.world.rank))) is not None:
            buffer.copy_(whole(value))


def load_feature_states(engine: Engine, state: Mapping[str, Any], prefix: str = "") -> None:
    """Let the engine's features go on with what ``feature_states`` of any number of ranks has returned."""
    saved_values: dict[str, Any] = dict(state["values"])
    of_ranks: dict[str, list[Any]] = dict(state.get(OF_RANKS, {}))
    known = states_of(engine)
    for name, kept in known.items():
        key = prefix + name
        if isinstance(kept, OfAllRanks) and key in saved_values:
            value = saved_values.pop(key)
            kept.load_of_ranks(of_ranks.pop(key, [value]))
    values = own_values(engine.world, saved_values, of_ranks)
    mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    for name, kept in known.items():
        if name in mine and not isinstance(kept, OfAllRanks):
            kept.load_state_dict(mine[name])
    if (others := [name for name in mine if name not in known]) and engine.world.rank == 0:
        log.warning(
            "The checkpoint has states of features that this run does not have: %s. They are left out. To go on with "
            "them, ask for the features by their keys; those of other packages have to be registered "
            "(lt_zero.core.feature.register).",
            ", ".join(map(repr, others)),
        )
