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


def check_supported(optimizer: Optimizer, sharded: bool) -> None:
    """Refuse what cannot be exact; warn about what nobody knows.

    Args:
        optimizer: any.
        sharded: whether ranks hold pieces of parameters.

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
    if names & _WHOLE_MATRICES:
        ours = "lt_zero.optim.Lamb" if names & {"Lamb", "LAMB"} else "stage 0"
        raise TypeError(
            f"{name} computes its update from whole matrices or per-parameter norms, but at this stage a rank holds "
            f"flat pieces of parameters. Use {ours}, or an element-wise optimizer such as AdamW."
        )
    if not names & _ELEMENTWISE:
        warnings.warn(
            f"{name} is not known to lt_zero: it is run on flat pieces of parameters, which is exact only if its "
            "update is element-wise.",
            stacklevel=4,
        )


def states_per_element(optimizer: Optimizer) -> int:
    """How many element-wise states the optimizer keeps, found out with a parameter of a few elements."""
    cls = next(c for c in type(optimizer).__mro__ if "_lt_zero_made" not in vars(c))
    parameter = Parameter(torch.zeros(3, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "initial_lr")}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            trial: Any = cls([{**group, "params": [parameter]}])
            trial.step()
    except Exception:  # a class of the user's own that wants something else
        return 2
    return sum(isinstance(v, Tensor) and v.numel() == 3 for v in trial.state[parameter].values())
