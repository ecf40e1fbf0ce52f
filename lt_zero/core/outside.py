"""Uses of guarded parameters outside of their unit's forward. See guard.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_zero.compat import without_torch_function
from lt_zero.core.bucket import State
from lt_zero.core.guard import HANDS_OUT

if TYPE_CHECKING:
    from lt_zero.core.engine import Engine


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
    names = [b.layout.spans[i].name for b, i in (engine.owner[id(p)] for p in parameters)]
    raise RuntimeError(
        f"The values of parameter {names[0]!r} are sharded over {engine.comm.world} ranks and not in memory here "
        f"(`{getattr(func, '__name__', func)}` needs them). Wrap the code in `with lt_zero.gathered(parameter):` "
        "on every rank (`write=True` to change values); to save weights use `trainer.save_checkpoint`, "
        "`trainer.strategy.export(path)` or `trainer.strategy.full_state_dict()`."
    )
