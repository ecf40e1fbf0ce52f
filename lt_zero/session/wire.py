"""Advice on the dtype of gradients in collectives between nodes."""

from __future__ import annotations

from lt_zero.common.units import format_bytes
from lt_zero.config import ZeroConfig
from lt_zero.engine.engine import Engine


def advice_on_wire(engine: Engine, config: ZeroConfig) -> str:
    """The bytes that ``communication_data_type`` would save between nodes; "" if it is set, or would save none.

    Gradients of 16 bits are sent in fp32 where the backend would round each partial sum to 16 bits.
    """
    if config.communication_data_type is not None:
        return ""
    sent = saved = 0
    dtypes, per = set[str](), "step"
    for bucket in engine.buckets:
        plan, crosses = bucket.weights.plan, len(bucket.group.nodes) > 1
        wire = bucket.grads.send_dtype(bucket.dtype) if bucket.wants_grad else bucket.dtype
        if not crosses or plan.codecs.reductions is not None or wire.itemsize <= bucket.dtype.itemsize:
            continue
        sent += bucket.layout.numel * wire.itemsize
        saved += bucket.layout.numel * (wire.itemsize - bucket.dtype.itemsize)
        dtypes.add(str(bucket.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp"))
        per = "micro-batch" if bucket.sharding.grads else per
    if not saved:
        return ""
    return (
        f"Gradients are reduced over {len(engine.world.nodes)} nodes in fp32, {format_bytes(sent)} per {per}: "
        f"communication_data_type={'/'.join(sorted(dtypes))} would save {format_bytes(saved)} of them, and round sums."
    )
