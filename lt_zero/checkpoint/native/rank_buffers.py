"""Buffers of each rank in checkpoints, where they may differ (``broadcast_buffers: false``).

The state dict has rank 0's. Beside it are those persistent buffers of other ranks that have other values, by name and
rank. The same number of ranks goes on with its own; any other one with rank 0's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lt_zero.engine.buffers import digests
from lt_zero.engine.engine import Engine
from lt_zero.engine.lazy_tensor import whole

KEY = "rank_buffers"  # in a Lightning checkpoint

log = logging.getLogger("lt_zero")


def rank_buffers(engine: Engine, prefix: str = "") -> dict[str, Any] | None:
    """What a checkpoint has to keep; None if all ranks have rank 0's buffers. Collective.

    ``prefix``: of names in the checkpoint.
    """
    world = engine.world
    if engine.buffers.enabled or world.size == 1:
        return None
    trained = engine.average.buffers(averaged=False) if engine.average is not None else {}
    persistent = engine.root.state_dict(keep_vars=True).keys()
    own = {name: trained.get(name, b) for name, b in engine.root.named_buffers() if name in persistent}
    values = dict(zip(own, digests(list(own.values())), strict=True))
    ranks = world.host_gather(values, "values of buffers")
    kept: dict[str, dict[str, Tensor]] = {}
    for name in own:
        if any(theirs.get(name) != values[name] for theirs in ranks):
            found = world.host_gather(own[name].detach().cpu(), f"buffer {name}")
            kept[prefix + name] = {str(rank): value for rank, value in enumerate(found) if rank > 0}
    return {"ranks": world.size, "buffers": kept} if kept else None


@torch.no_grad()
def load_rank_buffers(engine: Engine, state: Mapping[str, Any] | None, prefix: str = "") -> None:
    """Go on with this rank's buffers of a checkpoint whose state dict is loaded. Not collective."""
    mine = {k.removeprefix(prefix): v for k, v in (state or {"buffers": {}})["buffers"].items() if k.startswith(prefix)}
    if not state or not mine:
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
    for name, buffer in engine.root.named_buffers():
        if (value := mine.get(name, {}).get(str(engine.world.rank))) is not None:
            buffer.copy_(whole(value))
