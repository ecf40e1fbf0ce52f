"""The optimizer's states as the exchange of a 1-bit optimizer (compressed_momentum.py) needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from lt_zero.comm.shard_group import ShardGroup
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.exchange import OptimizerFragments
from lt_zero.optim.onebit import OneBitOptimizer


class OptimizerMomenta:
    """The momenta of one optimizer, as the exchange asks for them between steps.

    Args:
        peers: the ranks with the same model.
        fragments: of the optimizer.
        optimizer: the same.
    """

    def __init__(self, peers: ShardGroup, fragments: OptimizerFragments, optimizer: OneBitOptimizer) -> None:
        self._peers, self._fragments, self._optimizer = peers, fragments, optimizer
        self._factors: dict[Bucket, dict[int, float]] | None = None  # of the exchange, by index of the parameter

    @property
    def frozen(self) -> bool:
        """True if the running step averages momenta; the same on all ranks."""
        return self._optimizer.frozen

    def rules(self, bucket: Bucket) -> list[tuple[float, float]]:
        """The decay rate of each parameter's momentum, and its factor in the exchange. May be collective.

        The factors stay the same from the freeze on.
        """
        groups = zip(self._optimizer.param_groups, self._fragments.groups(), strict=True)
        betas = {id(p): float(group["betas"][0]) for group, params in groups for p in params}
        if self._factors is None:
            self._factors = self._read_factors() if self._optimizer.scales_momenta else {}
        factors = self._factors.get(bucket, {})
        return [(betas.get(id(p), 0.0), factors.get(index, 1.0)) for index, p in enumerate(bucket.params)]

    def forget(self) -> None:
        """Read the factors of the exchange again: states were loaded."""
        self._factors = None

    def _read_factors(self) -> dict[Bucket, dict[int, float]]:
        """The factors by which 1-bit LAMB scales momenta to one magnitude; computed at the freeze. Collective."""
        places, group = self._fragments.places(), self._peers
        table = torch.zeros(2, len(places), dtype=torch.float64)  # the factors; squared norms of momenta
        for number, (_, _, parameter) in enumerate(places):
            state = self._optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                table[0, number] = float(state.get("scaling_coeff", 0.0))
                table[1, number] = torch.linalg.vector_norm(state["exp_avg"], dtype=torch.float64).square()
        # Where states are sharded, a rank has parts of some parameters. All that have one know the same factor, so the
        # largest is that of ranks without it (0) and with it; squared norms of the parts add up.
        if any(not bucket.is_whole for bucket, _, _ in places):
            table[0] = group.max_all(table[0].to(group.device), "factors of momenta")
            table[1] = group.sum_scalar(table[1].to(group.device), "norms of momenta")
        factors = table[0]
        if not factors.any():
            spans = [bucket.layout.spans[index] for bucket, index, _ in places]
            numels = torch.tensor([span.hi - span.lo for span in spans])
            # A momentum that is still zero has no magnitude: its factor is 1.
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
        """The state ``key`` (1D fp32, this rank's shard) of a bucket, zero where there is none yet; a copy."""
        lo, hi = bucket.shard_range
        flat = torch.zeros(hi - lo, dtype=torch.float32, device=bucket.group.device)
        for index, parameter in enumerate(bucket.params):
            value = self._optimizer.state.get(parameter, {}).get(key)
            for piece in bucket.pieces_of(index) if value is not None else ():
                flat[piece.offset : piece.offset + piece.numel] = value.reshape(-1)
        return flat
