"""Gradients that ranks owe to the weights, in checkpoints.

Note [Residuals]
    Residuals of ``gradient_compression`` are kept by parameter: ``worker`` [ranks, *shape] has a row for each rank,
    ``server`` [*shape] the residuals of the owners. ``units`` are factors: a residual times its unit is what it adds to
    the mean gradient of a later step. The same ranks resume exactly. Other numbers of ranks, and stages that need no
    server's residual, get equal parts of the sum, so that what is owed to the weights stays the same.
    Gradients that are in no sum yet (``communication.slow_node_tolerance``) have one row, their sum, and ``counts``: of
    how many ranks, by parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt_zero.common.boxes import ParamSpec
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.exchange import BucketResiduals
from lt_zero.core.engine.lazy_tensor import Fragment, elements_of

log = logging.getLogger("lt_zero")


def residual_state(engine: Engine, sharded: bool) -> dict[str, Any] | None:
    """The residuals to save of an exchange that remembers; None if nothing is owed. See Note [Residuals]. Collective.

    ``sharded``: with a ``Fragment`` for each tensor; else with full tensors on the CPU of rank 0, and none elsewhere.
    """
    exchange = engine.exchange
    if exchange.sums_late:
        return _late_gradients(engine, sharded)
    state: dict[str, Any] = {"steps": exchange.steps, "units": {}, "worker": {}, "server": {}}
    if all(feedback.residuals is None for feedback in exchange.of_bucket.values()):
        return state  # still warming up
    for bucket, feedback in exchange.of_bucket.items():
        names = [span.name for span in bucket.layout.spans]
        state["units"].update(dict.fromkeys(names, _unit(bucket, feedback)))
        worker, server = _fragments(bucket, feedback) if sharded else _gathered(bucket, feedback)
        state["worker"].update(worker)
        state["server"].update(server)
    return state


def _unit(bucket: Bucket, feedback: BucketResiduals) -> float:
    feedback.make()
    return _late_unit(bucket) / feedback.scale


def _late_unit(bucket: Bucket) -> float:
    return bucket.group.factors(bucket.grads.send_dtype(bucket.dtype))[1]


def _late_gradients(engine: Engine, sharded: bool) -> dict[str, Any] | None:
    world = engine.world
    state: dict[str, Any] = {"steps": 0, "units": {}, "worker": {}, "server": {}, "counts": {}}
    for bucket, rows, counts in engine.exchange.late_gradients():
        for span in bucket.layout.spans:
            numel = span.hi - span.lo
            if sharded:
                lo, hi = (numel * rank // world.size for rank in (world.rank, world.rank + 1))
                local = partial(rows.narrow, 0, span.lo + lo, hi - lo)
                state["worker"][span.name] = _fragment(span.spec.stacked(1), local, lo, hi, bucket.group.of_process)
            elif world.rank == 0:
                state["worker"][span.name] = rows[span.lo : span.hi].view(1, *span.shape)
            state["units"][span.name] = _late_unit(bucket)
            state["counts"][span.name] = float(counts[span.lo : span.hi].mean()) if numel else 0.0
    return state if state["units"] else None


def _fragments(bucket: Bucket, feedback: BucketResiduals) -> tuple[dict[str, Fragment], dict[str, Fragment]]:
    group = bucket.group
    layout = bucket.layout
    (rows, shard, *_) = feedback.make()
    worker = dict[str, Fragment]()
    server = dict[str, Fragment]()
    pieces = {piece.index: piece for piece in layout.pieces(*layout.shard(group.rank))}
    for index, span in enumerate(layout.spans):
        numel = span.hi - span.lo
        mine = partial(rows.narrow, 0, span.lo, numel)
        lo = group.rank * numel
        hi = lo + numel
        worker[span.name] = _fragment(span.spec.stacked(group.size), mine, lo, hi, group.of_process)
        if shard is not None:
            piece = pieces.get(index)
            at, lo, hi = (piece.offset, piece.lo, piece.hi) if piece is not None else (0, 0, 0)
            server[span.name] = _fragment(span.spec, partial(shard.narrow, 0, at, hi - lo), lo, hi, group.of_process)
    return worker, server


def _fragment(spec: ParamSpec, local: Callable[[], Tensor], lo: int, hi: int, ranks: tuple[int, ...]) -> Fragment:
    return Fragment(local, spec.global_shape, lo, hi, torch.float32, box=spec.local_box, ranks=ranks)


def _gathered(bucket: Bucket, feedback: BucketResiduals) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    group = bucket.group
    layout = bucket.layout
    (rows, shard, *_) = feedback.make()

    def gather(own: Tensor) -> Tensor:
        flat = torch.empty(group.size, own.numel(), dtype=own.dtype, device=own.device)
        flat[group.rank] = own
        group.all_gather(flat.view(-1), f"residuals of {bucket.name}").wait()
        return flat if group.rank == 0 else flat[:, :0]

    every = gather(rows)
    sums = gather(shard).view(-1) if shard is not None else None
    worker = dict[str, Tensor]()
    server = dict[str, Tensor]()
    for span in layout.spans if group.rank == 0 else ():
        worker[span.name] = every[:, span.lo : span.hi].reshape(-1, *span.shape).to("cpu", copy=True)
        if sums is not None:
            server[span.name] = sums[span.lo : span.hi].view(span.shape).to("cpu", copy=True)
    return worker, server


@torch.no_grad()
def load_residuals(engine: Engine, state: Mapping[str, Any] | None) -> None:
    """Take over ``residual_state`` of any number of ranks and any stage; None: begin at zero. Collective."""
    exchange = engine.exchange
    if exchange.sums_late:
        exchange.replace_late_gradients(partial(_load_late, state or {"worker": {}}))
        return
    # Residuals of the run so far are not owed to the weights of the checkpoint.
    exchange.resume(int(state["steps"]) if state is not None else exchange.steps)
    if state is None:
        return
    worker = state["worker"]
    if not exchange.remembers:
        if worker and engine.world.rank == 0:
            log.warning(
                "The checkpoint has residuals of gradient_compression or late gradients; both are off: drop them."
            )
        return
    for bucket, feedback in exchange.of_bucket.items():
        found = [(index, span.name) for index, span in enumerate(bucket.layout.spans) if span.name in worker]
        unit = state["units"][found[0][1]] if found else 1.0
        for index, name in found:
            factor = state["units"][name] / unit
            _load(bucket, feedback, index, worker[name], state["server"].get(name), factor)
        # Keep the units in which they were saved: converted to others and back, they would be rounded.
        if found:
            feedback.begin_units(_late_unit(bucket) / unit)


def _load_late(state: Mapping[str, Any], bucket: Bucket) -> tuple[Tensor, Tensor]:
    """The sum (1D, all elements) of the late gradients in ``state`` of a bucket, and the ranks that each is of."""
    rows = torch.zeros(bucket.layout.numel)
    counts = torch.zeros(bucket.layout.numel)
    for span in bucket.layout.spans:
        if (found := state["worker"].get(span.name)) is None:
            continue
        numel = span.hi - span.lo
        factor = state["units"][span.name] / _late_unit(bucket)
        for rank in range(found.shape[0]):
            rows[span.lo : span.hi] += _row(found, span.spec, rank) * factor
        if (shard := state["server"].get(span.name)) is not None:
            rows[span.lo : span.hi] += elements_of(shard, 0, numel, span.spec.local_box) * factor
        counts[span.lo : span.hi] = state.get("counts", {}).get(span.name, 0.0)
    return rows, counts


def _row(rows: Tensor, spec: ParamSpec, rank: int) -> Tensor:
    """The residuals (1D) of this rank's part of a parameter that ``rank`` had."""
    numel = spec.local_box.numel
    return elements_of(rows, rank * numel, (rank + 1) * numel, spec.stacked(rows.shape[0]).local_box)


def _load(
    bucket: Bucket, feedback: BucketResiduals, index: int, rows: Tensor, sums: Tensor | None, factor: float
) -> None:
    """Load the residuals of parameter ``index``, times ``factor``."""
    group = bucket.group
    span = bucket.layout.spans[index]
    (worker, server, *_) = feedback.make()
    numel = span.hi - span.lo
    mine = worker[span.lo : span.hi]
    box = span.spec.local_box
    if rows.shape[0] == group.size and (sums is None) == (server is None):
        mine.copy_(_row(rows, span.spec, group.rank).to(mine.device) * factor)
        for piece in bucket.layout.pieces(*bucket.layout.shard(group.rank)):
            if server is not None and sums is not None and piece.index == index:
                own = elements_of(sums, piece.lo, piece.hi, box).to(mine.device)
                server[piece.offset : piece.offset + piece.numel] = own * factor
        return
    total = torch.zeros(numel, dtype=torch.float64, device=mine.device)
    for rank in range(rows.shape[0]):
        total += _row(rows, span.spec, rank).to(mine.device)
    if sums is not None:
        total += elements_of(sums, 0, numel, box).to(mine.device)
    mine.copy_(total * (factor / group.size))
