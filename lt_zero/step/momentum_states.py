"""Connects 1-bit optimizers with their exchanges (engine/compressed_momentum.py, engine/local_steps.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.engine.bucket import Bucket
from lt_zero.engine.compressed_momentum import CompressedMomentum
from lt_zero.engine.engine import Engine
from lt_zero.engine.layout import Piece
from lt_zero.engine.local_steps import LocalSteps
from lt_zero.optim.onebit import OneBitLamb, OneBitOptimizer
from lt_zero.optim.zero_one import ZeroOneAdam
from lt_zero.step.fragments import Fragments


class OptimizerMomenta:
    """The momenta of one optimizer, as the exchange asks for them between steps.

    Args:
        fragments: of the optimizer.
        optimizer: the same.
    """

    def __init__(self, fragments: Fragments, optimizer: OneBitOptimizer) -> None:
        self._fragments, self._optimizer = fragments, optimizer
        self._factors: dict[Bucket, dict[int, float]] | None = None  # of the exchange, by index of the parameter

    @property
    def frozen(self) -> bool:
        return self._optimizer.frozen

    def rules(self, bucket: Bucket) -> list[tuple[float, float]]:
        groups = zip(self._optimizer.param_groups, self._fragments.groups(), strict=True)
        betas = {id(p): float(group["betas"][0]) for group, params in groups for p in params}
        if self._factors is None:
            self._factors = self._read_factors() if isinstance(self._optimizer, OneBitLamb) else {}
        factors = self._factors.get(bucket, {})
        return [(betas.get(id(p), 0.0), factors.get(index, 1.0)) for index, p in enumerate(bucket.params)]

    def forget(self) -> None:
        """Read the factors of the exchange again: states were loaded."""
        self._factors = None

    def _read_factors(self) -> dict[Bucket, dict[int, float]]:
        """The factors by which 1-bit LAMB scales momenta to one magnitude; computed at the freeze. Collective."""
        places, group = self._fragments.places(), self._fragments.engine.groups[0]
        table = torch.zeros(2, len(places), dtype=torch.float64)  # the factors; squared norms of momenta
        for number, (_, _, parameter) in enumerate(places):
            state = self._optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                table[0, number] = float(state.get("scaling_coeff", 0.0))
                table[1, number] = torch.linalg.vector_norm(state["exp_avg"], dtype=torch.float64).square()
        if self._fragments.engine.sharded_optim:
            table[0] = group.max_all(table[0].to(group.device), "factors of momenta")
            table[1] = group.sum_scalar(table[1].to(group.device), "norms of momenta")
        factors = table[0]
        if not factors.any():
            spans = [bucket.layout.spans[index] for bucket, index, _ in places]
            numels = torch.tensor([span.hi - span.lo for span in spans])
            magnitudes = (table[1] / numels.clamp(min=1)).sqrt()
            factors = torch.where(magnitudes > 0, magnitudes.mean() / magnitudes, 1.0)
            for (_, _, parameter), factor in zip(places, factors, strict=True):
                if (state := self._optimizer.state.get(parameter)) is not None:
                    state["scaling_coeff"] = factor.to(parameter.device, torch.float32)
        found: dict[Bucket, dict[int, float]] = {}
        for (bucket, index, _), factor in zip(places, factors.float().tolist(), strict=True):
            found.setdefault(bucket, {})[index] = factor or 1.0
        return found

    def state(self, bucket: Bucket, key: str) -> Tensor:
        lo, hi = bucket.shard_range
        flat = torch.zeros(hi - lo, dtype=torch.float32, device=bucket.group.device)
        for index, parameter in enumerate(bucket.params):
            value = self._optimizer.state.get(parameter, {}).get(key)
            for piece in bucket.pieces_of(index) if value is not None else ():
                flat[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
        return flat


def connect_momenta(engine: Engine, fragments: Fragments, optimizer: OneBitOptimizer) -> None:
    """Let ``optimizer`` average momenta.

    Raises:
        TypeError: gradients or parameters are sharded, or the configuration does not name the optimizer.
    """
    if engine.world.size == 1:
        return
    compression = engine.compression
    if not isinstance(compression, CompressedMomentum):
        raise _unprepared(optimizer, "at stage 0 or 1")
    states = OptimizerMomenta(fragments, optimizer)
    compression.states = states
    compression.forget()
    optimizer.averages = lambda: True
    engine.reducer.at_step = lambda: states.frozen
    engine.reducer.before_flush = compression.clip


def connect_local_steps(engine: Engine, fragments: Fragments, optimizer: ZeroOneAdam) -> None:
    """Let ``optimizer`` average what the ranks have changed.

    Raises:
        TypeError: the configuration does not name the optimizer.
    """
    if engine.world.size == 1:
        return
    compression = engine.compression
    if not isinstance(compression, LocalSteps):
        raise _unprepared(optimizer, "at stage 0")
    compression.kind = optimizer

    def average(
        tensors: list[Tensor], value: Callable[[Tensor], Tensor], take: Callable[[Tensor, Tensor], None]
    ) -> None:
        wanted, found = set(map(id, tensors)), dict[Bucket, list[tuple[Piece, Tensor]]]()
        for bucket, index, parameter in fragments.places():
            for piece, fragment in zip(bucket.pieces_of(index), fragments.of(parameter), strict=False):  # some frozen
                if id(fragment) in wanted:
                    found.setdefault(bucket, []).append((piece, fragment))
        for bucket, rows in found.items():
            flat = torch.zeros(bucket.layout.numel, dtype=torch.float32, device=engine.device)
            for piece, own in rows:
                flat[piece.offset : piece.offset + piece.numel] = value(own).reshape(-1)
            mean = compression.average(bucket, flat)
            for piece, own in rows:
                take(own, mean[piece.offset : piece.offset + piece.numel].view(own.shape))

    optimizer.average = average


def _unprepared(optimizer: Optimizer, where: str) -> TypeError:
    name = type(optimizer).__name__
    return TypeError(
        f"{name} exchanges momenta, for which the ranks have to be prepared. Name it in the configuration "
        f"(optimizer.type: {name}) instead of building it, {where}."
    )
