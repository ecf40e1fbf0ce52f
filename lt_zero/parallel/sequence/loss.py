"""The mean of a loss over the tokens of sequences that are cut over ranks.

Note [Weights of ranks]
    The engine means gradients over all data and sequence ranks, N of them. If each rank's loss were the mean over its
    own tokens, tokens on ranks with few of them would count more. So a rank's backward starts from N w / W for a token
    of weight w: W is the weight of all tokens, and N times what the mean over ranks takes away. With
    ``over="sequence"`` W is that of the tokens of this data rank only, of which there are as many as N / n for n
    sequence ranks: n w / W gives the mean over data ranks of their means, as one process with accumulation or DDP has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt_zero.core import division
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.sequence import world_of
from lt_zero.parallel.sequence.ranks import current

OVER = ("sequence", "data")


def token_mean(losses: Tensor, mask: Tensor | None = None, over: str = "sequence") -> Tensor:
    """Mean of a loss over tokens, on all ranks that have some of them. Differentiable once, and collective.

    Args:
        losses: of each token of this rank, such as those of ``cross_entropy(..., reduction="none")``; of any shape.
        mask: of the shape of ``losses``, or broadcast to it: whether a token counts, or with how much weight. Default:
            all count.
        over: "sequence": the tokens of this data rank, on all of its sequence ranks. Data ranks count alike, as those
            of DDP do. "data": those of all data ranks, so that the mean is that of one process with the whole batch.
            Under gradient accumulation each micro-batch has a mean of its own.

    Returns:
        The mean, a scalar of the dtype of ``losses``, the same on all these ranks; 0 if no token counts. The gradients
        of the parameters, after the engine has averaged them over ranks, are those of this mean.

    Raises:
        ValueError: shapes do not fit, or the mask requires a gradient. Or the mean is over data ranks in a run of
            rounds, of which they run as many micro-batches at a time as there are of them.
    """
    if over not in OVER:
        raise ValueError(f'over={over!r} is unknown. Write "sequence" or "data".')
    weights = torch.ones_like(losses, dtype=torch.float64) if mask is None else mask.double()
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError("mask requires a gradient, which is not computed. Pass mask.detach().")
    try:
        weights = weights.expand(losses.shape)
    except RuntimeError as error:
        raise ValueError(f"mask {list(weights.shape)} does not broadcast to losses {list(losses.shape)}.") from error
    out: Tensor = _TokenMean.apply(losses, weights, _ranks(over, losses.device))  # type: ignore[no-untyped-call]
    return out


def means_taken() -> int:
    """The number of means over tokens that this process has computed."""
    return _TokenMean.calls


def _ranks(over: str, device: torch.device) -> Ranks | None:
    """The ranks that have tokens of the mean; None: this one alone."""
    run = division.current()
    if over == "data" and run is not None and run.rounds.count is not None:
        raise ValueError(
            f'over="data", and reproducible.virtual_ranks={run.rounds.count}: the mean would be over the micro-batches '
            'that run at the same time, whose number is that of data ranks. Use over="sequence".'
        )
    ranks = current()
    if ranks is not None:
        return ranks.group if over == "sequence" else ranks.data
    return world_of(device) if over == "data" else None


class _TokenMean(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(context: Any, losses: Tensor, weights: Tensor, ranks: Ranks | None) -> Tensor:
        _TokenMean.calls += 1
        # What does not count may be infinite or NaN.
        counted = torch.where(weights != 0, losses.double(), 0.0) * weights
        sums = torch.stack([counted.sum(), weights.sum()])
        size = 1
        if ranks is not None:
            sums, size = ranks.sum_all(sums, "tokens of a mean"), ranks.size
        total, weight = sums
        weight = torch.where(weight == 0, 1, weight)
        context.save_for_backward((weights * (size / weight)).to(losses.dtype))
        mean: Tensor = total / weight
        return mean.to(losses.dtype)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factors,) = context.saved_tensors
        return factors * grad, None, None
