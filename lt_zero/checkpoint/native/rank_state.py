"""State of each rank in checkpoints: buffers and values that differ. Gradients that it owes: residuals.py.

It is loaded by load_rank_state.py.

Note [Buffers of each rank]
    They may differ with ``broadcast_buffers: false``. The state dict has those of rank 0, or of the first rank that has
    the buffer. Beside it are those persistent buffers of other ranks that have other values, by name and rank. The same
    number of ranks goes on with its own; any other one with the state dict's.

Note [States of features]
    What features save (``Feature.states``) has two parts, both by the prefix of the engine and the name of the state:
    ``values`` of rank 0, with fragments, and ``of_ranks`` as values_of_ranks.py finds them. There is no entry without
    such a feature. A state whose feature is not there is left alone, and a warning names it. A state that is
    ``OfAllRanks`` gets the values of all ranks that saved, whatever their number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_zero.common import plain_names
from lt_zero.common.errors import CheckpointError
from lt_zero.common.names import merged
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.comm.world import World
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.buffers import digests
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.lazy_tensor import Fragment
from lt_zero.core.followers import states_of

# Keys in a Lightning checkpoint.
RESIDUALS = "gradient_compression"
RANK_BUFFERS = "rank_buffers"
FEATURES = "lt_zero_features"


# ---- buffers ---------------------------------------------------------------------------------------------------------


def rank_buffers(engine: Engine, prefix: str = "") -> dict[str, Any] | None:
    """The buffers of all ranks to save, where they are not sent; None if all have rank 0's. Collective.

    See Note [Buffers of each rank]. ``prefix``: of names in the checkpoint.
    """
    world = engine.world
    if world.size == 1:
        return None
    average = average_of(engine)
    trained = average.buffers(averaged=False) if average is not None else {}
    persistent = plain_names.state_dict(engine.root).keys()
    own = {name: trained.get(name, b) for name, b in plain_names.named_buffers(engine.root) if name in persistent}
    values = dict(zip(own, digests(list(own.values())), strict=True))
    ranks = world.host_gather(values, "values of buffers")
    kept: dict[str, dict[str, Tensor]] = {}
    for name in merged(ranks):  # ranks may have other modules
        has = [rank for rank, theirs in enumerate(ranks) if name in theirs]
        if any(ranks[rank][name] != ranks[has[0]][name] for rank in has):
            found = world.host_gather(own[name].detach().cpu() if name in own else None, f"buffer {name}")
            kept[prefix + name] = {str(rank): found[rank] for rank in has[1:]}
    return {"ranks": world.size, "buffers": kept} if kept else None


# ---- states of features ----------------------------------------------------------------------------------------------


def feature_states(engine: Engine, prefix: str = "", sharded: bool = True) -> dict[str, dict[str, Any]]:
    """The states of the engine's features; {} if there are none. See Note [States of features]. Collective.

    Args:
        prefix: of the engine's parameters in the checkpoint.
        sharded: with fragments; else with full tensors in their place, on rank 0.

    Raises:
        CheckpointError: on all ranks: a feature has failed.
    """
    world = engine.world
    with world.agree("reading states of features", CheckpointError):
        values = {prefix + name: saved.state_dict() for name, saved in states_of(engine).items()}
    if not values:
        return {}
    from lt_zero.checkpoint.native.values_of_ranks import OF_RANKS, values_of_ranks

    of_ranks = values_of_ranks(world, values)  # fragments count as alike
    if not sharded:
        values = map_tensors(values, partial(_whole_fragment, world))
    return {"values": values, OF_RANKS: of_ranks}


def _whole_fragment(world: World, tensor: Tensor) -> Tensor:
    """The full tensor (on the CPU) of a fragment, on rank 0, and one without elements elsewhere; others as they are.

    Collective for fragments.
    """
    if not isinstance(tensor, Fragment):
        return tensor
    mine = tensor.box, tensor.lo, tensor.hi, tensor.local().detach().cpu()
    parts = world.host_gather(mine, "a tensor of a feature")
    if tensor.done is not None:
        tensor.done()
    if world.rank > 0:
        return torch.empty(0, dtype=tensor.dtype)
    made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    for box, lo, hi, values in parts:
        part = box.of(made)
        rows = part.flatten()
        rows[lo:hi] = values
        part.copy_(rows.view(part.shape))
    return made
