"""Values in checkpoints that differ between ranks: of scripts, and of features.

Note [Values of each rank]
    What a script saves beside the model may differ between ranks: random states, or the place of a loader. Rank 0's
    values are where readers of one value look for them. Beside them are those of all ranks, of the keys that differ.
    The same number of ranks goes on with its own; any other one with rank 0's, and a warning names the keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lt_zero.core.comm.objects import packed
from lt_zero.core.comm.world import World

OF_RANKS = "of_ranks"  # key, in what a script has saved, of the values that differ between ranks
_UNKNOWN = b""  # the digest of a value that cannot be pickled

log = logging.getLogger("lt_zero")


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
