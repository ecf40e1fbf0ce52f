"""Trials of optimizers: whether they compute the same on a part of the elements, or of the parameters, as on all.

A trial steps copies of the user's optimizer over small tensors of the shapes that its groups have: one copy has all of
them, as one process would, and two copies have a part each, as two ranks would. It is a copy, not a new optimizer of
the class, so it has the options, counters and inner optimizers of the original, whatever the constructor asks for.

Note [What a trial cannot see]
    It is over after ``_STEPS`` steps, and its tensors have no more than ``_MOST`` elements along a dimension, so what
    begins later, or with larger tensors, is not seen. Gradients have other sizes in other steps, as an optimizer may
    clip only large ones, and some of their elements are zero.

Note [Random numbers]
    All elements get the same random number in a trial. So it tells whether the rest of the update needs whole
    parameters, or all. On ranks an optimizer that draws numbers draws others than in one process, and a number for a
    whole tensor would differ between its pieces: ``Separability.UNKNOWN``.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lt_zero.common.compat import bare_step, without_torch_function

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
_NOT_COPIED = ("_lt_zero", "step", "param_groups", "state")  # a schedule binds ``step`` to the original
_RATE = 0.1  # in place of a learning rate of zero, with which a schedule may begin
_RANDOM = "it draws random numbers, which differ from those of one process"


class Separability(Enum):
    """Parts of a model that ranks may step apart, so that an optimizer computes what it does in one process."""

    NOTHING = "it needs all parameters at once, or a loss"
    PARAMETERS = "each parameter"
    ELEMENTS = "each element"
    UNKNOWN = "it could not be tried"


class Untryable(Exception):
    """An optimizer cannot be tried; says why."""


def division_of(optimizer: Optimizer) -> tuple[Separability, str]:
    """Try how an optimizer may be divided; returns that, and why it could not be tried.

    The optimizer, its parameters and random states are left as they are.
    """
    why = ""
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        try:
            with _undisturbed() as numbers:
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


def states_of(optimizer: Optimizer, number: int, shape: Sequence[int]) -> list[Any]:
    """The states that an optimizer keeps of a parameter of ``shape`` in its group ``number``, after a step.

    Raises:
        Exception: the optimizer could not be tried.
    """
    parameter = Parameter(torch.zeros(*shape))
    parameter.grad = torch.ones_like(parameter)
    with _undisturbed():
        trial = copied(optimizer, [[parameter] if n == number else [] for n in range(len(optimizer.param_groups))])
        trial.param_groups[:] = [trial.param_groups[number]]
        _step(trial, _loss(0, 0.5))
    return list(trial.state[parameter].values())


# ---- a copy ----------------------------------------------------------------------------------------------------------


def copied(optimizer: Optimizer, groups: Sequence[Sequence[Parameter]]) -> Optimizer:
    """A copy of an optimizer, and of those that it wraps; its groups have the parameters of ``groups``, without states.

    States that a constructor makes are copied if all of their elements are the same.

    Raises:
        Untryable: it refers to something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    unused = Parameter(torch.zeros(1))
    for own, others in zip(optimizer.param_groups, groups, strict=True):
        memo.update((id(p), others[0] if others else unused) for p in own["params"])
    try:
        made = _copied(optimizer, memo)
    except Exception as error:
        raise Untryable(f"it cannot be copied ({type(error).__name__}: {error})") from error
    for group, own, parameters in zip(made.param_groups, optimizer.param_groups, groups, strict=True):
        for parameter in parameters:
            made.state.update(_initial(optimizer, own["params"], parameter))
        group["params"][:] = parameters  # in place: an optimizer around another one shares the list
        if not isinstance(own.get("lr"), Tensor) and own.get("lr") == 0:
            group["lr"] = _RATE
    return made


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy with the members that torch's own way to copy optimizers leaves out."""
    if id(optimizer) in memo:
        found: Optimizer = memo[id(optimizer)]
        return found
    made: Optimizer = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = made
    members = vars(optimizer)
    for value in members.values():
        if isinstance(value, Optimizer):
            _copied(value, memo)
    # Others may share the groups and the states, so these are copied first.
    made.param_groups = copy.deepcopy(optimizer.param_groups, memo)
    made.state = memo.setdefault(id(optimizer.state), defaultdict(dict))
    for name, value in members.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(made, name, OrderedDict())
        elif name not in _NOT_COPIED:
            setattr(made, name, copy.deepcopy(value, memo))
    return made


def _initial(optimizer: Optimizer, own: Sequence[Tensor], parameter: Tensor) -> dict[Tensor, Any]:
    """The states of ``parameter`` that a constructor makes, as for the first of its ``own`` parameters; {} if none.

    States that are not the same number for all elements are left out: they may be of earlier steps.
    """
    first = next((p for p in own if p in optimizer.state and optimizer.state[p]), None)
    if first is None:
        return {}
    try:
        return {parameter: {key: _like(value, first, parameter) for key, value in optimizer.state[first].items()}}
    except ValueError:
        return {}


def _like(value: Any, own: Tensor, parameter: Tensor) -> Any:
    """A state ``value`` of the parameter ``own``, for another one.

    Raises:
        ValueError: its elements are not all the same.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return copy.deepcopy(value)
    with torch.no_grad():
        if value.shape != own.shape or value.numel() == 0 or not bool((value == value.flatten()[0]).all()):
            raise ValueError
        dtype = parameter.dtype if value.is_floating_point() else value.dtype
        return torch.full(parameter.shape, value.flatten()[0].item(), dtype=dtype)


# ---- trials ----------------------------------------------------------------------------------------------------------


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
        self.value, self._range = value, None if hi is None else slice(lo, hi)

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
        _step(self._optimizer, loss)

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


def _step(optimizer: Optimizer, loss: float) -> None:
    step = bare_step(optimizer)
    closes = "closure" in inspect.signature(step).parameters
    step(optimizer, **({"closure": lambda: torch.tensor(loss)} if closes else {}))


# ---- the surroundings of a trial -------------------------------------------------------------------------------------


class _Numbers(TorchDispatchMode):
    """Mode in which torch draws the same random number for all elements. See Note [Random numbers].

    Attributes:
        drawn: numbers were drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = True
            if isinstance(result, Tensor) and result.is_floating_point():
                result.fill_(0.7)
        return result


@contextmanager
def _undisturbed() -> Iterator[_Numbers]:
    """Context for trials: no warnings, no compilation, random states restored; gives what knows of random numbers."""
    python = random.getstate()
    arrays = np.random.get_state(legacy=False)
    numbers = _Numbers()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.callback(random.setstate, python)
        stack.callback(np.random.set_state, arrays)
        with numbers:
            yield numbers
        # Numbers of other generators cannot be replaced.
        numbers.drawn |= random.getstate() != python or not _are_same(np.random.get_state(legacy=False), arrays)


def _are_same(some: Any, others: Any) -> bool:
    return (
        bool((some["state"]["key"] == others["state"]["key"]).all()) and some["state"]["pos"] == others["state"]["pos"]
    )
