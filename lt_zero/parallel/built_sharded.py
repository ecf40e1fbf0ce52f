"""Modules whose parameters were sharded while they were built are cut without a whole copy of them on any rank.

torch's ``parallelize_module`` distributes the values of a parameter, for which each would have to be gathered, and a
rank would have its part of all layers before the engine shards them. So the modules are cut with parameters on the
meta device in their place, and the engine gathers each value when it takes it over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.core.engine.construction import ConstructionSharder
from lt_zero.core.engine.guard import is_guarded, owner_of


def cut_sharded(module: nn.Module, cut: Callable[[], object]) -> dict[Parameter, Callable[[], Tensor]]:
    """Call ``cut``, which replaces parameters of ``module`` by parts; returns readers of their whole values.

    Readers are collective. Parameters that were not replaced are the ones that there were, as sharded as before. So are
    all of them after an error.
    """
    places: dict[Parameter, list[tuple[nn.Module, str]]] = {}
    for sub in module.modules():
        for name, parameter in sub._parameters.items():
            if parameter is not None and is_guarded(parameter) and isinstance(owner_of(parameter), ConstructionSharder):
                places.setdefault(parameter, []).append((sub, name))
    empty = {
        parameter: Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
        )
        for parameter in places
    }
    for parameter, where in places.items():
        for sub, name in where:
            sub._parameters[name] = empty[parameter]
    readers: dict[Parameter, Callable[[], Tensor]] = {}
    try:
        cut()
    except BaseException:
        for parameter, where in places.items():
            for sub, name in where:
                sub._parameters[name] = parameter
        raise
    for parameter, where in places.items():
        for sub, name in where:
            now = sub._parameters[name]
            if now is empty[parameter]:
                sub._parameters[name] = parameter
                vars(parameter).update(vars(now))  # what the plan says of it
            elif now is not None:
                readers[now] = partial(_whole, parameter)
    return readers


def _whole(parameter: Parameter) -> Tensor:
    owner = owner_of(parameter)
    assert isinstance(owner, ConstructionSharder)
    [value] = owner.whole([parameter])
    return value
