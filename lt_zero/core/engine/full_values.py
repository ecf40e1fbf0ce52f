"""Full tensors of a sharded model: its weights, and what is sharded as they are, one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine


def full_parameters(engine: Engine) -> Iterator[tuple[str, Parameter, Tensor]]:
    """Every parameter with its full value in the master's dtype, valid until the next one is asked for. Collective.

    At most one more bucket than before is in memory.
    """
    engine.prepare_reading()
    if engine.offload_manager.overlaps:
        engine.offload_manager.refuse_partially_stepped(engine.world)
    for bucket in engine.buckets:
        flat = full_flat(bucket)
        for parameter, span in zip(bucket.params, bucket.layout.spans, strict=True):
            yield span.name, parameter, flat[span.lo : span.hi].view(span.shape)
        bucket.put_away()
        engine.offload_manager.check(engine.peers, "weights in files")


@torch.no_grad()
def full_flat(bucket: Bucket) -> Tensor:
    """All elements (1D) of the bucket's master weights. Collective."""
    bucket.wait_background_step()
    bucket.edits.check(values=True)
    if bucket.resident and not bucket.weights.has_master:
        return bucket.compute.flat
    return gather_own(bucket, bucket.weights.values())


@torch.no_grad()
def gather_own(bucket: Bucket, shard: Tensor) -> Tensor:
    """All elements (1D) of a tensor sharded as the master weights (a moment, the accumulator). Collective."""
    if bucket.storage.is_whole:
        return shard
    flat = torch.empty(bucket.layout.numel, dtype=shard.dtype, device=bucket.group.device)
    flat[bucket.shard_range[0] : bucket.shard_range[1]] = shard
    bucket.group.all_gather(flat, bucket.name).wait()
    return flat


def joined(engine: Engine, parameter: Parameter, part: Tensor) -> Tensor:
    """The full tensor, of which this rank's group has ``part``. Collective."""
    bucket, index = engine.owner[id(parameter)]
    return part if bucket.layout.spans[index].spec.is_whole else engine.parts.join(parameter, part)


def refuse_parts(engine: Engine, what: str) -> None:
    """Check that all of each tensor can be had.

    Raises:
        ValueError: one is a part, and other ranks' parts are out of reach; names it.
    """
    for spec in engine.plan.parts[:1] if not engine.parts.joins else ():
        raise ValueError(
            f"{what}: of {spec.name!r} of {spec.global_shape} the ranks of this group have {spec.local_box} only. Save "
            'a checkpoint (checkpoint.format="sharded"), and run `lt-zero export` on it.'
        )
