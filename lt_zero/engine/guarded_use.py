"""Uses of guarded parameters outside of their unit's forward. See guard.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import without_torch_function
from lt_zero.engine.bucket import State
from lt_zero.engine.full_params import gathered
from lt_zero.engine.guard import HANDS_OUT
from lt_zero.engine.lazy_tensor import AbsentTensor

if TYPE_CHECKING:
    from lt_zero.engine.engine import Engine


def use_outside(engine: Engine, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that needs the values of guarded ``parameters``.

    Raises:
        RuntimeError: outside of forward and backward the values of a released parameter cannot be read.
    """
    buckets = list(dict.fromkeys(engine.owner[id(p)][0] for p in parameters))
    if engine.finish_steps() and not any(bucket.sharding.params for bucket in buckets):
        return func(*args, **kwargs)
    if func is Tensor.copy_ and args[0] is parameters[0] and len(parameters) == 1:
        bucket, index = engine.owner[id(args[0])]
        with without_torch_function():
            value, shape = args[1], torch.Size(bucket.shapes[index])
            bucket.write(index, value if value.shape == shape else value.expand(shape))
        return args[0]
    if engine.running:
        for bucket in buckets:
            engine.gatherer.pin_gathered(bucket)
            bucket.edits.handed_out |= func in HANDS_OUT
            if torch.is_grad_enabled():
                engine.gatherer.pin_in_backward(bucket)
        return func(*args, **kwargs)
    if all(bucket.state is State.RESIDENT for bucket in buckets):
        with without_torch_function():
            return func(*args, **kwargs)
    if func is Tensor.detach and len(buckets) == 1:  # this is what state_dict() puts into a state dict
        return _absent(engine, parameters[0])
    if func is torch.equal:  # Lightning's finetuning callbacks search an optimizer's parameters with it
        return _equal(*args)
    raise RuntimeError(
        f"The values of parameter {_name(engine, parameters[0])!r} are sharded over {engine.comm.world} ranks and not "
        f"in memory here (`{getattr(func, '__name__', func)}` needs them). Wrap the code in `with "
        "lt_zero.gathered(parameter):` "
        "on every rank (`write=True` to change values); to save weights use `trainer.save_checkpoint`, "
        "`trainer.strategy.export(path)` or `trainer.strategy.full_state_dict()`."
    )


def _name(engine: Engine, parameter: Tensor) -> str:
    bucket, index = engine.owner[id(parameter)]
    return bucket.layout.spans[index].name


def _absent(engine: Engine, parameter: Tensor) -> Tensor:
    """The placeholder of a parameter in a state dict; reading it raises with the remedy."""
    name, world = _name(engine, parameter), engine.comm.world

    def read(lo: int, hi: int) -> Tensor:
        raise RuntimeError(
            f"The values of parameter {name!r} are sharded over {world} ranks, and `state_dict()` has names, shapes "
            "and dtypes only. Take the values from `trainer.strategy.full_state_dict()` (called on every rank, full on "
            "rank 0), or call `state_dict()` inside of `with lt_zero.gathered(module):` on every rank; to save weights "
            "use `trainer.save_checkpoint` or `trainer.strategy.export(path)`."
        )

    with without_torch_function():
        return AbsentTensor(tuple(parameter.shape), parameter.dtype, read, parameter.device)


def _equal(one: Tensor, other: Tensor) -> bool:
    """``torch.equal``. Collective, unless identity or shape decides."""
    if one is other or one.shape != other.shape:
        return one is other
    with gathered([p for p in (one, other) if isinstance(p, Parameter)]):
        return torch.equal(one, other)
