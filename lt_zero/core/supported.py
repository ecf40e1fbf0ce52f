"""Which optimizers compute the same on flat pieces of parameters as on whole ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

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
_CLOSURES = {"LBFGS"}
_SPARSE = {"SparseAdam"}


def check_supported(optimizer: Optimizer, sharded: bool, whole: bool = False) -> None:
    """Refuse what cannot be exact; warn about what nobody knows.

    Args:
        optimizer: any.
        sharded: whether ranks hold parts of the model.
        whole: whether these are whole parameters.

    Raises:
        TypeError: the optimizer needs whole matrices, sparse gradients or repeated closures.
    """
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    name = type(optimizer).__name__
    if names & _CLOSURES:
        raise TypeError(f"{name} evaluates its closure several times per step, which ZeRO does not support. Use AdamW.")
    if names & _SPARSE:
        raise TypeError(f"{name} needs sparse gradients; ZeRO reduces dense buckets. Use Adam and sparse=False.")
    if not sharded or isinstance(optimizer, Lamb):  # ours asks for the norms of whole parameters
        return
    if names & _WHOLE_MATRICES and whole:
        return
    if names & _WHOLE_MATRICES:
        ours = "lt_zero.optim.Lamb" if names & {"Lamb", "LAMB"} else "stage 0"
        raise TypeError(
            f"{name} computes its update from whole matrices or per-parameter norms, but at this stage a rank holds "
            f"flat pieces of parameters. Use {ours}, or set zero_optimization.shard_along=parameter, or take an "
            "element-wise optimizer such as AdamW."
        )
    if not names & _ELEMENTWISE:
        held = "a part of the parameters" if whole else "flat pieces of parameters"
        why = "treats parameters one by one" if whole else "is element-wise (zero_optimization.shard_along=parameter "
        why += "" if whole else "gives it whole parameters)"
        warnings.warn(
            f"{name} is not known to lt_zero: each rank runs it on {held}, which is exact only if its update {why}.",
            stacklevel=4,
        )


def states_per_element(optimizer: Optimizer) -> int:
    """How many states of its parameters' size the optimizer keeps at most."""
    return max(states_by_group(optimizer), default=0)


def states_by_group(optimizer: Optimizer) -> list[int]:
    """How many states of a parameter's size the optimizer keeps, by group: found out with a matrix of a few elements.

    A group of vectors, such as Adafactor's of biases, may keep more.
    """
    cls = next(c for c in type(optimizer).__mro__ if "_lt_zero_made" not in vars(c))
    found: dict[str, int] = {}
    groups = [{k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in optimizer.param_groups]
    return [found[key] if (key := repr(g)) in found else found.setdefault(key, _tried(cls, g)) for g in groups]


def _tried(cls: Any, group: dict[str, Any]) -> int:
    parameter = Parameter(torch.zeros(3, 5, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            trial: Any = cls([{**group, "params": [parameter]}])
            trial.step()
    except Exception:  # a class of the user's own that wants something else
        return 2
    return sum(isinstance(v, Tensor) and v.shape == parameter.shape for v in trial.state[parameter].values())
