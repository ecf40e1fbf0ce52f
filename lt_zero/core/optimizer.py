"""Any element-wise torch optimizer on fragments: the user's object, its groups and its class stay.

Note [Narrowing]
    At rest ``param_groups[i]["params"]`` are the module's parameters, because schedulers, callbacks and
    ``toggle_optimizer`` look there. For the duration of ``step`` they are replaced by this rank's fragments, flat
    pieces of the master weights whose ``.grad`` is a piece of the accumulator. State lives per fragment and is shown
    under its parameter. A fragment that is a whole parameter has the parameter's shape.

Note [Unused parameters]
    A zero gradient is not "no gradient": AdamW would decay and move a parameter that no rank used. The ranks agree
    on which parameters were used, and the others' fragments have ``grad=None`` for this step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.core.bucket import Bucket
from lt_zero.core.engine import Engine

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


class ShardedOptimizer:
    """What the engine does around one optimizer's ``step`` and ``zero_grad``.

    Args:
        engine: owns the parameters; parameters it does not own are stepped as they are.
        optimizer: any ``torch.optim.Optimizer`` whose update is element-wise.

    Raises:
        TypeError: the optimizer needs whole matrices, sparse gradients or repeated closures.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        _check_supported(engine, optimizer)
        self.engine, self.optimizer = engine, optimizer
        self._fragments: dict[int, list[Parameter]] = {}
        self._wide: list[list[Parameter]] | None = None
        self._adopt_state()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        _intercept_zero_grad(optimizer, self)

    # ---- fragments ---------------------------------------------------------------------------------------------

    def fragments(self, parameter: Parameter) -> list[Parameter]:
        """This rank's pieces of ``parameter`` (none or one), or itself if the engine does not own it."""
        place = self.engine.owner.get(id(parameter))
        if place is None:
            return [parameter]
        bucket, index = place
        if id(parameter) not in self._fragments:
            bucket.enable_training()
            assert bucket.master is not None
            shape = bucket.shapes[index]
            self._fragments[id(parameter)] = [
                Parameter(_shaped(bucket.master[p.offset : p.offset + p.numel], shape))
                for p in bucket.pieces()
                if p.index == index
            ]
        return self._fragments[id(parameter)]

    def parameters(self) -> list[Parameter]:
        groups = self._wide if self._wide is not None else [g["params"] for g in self.optimizer.param_groups]
        return [p for params in groups for p in params]

    def _places(self) -> list[tuple[Bucket, int, Parameter]]:
        owner = self.engine.owner
        return [(*owner[id(p)], p) for p in self.parameters() if id(p) in owner]

    @torch.no_grad()
    def attach_grads(self) -> list[Parameter]:
        """Give the fragments their part of the reduced gradients; returns those that have one. Collective."""
        used = self.engine.settle_grads()
        attached = []
        for bucket, index, parameter in self._places():
            pieces = bucket.pieces_of(index)
            for piece, fragment in zip(pieces, self.fragments(parameter), strict=True):
                fragment.grad = None
                if used(bucket, index):
                    assert bucket.grad is not None
                    grad = bucket.grad[piece.offset : piece.offset + piece.numel]
                    fragment.grad = grad.view(fragment.shape)
                    attached.append(fragment)
        return attached + [p for p in self.parameters() if id(p) not in self.engine.owner and p.grad is not None]

    # ---- step --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is not None:
            with torch.enable_grad():  # the closure runs backward; step must see its result, on fragments
                result = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: result}
        self.attach_grads()
        self.narrow()
        self.engine.comm.before_write()
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.widen()
        self.engine.publish({bucket for bucket, _, _ in self._places()})

    def narrow(self) -> None:
        """Groups and state from parameters to fragments. See Note [Narrowing]."""
        assert self._wide is None, "a step of this optimizer failed half way; its groups hold fragments"
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._wide = [group["params"] for group in groups]
        for group, wide in zip(groups, self._wide, strict=True):
            group["params"] = [fragment for p in wide for fragment in self.fragments(p)]
            for p in wide:
                for fragment in self.fragments(p):
                    if fragment is not p and p in state:
                        state[fragment] = state.pop(p)

    def widen(self) -> None:
        """The reverse of ``narrow``; nothing happens if the groups are wide already."""
        if self._wide is None:
            return
        state = self.optimizer.state
        for group, wide in zip(self.optimizer.param_groups, self._wide, strict=True):
            group["params"] = wide
            for p in wide:
                for fragment in self.fragments(p):
                    if fragment is not p and fragment in state:
                        state[p] = state.pop(fragment)
                    fragment.grad = None if fragment is not p else fragment.grad
        self._wide = None

    def clear_grads(self) -> None:
        """Forget the accumulated gradients of this optimizer's parameters."""
        indices: dict[Bucket, set[int]] = {}
        for bucket, index, _ in self._places():
            indices.setdefault(bucket, set()).add(index)
        for bucket, which in indices.items():
            bucket.clear_grads(which)

    def _adopt_state(self) -> None:
        """Cut state that the constructor made in the parameters' full shape (Adagrad)."""
        for bucket, index, parameter in self._places():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            pieces = bucket.pieces_of(index)
            if not pieces:
                del self.optimizer.state[parameter]
            for piece in pieces:
                for key, value in state.items():
                    state[key] = cut_state(value, bucket.shapes[index], piece.lo, piece.hi)


def cut_state(value: Any, shape: tuple[int, ...], lo: int, hi: int) -> Any:
    """Elements [lo, hi) of a state tensor that has its parameter's shape; anything else as it is."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dim() == 0:
        return value
    return _shaped(value.reshape(-1)[lo:hi].clone(), shape)


def _shaped(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A piece that is the whole parameter gets its shape; others stay 1D."""
    return row.view(shape) if row.numel() == torch.Size(shape).numel() else row


def clip_grad_norm(sharded: ShardedOptimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; returns the norm before. Collective.

    The same formula as ``torch.nn.utils.clip_grad_norm_``.
    """
    fragments = sharded.attach_grads()
    total = total_norm(sharded.engine, fragments, norm_type)
    torch.nn.utils.clip_grads_with_norm_(fragments, max_norm, total)
    return total


def clip_grad_value(sharded: ShardedOptimizer, limit: float) -> None:
    """Clamp each element of the averaged gradients to [-limit, limit]. Collective."""
    torch.nn.utils.clip_grad_value_(sharded.attach_grads(), limit)


def grad_norm(sharded: ShardedOptimizer, norm_type: float = 2.0) -> Tensor:
    """The global norm of the averaged gradients of the optimizer's parameters (0D). Collective."""
    return total_norm(sharded.engine, sharded.attach_grads(), norm_type)


@torch.no_grad()
def total_norm(engine: Engine, fragments: Iterable[Parameter], norm_type: float) -> Tensor:
    """The norm over all ranks' fragments, each element counted once."""
    grads = [f.grad for f in fragments if f.grad is not None]
    device = engine.comm.device
    local = torch.nn.utils.get_total_norm(grads, norm_type) if grads else torch.zeros((), device=device)
    if not engine.sharded_optim:
        return local
    if norm_type == float("inf"):
        return engine.comm.max_scalar(local, "gradient norm")
    total = engine.comm.sum_scalar(local.to(torch.float64) ** norm_type, "gradient norm")
    return (total ** (1.0 / norm_type)).to(local.dtype)


def _check_supported(engine: Engine, optimizer: Optimizer) -> None:
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    name = type(optimizer).__name__
    if names & _CLOSURES:
        raise TypeError(f"{name} evaluates its closure several times per step, which ZeRO does not support. Use AdamW.")
    if names & _SPARSE:
        raise TypeError(f"{name} needs sparse gradients; ZeRO reduces dense buckets. Use Adam and sparse=False.")
    if not engine.sharded_optim:
        return
    if names & _WHOLE_MATRICES:
        raise TypeError(
            f"{name} computes its update from whole matrices or per-parameter norms, but at this stage a rank holds "
            "flat pieces of parameters. Use stage 0, or an element-wise optimizer such as AdamW."
        )
    if not names & _ELEMENTWISE:
        warnings.warn(
            f"{name} is not known to lt_zero: it is run on flat pieces of parameters, which is exact only if its "
            "update is element-wise.",
            stacklevel=3,
        )


def _intercept_zero_grad(optimizer: Optimizer, sharded: ShardedOptimizer) -> None:
    """Make ``zero_grad`` clear the accumulators too.

    By class, not on the instance: Lightning's optimizer wrapper is a dynamic subclass of the optimizer's class and
    would not see an attribute of the instance. Name and module stay, so checkpoints and loggers see no difference.
    """
    cls = type(optimizer)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        cls.zero_grad(self, set_to_none)
        if set_to_none:
            self._lt_zero.clear_grads()

    optimizer._lt_zero = sharded  # type: ignore[attr-defined]
    optimizer.__class__ = type(cls.__name__, (cls,), {"zero_grad": zero_grad, "__module__": cls.__module__})
