"""Batches, cut into micro-batches of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.common.tensor_tree import iter_tensors, map_tensors


class Form(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype)

    def example(self, device: torch.device | str, needs_grad: bool) -> Tensor:
        """A tensor of this form, of zeros."""
        made = torch.zeros(self.shape, dtype=self.dtype, device=device)
        return made.requires_grad_(needs_grad and made.is_floating_point())

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


def forms_of(value: Any) -> tuple[Form, ...]:
    """Forms of all tensors in ``value``."""
    return tuple(Form.of(tensor) for tensor in iter_tensors(value))


def rows_in(inputs: Any) -> int:
    """The size of a batch.

    Raises:
        ValueError: it has no tensor with a dimension.
    """
    rows = next((tensor.shape[0] for tensor in iter_tensors(inputs) if tensor.dim() > 0), None)
    if rows is not None:
        return rows
    raise ValueError("A pipeline cuts its batch into micro-batches along the first dimension, and no input has one.")


def cut(value: Any, rows: int, count: int) -> list[Any]:
    """``value`` for each of ``count`` micro-batches: tensors of ``rows`` rows are cut, all else is in each.

    Raises:
        TypeError: there are tensors in objects that are no tuples, lists or dicts.
    """
    seen, size = set[int](), rows // count

    def part(number: int) -> Any:
        def of(tensor: Tensor) -> Tensor:
            seen.add(id(tensor))
            cuts = tensor.dim() > 0 and tensor.shape[0] == rows
            return tensor[number * size : (number + 1) * size] if cuts else tensor

        return map_tensors(value, of)

    parts = [part(number) for number in range(count)]
    if not {id(tensor) for tensor in iter_tensors(value)} <= seen:
        raise TypeError(
            f"A pipeline cuts tensors in tuples, lists and dicts into micro-batches; this is {type(value).__name__}, "
            "or has objects with tensors. Pass a tuple or a dict."
        )
    return parts


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of micro-batches as one: tensors, or tuples of tensors."""
    if isinstance(outputs[0], Tensor):
        return torch.cat([output if output.dim() else output[None] for output in outputs])
    return tuple(joined(parts) for parts in zip(*outputs, strict=True))
