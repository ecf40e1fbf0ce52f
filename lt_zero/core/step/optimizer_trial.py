"""Trials of optimizers: whether they compute the same on a part of the elements, or of the parameters, as on all.

A trial steps copies of the user's optimizer (optimizer_copy.py) over small tensors of the shapes that its groups have:
one copy has all of them, as one process would, and two copies have a part each, as two ranks would.

Note [What a trial cannot see]
    It is over after ``_STEPS`` steps, and its tensors have no more than ``_MOST`` elements along a dimension, so what
    begins later, or with larger tensors, is not seen. Gradients have other sizes in other steps, as an optimizer may
    clip only large ones, and some of their elements are zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import without_torch_function
from lt_zero.core.engine.optimizer_spec import Separability
from lt_zero.core.step.optimizer_copy import Untryable, copied, one_step, undisturbed

_STEPS = 16  # lookahead and its like act every fifth to tenth step; rectified optimizers do not move before the sixth
_STEPS_OF_WHOLE = 7  # at least, with full parameters, as optimizers of matrices are slow
_SIZES = (10.0, 1.0, 0.01, 3.0)  # of the gradients, by turns
_MOST = {  # elements along the dimensions of a tensor, by the number of these
    1: (6000,),  # 8-bit optimizers keep tensors of less than 4096 elements in 32 bits
    2: (144, 144),  # optimizers factor matrices of at least 128 rows and columns
    3: (32, 32, 8),
}
_MOST_OF_MORE = (24, 24, 5, 5)
_NOT_OPTIONS = ("params", "param_names", "initial_lr", "name", "lr")  # keys that do not change how an update is made
_RANDOM = "it draws random numbers, which differ from those of one process"


def division_of(optimizer: Optimizer) -> tuple[Separability, str]:
    """Try how an optimizer may be divided; returns that, and why it could not be tried.

    The optimizer, its parameters and random states are left as they are.
    """
    why = ""
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        try:
            with undisturbed() as numbers:
                trial = _Trial(optimizer, dtype, tolerance)
                found = Separability.NOTHING
                if trial.agrees(by_elements=True):
                    found = Separability.ELEMENTS
                elif trial.agrees(by_elements=False):
                    found = Separability.PARAMETERS
        except Untryable as error:
            why = str(error)
        except Exception as error:  # of the optimizer's own code
            why = f"its step raised {type(error).__name__} in a trial: {error}"
        else:
            if numbers.drawn and found is not Separability.NOTHING:
                return Separability.UNKNOWN, _RANDOM
            return found, ""
    return Separability.UNKNOWN, why


class _Value:
    """A parameter of a trial: its first weights, its group, and how far it has moved.

    ``direction``: of its gradients in the mean; optimizers that estimate a distance do so only if there is one.
    """

    def __init__(self, group: int, start: Tensor, direction: Tensor) -> None:
        self.group = group
        self.start = start
        self.direction = direction
        self.moved = 0.0


class _Piece:
    """The part of a ``_Value`` on one rank: elements ``[lo, hi)``, flat, or all of them in its shape."""

    def __init__(self, value: _Value, lo: int = 0, hi: int | None = None) -> None:
        self.value = value
        self._range = None if hi is None else slice(lo, hi)

    def of(self, whole: Tensor) -> Tensor:
        return whole if self._range is None else whole.flatten()[self._range]


class _Stepper:
    """A copy of an optimizer over some pieces."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[int], pieces: Sequence[_Piece]) -> None:
        self.pieces = pieces
        self.parameters = [Parameter(piece.of(piece.value.start).clone()) for piece in pieces]
        of_groups: list[list[Parameter]] = [[] for _ in optimizer.param_groups]
        for piece, parameter in zip(pieces, self.parameters, strict=True):
            of_groups[piece.value.group].append(parameter)
        self._optimizer = copied(optimizer, of_groups)
        self._optimizer.param_groups[:] = [self._optimizer.param_groups[number] for number in groups]
        # Schedule-free optimizers refuse a step outside of their train mode.
        getattr(self._optimizer, "train", lambda: None)()

    def step(self, grads: Sequence[Tensor], loss: float) -> None:
        for parameter, piece, grad in zip(self.parameters, self.pieces, grads, strict=True):
            parameter.grad = piece.of(grad).clone()
        one_step(self._optimizer, loss)

    def numbers(self) -> dict[Any, float]:
        """Numbers that the optimizer keeps for all parameters: what they are computed from may count only later."""
        found = {
            (n, key): value for n, group in enumerate(self._optimizer.param_groups) for key, value in group.items()
        }
        return _numbers_of(found | vars(self._optimizer))

    def numbers_of(self, parameter: Parameter) -> dict[Any, float]:
        """Numbers that the optimizer keeps for one parameter of several elements."""
        state = self._optimizer.state.get(parameter)
        return _numbers_of(state) if isinstance(state, dict) and parameter.numel() > 1 else {}


def _numbers_of(values: Mapping[Any, Any]) -> dict[Any, float]:
    """The numbers among some values, also those in tensors of one element."""
    single = (
        v for v in values.items() if isinstance(v[1], (int, float)) or (isinstance(v[1], Tensor) and v[1].numel() == 1)
    )
    return {key: float(value) for key, value in single}


def _are_close(some: Mapping[Any, float], others: Mapping[Any, float], tolerance: float) -> bool:
    """True if two sets of numbers have the same keys, and about the same values."""
    return some.keys() == others.keys() and all(
        value == others[key] or abs(value - others[key]) <= tolerance * abs(others[key]) for key, value in some.items()
    )


class _Trial:
    """Steps of copies of one optimizer, with all parameters and with parts of them.

    Args:
        dtype: of parameters and gradients.
        tolerance: of differences, relative to the farthest that a weight of the parameter has moved.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype, tolerance: float) -> None:
        self._optimizer = optimizer
        self._dtype = dtype
        self._tolerance = tolerance
        self._differed = 0  # the step at which the last comparison found a difference
        # Not torch's: a trial notes who draws these.
        self._numbers = np.random.default_rng(0)
        cases = _cases(optimizer)
        self._groups = list(cases)
        # Each shape twice: where parameters are not cut, each rank has one of them, of another size.
        self._values = [
            _Value(group, self._draw(shape) * size, self._draw(shape))
            for group, shapes in cases.items()
            for shape in shapes
            for size in (3.0, 1.0)
        ]

    def agrees(self, by_elements: bool) -> bool:
        """True if two optimizers with a part each compute what one with all does.

        ``by_elements``: the parts are flat pieces of each parameter; otherwise they are full parameters.

        Raises:
            Untryable: weights do not move, or not to finite values.
            Exception: of the optimizer, with all parameters.
        """
        if by_elements:
            pairs = [_halves(value) for value in self._values]
            parts = [[piece for pair in pairs for piece in pair[number]] for number in range(2)]
        else:
            parts = [[_Piece(value) for value in self._values[number::2]] for number in range(2)]
        steps = _STEPS if by_elements else max(_STEPS_OF_WHOLE, self._differed + 4)
        whole = _Stepper(self._optimizer, self._groups, [_Piece(value) for value in self._values])
        ranks = [_Stepper(self._optimizer, self._groups, pieces) for pieces in parts]
        for value in self._values:
            value.moved = 0.0
        for step in range(steps):
            self._differed = step
            grads = {value: self._gradient(value, step) for value in self._values}
            whole.step(list(grads.values()), _loss(step, 0.5))
            for value, parameter in zip(self._values, whole.parameters, strict=True):
                value.moved = max(value.moved, float((parameter.detach() - value.start).abs().max()))
                if not math.isfinite(value.moved):
                    raise Untryable("its weights become infinite in a trial")
            got = dict(zip(self._values, whole.parameters, strict=True))
            for number, rank in enumerate(ranks):
                try:
                    rank.step([grads[piece.value] for piece in rank.pieces], _loss(step, number))
                except Exception:  # it works with all parameters, but not with a part
                    return False
                if not _are_close(rank.numbers(), whole.numbers(), self._tolerance):
                    return False
                for piece, parameter in zip(rank.pieces, rank.parameters, strict=True):
                    several = parameter.numel() > 1
                    if several and not _are_close(
                        rank.numbers_of(parameter), whole.numbers_of(got[piece.value]), self._tolerance
                    ):
                        return False
                    far = (parameter - piece.of(got[piece.value])).detach().abs().max()
                    if not bool(far <= self._tolerance * piece.value.moved):
                        return False
        if not all(value.moved > 0 for value in self._values):
            raise Untryable("it moves no weights in a trial")
        return True

    def _draw(self, shape: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.asarray(self._numbers.standard_normal(tuple(shape)))).to(self._dtype)

    def _gradient(self, value: _Value, step: int) -> Tensor:
        """A gradient, other in scale in each half, so that norms of pieces differ."""
        grad = (value.direction + 0.5 * self._draw(value.start.shape)) * _SIZES[step % len(_SIZES)]
        flat = grad.view(-1)
        flat[flat.numel() // 2 :] *= 10
        if step % 4 == 2:
            flat[::5] = 0
        return grad


def _loss(step: int, rank: float) -> float:
    """The loss of a step on a rank; that of all is the mean."""
    return 1.0 + rank + 0.3 * rank * (step % 5)


def _halves(value: _Value) -> tuple[list[_Piece], list[_Piece]]:
    """The flat pieces of a value that two ranks have; a single element is on the first."""
    numel = value.start.numel()
    if numel < 2:
        return [_Piece(value)], []
    middle = numel - numel // 2 + (1 if numel > 4 else 0)
    return [_Piece(value, 0, middle)], [_Piece(value, middle, numel)]


def _cases(optimizer: Optimizer) -> dict[int, list[tuple[int, ...]]]:
    """The shapes to try, by the number of the group; groups that differ in nothing but shapes and rates are one."""
    numbers: dict[str, int] = {}
    found: dict[int, set[tuple[int, ...]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        with without_torch_function():
            shapes = {_bounded(tuple(p.shape)) for p in group["params"] if p.numel() > 0}
        options = repr({k: v for k, v in group.items() if k not in _NOT_OPTIONS})
        if shapes:
            found.setdefault(numbers.setdefault(options, number), set()).update(shapes)
    chosen: dict[int, list[tuple[int, ...]]] = {}
    for number, shapes in found.items():
        of_dims: dict[int, list[tuple[int, ...]]] = {}
        for shape in sorted(shapes, key=lambda shape: (math.prod(shape), shape)):
            of_dims.setdefault(len(shape), []).append(shape)
        # The smallest and the largest of each number of dimensions.
        chosen[number] = [shape for some in of_dims.values() for shape in dict.fromkeys((some[0], some[-1]))]
    return chosen


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with the dimensions of ``shape``, as far as they are small enough for a trial."""
    most = _MOST.get(len(shape), _MOST_OF_MORE)
    return tuple(min(size, most[min(dim, len(most) - 1)]) for dim, size in enumerate(shape))
