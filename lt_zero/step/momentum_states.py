"""Connects a 1-bit optimizer with the exchange of momenta (engine/compressed_momentum.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from lt_zero.engine.bucket import Bucket
from lt_zero.engine.compressed_momentum import CompressedMomentum
from lt_zero.engine.engine import Engine
from lt_zero.optim.onebit import OneBitAdam
from lt_zero.step.fragments import Fragments


class OptimizerMomenta:
    """The momenta of one optimizer, as the exchange asks for them between steps.

    Args:
        fragments: of the optimizer.
        optimizer: the same.
    """

    def __init__(self, fragments: Fragments, optimizer: OneBitAdam) -> None:
        self._fragments, self._optimizer = fragments, optimizer

    @property
    def frozen(self) -> bool:
        return self._optimizer.frozen

    def beta(self, bucket: Bucket, index: int) -> float:
        parameter = bucket.params[index]
        for group, params in zip(self._optimizer.param_groups, self._fragments.groups(), strict=True):
            if any(parameter is other for other in params):
                return float(group["betas"][0])
        return 0.0

    def state(self, bucket: Bucket, key: str) -> Tensor:
        lo, hi = bucket.shard_range
        flat = torch.zeros(hi - lo, dtype=torch.float32, device=bucket.comm.device)
        for index, parameter in enumerate(bucket.params):
            value = self._optimizer.state.get(parameter, {}).get(key)
            for piece in bucket.pieces_of(index) if value is not None else ():
                flat[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
        return flat


def connect_momenta(engine: Engine, fragments: Fragments, optimizer: OneBitAdam) -> None:
    """Let ``optimizer`` average momenta.

    Raises:
        TypeError: gradients or parameters are sharded, or the configuration does not name the optimizer.
    """
    if engine.comm.world == 1:
        return
    compression, name = engine.compression, type(optimizer).__name__
    if not isinstance(compression, CompressedMomentum):
        raise TypeError(
            f"{name} averages momenta, for which the ranks have to be prepared. Name it in the configuration "
            f"(optimizer.type: {name}) instead of building it, at stage 0 or 1."
        )
    states = OptimizerMomenta(fragments, optimizer)
    compression.states = states
    compression.forget()
    optimizer.averages = lambda: True
    engine.reducer.at_step = lambda: states.frozen
