"""Runs any torch optimizer on this rank's shard; the user's object, its groups and its class stay.

Note [Narrowing]
    Between steps ``param_groups[i]["params"]`` are the module's parameters, because schedulers, callbacks and
    ``toggle_optimizer`` look there. During ``step`` they are replaced by this rank's fragments: flat pieces of the
    master weights whose ``.grad`` is a piece of the accumulator. State is that of fragments, and keyed by parameter
    between steps. A fragment that is a full parameter has the parameter's shape.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.engine import Engine
from lt_zero.engine.layout import Piece
from lt_zero.io.thread_pool import SwapError
from lt_zero.optim.lamb import Lamb
from lt_zero.step.fused_step import FusedAdam, Member
from lt_zero.step.global_norms import FullNorms
from lt_zero.step.overlap import Overlap
from lt_zero.step.per_bucket import RanClosure, Stepper, grad_of
from lt_zero.step.reduced_grads import ReducedGrads
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
        whole = engine.config.zero_optimization.shard_along == "parameter" or not engine.sharded_optim
        check_supported(optimizer, engine.sharded_optim or engine.offload_manager.optim is not None, whole)
        if engine.offload_manager.optim is not None:
            engine.offload_manager.require(engine.comm, states_per_element(optimizer))
        engine.begin_training()
        self.engine, self.optimizer = engine, optimizer
        self._fragments: dict[int, list[Parameter]] = {}
        self._wide: list[list[Parameter]] | None = None
        self.loss_scale = 1.0  # of the accumulated gradients; see loss_scale_controller.py
        self.found_inf: Tensor | None = None  # 0D fp32: the kernel skips the step if it is not zero
        self.before_state_dict: Callable[[], object] = lambda: None  # waits for the outcome of the last step
        self.by_bucket = False  # the caller of ``state_dict`` reads stored states bucket by bucket
        self._depth = 0  # nested calls of step
        self._entered = 0  # ``Engine.backwards`` when the running step began
        self._stepping: dict[Bucket, list[Member]] = {}  # fragments that the optimizer's own ``step`` updates
        self._early: set[Bucket] = set()  # buckets of the running step that were stepped beside backward
        fused = engine.config.fused_step and FusedAdam.fits(optimizer)
        self.fused = FusedAdam(optimizer) if fused else None
        self.norms: FullNorms | None = None  # for an optimizer whose step is collective
        if isinstance(optimizer, Lamb):
            optimizer.full_norms = self.norms = FullNorms(engine.comm)
        self.overlap = Overlap(self)
        self.grads = ReducedGrads(self)
        self.stepper = Stepper(self)
        if engine.offload_manager.partially_stepped:
            warnings.warn(
                f"Training goes on although the weights of {engine.offload_manager.partially_stepped} are a step ahead "
                "of the others: load a checkpoint.",
                stacklevel=3,
            )
            engine.offload_manager.partially_stepped = ""
        self._handles: list[RemovableHandle] = []
        self._adopt_state()
        self._install()

    def _install(self) -> None:
        """Install hooks and one attribute; the optimizer keeps its class, and copies and pickles have neither."""
        optimizer = self.optimizer
        before = ShardedOptimizer.of(optimizer)
        for handle in before._handles if before is not None else ():
            handle.remove()  # of an earlier engine
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._on_state_dict),
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

    # ---- fragments ---------------------------------------------------------------------------------------------

    def fragments(self, parameter: Parameter) -> list[Parameter]:
        """This rank's fragment of ``parameter`` (none or one), or ``parameter`` if the engine does not own it."""
        place = self.engine.owner.get(id(parameter))
        if place is None:
            return [parameter]
        bucket, index = place
        if id(parameter) not in self._fragments:
            bucket.weights.enable_training()
            shape = torch.Size(bucket.shapes[index])
            master = bucket.weights.master
            assert master is not None
            self._fragments[id(parameter)] = [
                cast(Parameter, master.lend(p.offset, _shape_of(p, shape), Parameter)) for p in bucket.pieces_of(index)
            ]
        return self._fragments[id(parameter)]

    def parameters(self) -> list[Parameter]:
        return [p for params in self.wide_groups() for p in params]

    def wide_groups(self) -> list[list[Parameter]]:
        """The module's parameters, by group. See Note [Narrowing]."""
        return self._wide if self._wide is not None else [g["params"] for g in self.optimizer.param_groups]

    def indices(self) -> dict[Bucket, set[int]]:
        """This optimizer's parameters in each bucket."""
        found: dict[Bucket, set[int]] = {}
        for bucket, index, _ in self.places():
            found.setdefault(bucket, set()).add(index)
        return found

    def places(self) -> list[tuple[Bucket, int, Parameter]]:
        """(bucket, index in it, parameter) of all parameters that the engine owns, in the order of the groups."""
        owner = self.engine.owner
        return [(*owner[id(p)], p) for p in self.parameters() if id(p) in owner]

    def taken(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """The ``buckets`` that the kernel steps."""
        return self.fused.takes(buckets) if self.fused is not None else set()

    def skips_on_device(self) -> bool:
        """Whether kernels that take ``found_inf`` do all of a step."""
        places = self.places()
        buckets = {bucket for bucket, _, _ in places}
        if any(bucket.offloaded for bucket in buckets):
            return False  # a skipped step would still be copied to the device or written to files
        return len(places) == len(self.parameters()) and self.taken(buckets) == buckets

    def uncount_step(self) -> None:
        """Restore the step counters after the last step was skipped on the device."""
        assert self.fused is not None
        self.fused.uncount()

    def members(self, used: Callable[[Bucket, int], bool]) -> dict[Bucket, list[Member]]:
        """The fragments by bucket, in order."""
        found: dict[Bucket, list[Member]] = {}
        for bucket, index, parameter in self.places():
            members = found.setdefault(bucket, [])
            for piece, fragment in zip(bucket.pieces_of(index), self.fragments(parameter), strict=True):
                members.append(Member(parameter, fragment, piece, used(bucket, index)))
        return {bucket: sorted(members, key=lambda m: m.piece.offset) for bucket, members in found.items()}

    # ---- step --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.stepper.staging:
            return None
        if self._wide is not None and self._entered == self.engine.backwards:
            self._depth += 1  # a subclass calls its parent's step; torch runs the hooks for both
            if self.stepper.closure is not None:
                self.stepper.closure.renew()
            return None
        if self.loss_scale != 1.0:
            raise RuntimeError(
                f"The gradients of this {type(optimizer).__name__} still carry the loss scale {self.loss_scale:g}. In "
                "manual optimization step the optimizer that `self.optimizers()` returns: it unscales first."
            )
        args, kwargs = self._run_closure(args, kwargs)
        used = self.grads.used()
        known = {(bucket, index) for bucket, indices in used.items() for index in indices}
        members = self.members(lambda bucket, index: (bucket, index) in known)
        self._early = self.overlap.take_early(members, used)
        for bucket in members:
            bucket.edits.check(values=True)
        if self.fused is not None and not self._early:
            self.fused.begin()
        plans = self.overlap.plan_late(members, self._early, used)
        for bucket in members:
            if plans.get(bucket) is None:
                bucket.wait_background_step()  # this thread steps it
        for bucket in self._early - plans.keys():
            bucket.wait_background_step()  # this thread publishes it
            bucket.weights.note_readers()  # the rest of backward may have read unsharded parameters meanwhile
        self.narrow()
        self._depth, self._entered = 1, self.engine.backwards
        self.engine.comm.before_write()
        try:
            self.stepper.hand_over(plans, members)
            self.stepper.step_resting(members, used if self.norms is not None else ())
            self.stepper.step_host(members)
            self.engine.offload_manager.check(self.engine.comm, "states in files")
        except SwapError:
            self.widen()
            raise
        self._drop_buckets({*self._early, *plans})
        taken = self.taken(members)
        fused = {bucket: members.pop(bucket) for bucket in list(members) if bucket in taken}
        if self.fused is not None and fused:
            self.fused.step(fused, self.found_inf)
            self.drop({id(member.fragment) for bucket in fused.values() for member in bucket})
        for bucket in [bucket for bucket in members if bucket.staged]:
            self.stepper.step_staged(bucket, members.pop(bucket))
        for bucket, fragments in members.items():
            grads = bucket.grads
            for member in fragments:
                member.fragment.grad = grad_of(grads, member)
        if self.norms is not None:
            self.norms.expect(members)
        if self.stepper.closure is not None:
            self.stepper.closure.expect(member.fragment for mine in members.values() for member in mine)
        self._stepping = members
        return args, kwargs

    def _run_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the closure now, because the step needs its gradients on fragments."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if callable(closure) and not isinstance(closure, RanClosure):
            with torch.enable_grad():
                closure = RanClosure(type(self.optimizer).__name__, closure())
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": closure}
            else:
                args = (args[0], closure, *args[2:])
        self.stepper.closure = closure if isinstance(closure, RanClosure) else None
        self.stepper.arguments = args[1:], kwargs
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.stepper.staging:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self.stepper.keep(self._stepping)
        self._stepping, self.stepper.closure, self.stepper.arguments = {}, None, ((), {})
        self.widen()
        self.engine.publish({bucket for bucket, _, _ in self.places()} - self.overlap.take_late())
        self.overlap.forget_early(self._early)
        self._early = set()

    def switch(self, method: Callable[[], Any]) -> Any:
        """Call a method of the optimizer that changes weights, on fragments as in ``step``. Collective."""
        self.before_state_dict()
        self.engine.finish_steps()
        members = self.members(lambda bucket, index: False)
        buckets = set(members)
        self.narrow()
        self.engine.comm.before_write()
        try:
            self.stepper.step_resting(members, buckets, method)
            self.engine.offload_manager.check(self.engine.comm, "states in files")
            for bucket in [bucket for bucket in members if bucket.staged]:
                self.stepper.step_staged(bucket, members.pop(bucket), method)
            result = method()
            self.stepper.keep(members)
        finally:
            self.widen()
        self.engine.publish(buckets)
        return result

    # ---- groups and state --------------------------------------------------------------------------------------

    def narrow(self) -> None:
        """Replace parameters by fragments in groups and state. See Note [Narrowing]."""
        assert self._wide is None, "a step of this optimizer failed half way; its groups hold fragments"
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._wide = [group["params"] for group in groups]
        for group, wide in zip(groups, self._wide, strict=True):
            group["params"] = [fragment for p in wide for fragment in self.fragments(p)]
            for p in wide:
                for fragment in self.fragments(p):
                    if fragment is not p and p in state:
                        state[fragment] = state.pop(p)

    def drop(self, done: set[int]) -> None:
        """Remove stepped fragments from the groups, until ``widen``."""
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in done]

    def _drop_buckets(self, done: set[Bucket]) -> None:
        if done:
            self.drop({id(f) for bucket, _, p in self.places() if bucket in done for f in self.fragments(p)})

    @property
    def narrowed(self) -> bool:
        """Whether groups and state hold fragments."""
        return self._wide is not None

    def widen(self) -> None:
        """Undo ``narrow``; no-op if groups hold parameters."""
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

    def _adopt_state(self) -> None:
        """Shard and cast state that the constructor made in the parameters' full shape (Adagrad)."""
        for bucket, index, parameter in self.places():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            pieces = bucket.pieces_of(index)
            if not pieces:
                del self.optimizer.state[parameter]
            for piece in pieces:
                for key, value in state.items():
                    cut = cut_state(value, bucket.shapes[index], piece.lo, piece.hi)
                    # The constructor used the dtype of the compute copy.
                    wide = cut is not value and cut.is_floating_point()
                    state[key] = cut.to(bucket.step_dtype) if wide else cut

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.engine.finish_steps()

    def _on_state_dict(self, optimizer: Optimizer) -> None:
        self.before_state_dict()
        self.engine.finish_steps()
        if not self.by_bucket:
            for bucket in {bucket for bucket, _, _ in self.places()}:
                for store in bucket.step_stores():
                    store.write()  # the caller may edit it


def cut_state(value: Any, shape: tuple[int, ...], lo: int, hi: int) -> Any:
    """Elements [lo, hi) of a state tensor that has its parameter's shape; any other value unchanged."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dim() == 0:
        return value
    return _shaped(value.reshape(-1)[lo:hi].clone(), shape)


def _shaped(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``row`` in the parameter's shape if it has all elements, else 1D."""
    return row.view(shape) if row.numel() == torch.Size(shape).numel() else row


def _shape_of(piece: Piece, shape: torch.Size) -> torch.Size:
    """The shape of a fragment, as ``_shaped``."""
    return shape if piece.numel == shape.numel() else torch.Size([piece.numel])


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
        if sharded is None or sharded.narrowed:
            return method(self, *args, **kwargs)
        # On the user's instance, not on Lightning's wrapper: the method may set attributes.
        return sharded.switch(lambda: method(sharded.optimizer, *args, **kwargs))

    on_fragments.narrows = True  # type: ignore[attr-defined]
    setattr(cls, name, on_fragments)
