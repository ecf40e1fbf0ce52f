"""Which optimizers compute the same on flat pieces of parameters as on whole ones.

Note [Trial]
    A class that is not torch's or ours is tried out: what one optimizer makes of a small matrix in some steps is
    compared with what two make of a piece each, with the hyper-parameters of every group. The same with two whole
    matrices shows what needs all parameters at once. Random numbers, or a constructor that wants something else than
    the groups and its defaults, leave it open; then names decide.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.compat import bare_step
from lt_zero.optim.lamb import Lamb

_ELEMENTWISE = {
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Lion",
}
_WHOLE_MATRICES = {
    "Muon",
    "Adafactor",
    "Shampoo",
    "SOAP",
    "DistributedShampoo",
    "Kron",
    "PSGD",
    "Lamb",
    "LAMB",
    "Lars",
    "LARS",
}
_CUT = 5000  # of 10,240 elements: optimizers with states of 8 bits leave less than 4096 as they are
_STEPS = 8  # rectified ones move after five
_CLOSURES = {"LBFGS"}
_SPARSE = {"SparseAdam"}


def check_supported(optimizer: Optimizer, sharded: bool, whole: bool = False) -> None:
    """Refuse what cannot be exact; warn about what nobody knows.

    Args:
        optimizer: any.
        sharded: whether ranks hold parts of the model.
        whole: whether these are whole parameters.

    Raises:
        TypeError: the optimizer needs whole matrices, all parameters, sparse gradients or repeated closures.
    """
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    name = type(optimizer).__name__
    if names & _CLOSURES:
        raise TypeError(f"{name} evaluates its closure several times per step, which ZeRO does not support. Use AdamW.")
    if names & _SPARSE:
        raise TypeError(f"{name} needs sparse gradients; ZeRO reduces dense buckets. Use Adam and sparse=False.")
    if not sharded or isinstance(optimizer, Lamb):  # ours asks for the norms of whole parameters
        return
    if names & _WHOLE_MATRICES and not whole:
        ours = "lt_zero.optim.Lamb" if names & {"Lamb", "LAMB"} else "stage 0"
        raise TypeError(
            f"{name} computes its update from whole matrices or per-parameter norms, but at this stage a rank holds "
            f"flat pieces of parameters. Use {ours}, or set zero_optimization.shard_along=parameter, or take an "
            "element-wise optimizer such as AdamW."
        )
    if type(optimizer).__module__.startswith(("torch.optim.", "lt_zero.optim.")):
        return
    found = divides(optimizer, whole)
    if found is False:
        _refuse(optimizer, whole)
    if found is None and not names & (_ELEMENTWISE | _WHOLE_MATRICES):
        held = "a part of the parameters" if whole else "flat pieces of parameters"
        why = "treats parameters one by one" if whole else "is element-wise (zero_optimization.shard_along=parameter "
        why += "" if whole else "gives it whole parameters)"
        warnings.warn(
            f"{name} is not known to lt_zero: each rank runs it on {held}, which is exact only if its update {why}.",
            stacklevel=4,
        )


def _refuse(optimizer: Optimizer, whole: bool) -> None:
    name = type(optimizer).__name__
    if whole or divides(optimizer, whole=True) is False:
        raise TypeError(
            f"{name} computes its update from all parameters at once (found out by a trial with two small matrices), "
            "but at this stage each rank holds a part of them. Use stage 0, or take an element-wise optimizer such as "
            "AdamW."
        )
    raise TypeError(
        f"{name} computes something else on pieces of a parameter than on all of it (found out by a trial with a small "
        "matrix), but at this stage a rank holds flat pieces. Set zero_optimization.shard_along=parameter, which gives "
        "it whole parameters, or use stage 0, or take an element-wise optimizer such as AdamW."
    )


def divides(optimizer: Optimizer, whole: bool) -> bool | None:
    """Whether optimizers that have a part of the elements each compute what one that has all of them computes.

    ``whole``: the parts are whole parameters. None if it cannot be found out. See Note [Trial].
    """
    found = [_group_divides(optimizer, group, whole) for group in _distinct(optimizer)]
    return False if False in found else None if None in found else True


def _group_divides(optimizer: Optimizer, group: dict[str, Any], whole: bool) -> bool | None:
    if "lr" in group and not isinstance(group["lr"], Tensor):
        group = {**group, "lr": 0.1}  # a schedule may begin at zero
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(64, 160, generator=random, dtype=torch.float64) for _ in range(2 * (_STEPS + 1))]
    pairs = []  # the two parts: weights, then the gradients of each step; of different size, for norms to differ
    for first, second, scale in zip(rows[::2], rows[1::2], [3.0, *[10.0] * _STEPS], strict=True):
        flat = first.flatten()
        pairs.append((first, second * scale) if whole else (flat[:_CUT], flat[_CUT:] * scale))
    merged = [list(pair) if whole else [torch.cat(pair).view(64, 160)] for pair in pairs]
    try:
        with _undisturbed():
            together = _stepped(optimizer, group, merged)
    except Exception:  # a class of the user's own that wants something else
        return None
    try:
        with _undisturbed():
            parts = [_stepped(optimizer, group, [[pair[number]] for pair in pairs])[0] for number in range(2)]
    except _RandomError:
        return None
    except Exception:
        return False
    got, want, start = (torch.cat([t.flatten() for t in some]) for some in (parts, together, merged[0]))
    moved = (want - start).abs().max()
    if not torch.isfinite(moved) or moved == 0:
        return None
    return bool((got - want).abs().max() <= 1e-5 * moved)


class _RandomError(Exception):
    """A trial drew random numbers."""


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Around trials: no warnings, no compilation, and random numbers go on as if there were none."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise _RandomError


def _stepped(optimizer: Optimizer, group: dict[str, Any], rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What a new optimizer of the same kind makes of the weights ``rows[0]`` with the gradients of each step."""
    parameters = [Parameter(row.clone()) for row in rows[0]]
    trial = _trial(optimizer, group, parameters)
    getattr(trial, "train", lambda: None)()  # schedule-free ones ask for it
    closes = "closure" in inspect.signature(trial.step).parameters
    for grads in rows[1:]:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        bare_step(trial)(trial, **({"closure": lambda: torch.zeros(())} if closes else {}))
    return [parameter.detach() for parameter in parameters]


def _distinct(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups that differ, without what says nothing of the update."""
    own = ("params", "param_names", "initial_lr", "name")
    groups = [{k: v for k, v in group.items() if k not in own} for group in optimizer.param_groups]
    return list({repr(group): group for group in groups}.values())


def _trial(optimizer: Optimizer, group: dict[str, Any], parameters: list[Parameter]) -> Any:
    """A new optimizer of the same class and hyper-parameters."""
    cls: Any = type(optimizer)
    accepted = inspect.signature(cls).parameters
    return cls([{**group, "params": parameters}], **{k: v for k, v in optimizer.defaults.items() if k in accepted})


def states_per_element(optimizer: Optimizer) -> int:
    """How many states of its parameters' size the optimizer keeps at most."""
    return max(states_by_group(optimizer), default=0)


def states_by_group(optimizer: Optimizer) -> list[int]:
    """How many states of a parameter's size the optimizer keeps, by group: found out with a matrix of a few elements.

    A group of vectors, such as Adafactor's of biases, may keep more.
    """
    found: dict[str, int] = {}
    groups = [{k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in optimizer.param_groups]
    return [found[k] if (k := repr(g)) in found else found.setdefault(k, _tried(optimizer, g)) for g in groups]


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> int:
    parameter = Parameter(torch.zeros(3, 5, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            trial = _trial(optimizer, group, [parameter])
            trial.step()
    except Exception:  # a class of the user's own that wants something else
        return 2
    return sum(isinstance(v, Tensor) and v.shape == parameter.shape for v in trial.state[parameter].values())
