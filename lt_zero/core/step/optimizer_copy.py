"""Copies of optimizers that step over small tensors, to find out what the original does.

It is a copy, not a new optimizer of the class, so it has the options, counters and inner optimizers of the original,
whatever the constructor asks for.

Note [Random numbers]
    All elements get the same random number in a trial. So it tells whether the rest of the update needs whole
    parameters, or all. On ranks an optimizer that draws numbers draws others than in one process, and a number for a
    whole tensor would differ between its pieces: ``Separability.UNKNOWN``.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lt_zero.common.compat import bare_step

_NOT_COPIED = ("_lt_zero", "step", "param_groups", "state")  # a schedule binds ``step`` to the original
_RATE = 0.1  # in place of a learning rate of zero, with which a schedule may begin


class Untryable(Exception):
    """An optimizer cannot be tried; says why."""


def states_of(optimizer: Optimizer, number: int, shape: Sequence[int]) -> list[Any]:
    """The states that an optimizer keeps of a parameter of ``shape`` in its group ``number``, after a step.

    Raises:
        Exception: the optimizer could not be tried.
    """
    parameter = Parameter(torch.zeros(*shape))
    parameter.grad = torch.ones_like(parameter)
    with undisturbed():
        trial = copied(optimizer, [[parameter] if n == number else [] for n in range(len(optimizer.param_groups))])
        trial.param_groups[:] = [trial.param_groups[number]]
        one_step(trial, loss=1.5)
    return list(trial.state[parameter].values())


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


def one_step(optimizer: Optimizer, loss: float) -> None:
    """Step an optimizer as one process does, without the hooks of a run; its closure returns ``loss``."""
    step = bare_step(optimizer)
    closes = "closure" in inspect.signature(step).parameters
    step(optimizer, **({"closure": lambda: torch.tensor(loss)} if closes else {}))


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
def undisturbed() -> Iterator[_Numbers]:
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
