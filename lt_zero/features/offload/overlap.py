"""Background steps: which offloaded buckets are stepped during backward or the next forward.

Note [Beside backward]
    Once the gradients of a bucket are reduced, backward does not need its weights any more, and the bucket can be
    stepped if gradients are not clipped, unscaled or read before the step. That is not collective, so each rank decides
    for itself: a bucket with a parameter that this rank did not use waits for the optimizer step, when the ranks have
    agreed on the used parameters. Later backwards of the same step find their weights unchanged: the compute copies
    of unsharded parameters are written by the optimizer step, and gathering a bucket again after its background step
    raises. If backward fails, or no step follows, the model is partially stepped
    (``Offload.partially_stepped``) and can be neither stepped nor saved.

Note [Edits before a step beside backward]
    A bucket whose compute copy user code has edited waits for the optimizer step, too, which keeps edits. On an
    accelerator, to ask in the middle of backward is to wait until the device has done all that was queued, and then
    nothing is queued for the next unit. So digests are compared at the beginning of backward, and again when a bucket
    is stepped. The second answer is read by the optimizer step: an edit that came between the two is an error.

Note [Beside the next forward]
    ``overlap_step: true``: the optimizer step records its plan (with the current learning rates), hands its buckets to
    the background thread and returns. A unit waits for its own buckets before its forward. Unsharded parameters are
    guarded meanwhile, so that any other use waits for all buckets; a state dict waits for the optimizer states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lt_zero.common.users_code import warn
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.inplace_edits import ComparedDigests, InplaceEdits
from lt_zero.core.engine.options import StatesOffload
from lt_zero.core.step.background_steps import BackgroundSteps, OverlappingOffload
from lt_zero.core.step.fused_step import FusedStep, Part
from lt_zero.core.step.param_groups import BucketStep, ShardedParamGroups, StepPlan
from lt_zero.core.step.reduced_grads import ReducedGrads
from lt_zero.core.stores.io_options import SwapError
from lt_zero.offload.background import Background, Job

log = logging.getLogger("lt_zero")

_WAITING = 1  # the most buckets that are queued with gradients in memory, if gradients are in files


@dataclass(kw_only=True)
class SteppingOffload(OverlappingOffload):
    """The background thread of one engine, and what is known of its steps."""

    how: StatesOffload
    background: Background | None = None
    failure: SwapError | None = None  # the first error of a background step

    def overlap(self, background: Background | None) -> None:
        """Step in the background from now on, by this thread; None: other ranks do."""
        self.overlaps = True
        self.background = background

    @override
    def background_steps(self, fragments: ShardedParamGroups, fused: FusedStep | None, grads: ReducedGrads) -> Overlap:
        return Overlap(self, fragments, fused, grads)

    def streaming(self) -> AbstractContextManager[object]:
        """Context for visiting buckets one by one."""
        return nullcontext()

    def note(self, error: Exception) -> None:
        """Record an error of a background step. See background.py, Note [Errors in the thread]."""
        if not isinstance(error, SwapError):
            log.error("A step in the background failed", exc_info=error)
            error = SwapError(f"a step in the background failed ({error!r}); restart from a checkpoint")
        self.failure = self.failure or error

    @override
    def find_problem(self) -> SwapError | None:
        return self.failure or super().find_problem()

    @override
    def refuse_partially_stepped(self, world: World, problem: str = "") -> None:
        with world.agree("checking steps beside backward", SwapError):
            if problem:
                raise SwapError(problem)
            if self.partially_stepped:
                raise SwapError(
                    f"{self.partially_stepped} were stepped during a backward that no optimizer step followed, so the "
                    "weights are from two different steps. Load a checkpoint; to step only after backward, set "
                    "zero_optimization.offload_optimizer.overlap_step=false."
                )

    @override
    def accept_partially_stepped(self) -> None:
        if self.partially_stepped:
            ahead = self.partially_stepped
            self.end_partially_stepped()
            warn(f"Training goes on although the weights of {ahead} are a step ahead of the others: load a checkpoint.")

    @override
    def rest(self) -> None:
        if self.background is not None:
            self.background.close()

    @override
    def close(self) -> None:
        if self.background is not None:
            self.background.close()
        self.background = None


class Overlap(BackgroundSteps):
    """The background steps of one optimizer.

    Args:
        offload: has the thread; without one nothing is stepped in the background.
        fragments: of the optimizer.
        fused: its kernel; without one nothing is stepped in the background.
        grads: its reduced gradients.
    """

    def __init__(
        self, offload: SteppingOffload, fragments: ShardedParamGroups, fused: FusedStep | None, grads: ReducedGrads
    ) -> None:
        self._fragments = fragments
        self._fused = fused
        self._grads = grads
        self._engine = fragments.engine
        self._offload = offload
        self._early: dict[Bucket, int] = {}  # stepped beside the last backward -> ``GradAccumulator.changes`` then
        self._backwards = 0  # ``Engine.backwards`` after that backward
        self.early: set[Bucket] = set()
        self.late: set[Bucket] = set()
        self._digests = ComparedDigests({})  # at the beginning of the backward
        self._stepped_digests: dict[InplaceEdits, Tensor | None] = {}  # when a bucket was stepped beside it
        self._steps: dict[Bucket, BucketStep] = {}
        self._indices: dict[Bucket, set[int]] = {}  # this optimizer's parameters in a bucket
        self._steady: dict[Bucket, list[int]] = {}  # used parameters of a bucket in the last step

    # ---- beside backward ---------------------------------------------------------------------------------------

    @override
    @contextmanager
    def beside_backward(self) -> Iterator[None]:
        """Context of a backward. See Note [Beside backward]."""
        # If no step followed the last backward, the engine stays partially stepped, and the next check says so.
        self._end_early()
        if self._offload.background is None or not self._can_begin():
            yield
            return
        try:
            with self._engine.reducer.stepping(self._landed), self._offload.streaming():
                yield
        except BaseException:
            self._end_early()
            raise
        finally:
            self._backwards = self._engine.backwards
            for bucket in self._early:
                # Backward is over, so later forwards may gather the bucket again.
                bucket.grads.end_early_step()

    def _can_begin(self) -> bool:
        fused = self._fused
        if self._offload.partially_stepped or fused is None:
            return False
        if self._grads.loss_scale != 1.0 or not self._engine.reducer.sync:
            return False
        # Frozen parameters have no gradient; ``_landed`` checks that the others have one.
        places = self._fragments.places()
        plan = self._fragments.plan({(bucket, index) for bucket, index, p in places if p.requires_grad})
        self._indices = self._fragments.indices()
        taken = fused.takes(b for b in plan.steps if b.can_step_early and fused.steps_alone(b))
        self._steps = {bucket: step for bucket, step in plan.steps.items() if bucket in taken}
        edits = [bucket.edits for bucket in self._steps if bucket.edits.on_accelerator]
        self._digests = ComparedDigests({each: each.differs() for each in edits})
        fused.begin()
        return bool(self._steps)

    def _landed(self, bucket: Bucket) -> bool:
        """Called when the gradients of ``bucket`` are reduced; returns whether it is stepped now."""
        step = self._steps.get(bucket)
        fused = self._fused
        if (
            step is None
            or not step.members
            or bucket in self._early
            or self._engine.gatherer.is_pinned(bucket)
            or bucket.has_grads()
        ):
            # A second gradient of a bucket that was stepped comes too late: ``take_early`` notices it and raises.
            return False
        if bucket.grads.used != bucket.grads.valid or not bucket.grads.valid <= self._indices[bucket]:
            return False
        if not bucket.sharding.params and bucket.edits.seen(self._digests):
            return False
        assert fused is not None
        # Planning counts the step, so it comes after all checks.
        parts = fused.plan(step)
        if parts is None:
            return False
        self._early[bucket] = bucket.grads.changes
        if bucket.edits.on_accelerator:
            self._stepped_digests[bucket.edits] = bucket.edits.differs()
        bucket.grads.begin_early_step()
        names = ", ".join(repr(bucket.name) for bucket in list(self._early)[:3])
        self._offload.note_partially_stepped(
            f"{len(self._early)} of {len(self._engine.buckets)} buckets ({names}, ...)"
        )
        limit = _WAITING if bucket.grads.streamed else None
        self._submit(bucket, lambda: self._step_early(bucket, parts), None, limit)
        return True

    def _edited_meanwhile(self) -> str:
        """Say which buckets were edited between the beginning of backward and their step; '': none."""
        digests, self._stepped_digests = ComparedDigests(self._stepped_digests), {}
        names = ", ".join(repr(edits.name) for edits in digests.edited[:3])
        return names and (
            f"The weights of the modules of {names} were changed through `p.data` during a backward in which they were "
            "stepped, so the change is lost. Load a checkpoint. Change weights before backward or after the optimizer "
            "step, or set zero_optimization.offload_optimizer.overlap_step=false."
        )

    def _step_early(self, bucket: Bucket, parts: list[Part]) -> None:
        assert self._fused is not None
        # Backward may still read unsharded parameters; sharded ones are not gathered again.
        self._fused.launch([bucket], parts, write=bucket.sharding.params)
        if bucket.sharding.params:
            bucket.weights.refresh()
        if bucket.streamed:
            # Discarding saves a write and a read of the file; ``end_step`` clears the gradients.
            bucket.grads.drop_stored()

    @override
    def take_early(self, used: Mapping[Bucket, list[int]]) -> set[Bucket]:
        problem = self._edited_meanwhile()
        same = all(bucket in used and bucket.grads.changes == then for bucket, then in self._early.items())
        self.early = self._end_early()
        if self.early and same and not problem and self._backwards == self._engine.backwards:
            assert self._fused is not None
            if self._fused.has_same_groups():
                self._offload.end_partially_stepped()
        if self._offload.overlaps:
            self._offload.refuse_partially_stepped(self._engine.world, problem)
        return self.early

    def _end_early(self) -> set[Bucket]:
        early = set(self._early)
        self._early = {}
        self._stepped_digests = {}
        for bucket in early:
            bucket.grads.end_early_step()
        return early

    # ---- beside the next forward -------------------------------------------------------------------------------

    @override
    def plan_late(self, plan: StepPlan, early: Set[Bucket]) -> dict[Bucket, list[Part] | None]:
        fused = self._fused
        if fused is None or self._offload.background is None or self._offload.how.overlap_step is not True:
            return {}
        taken = fused.takes(b for b in plan.used if b.offloaded and fused.steps_alone(b))
        plans: dict[Bucket, list[Part] | None] = {}
        for bucket, indices in plan.used.items():
            steady = self._steady.get(bucket) == indices
            self._steady[bucket] = indices
            if steady and bucket in taken:
                plans[bucket] = None if bucket in early else fused.plan(plan.steps[bucket])
        return plans

    @override
    def hand_over(self, bucket: Bucket, parts: list[Part] | None) -> None:
        bucket.release()
        publish = bucket.await_publication()
        self.late.add(bucket)
        self._submit(bucket, lambda: self._step_late(bucket, parts), publish, None)

    def _step_late(self, bucket: Bucket, parts: list[Part] | None) -> None:
        if parts is not None:
            assert self._fused is not None
            self._fused.launch([bucket], parts)
            if bucket.streamed:
                bucket.weights.refresh()
        bucket.refresh_after_step()

    def _submit(
        self, bucket: Bucket, step: Callable[[], None], publish: Callable[[], object] | None, limit: int | None
    ) -> None:
        background = self._offload.background
        assert background is not None
        bucket.weights.copy.note_readers()
        bucket.edits.pause()
        job = Job(step, bucket.stores_of_step, publish, self._offload.note)
        bucket.hand_over(job)
        background.hand_over(job, limit)

    # ---- after a step ------------------------------------------------------------------------------------------

    @override
    def end_step(self) -> None:
        """Forget the buckets of the step; clears gradients whose files were discarded."""
        for bucket in self.early:
            if bucket.grads.streamed:
                for index in bucket.grads.valid:
                    bucket.params[index].grad = None
                bucket.grads.clear(set(bucket.grads.valid))
        self.early = set()
        self.late = set()

    @override
    def forget_states(self) -> None:
        self._steady = {}
        self._offload.end_partially_stepped()
        self._end_early()
