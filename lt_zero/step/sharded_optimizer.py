"""Runs any torch optimizer on this rank's shard; the user's object, its groups and its class stay."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.engine import Engine
from lt_zero.io.thread_pool import SwapError
from lt_zero.optim.lamb import Lamb
from lt_zero.step.fragments import Fragments
from lt_zero.step.fused_step import FusedStep
from lt_zero.step.kernels import FullNorms
from lt_zero.step.overlap import Overlap
from lt_zero.step.reduced_grads import ReducedGrads
from lt_zero.step.stepper import RanClosure, Stepper
from lt_zero.step.supported_optimizers import check_supported, states_per_element

_ATTRIBUTE = "_lt_zero"  # set on the optimizer
_SWITCHES = ("train", "eval")  # methods of schedule-free optimizers that change weights


class ShardedOptimizer(ProcessLocal):
    """Hooks around one optimizer's ``step``, state dicts and ``train`` and ``eval``.

    Args:
        engine: owns the parameters; other parameters are stepped as usual.
        optimizer: any ``torch.optim.Optimizer`` whose update is element-wise, or, with
            ``zero_optimization.shard_along=parameter``, treats parameters one by one.

    Raises:
        TypeError: the optimizer needs full matrices, sparse gradients or repeated closures.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        manager = engine.offload_manager
        whole = engine.config.zero_optimization.shard_along == "parameter" or not engine.sharded_optim
        check_supported(optimizer, engine.sharded_optim or manager.optim is not None, whole)
        if manager.optim is not None:
            manager.require(engine.comm, states_per_element(optimizer))
        engine.begin_training()
        self.engine, self.optimizer = engine, optimizer
        self.fragments = Fragments(engine, optimizer)
        self.found_inf: Tensor | None = None  # 0D fp32: the kernel skips the step if it is not zero
        self.before_state_dict: Callable[[], object] = lambda: None  # waits for the outcome of the last step
        self.by_bucket = False  # the caller of ``state_dict`` reads stored states bucket by bucket
        self._depth = 0  # nested calls of step
        self._entered = 0  # ``Engine.backwards`` when the running step began
        norms = None  # for an optimizer whose step is collective
        if isinstance(optimizer, Lamb):
            optimizer.full_norms = norms = FullNorms(engine.comm)
        fused = engine.config.fused_step and FusedStep.fits(optimizer)
        self.fused = FusedStep(self.fragments, norms) if fused else None
        self.grads = ReducedGrads(self.fragments, self.fused)
        self.overlap = Overlap(self.fragments, self.fused, self.grads)
        self.stepper = Stepper(self.fragments, self.fused, self.overlap, norms)
        if manager.partially_stepped:
            warnings.warn(
                f"Training goes on although the weights of {manager.partially_stepped} are a step ahead "
                "of the others: load a checkpoint.",
                stacklevel=3,
            )
            manager.partially_stepped = ""
        self.fragments.adopt_state()
        # Hooks and one attribute: the optimizer keeps its class, and copies and pickles have neither.
        before = ShardedOptimizer.of(optimizer)
        for handle in before._handles if before is not None else ():
            handle.remove()  # of an earlier engine
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]
        setattr(optimizer, _ATTRIBUTE, self)
        for name in _SWITCHES:
            _narrow_in(type(optimizer), name)

    @staticmethod
    def of(optimizer: Any) -> ShardedOptimizer | None:
        """The ``ShardedOptimizer`` of ``optimizer``; None if there is none."""
        found = getattr(optimizer, _ATTRIBUTE, None)
        return found if isinstance(found, ShardedOptimizer) else None

    # ---- for loops without a Trainer -----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer; the same as its own ``step``. Collective.

        Raises:
            RuntimeError: under fp16, which needs loss scaling.
        """
        if self.engine.policy.scaling is not None:
            raise RuntimeError("fp16 needs a loss scale, which comes with ZeroStrategy. Use bf16, or a Trainer.")
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the same as the optimizer's own ``zero_grad``."""
        self.optimizer.zero_grad(set_to_none)

    def parameters(self) -> list[Parameter]:
        """The module's parameters, in the order of the groups."""
        return self.fragments.parameters()

    # ---- steps that the device may skip --------------------------------------------------------------------------

    def skips_on_device(self) -> bool:
        """Whether kernels that take ``found_inf`` do all of a step."""
        places, buckets = self.fragments.places(), self._buckets()
        if any(bucket.offloaded for bucket in buckets):
            return False  # a skipped step would still be copied to the device or written to files
        return len(places) == len(self.parameters()) and self.stepper.taken(buckets) == buckets

    def uncount_step(self) -> None:
        """Restore the step counters after the last step was skipped on the device."""
        assert self.fused is not None
        self.fused.uncount()

    def _buckets(self) -> set[Bucket]:
        return {bucket for bucket, _, _ in self.fragments.places()}

    # ---- step --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stepper = self.stepper
        if stepper.staging:
            return None
        if self.fragments.narrowed and self._entered == self.engine.backwards:
            self._depth += 1  # a subclass calls its parent's step; torch runs the hooks for both
            if stepper.closure is not None:
                stepper.closure.called_now = False
            return None
        if self.grads.loss_scale != 1.0:
            raise RuntimeError(
                f"The gradients of this {type(optimizer).__name__} still carry the loss scale "
                f"{self.grads.loss_scale:g}. In manual optimization step the optimizer that `self.optimizers()` "
                "returns: it unscales first."
            )
        # The closure runs now, because the step needs its gradients on fragments.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if callable(closure) and not isinstance(closure, RanClosure):
            with torch.enable_grad():
                closure = RanClosure(type(optimizer).__name__, closure())
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": closure}
            else:
                args = (args[0], closure, *args[2:])
        stepper.closure = closure if isinstance(closure, RanClosure) else None
        stepper.arguments = args[1:], kwargs
        plan = stepper.plan_step(self.grads.used())
        self.fragments.narrow()
        self._depth, self._entered = 1, self.engine.backwards
        self.engine.comm.before_write()
        try:
            stepper.run(plan, self.found_inf)
        except SwapError:
            self.widen()
            raise
        self.fragments.drop(self.overlap.early)
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.stepper.staging:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self.stepper.finish()
        self.widen()
        self.engine.publish(self._buckets() - self.overlap.late)
        self.overlap.end_step()

    def widen(self) -> None:
        """Put the module's parameters back into the groups; no-op outside of a step."""
        self.fragments.widen()

    def switch(self, method: Callable[[], Any]) -> Any:
        """Call a method of the optimizer that changes weights, on fragments as in ``step``. Collective."""
        self.before_state_dict()
        self.engine.finish_steps()
        buckets = self._buckets()
        self.fragments.narrow()
        self.engine.comm.before_write()
        try:
            result = self.stepper.switch(method)
        finally:
            self.widen()
        self.engine.publish(buckets)
        return result

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.engine.finish_steps()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self.before_state_dict()
        self.engine.finish_steps()
        if not self.by_bucket:
            for bucket in self._buckets():
                for store in bucket.step_stores():
                    store.write()  # the caller may edit it


def _narrow_in(cls: type[Optimizer], name: str) -> None:
    """Wrap method ``name`` of a class so that it runs on fragments if the optimizer is sharded.

    The class is patched, as torch does with ``step``: Lightning's wrapper is an instance of a subclass, which does not
    see attributes of the user's instance. Optimizers that are not sharded behave as before.
    """
    method = getattr(cls, name, None)
    if not inspect.isfunction(method) or hasattr(method, "narrows"):
        return

    @functools.wraps(method)
    def on_fragments(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = ShardedOptimizer.of(self)
        if sharded is None or sharded.fragments.narrowed:
            return method(self, *args, **kwargs)
        # On the user's instance, not on Lightning's wrapper: the method may set attributes.
        return sharded.switch(lambda: method(sharded.optimizer, *args, **kwargs))

    on_fragments.narrows = True  # type: ignore[attr-defined]
    setattr(cls, name, on_fragments)
