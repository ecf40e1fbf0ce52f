"""Runs any torch optimizer on this rank's shard; the user's object, its groups and its class stay.

Note [The plan of a step]
    What a step needs to know of groups, used parameters and training is in a ``StepPlan`` (param_groups.py), and kept
    while these are the same. Each of its buckets is stepped in one of six ways (``StepPath``), which is decided anew in
    each step, before anything is written: hooks and options decide whether the kernel steps, and what was stepped
    beside backward differs. The step runs in their order: what moves bytes begins first, and the optimizer's own
    ``step`` comes last.

Note [Staged buckets]
    Where master weights, accumulators or moments have 16 bits and the step has not, the optimizer steps fp32 copies of
    one bucket's fragments, gradients and moments at a time. The update is computed in fp32 and rounded once, weights as
    ``StoragePlan.rounding`` says. A kernel does the same without copies.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lt_zero.common.arguments import expect
from lt_zero.common.compat import bare_step, version_of, without_grad
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.common.moment_form import stored_part
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.inplace_edits import check_all
from lt_zero.core.engine.layout import Piece
from lt_zero.core.engine.optimizer_spec import ExchangingOptimizer, NormedOptimizer
from lt_zero.core.step.background_steps import BackgroundSteps, OverlappingOffload
from lt_zero.core.step.fused_step import FusedStep, Part
from lt_zero.core.step.loaded_states import LoadedStates
from lt_zero.core.step.param_groups import (
    BucketStep,
    ShardedParamGroups,
    StepOptions,
    StepParam,
    StepPlan,
    grad_of,
    keep_assigned,
    keep_moments,
    row_of,
    widen_moments,
)
from lt_zero.core.step.reduced_grads import ReducedGrads
from lt_zero.core.step.supported_optimizers import (
    check_moments,
    check_parts,
    check_rounding,
    check_supported,
    states_per_element,
)
from lt_zero.core.stores.io_options import SwapError

if TYPE_CHECKING:
    from lt_zero.core.step.full_norms import FullNorms

log = logging.getLogger("lt_zero")

_ATTRIBUTE = "_lt_zero"  # set on the optimizer
_SWITCHES = ("train", "eval")  # methods of schedule-free optimizers that change weights


class StepPath(Enum):
    """Ways to step a bucket, in the order of a step."""

    __hash__ = object.__hash__  # Enum's is a function in Python, and a step looks up paths many times

    BACKGROUND = "the background thread, which publishes it, too"
    STREAMED = "one bucket at a time: its states are in files"
    HOST = "the kernel, one bucket at a time: copies to the device overlap with the next bucket's step"
    KERNEL = "the kernel, many buckets in a call"
    STAGED = "the optimizer, one bucket at a time, on fp32 copies"
    TORCH = "the optimizer, together with all others"


# Steps of single buckets, which have nothing to do without gradients.
_ONE_BY_ONE = StepPath.BACKGROUND, StepPath.STREAMED, StepPath.HOST


class RanClosure:
    """The closure that ``step`` gets: forward and backward ran before, because ``step`` works on fragments.

    Args:
        name: name of the optimizer's class.
        result: what the user's closure returned.
    """

    def __init__(self, name: str, result: Any) -> None:
        self.name, self.result = name, result
        self.called = False
        self.called_now = False  # in the running step
        self._before: list[tuple[Parameter, int, Tensor | None]] = []  # fragment, version, gradient

    def expect(self, fragments: Iterable[Parameter]) -> None:
        """Begin a step of ``fragments``."""
        self._before = [(fragment, version_of(fragment), fragment.grad) for fragment in fragments]
        self.called_now = False

    def __call__(self) -> Any:
        """The result of the user's closure.

        Raises:
            RuntimeError: on a second call, or if weights or gradients have changed: the optimizer needs another pass.
        """
        changed = any(version_of(f) != version or f.grad is not grad for f, version, grad in self._before)
        if changed or self.called_now:
            raise RuntimeError(
                f"{self.name}.step evaluates its closure {'again' if self.called else 'at other weights'}, but "
                "ZeRO runs forward and backward once per step, before the optimizer gets this rank's shard of weights "
                "and gradients. Use an optimizer that needs one pass per step, such as AdamW, or train with DDP."
            )
        self.called = self.called_now = True
        return self.result


class ShardedOptimizer(ProcessLocal):
    """Hooks around one optimizer's ``step``, state dicts and ``train`` and ``eval``.

    Args:
        engine: owns the parameters; in a single process other parameters are stepped as usual.
        optimizer: any ``torch.optim.Optimizer`` whose update is element-wise, or, with
            ``zero_optimization.shard_along=parameter``, treats parameters one by one.

    Raises:
        TypeError: the optimizer needs full matrices, sparse gradients or repeated closures.
        RuntimeError: on all ranks, if their optimizers differ, or have parameters that the engine does not own.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        expect(engine, Engine, "ShardedOptimizer(engine=...)", "pass what lt_zero.shard returns")
        expect(optimizer, Optimizer, "ShardedOptimizer(optimizer=...)", "pass a torch.optim.Optimizer")
        self.fragments = ShardedParamGroups(engine, optimizer)
        self.options = StepOptions(self.fragments)
        engine.same_on_ranks.begin(self.options)
        manager = engine.offload_manager
        whole = engine.options.shard_along == "parameter" or not engine.sharded_optim
        divided = engine.sharded_optim or manager.streams or engine.has_groups
        elementwise = engine.options.optimizer_is_elementwise
        gather = partial(engine.peers.host_gather, name=f"trials of {type(optimizer).__name__}")
        check_supported(optimizer, divided, whole, elementwise, gather)
        spans = {id(p): bucket.layout.spans[index] for bucket, index, p in self.fragments.places()}
        parts = {key: span.name for key, span in spans.items() if not span.spec.is_whole}
        check_parts(optimizer, parts, elementwise)
        check_moments(optimizer, engine.policy.moments)
        if engine.policy.stochastic:
            check_rounding(optimizer)
        if manager.streams:
            manager.require(engine.world, states_per_element(optimizer))
        engine.begin_training()
        self.engine, self.optimizer = engine, optimizer
        self.found_inf: Tensor | None = None  # 0D fp32: the kernel skips the step if it is not zero
        self.before_state_dict: Callable[[], object] = lambda: None  # waits for the outcome of the last step
        self._by_bucket = False  # see ``by_bucket``
        self._depth = 0  # nested calls of step
        self._entered = 0  # ``Engine.backwards`` when the running step began
        self._staging = False  # the optimizer steps a single bucket now
        self._closure: RanClosure | None = None  # of the running step
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the running step
        self._torch: Sequence[BucketStep] = ()  # what the optimizer's own ``step`` updates now
        self._told = False
        self._norms: FullNorms | None = None  # set if the optimizer's step is collective
        if isinstance(optimizer, NormedOptimizer):
            from lt_zero.core.step.full_norms import FullNorms

            exact = engine.options.norm_of(2.0) if engine.options.norms is not None else None
            self._norms = FullNorms(engine.device, exact)
            optimizer.combine(self._norms, self._norms.maxima)
        engine.exchange.connect(optimizer, self.fragments)
        if isinstance(optimizer, ExchangingOptimizer):
            engine.before_reading.append(self._end_interval)
        fused = engine.options.fused_step and bool(FusedStep.operation_of(optimizer))
        self.fused = FusedStep(self.fragments, self._norms) if fused else None
        self.grads = ReducedGrads(self.fragments)
        self.overlap = BackgroundSteps()
        if isinstance(manager, OverlappingOffload):
            self.overlap = manager.background_steps(self.fragments, self.fused, self.grads)
        manager.accept_partially_stepped()
        self.fragments.adopt_state()
        # Hooks and one attribute: the optimizer keeps its class, and copies and pickles have neither.
        before = ShardedOptimizer.of(optimizer)
        for handle in before._handles if before is not None else ():
            # These hooks are of an earlier engine.
            handle.remove()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            *LoadedStates(self.fragments).install(),
        ]
        setattr(optimizer, _ATTRIBUTE, self)
        engine.optimizers.add(self)
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
        """True if kernels that take ``found_inf`` do all of a step."""
        places, buckets = self.fragments.places(), self.fragments.buckets()
        if any(bucket.offloaded for bucket in buckets):
            # A step that the device skips would still be copied to the device or written to files.
            return False
        return len(places) == len(self.parameters()) and self.kernel_buckets(buckets) == buckets

    def uncount_step(self) -> None:
        """Restore the step counters after the last step was skipped on the device."""
        assert self.fused is not None
        self.fused.uncount()

    # ---- its parts -----------------------------------------------------------------------------------------

    def kernel_buckets(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """The ``buckets`` that the kernel steps."""
        return self.fused.takes(buckets) if self.fused is not None else set()

    def _begin(self, plan: StepPlan) -> tuple[Set[Bucket], Mapping[Bucket, list[Part] | None]]:
        """Begin a step; returns the buckets that were stepped beside backward, and ``BackgroundSteps.plan_late``.

        Collective. Waits for background steps of the buckets that this thread steps or publishes.
        """
        overlaps = self.engine.offload_manager.overlaps  # the same on all ranks
        early = self.overlap.take_early(plan.used) if overlaps else frozenset[Bucket]()
        steps = [bucket for bucket in plan.steps if bucket not in early]
        check_all(bucket.edits for bucket in steps)
        if self.fused is not None and not early:
            self.fused.begin()
        late = self.overlap.plan_late(plan, early) if overlaps else {}
        for bucket in steps:
            if late.get(bucket) is None:
                # This thread steps the bucket, so the background step of the last step has to be over.
                bucket.wait_background_step()
        for bucket in early - late.keys():
            # The background thread has stepped the bucket beside backward, and this thread publishes it.
            bucket.wait_background_step()
            # The rest of backward may have read unsharded parameters meanwhile: note that work again before the copy.
            bucket.weights.copy.note_readers()
        return early, late

    @without_grad
    def _run(
        self,
        plan: StepPlan,
        early: Set[Bucket],
        late: Mapping[Bucket, list[Part] | None],
        method: Callable[[], Any] | None = None,
    ) -> None:
        """Do a step up to the optimizer's own ``step``, for which the gradients are ready afterwards. Collective.

        Args:
            plan: of the step.
            early: as from ``_begin``.
            late: likewise.
            method: called instead of ``step``.

        Raises:
            SwapError: on all ranks, if states of one cannot be read or written.
        """
        steps = {bucket: step for bucket, step in plan.steps.items() if bucket not in early}
        kernel = self.kernel_buckets(steps) if method is None else set[Bucket]()
        # The buckets that are stepped without gradients here, too: their step is collective, or it is no step.
        together = steps.keys() if method is not None else plan.used.keys() if self._norms is not None else ()
        paths = defaultdict[StepPath, list[BucketStep]](list)
        for bucket, step in steps.items():
            path = self._path_of(bucket, bucket in kernel, bucket in late)
            if step.used or bucket in together or path not in _ONE_BY_ONE:
                paths[path].append(step)
        for step in paths[StepPath.BACKGROUND]:
            if late[step.bucket] is not None:
                continue
            if step.bucket.streamed:
                self._step_streamed([step], kernel)
            else:
                self._step_on_host(step)
        for bucket, parts in late.items():
            self.overlap.hand_over(bucket, parts)
        if paths[StepPath.STREAMED]:
            self._step_streamed(paths[StepPath.STREAMED], kernel, method)
        for step in paths[StepPath.HOST]:
            self._step_on_host(step)
        self.engine.offload_manager.check(self.engine.world, "states in files")
        if paths[StepPath.KERNEL]:
            assert self.fused is not None
            self.fused.step(paths[StepPath.KERNEL], self.found_inf)
        self._torch = paths[StepPath.TORCH]
        if (self._torch or paths[StepPath.STAGED]) and not self._told:
            self._tell()
        for step in paths[StepPath.STAGED]:
            self._step_staged(step, method)
        self.fragments.drop(plan.steps.keys() - {step.bucket for step in self._torch})
        if method is None:
            for step in self._torch:
                for member in step.members:
                    member.fragment.grad = grad_of(step.bucket, member)
            self._expect(self._torch)

    @staticmethod
    def _path_of(bucket: Bucket, in_kernel: bool, is_late: bool) -> StepPath:
        """The way to step a bucket, which the kernel may step (``in_kernel``), and the background publish."""
        if is_late:
            return StepPath.BACKGROUND
        if bucket.streamed:
            return StepPath.STREAMED
        if in_kernel:
            return StepPath.HOST if bucket.offloaded else StepPath.KERNEL
        return StepPath.STAGED if bucket.storage.staged else StepPath.TORCH

    def _tell(self) -> None:
        """Say once why no kernel steps."""
        self._told = True
        name = type(self.optimizer).__name__
        on = self.engine.options.fused_step
        why = self.fused.refusal() if self.fused is not None else "it has no kernel" if on else "by fused_step"
        log.info("%s is stepped by its own step, not by a kernel of lt_zero: %s", name, why)

    def _expect(self, steps: Sequence[BucketStep]) -> None:
        """Prepare what the optimizer's own step of these fragments calls."""
        if self._norms is not None:
            self._norms.expect(steps)
        if self._closure is not None:
            self._closure.expect(member.fragment for step in steps for member in step.members)

    def _step_on_host(self, step: BucketStep) -> None:
        """Step a bucket whose states are in host memory, and start copying its weights to the device.

        That gives the staging buffer back, for which steps that were handed to the background wait.
        """
        assert self.fused is not None
        self.fused.step([step])
        step.bucket.weights.refresh()

    def _step_streamed(
        self, steps: Sequence[BucketStep], kernel: Collection[Bucket], method: Callable[[], Any] | None = None
    ) -> None:
        """Step the buckets whose states are in files one by one: core/stores/store.py, ``stream``."""
        stepped = {step.bucket: step for step in steps}
        for bucket in self.engine.offload_manager.stream_buckets(list(stepped)):
            step = stepped[bucket]
            holders = [(member.fragment, member.piece) for member in step.members]
            self._store_states(bucket, holders)
            if self.fused is not None and bucket in kernel:
                self.fused.step([step])
            else:
                self._step_staged(step, method)
            self._store_states(bucket, holders)
            bucket.weights.refresh()

    def _step_staged(self, step: BucketStep, method: Callable[[], Any] | None) -> None:
        """Step the fragments of one bucket on copies. See Note [Staged buckets].

        ``method`` is called instead of ``step``.
        """
        bucket = step.bucket
        members = step.members
        states = self.optimizer.state
        dtype = bucket.storage.step
        rows = [row_of(bucket, member) for member in members]
        for member, row in zip(members, rows, strict=True):
            member.fragment.data = row.to(dtype)
            grad = grad_of(bucket, member)
            member.fragment.grad = grad.to(dtype) if grad is not None else None
        kept = [widen_moments(states.get(member.fragment, {}), member.fragment, dtype) for member in members]
        self._expect([step])
        self._staging = True
        try:
            with self.fragments.only(members):
                if method is not None:
                    method()
                else:
                    args, kwargs = self._arguments
                    # Call the bare step: hooks run once, around the whole step.
                    bare_step(self.optimizer)(self.optimizer, *args, **kwargs)
            for member, row in zip(members, rows, strict=True):
                if method is None and member.used:
                    self._round(bucket, member, row)
                else:
                    keep_assigned(member.fragment, row)
        finally:
            self._staging = False
            for member, row, before in zip(members, rows, kept, strict=True):
                if (state := states.get(member.fragment)) is not None:
                    keep_moments(state, member.fragment, bucket.storage.moments, before)
                member.fragment.grad = None
                member.fragment.data = row

    def _round(self, bucket: Bucket, member: StepParam, row: Tensor) -> None:
        """Write a fragment's stepped weights to ``row``, its master weights; no-op if it is a view of them."""
        fragment, states = member.fragment, self.optimizer.state
        if fragment.data_ptr() == row.data_ptr():
            return
        spec, state = bucket.layout.spans[member.piece.index].spec, states.get(fragment, {})
        bucket.storage.rounding.store(fragment.detach(), row, spec, member.piece.lo, state)
        if state:
            states[fragment] = state

    @without_grad
    def _finish(self) -> None:
        """Copy weights that the optimizer's own ``step`` assigned (``p.data``) to the master weights."""
        for step in self._torch:
            for member in step.members:
                row = row_of(step.bucket, member)
                if keep_assigned(member.fragment, row):
                    member.fragment.data = row
        self._torch = ()
        self._closure = None
        self._arguments = ((), {})

    # ---- step --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._staging:
            return None
        if self.fragments.narrowed and self._entered == self.engine.backwards:
            # A subclass calls its parent's step, and torch runs the hooks for both.
            self._depth += 1
            if self._closure is not None:
                self._closure.called_now = False
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
        self._closure = closure if isinstance(closure, RanClosure) else None
        self._arguments = args[1:], kwargs
        self._prepare()
        return args, kwargs

    @without_grad
    def _prepare(self) -> None:
        """Do all of a step that comes before the optimizer's own. Collective."""
        plan = self.grads.plan()
        self.engine.same_on_ranks.note(self.options)
        early, late = self._begin(plan)
        self.fragments.narrow(plan)
        self._depth, self._entered = 1, self.engine.backwards
        # Wait until no peer reads the weights that this step writes.
        self.engine.before_write()
        try:
            self._run(plan, early, late)
        except SwapError:
            self.widen()
            raise

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._staging:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._finish()
        self.widen()
        self.engine.grad_views.spend()
        # The background thread publishes the buckets in ``late`` when it has stepped them.
        self.engine.publish(self.fragments.buckets() - self.overlap.late)
        if self.engine.offload_manager.overlaps:
            self.overlap.end_step()

    @contextmanager
    def by_bucket(self) -> Iterator[None]:
        """Context of a ``state_dict`` whose caller reads stored states by itself, bucket by bucket."""
        self._by_bucket = True
        try:
            yield
        finally:
            self._by_bucket = False

    def widen(self) -> None:
        """Put the module's parameters back into the groups; no-op outside of a step."""
        self.fragments.widen()

    def switch(self, method: Callable[[], Any]) -> Any:
        """Call a method of the optimizer that changes weights, on fragments as in ``step``. Collective."""
        self.before_state_dict()
        self.engine.finish_steps()
        buckets = self.fragments.buckets()
        plan = self.fragments.plan(frozenset())
        self.fragments.narrow(plan)
        self.engine.before_write()
        try:
            self._run(plan, frozenset(), {}, method)
            result = method()
            self._finish()
        finally:
            self.widen()
        self.engine.publish(buckets)
        return result

    def _end_interval(self) -> None:
        """Let ranks that have stepped apart exchange. Collective."""
        optimizer = self.optimizer
        if isinstance(optimizer, ExchangingOptimizer) and ShardedOptimizer.of(optimizer) is self:
            self.switch(optimizer.end_interval) if optimizer.pending else optimizer.end_interval()

    # ---- states ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def store_states(self) -> None:
        """Move loaded states to the bucket stores, bucket by bucket. Not collective."""
        self.engine.finish_steps()
        if self.engine.offload_manager.overlaps:
            self.overlap.forget_states()
        places: dict[Bucket, list[tuple[Parameter, Piece]]] = {}
        for bucket, index, parameter in self.fragments.places():
            if bucket.streamed:
                places.setdefault(bucket, []).extend((parameter, piece) for piece in bucket.pieces_of(index))
        for bucket, holders in places.items():
            for store in bucket.step_stores():
                store.write()
            self._store_states(bucket, holders)
            bucket.put_away()

    def _store_states(self, bucket: Bucket, holders: list[tuple[Parameter, Piece]]) -> None:
        """Move element-wise states from a first step or a checkpoint to the bucket's stored tensors."""
        for holder, piece in holders:
            state = self.optimizer.state.get(holder, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != piece.numel:
                    continue
                form = bucket.storage.moments.form_of(value)
                store = bucket.states.store(key, form)
                if store is not None and not store.owns(stored_part(value)):
                    store.write()
                    state[key] = form.view(store.lend, piece.offset, value.shape, key).copy_(value)

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self.before_state_dict()
        self.engine.finish_steps()
        if not self._by_bucket:
            for bucket in self.fragments.buckets():
                for store in bucket.step_stores():
                    # Mark the states as changed: the caller of ``state_dict`` may edit them.
                    store.write()


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
