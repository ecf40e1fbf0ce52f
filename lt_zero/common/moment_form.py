"""The form in which an optimizer's element-wise states are kept between steps: by default a tensor in a dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Lend = Callable[[int, torch.Size], Tensor]  # (first element, shape) -> a view of a stored tensor (1D)


class EncodedTensor(Tensor):
    """A state in another form than its values, as ``MomentForm.view`` makes it.

    Attributes:
        rows: the tensor that keeps it.
    """

    rows: Tensor

    def decoded(self) -> Tensor:
        """The values, decoded now."""
        raise NotImplementedError


class MomentForm(Protocol):
    """The form in which element-wise states of an optimizer are kept between steps.

    Attributes:
        name: of the form, for users.
        dtype: of the tensor (1D) that keeps them.
        align: parameters, and what ranks have of them, begin at multiples of so many elements.
        bytes_per_element: with all that belongs to a state.
        value_nbytes: bytes of an element's value in checkpoints.
        least: elements of the smallest parameter whose moments are kept in it; those of others are not converted.
        not_of: modules whose parameters' moments are not, either.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def align(self) -> int: ...
    @property
    def bytes_per_element(self) -> float: ...
    @property
    def value_nbytes(self) -> int: ...
    @property
    def least(self) -> int: ...
    @property
    def not_of(self) -> tuple[type[nn.Module], ...]: ...

    def is_taken_by(self, step: str) -> bool:
        """True if the kernel of this step of ``lt_zero.ops`` reads and writes states in this form."""

    def length(self, numel: int) -> int:
        """Elements of the tensor that keeps ``numel`` elements."""

    def nbytes(self, numel: int) -> int:
        """Bytes of the tensor that keeps ``numel`` elements."""

    def view(self, lend: Lend, lo: int, shape: torch.Size, key: str) -> Tensor:
        """A state ``key`` of this shape, whose first element is number ``lo`` of what ``lend`` lends."""

    def keeps(self, value: Tensor) -> bool:
        """True if ``value`` is in this form."""

    def kept(self, value: Tensor, key: str) -> Tensor:
        """``value`` in this form; a new tensor, unless it is already."""

    def form_of(self, value: Tensor) -> MomentForm:
        """The form in which a state ``value`` of an optimizer is stored."""


@dataclass(frozen=True)
class PlainMoments:
    """Moments in a dtype of torch."""

    dtype: torch.dtype
    align: int = 8
    least: int = 0
    not_of: tuple[type[nn.Module], ...] = ()

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes_per_element(self) -> float:
        return self.dtype.itemsize

    @property
    def value_nbytes(self) -> int:
        return self.dtype.itemsize

    def is_taken_by(self, step: str) -> bool:
        return True

    def length(self, numel: int) -> int:
        return numel

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def view(self, lend: Lend, lo: int, shape: torch.Size, key: str) -> Tensor:
        return lend(lo, shape)

    def keeps(self, value: Tensor) -> bool:
        return value.dtype == self.dtype and not isinstance(value, EncodedTensor)

    def kept(self, value: Tensor, key: str) -> Tensor:
        if not value.is_floating_point():
            return value
        return (value.decoded() if isinstance(value, EncodedTensor) else value).to(self.dtype)

    def form_of(self, value: Tensor) -> MomentForm:
        return PlainMoments(value.dtype)


def stored_part(value: Tensor) -> Tensor:
    """The tensor of ``value`` that a store may have lent."""
    return value.rows if isinstance(value, EncodedTensor) else value
