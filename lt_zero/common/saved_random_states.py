"""Random states of checkpoints: read, compared, and derived for ranks that have saved none."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lt_zero.common import accelerator
from lt_zero.common.errors import CheckpointError
from lt_zero.common.random_states import RandomStates


def read_states(packed: Any, where: str) -> RandomStates:
    """Read what ``RandomStates.state_dict`` has returned; new generators check the states.

    Raises:
        CheckpointError: the states are malformed.
    """
    try:
        host = packed["torch"].cpu()
        cuda = packed.get("cuda")
        python = packed["python"]
        saved = packed.get("numpy")
        torch.Generator().set_state(host)
        if cuda is not None and accelerator.in_use():
            cuda = cuda.cpu()
            accelerator.new_generator().set_state(cuda)
        state = (int(python["version"]), tuple(python["words"].tolist()), python["gauss"])
        random.Random().setstate(state)
        numpy = dict(np.random.get_state(legacy=False))
        if saved is not None:
            numpy = {
                "bit_generator": "MT19937",
                "state": {"key": np.array(saved["words"].tolist(), dtype=np.uint32), "pos": int(saved["position"])},
                "has_gauss": int(saved["has_gauss"]),
                "gauss": float(saved["gauss"]),
            }
            np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{where}: the states of the random number generators cannot be read ({error!r}). The checkpoint is "
            "damaged, or was written by another version. Remove this key to resume without them."
        ) from error
    return RandomStates(host, cuda, state, numpy)


def differing(one: RandomStates, other: RandomStates) -> set[str]:
    """Names of the host's generators with other states."""
    same = {
        "torch": torch.equal(one.torch, other.torch),
        "random": one.python == other.python,
        "numpy": str(one.numpy_words()) == str(other.numpy_words()),
    }
    return {name for name, equal in same.items() if not equal}


def derived(states: RandomStates, rank: int) -> RandomStates:
    """New states for ``rank``, a deterministic function of ``states``."""
    seed = int.from_bytes(hashlib.sha256(bytes(states.torch.tolist()) + rank.to_bytes(8, "big")).digest()[:4], "big")
    cuda = accelerator.new_generator().manual_seed(seed).get_state() if accelerator.in_use() else None
    numpy = np.random.RandomState(seed).get_state(legacy=False)
    host = torch.Generator().manual_seed(seed).get_state()
    return RandomStates(host, cuda, random.Random(seed).getstate(), dict(numpy))


def own_or_derived(states: Sequence[RandomStates], rank: int) -> RandomStates:
    """This rank's states among those of all saved ranks.

    A new rank gets derived states, unless all saved ranks had equal states: the program may rely on that (a sampler
    that draws the same order on all ranks), so the new rank gets them, too.
    """
    if rank < len(states):
        return states[rank]
    if len(states) > 1 and not any(differing(states[0], other) for other in states[1:]):
        return states[0]
    return derived(states[0], rank)
