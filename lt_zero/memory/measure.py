"""Bytes that an engine has in memory and in files right now, in the kinds of a forecast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from lt_zero.engine.bucket import Bucket, State
from lt_zero.engine.engine import Engine
from lt_zero.io.pinned import rounded
from lt_zero.memory.costs import GATHERED, GRADS, LOCAL, MASTER, MOMENTS, OFFLOAD, REDUCE, WEIGHTS
from lt_zero.step.sharded_optimizer import ShardedOptimizer

RESTING = "in files"  # bytes of files, whatever lies in them


def measured(engine: Engine, optimizers: Iterable[ShardedOptimizer] = ()) -> dict[str, int]:
    """Bytes by kind. Views of one storage are counted once, and what rests in files only if it takes memory."""
    total: Counter[str] = Counter()
    for bucket in engine.buckets:
        total.update(_of_bucket(bucket))
    homes = [home for bucket in engine.buckets for home in bucket.store.stored.values()]
    values = [v for s in optimizers for p in s.parameters() for v in s.optimizer.state.get(p, {}).values()]
    tensors = [v for v in values if isinstance(v, Tensor) and v.dim() > 0 and not any(h.owns(v) for h in homes)]
    states = {v.untyped_storage().data_ptr(): v for v in tensors}
    total[MOMENTS] = sum(v.untyped_storage().nbytes() for v in states.values())
    tiers = {
        id(tier): tier for tier in (engine.offload_manager.optim, engine.offload_manager.params) if tier is not None
    }
    total[OFFLOAD] = sum(rounded(home.nbytes) for home in homes if home.takes_memory)
    total[OFFLOAD] += sum(tier.spare_nbytes for tier in tiers.values())
    total[OFFLOAD] += (
        engine.offload_manager.host_link.slots.nbytes if engine.offload_manager.host_link is not None else 0
    )
    total[REDUCE] = engine.reducer.buffer_bytes
    total[RESTING] = sum(tier.bytes_on_disk for tier in tiers.values())
    return {kind: nbytes for kind, nbytes in total.items() if nbytes}


def _of_bucket(bucket: Bucket) -> dict[str, int]:
    """What of a bucket is in memory, without its homes."""
    sharded, weights, grads = bucket.sharding.params, bucket.weights, bucket.grads
    held = {
        GATHERED if sharded else WEIGHTS: bucket.flat.nbytes if bucket.state is not State.RELEASED else 0,
        GRADS: grads.nbytes if not grads.rests else 0,
        LOCAL: grads.local.nbytes if grads.local is not None else 0,
    }
    apart = weights.master_or_frozen.nbytes if weights.has_master and not bucket.store.stored else 0
    kind = MASTER if weights.trains else WEIGHTS
    held[kind] = held.get(kind, 0) + apart
    held[WEIGHTS] = held.get(WEIGHTS, 0) + weights.gather_source_nbytes
    return held
