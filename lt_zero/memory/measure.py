"""Bytes that an engine currently has in memory and in files, in the kinds of a forecast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from lt_zero.engine.bucket import Bucket, State
from lt_zero.engine.engine import Engine
from lt_zero.io.pinned import rounded
from lt_zero.memory.costs import GATHERED, GRADS, LOCAL, MASTER, MOMENTS, OFFLOAD, REDUCE, WEIGHTS
from lt_zero.step.sharded_optimizer import ShardedOptimizer

RESTING = "in files"  # bytes of files, of all kinds


def measured(engine: Engine, optimizers: Iterable[ShardedOptimizer] = ()) -> dict[str, int]:
    """Bytes by kind. Views of one storage count once; stored tensors count while they are in memory."""
    total: Counter[str] = Counter()
    for bucket in engine.buckets:
        total.update(_of_bucket(bucket))
    stored = [tensor for bucket in engine.buckets for tensor in bucket.store.stored.values()]
    values = [v for s in optimizers for p in s.parameters() for v in s.optimizer.state.get(p, {}).values()]
    tensors = [v for v in values if isinstance(v, Tensor) and v.dim() > 0 and not any(t.owns(v) for t in stored)]
    states = {v.untyped_storage().data_ptr(): v for v in tensors}
    total[MOMENTS] = sum(v.untyped_storage().nbytes() for v in states.values())
    manager = engine.offload_manager
    files = {id(found): found for found in (manager.optim, manager.params) if found is not None}
    total[OFFLOAD] = sum(rounded(tensor.nbytes) for tensor in stored if tensor.takes_memory)
    total[OFFLOAD] += sum(found.spare_nbytes for found in files.values())
    total[OFFLOAD] += (
        engine.offload_manager.host_link.slots.nbytes if engine.offload_manager.host_link is not None else 0
    )
    total[REDUCE] = engine.reducer.buffer_bytes
    total[RESTING] = sum(found.bytes_on_disk for found in files.values())
    return {kind: nbytes for kind, nbytes in total.items() if nbytes}


def _of_bucket(bucket: Bucket) -> dict[str, int]:
    """Bytes of a bucket in memory, without its stored tensors."""
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
