"""Checks that the model still has the parameters that were sharded; broadcast of buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lt_zero.engine.bucket import State

if TYPE_CHECKING:
    from lt_zero.engine.engine import Engine


def owns_all(engine: Engine) -> bool:
    """Whether the model has the parameters that it had when it was sharded."""
    return {id(p) for p in engine.root.parameters()} == engine.owner.keys()


def check_identity(engine: Engine) -> None:
    """Check that the model still has the engine's parameters, in their buckets.

    Raises:
        RuntimeError: a parameter was replaced or moved (``load_state_dict(assign=True)``, ``.double()``, ...).
    """
    for name, parameter in engine.root.named_parameters():
        place = engine.owner.get(id(parameter))
        if place is None:
            raise RuntimeError(
                f"Parameter {name!r} was replaced or added after the model was sharded (for example by "
                "`load_state_dict(assign=True)`). Change the model before training starts, or load by copying."
            )
        bucket, index = place
        moved = bucket.state is State.RESIDENT and parameter.data_ptr() != bucket.param_views[index].data_ptr()
        if moved or parameter.dtype != bucket.dtype:
            raise RuntimeError(
                f"Parameter {name!r} no longer lies in its bucket: it was cast, moved or assigned to after the model "
                "was sharded. Do this before training starts, or copy values inside "
                "`lt_zero.gathered(parameter, write=True)`."
            )


@torch.no_grad()
def sync_buffers(engine: Engine) -> None:
    """Give all ranks rank 0's buffers (running statistics), as DDP does. Collective."""
    for name, buffer in engine.root.named_buffers():
        # As bytes: gloo does not know every dtype.
        row = buffer.contiguous().view(-1).view(torch.uint8)
        engine.comm.broadcast(row, f"buffer {name}")
        buffer.copy_(row.view(buffer.dtype).view(buffer.shape))
