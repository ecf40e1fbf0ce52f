"""Exports the weights of a running engine, gathered bucket by bucket on demand.

Rank 0 writes and requests one bucket after the other; the other ranks take part in gathering it until rank 0 signals
the end, which it does in any case (a full disk, Ctrl-C).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lt_zero.checkpoint.export import Format, export
from lt_zero.checkpoint.source import SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.engine.engine import Engine
from lt_zero.engine.full_params import full_flat, joined, refuse_parts

_END = -1


class EngineSource:
    """A ``Source`` of the engine's weights in the dtype of the master weights. For rank 0.

    Args:
        engine: its other ranks must be in ``_serve``.
    """

    optimizers: Sequence[SavedOptimizer] = ()
    meta: Mapping[str, Any] = {}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        state = engine.root.state_dict(keep_vars=True)
        self._tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        first: dict[int, str] = {}
        owners = {name: first.setdefault(id(value), name) for name, value in self._tensors.items()}
        self.aliases: Mapping[str, str] = {name: owner for name, owner in owners.items() if name != owner}
        self.weights: dict[str, Spec] = {}
        for name, value in self._tensors.items():
            place = engine.owner.get(id(value))
            dtype = place[0].weights.precision if place is not None else value.dtype
            self.weights[name] = Spec(tuple(value.shape), dtype)
        self._bucket = Gathered(engine)

    def read(self, name: str) -> Tensor:
        value = self._tensors[name]
        place = self._engine.owner.get(id(value))
        if place is None:
            return value.detach().cpu().contiguous()
        bucket, index = place
        number, part = self._engine.buckets.index(bucket), not bucket.layout.spans[index].spec.is_whole
        if part or number != self._bucket.number:
            self._engine.world.host_broadcast((number, index if part else None), "export")
        return self._bucket.get(number, index).detach().cpu()

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        raise CheckpointError("Optimizer states of a running engine are in its checkpoints: `trainer.save_checkpoint`.")


class Gathered:
    """All elements of one bucket, the last that was asked for. Where ranks have parts of tensors, all keep it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flat: Tensor | None = None
        self.number = _END  # of the bucket

    def gather(self, number: int) -> None:
        """Gather bucket ``number``. Collective, unless it is there."""
        if number == self.number:
            return
        self._flat = None  # free it before gathering the next one
        bucket = self._engine.buckets[number]
        self.number, self._flat = number, full_flat(bucket)
        bucket.put_away()
        self._engine.offload_manager.check(self._engine.world, "weights in files")

    def get(self, number: int, index: int) -> Tensor:
        """Parameter ``index`` of bucket ``number``: all of the tensor. Collective if it is not there, or a part."""
        self.gather(number)
        bucket = self._engine.buckets[number]
        span = bucket.layout.spans[index]
        assert self._flat is not None
        return joined(self._engine, bucket.params[index], self._flat[span.lo : span.hi].view(span.shape))

    def drop(self) -> None:
        """Free the memory."""
        self._flat, self.number = None, _END


def _serve(engine: Engine) -> None:
    """Take part in gathering until rank 0 signals the end."""
    gathered = Gathered(engine)
    while (asked := engine.world.host_broadcast(None, "export")) != _END:
        number, index = asked
        if index is None:
            gathered.gather(number)
            if all(span.spec.is_whole for span in engine.buckets[number].layout.spans):
                gathered.drop()
        else:
            gathered.get(number, index)


def export_engine(
    engine: Engine,
    path: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float16,
    format: Format = "auto",
    shard_size: int | str | None = None,
    strip_prefix: str | None = "",
    overwrite: bool = False,
) -> None:
    """Write all weights, bucket by bucket, on rank 0. Collective.

    Args:
        engine: of the module.
        path, dtype, format, shard_size, strip_prefix, overwrite: as for ``export``. Parameters that
            ``fp16_override_modules`` keeps in fp32 are exported in fp32.

    Raises:
        CheckpointError, ValueError: on all ranks; an existing file at ``path`` is unchanged.
    """
    refuse_parts(engine, "The export of weights in memory")
    engine.prepare_reading()
    if engine.offload_manager.overlaps:
        engine.offload_manager.refuse_partially_stepped(engine.world)
    with engine.world.agree("the export", CheckpointError):
        if engine.world.rank == 0:
            kept = {id(p) for p in engine.kept}
            source = EngineSource(engine)
            names = [name for name, p in engine.root.named_parameters() if id(p) in kept]
            try:
                export(source, path, dtype, format, shard_size, False, names, True, strip_prefix, overwrite)
            finally:
                engine.world.host_broadcast(_END, "export")
        else:
            engine.root.state_dict(keep_vars=True)  # metrics may synchronise in it
            _serve(engine)
