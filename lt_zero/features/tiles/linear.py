"""Linear layers whose weight is several parameters, gathered one after the other: ``TiledLinear``.

ZeRO-Infinity's memory-centric tiling, arXiv:2104.07857, section 5.1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common.arguments import wrong

_CALL = "lt_zero.TiledLinear"


class TiledLinear(nn.Module):
    """A linear layer as a grid of smaller ones, each a unit: at stage 3 one tile of the weight is gathered at a time.

    The arguments, the names of the parameters (``linears.OUT.IN.weight``) and how sizes that splits do not divide are
    cut (the first parts have one more) are those of DeepSpeed's ``TiledLinear``, so its checkpoints load.

    Args:
        in_features, out_features: of the whole layer. Tiles are initialised as layers of their own sizes: with
            ``in_splits`` their sum is larger than that of one layer. ``init_linear`` takes the values of one.
        bias: the last tile of each row has the bias.
        in_splits: into how many parts the input is cut. Their products are added.
        out_splits: into how many parts the output is cut.
        input_is_already_split: the input is a sequence of ``in_splits`` tensors, not one that is to be cut.
        combine_out_splits: return one tensor, not a list of ``out_splits``.
        linear_cls: makes the tiles: ``linear_cls(in_features, out_features, bias=..., **options)``.
        init_linear: a linear layer to copy the weights from.
        options: further arguments of ``linear_cls``, as ``dtype`` and ``device``.

    Raises:
        TypeError: a number is no whole number.
        ValueError: there are more splits than features, or less than one; or ``init_linear`` has other sizes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_parts = _parts(in_features, in_splits, "in")
        self.out_parts = _parts(out_features, out_splits, "out")
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.linears = nn.ModuleList(
            nn.ModuleList(
                _apart(linear_cls(width, height, bias=bias and place == in_splits - 1, **options))
                for place, width in enumerate(self.in_parts)
            )
            for height in self.out_parts
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def extra_repr(self) -> str:
        splits = f"in_splits={len(self.in_parts)}, out_splits={len(self.out_parts)}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, {splits}"

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        """Compute [..., out_features] of [..., in_features], or lists of their parts."""
        parts = self._split(x)
        outputs: list[Tensor] = []
        for row in self.linears:
            output: Any = None
            for part, tile in zip(parts, row, strict=True):  # type: ignore[call-overload]
                product = tile(part)
                output = product if output is None else output + product
            outputs.append(output)
        return torch.cat(outputs, -1) if self.combine_out_splits else outputs

    def _split(self, x: Any) -> list[Tensor]:
        if not self.input_is_already_split:
            if not isinstance(x, Tensor):
                raise wrong(f"The input of {_CALL}", x, "pass a tensor, or set input_is_already_split")
            return list(x.split(self.in_parts, -1))
        widths = [part.shape[-1] for part in x]
        if widths != self.in_parts:
            raise ValueError(f"{_CALL} got parts of {widths} features. Pass {self.in_parts}.")
        return list(x)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy weight and bias of a linear layer of the same sizes. Not of, or into, one that is sharded at stage 3.

        Raises:
            ValueError: it has other sizes, or a bias where this has none.
        """
        shape = self.out_features, self.in_features
        if other.weight.shape != shape or (other.bias is not None) != self.use_bias:
            biased = "with" if other.bias is not None else "without"
            mine = "with" if self.use_bias else "without"
            text = f"{_CALL}.copy_params_from: the layer has {tuple(other.weight.shape)} {biased} bias"
            raise ValueError(f"{text}, and this {shape} {mine}. Pass one of the same sizes.")
        rows = other.weight.split(self.out_parts)
        biases = other.bias.split(self.out_parts) if other.bias is not None else [None] * len(rows)
        for tiles, row, bias in zip(self.linears, rows, biases, strict=True):
            for tile, weight in zip(tiles, row.split(self.in_parts, 1), strict=True):  # type: ignore[call-overload]
                tile.weight.copy_(weight)
            if bias is not None:
                tile.bias.copy_(bias)


def _parts(features: int, splits: int, side: str) -> list[int]:
    """The sizes of ``splits`` parts; the first have one more where they are not equal."""
    for name, value in ((f"{side}_features", features), (f"{side}_splits", splits)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(f"{name} of {_CALL}", value, "pass a whole number")
    if not 1 <= splits <= features:
        raise ValueError(f"{_CALL}({side}_splits={splits}): pass 1 to {side}_features={features}.")
    return [features // splits + (number < features % splits) for number in range(splits)]


def _apart(tile: nn.Module) -> nn.Module:
    """Mark a unit: see find_units.py, Note [Wishes of modules]."""
    tile.unit_apart = True  # type: ignore[assignment]
    return tile
