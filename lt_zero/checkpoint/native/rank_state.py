"""State of each rank in checkpoints: buffers and values that differ. Gradients that it owes: residuals.py.

Note [Buffers of each rank]
    They may differ with ``broadcast_buffers: false``. The state dict has those of rank 0, or of the first rank that has
    the buffer. Beside it are those persistent buffers of other ranks that have other values, by name and rank. The same
    number of ranks goes on with its own; any other one with the state dict's.

Note [Values of each rank]
    What a script saves beside the model may differ between ranks: random states, or the place of a loader. Rank 0's
    values are where readers of one value look for them. Beside them are those of all ranks, of the keys that differ.
    The same number of ranks goes on with its own; any other one with rank 0's, and a warning names the keys.

Note [States of features]
    What features save (``Feature.states``) has two parts, both by the prefix of the engine and the name of the state:
    ``values`` of rank 0, with fragments, and ``of_ranks`` as in Note [Values of each rank]. There is no entry without
    such a feature. A state whose feature is not there is left alone, and a warning names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_zero.common import plain_names
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import CheckpointError
from lt_zero.common.names import merged
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.core.comm.objects import packed
from lt_zero.core.comm.world import World
from lt_zero.core.engine.averaged_weights import average_of
from lt_zero.core.engine.buffers import digests
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.lazy_tensor import Fragment, whole
from lt_zero.core.followers import states_of

# Keys in a Lightning checkpoint.
RESIDUALS = "gradient_compression"
RANK_BUFFERS = "rank_buffers"
FEATURES = "lt_zero_features"
_UNKNOWN = b""  # the digest of a value that cannot be pickled
OF_RANKS = "of_ranks"  # key, in what a script has saved, of the values that differ between ranks

log = logging.getLogger("lt_zero")


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


# ---- values of scripts -----------------------------------------------------------------------------------------------


class _Compared(pickle.Pickler):
    """Writes the same bytes for the same values; torch writes addresses of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return NotImplemented
        dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return bytes, (dense.reshape(-1).view(torch.uint8).numpy().tobytes(),), (str(value.dtype), value.shape)


def values_of_ranks(world: World, values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Find the values that differ between ranks, by key, with those of each rank. Collective.

    Values that cannot be pickled on some rank, or not unpickled, count as alike, and a rank without a value as one with
    rank 0's. A warning names values that rank 0 does not have. See Note [Values of each rank].
    """
    if world.alone:
        return {}
    every = world.host_gather({key: _digest_of(value) for key, value in values.items()}, "what the script saves")
    lacking = dict.fromkeys(key for found in every for key in found if key not in every[0])
    if lacking and world.rank == 0:
        log.warning(
            f"Other ranks save {', '.join(map(repr, lacking))}, and rank 0 does not: it is not in the checkpoint. Save "
            "it on all ranks."
        )
    digests = {key: {found[key] for found in every if key in found} for key in every[0]}
    differ = [key for key, those in digests.items() if len(those) > 1 and _UNKNOWN not in those]
    if not differ:
        return {}
    gathered = world.host_gather({key: packed(values[key]) for key in differ if key in values}, "values of each rank")
    made = dict[str, list[Any]]()
    for key in differ:
        # Some objects, such as many exceptions, can be pickled and not unpickled. All ranks have the same bytes.
        with contextlib.suppress(Exception):
            made[key] = [pickle.loads(found.get(key, gathered[0][key])) for found in gathered]
    return made


def _digest_of(value: Any) -> bytes:
    """Bytes that are the same for the same values; ``_UNKNOWN`` for what cannot be pickled."""
    file = io.BytesIO()
    try:
        _Compared(file).dump(value)
        packed(value)
    except Exception:  # of a class of the user's
        return _UNKNOWN
    return hashlib.blake2b(file.getbuffer(), digest_size=16).digest()


def own_values(world: World, values: Mapping[str, Any], of_ranks: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the saved values with this rank's own, where as many ranks have saved them.

    Args:
        values: of rank 0.
        of_ranks: what ``values_of_ranks`` has found.
    """
    fitting = {key: found for key, found in of_ranks.items() if len(found) == world.size and key in values}
    others = [key for key in of_ranks if key not in fitting]
    if others and not world.alone and world.rank == 0:
        log.warning(
            f"Each rank has saved another value of {', '.join(map(repr, others))}, and {world.size} ranks go on where "
            f"{len(of_ranks[others[0]])} have saved: all get that of rank 0."
        )
    return {**values, **{key: found[world.rank] for key, found in fitting.items()}}


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


def load_feature_states(engine: Engine, state: Mapping[str, Any], prefix: str = "") -> None:
    """Let the engine's features go on with what ``feature_states`` of any number of ranks has returned."""
    values = own_values(engine.world, state["values"], state.get(OF_RANKS, {}))
    mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    known = states_of(engine)
    for name, saved in known.items():
        if name in mine:
            saved.load_state_dict(mine[name])
    if (others := [name for name in mine if name not in known]) and engine.world.rank == 0:
        log.warning(
            "The checkpoint has states of features that this run does not have: %s. They are left out. To go on with "
            "them, ask for the features by their keys; those of other packages have to be registered "
            "(lt_zero.core.feature.register).",
            ", ".join(map(repr, others)),
        )
