"""Cross-entropy of a linear layer, whose logits exist for a tile of tokens at a time.

Note [One pass]
    The gradients of a sum of losses are known as soon as a tile's logits are: its rows of the hidden states' gradient,
    and what it adds to the weight's. So forward computes both, without the factor that backward brings, and backward
    only multiplies. No logits are computed twice, and none are kept. They are the gradients of one sum, so a second
    backward has none.
    The losses of single tokens (``reduction="none"``) have a factor each, and the weight's gradient is a sum of
    products with these factors. There backward computes the logits of each tile again.

Note [Range of fp16]
    Probabilities of a large vocabulary are below the smallest number of fp16, so they are multiplied by 256 before they
    are rounded to it, and the gradients are divided by it where they are wide again. A power of two rounds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from lt_zero.common.arguments import wrong
from lt_zero.core.comm.layer_ranks import ProcessGroup, maximum, rows_before, total
from lt_zero.kernels.flat import wide

Reduction = Literal["mean", "sum", "none"]
_FEWEST = 128  # tokens of a tile, unless it is given
_FP16_FACTOR = 256.0


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    tokens_per_tile: int | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    group: ProcessGroup | None = None,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` and ``labels``, without logits of all tokens at a time.

    Args:
        hidden: [..., features]; the same on all ranks of ``group``.
        weight: [vocabulary, features]. A DTensor that is cut along its first dimension, or, with ``group``, the rank's
            rows of it: the vocabulary is then that of all ranks, in their order.
        labels: [...], integers; those equal to ``ignore_index`` count for nothing.
        bias: [vocabulary]; with ``group`` the rank's part.
        tokens_per_tile: default: so many that a tile's logits take a quarter of the memory that the weight's gradient
            takes in fp32, but at least 128.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        label_smoothing: as in torch.
        z_loss: this times the square of the logarithm of the sum of exponentials is added to a token's loss.
        reduction: the mean over the tokens that count, their sum, or the loss of each token, 0 for those that do not.
            "mean" and "sum" compute gradients in forward, once; "none" computes logits again in each backward.
        group: ranks with parts of the vocabulary.

    Returns:
        A loss in fp32, or in fp64 if the inputs are.

    Raises:
        TypeError, ValueError: an argument is of a wrong kind, shape, dtype or range.
        IndexError: a label is no row of the vocabulary (on a GPU without ``group``: torch's assertion on the device).
    """
    if isinstance(weight, DTensor):
        if group is not None:
            raise ValueError("tiled_cross_entropy: the weight is a DTensor, which has its ranks: leave out `group`.")
        weight, bias, group = _local(weight, bias)
    _check_options(reduction, label_smoothing, softcap)
    dtype = _check(hidden, weight, labels, bias)
    tokens = _tokens_per_tile(tokens_per_tile, hidden.shape[-1])
    flat = labels.reshape(-1).long()
    first, vocabulary = rows_before(weight.shape[0], group, hidden.device)
    counted = flat != ignore_index
    _check_labels(flat, counted, vocabulary, hidden.device.type == "cpu" or group is not None)
    shape = _Shape(softcap, label_smoothing, z_loss, vocabulary, group)
    tile = _Tile(flat - first, counted, shape)
    with torch.autocast(hidden.device.type, enabled=False):
        keeps = reduction != "none" and torch.is_grad_enabled()
        losses: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            tile, tokens, dtype, reduction == "none", keeps, hidden.reshape(-1, hidden.shape[-1]), weight, bias
        )
        if reduction == "none":
            return losses.view(labels.shape)
        return mean_of(losses, counted.sum()) if reduction == "mean" else losses


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """The mean of ``count`` losses, of their sum. Of none it is NaN and its gradient 0, as torch's."""
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _local(weight: DTensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, ProcessGroup | None]:
    """This rank's part of a weight and of its bias, and the ranks that have the others."""
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or not (placements[0].is_shard(0) or placements[0].is_replicate()):
        text = f"tiled_cross_entropy: the weight is placed as {tuple(placements)} over {mesh}"
        raise ValueError(f"{text}. Cut its first dimension over one dimension of ranks: Shard(0).")
    if isinstance(bias, DTensor) and bias.placements != placements:
        raise ValueError(f"tiled_cross_entropy: the weight is placed as {placements}, its bias as {bias.placements}.")
    if isinstance(bias, Tensor) and not isinstance(bias, DTensor):
        raise ValueError("tiled_cross_entropy: the weight is a DTensor, and the bias is none. Cut both alike.")
    cut = isinstance(placements[0], Shard)
    # The gradient of hidden states is summed over the ranks below, and that of a part is its own.
    local = weight.to_local(grad_placements=[Shard(0) if cut else Replicate()])
    part = bias.to_local(grad_placements=[Shard(0) if cut else Replicate()]) if isinstance(bias, DTensor) else None
    return local, part, mesh.get_group() if cut else None


def _check_options(reduction: str, label_smoothing: float, softcap: float | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"tiled_cross_entropy(reduction={reduction!r}): pass 'mean', 'sum' or 'none'.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"tiled_cross_entropy(label_smoothing={label_smoothing}): pass a number from 0 to 1.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"tiled_cross_entropy(softcap={softcap}): pass a positive number, or None.")


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> torch.dtype:
    """Raise an error unless the tensors fit; returns the dtype to multiply in."""
    name = "tiled_cross_entropy"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{name}: labels of {labels.dtype}: pass indices (torch.long), one for each token.")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        text = f"{name}: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit"
        raise ValueError(f"{text}: pass [..., features] and [vocabulary, features].")
    if labels.shape != hidden.shape[:-1]:
        text = f"{name}: labels {tuple(labels.shape)} are not one for each of {tuple(hidden.shape[:-1])} tokens"
        raise ValueError(f"{text}. Shift labels, and cut hidden states, to the same tokens.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias {tuple(bias.shape)} of weight {tuple(weight.shape)}: pass [vocabulary].")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return weight.dtype if weight.dtype == torch.float64 else torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype or not weight.is_floating_point():
        text = f"{name}: hidden is {hidden.dtype} and weight {weight.dtype}"
        raise TypeError(f"{text}: convert one of them, or use torch.autocast.")
    return weight.dtype


def _check_labels(labels: Tensor, counted: Tensor, vocabulary: int, looks: bool) -> None:
    if looks and labels.numel():
        low, high = torch.where(counted, labels, 0).aminmax()
        if int(low) < 0 or int(high) >= vocabulary:
            found = int(low) if int(low) < 0 else int(high)
            raise IndexError(
                f"tiled_cross_entropy: label {found} is none of the {vocabulary:,} rows of the vocabulary."
            )


def _tokens_per_tile(given: int | None, features: int) -> int:
    if given is None:
        return max(_FEWEST, features // 4)
    if isinstance(given, bool) or not isinstance(given, int):
        raise wrong("tokens_per_tile of tiled_cross_entropy", given, "pass a whole number, or None")
    if given < 1:
        raise ValueError(f"tiled_cross_entropy(tokens_per_tile={given}): pass a positive number, or None.")
    return given


@dataclass(frozen=True)
class _Shape:
    """Options of how logits become losses."""

    softcap: float | None
    smoothing: float
    z_loss: float
    vocabulary: int  # rows on all ranks
    group: ProcessGroup | None


@dataclass(frozen=True)
class _Tile:
    """Tokens: their labels, counted from the rank's first row, which of them count, and the factors of their losses."""

    labels: Tensor  # [tokens]
    counted: Tensor  # [tokens], bool
    shape: _Shape
    factors: Tensor | None = None  # [tokens]; None: 1

    def part(self, rows: slice) -> _Tile:
        factors = self.factors[rows] if self.factors is not None else None
        return replace(self, labels=self.labels[rows], counted=self.counted[rows], factors=factors)

    def losses(self, logits: Tensor, derives: bool) -> tuple[Tensor, Tensor | None]:
        """Losses [tokens] of wide logits [tokens, rows], and, if it ``derives``, their derivatives by the logits.

        Writes to the logits. Collective over the group.
        """
        how = self.shape
        if how.softcap is not None:
            logits.div_(how.softcap).tanh_().mul_(how.softcap)
        # tanh' = 1 - tanh^2, so the capped logits are kept.
        slope = (logits / how.softcap).square_().neg_().add_(1) if derives and how.softcap is not None else None
        here = self.counted & (self.labels >= 0) & (self.labels < logits.shape[1])
        index = torch.where(here, self.labels, 0)[:, None]
        top = maximum(logits.amax(1), how.group)
        of_label = torch.where(here, logits.gather(1, index)[:, 0], 0)
        of_all = logits.sum(1) if how.smoothing else torch.zeros_like(of_label)
        powers = logits.sub_(top[:, None]).exp_()
        denominator, of_label, of_all = total(torch.stack([powers.sum(1), of_label, of_all]), how.group)
        log_sum = top + denominator.log()
        losses = log_sum - (1 - how.smoothing) * of_label + how.z_loss * log_sum.square()
        if how.smoothing:
            losses -= how.smoothing / how.vocabulary * of_all
        losses = torch.where(self.counted, losses, 0)
        if not derives:
            return losses, None
        factors = self.counted.to(losses.dtype) if self.factors is None else self.factors * self.counted
        grads = powers.mul_((factors * (1 + 2 * how.z_loss * log_sum) / denominator)[:, None])
        if how.smoothing:
            grads -= (factors * (how.smoothing / how.vocabulary))[:, None]
        grads.scatter_add_(1, index, torch.where(here, (how.smoothing - 1) * factors, 0)[:, None])
        return losses, grads if slope is None else grads.mul_(slope)


class _Gradients:
    """The gradients of hidden states, weight and bias, where they are needed, as tiles add to them."""

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = wide(weight.dtype)
        self.factor = _FP16_FACTOR if weight.dtype == torch.float16 else 1.0  # of ``hidden``
        self.hidden = torch.empty_like(hidden, dtype=weight.dtype) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if needed[2] and bias is not None else None

    def add(self, rows: slice, grads: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add a tile: the derivatives [tokens, rows of the weight], its hidden states, and the weight."""
        if self.bias is not None:
            self.bias += grads.sum(0)
        grads = grads.mul_(self.factor).to(weight.dtype) if self.factor != 1 else grads.to(weight.dtype)
        if self.hidden is not None:
            torch.mm(grads, weight, out=self.hidden[rows])
        if self.weight is None:
            return
        if self.weight.dtype == weight.dtype:
            self.weight.addmm_(grads.T, hidden)
        else:
            self.weight.add_(grads.T @ hidden, alpha=1 / self.factor)


class _Loss(torch.autograd.Function):
    """The sum of the losses, or the loss of each token. See Note [One pass]."""

    @staticmethod
    def forward(
        context: Any,
        tokens: _Tile,
        size: int,
        dtype: torch.dtype,
        each: bool,
        keeps: bool,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        dtypes = hidden.dtype, weight.dtype, bias.dtype if bias is not None else None
        context.how = tokens, size, dtype, each, dtypes
        if each:
            context.save_for_backward(hidden, weight, bias)
        needed = tuple(needs and keeps for needs in context.needs_input_grad[5:])
        losses, context.made = _run(tokens, size, dtype, needed, hidden, weight, bias)
        return losses if each else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, size, dtype, each, dtypes = context.how
        made: _Gradients | None = context.made
        if each:
            # Factors of at most 1, as those of a sum: a loss scale must not leave the range of fp16.
            most = grad.abs().amax() if dtype == torch.float16 and len(grad) else grad.new_ones(())
            most = torch.where(most > 0, most, 1)
            tokens = replace(tokens, factors=grad / most)
            with torch.autocast(grad.device.type, enabled=False):
                _, made = _run(tokens, size, dtype, context.needs_input_grad[5:], *context.saved_tensors)
            grad = most
        elif made is None:
            raise RuntimeError(
                "tiled_cross_entropy has handed out the gradients of this loss, which it computes once. Compute the "
                "loss again for another backward, or use reduction='none', which computes logits in each."
            )
        context.made = None  # frees the memory, and the weight's gradient is scaled in place
        assert made is not None
        in_dtype = [_times(t, grad, size, to) for t, to in zip((made.weight, made.bias), dtypes[1:], strict=True)]
        hidden = _times(made.hidden, grad / made.factor, size, dtypes[0])
        if hidden is not None:
            total(hidden, tokens.shape.group)
        return None, None, None, None, None, hidden, *in_dtype


def _run(
    tokens: _Tile,
    size: int,
    dtype: torch.dtype,
    needed: tuple[bool, ...],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, _Gradients]:
    """The losses of all tokens, in tiles of ``size``, and the gradients that are needed."""
    weight, bias = weight.to(dtype), bias.to(dtype) if bias is not None else None
    made = _Gradients(needed, hidden, weight, bias)
    losses = torch.empty(len(hidden), dtype=wide(dtype), device=hidden.device)
    for low in range(0, len(hidden), size):
        rows = slice(low, low + size)
        part = hidden[rows].to(dtype)
        logits = (part @ weight.T if bias is None else torch.addmm(bias, part, weight.T)).to(losses.dtype)
        losses[rows], grads = tokens.part(rows).losses(logits, any(needed))
        if grads is not None:
            made.add(rows, grads, part, weight)
        del logits, grads  # before the next tile's
    return losses, made


def _times(values: Tensor | None, factor: Tensor, size: int, dtype: torch.dtype) -> Tensor | None:
    """``values`` times a wide ``factor`` (0D), rounded once, to ``dtype``; in place if that is theirs."""
    if values is None:
        return None
    if values.dtype == factor.dtype == dtype:
        return values.mul_(factor)
    out = values if values.dtype == dtype else torch.empty_like(values, dtype=dtype)
    for low in range(0, len(values), size):
        out[low : low + size] = values[low : low + size].to(factor.dtype) * factor
    return out
