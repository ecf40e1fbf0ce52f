"""Which offloaded buckets are stepped beside backward or the next forward, and when that must not be.

Note [Beside backward]
    When the gradients of a bucket are reduced, backward does not need its weights any more, and if nobody clips,
    unscales or looks at the gradients before the step, the step can begin. Each rank decides for itself, as nothing of
    it is collective: a bucket with a parameter that this rank did not use waits for the step, when the ranks have
    agreed on what was used. What later backwards of this step need stays as it is: the compute copies of whole
    parameters are written by the step proper, and a unit that is gathered again after its bucket was stepped raises.
    If backward fails half way, or the step does not follow, some buckets are a step ahead of others
    (``OffloadManager.torn``): then nothing can be stepped or saved any more.

Note [Beside the next forward]
    ``overlap_step: true``: the step plans (learning rates are those of now), hands its buckets to the thread and
    returns. A unit waits for its own buckets before its forward. Whole parameters are guarded meanwhile, so that any
    other use waits for all; what rests in the optimizer is waited for before a state dict is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lt_zero.engine.bucket import Bucket
from lt_zero.engine.offload_manager import stored_tensors_of
from lt_zero.offload.background import Job
from lt_zero.step.fused_step import Member, Part

if TYPE_CHECKING:
    from lt_zero.step.sharded_optimizer import ShardedOptimizer

_WAITING = 1  # buckets with gradients in memory that stand in line at most, if gradients rest in files


class Overlap:
    """The steps of one optimizer that run in the background."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self._sharded, self._engine = sharded, sharded.engine
        self._offload_manager = sharded.engine.offload_manager
        self._early: dict[Bucket, int] = {}  # stepped beside the last backward, and with which gradients
        self._backwards = 0  # that had ended when it had
        self._late: set[Bucket] = set()  # handed over by the step at hand
        self._members: dict[Bucket, list[Member]] = {}
        self._indices: dict[Bucket, set[int]] = {}  # this optimizer's parameters in a bucket
        self._number_of: dict[int, int] = {}  # group of a parameter, by id
        self._rules: list[dict[str, Any]] = []  # of the groups, as they are when a step is planned
        self._steady: dict[Bucket, list[int]] = {}  # used parameters, in the last step of its own

    # ---- beside backward ---------------------------------------------------------------------------------------

    @contextmanager
    def beside_backward(self) -> Iterator[None]:
        """Around a backward that this optimizer's step follows, with no look at the gradients in between.

        Without effect where nothing can be stepped early. See Note [Beside backward].
        """
        if not self._can_begin():
            yield
            return
        reducer = self._engine.reducer
        reducer.on_landed = self._landed
        try:
            with self._offload_manager.streaming():
                yield
        except BaseException:
            self._end_early()
            raise
        finally:
            reducer.on_landed = None
            self._backwards = self._engine.backwards
            for bucket in self._early:
                bucket.stepped_early = False  # later forwards may gather it

    def _can_begin(self) -> bool:
        sharded = self._sharded
        self._end_early()  # of a backward that no step followed: the engine stays torn
        if self._offload_manager.partially_stepped:
            return False
        if self._offload_manager.background is None or sharded.fused is None or sharded.loss_scale != 1.0:
            return False
        if not self._engine.reducer.sync:
            return False
        # Its parameters that are frozen have no gradient, and the others are looked at when they have.
        members = sharded.members(lambda bucket, index: bucket.params[index].requires_grad)
        self._indices = sharded.indices()
        taken = sharded.fused.takes(bucket for bucket in members if bucket.can_step_early)
        self._members = {bucket: found for bucket, found in members.items() if bucket in taken}
        if self._members:
            self._read_groups()
            sharded.fused.begin()
        return bool(self._members)

    def _read_groups(self) -> None:
        groups = self._sharded.wide_groups()
        self._rules = self._rules_now()
        self._number_of = {id(p): number for number, params in enumerate(groups) for p in params}

    def _rules_now(self) -> list[dict[str, Any]]:
        return self._sharded.fused.rules() if self._sharded.fused is not None else []

    def _landed(self, bucket: Bucket) -> bool:
        """The gradients of ``bucket`` were reduced; returns whether it is stepped now."""
        members, fused = self._members.get(bucket, []), self._sharded.fused
        if not members or bucket in self._early or self._engine.gatherer.is_pinned(bucket) or bucket.has_grads():
            return False  # a second gradient of what was stepped is found out by ``take_early``
        if bucket.grads.used != bucket.grads.valid or not bucket.grads.valid <= self._indices[bucket]:
            return False
        if not bucket.sharding.params and bucket.edits.seen():
            return False
        assert fused is not None
        parts = fused.plan(bucket, members, self._number_of, self._rules)  # counts the step
        if parts is None:
            return False
        self._early[bucket] = bucket.grads.changes
        bucket.stepped_early = True
        names = ", ".join(repr(bucket.name) for bucket in list(self._early)[:3])
        self._offload_manager.partially_stepped = (
            f"{len(self._early)} of {len(self._engine.buckets)} buckets ({names}, ...)"
        )
        self._hand_over(bucket, lambda: self._step_early(bucket, parts), None, _WAITING if bucket.grads.rests else None)
        return True

    def _step_early(self, bucket: Bucket, parts: list[Part]) -> None:
        assert self._sharded.fused is not None
        # Backward may still read whole parameters; those that are sharded are not gathered any more.
        self._sharded.fused.launch([bucket], parts, write=bucket.sharding.params)
        if bucket.sharding.params:
            bucket.weights.refresh()
        if bucket.store.optim is not None:
            bucket.store.stored["grad"].discard()  # spares writing and reading it; ``forget_early`` forgets it

    def take_early(self, members: dict[Bucket, list[Member]], used: dict[Bucket, list[int]]) -> set[Bucket]:
        """The step proper begins: leave out what was stepped already; returns it. Collective.

        Raises:
            SwapError: on all ranks, if one has stepped with other gradients than those that are there now.
        """
        same = all(bucket in used and bucket.grads.changes == then for bucket, then in self._early.items())
        early = self._end_early()
        if early and same and self._backwards == self._engine.backwards and self._rules == self._rules_now():
            self._offload_manager.partially_stepped = ""
        self._offload_manager.refuse_partially_stepped(self._engine.comm)
        for bucket in early:
            members.pop(bucket, None)
        return early

    def _end_early(self) -> set[Bucket]:
        early, self._early = set(self._early), {}
        for bucket in early:
            bucket.stepped_early = False
        return early

    def forget_early(self, early: set[Bucket]) -> None:
        """The step is done: gradients that were not kept are gone."""
        for bucket in early:
            if bucket.grads.rests:
                for index in bucket.grads.valid:
                    bucket.params[index].grad = None
                bucket.grads.clear(set(bucket.grads.valid))

    # ---- beside the next forward -------------------------------------------------------------------------------

    @property
    def _publishes_late(self) -> bool:
        return self._offload_manager.background is not None and self._offload_manager.how.overlap_step is True

    def plan_late(
        self, members: dict[Bucket, list[Member]], early: set[Bucket], used: dict[Bucket, list[int]]
    ) -> dict[Bucket, list[Part] | None]:
        """What the thread is to step and publish, the same buckets in the same order on all ranks.

        None instead of a plan: the thread only publishes. That is so for buckets of ``early``, and where states have to
        be moved first, on this rank; only those are left in ``members``.
        """
        if not self._publishes_late or self._sharded.fused is None:
            return {}
        taken = self._sharded.fused.takes(b for b in used if b.store.moves_optim)
        if taken:
            self._read_groups()
        plans: dict[Bucket, list[Part] | None] = {}
        for bucket, indices in used.items():
            steady, self._steady[bucket] = self._steady.get(bucket) == indices, indices
            if not steady or bucket not in taken:
                continue
            plans[bucket] = None
            if bucket not in early:
                plans[bucket] = self._sharded.fused.plan(bucket, members.get(bucket, []), self._number_of, self._rules)
            if plans[bucket] is not None:
                members.pop(bucket, None)
        return plans

    def hand_over(self, bucket: Bucket, parts: list[Part] | None) -> None:
        """Have the thread step (with ``parts``) and publish a bucket."""
        bucket.release()
        bucket.await_publication()
        self._late.add(bucket)
        self._hand_over(bucket, lambda: self._step_late(bucket, parts), bucket.publication(), None)

    def _step_late(self, bucket: Bucket, parts: list[Part] | None) -> None:
        if parts is not None:
            assert self._sharded.fused is not None
            self._sharded.fused.launch([bucket], parts)
            if bucket.store.optim is not None:
                bucket.weights.refresh()
        bucket.refresh_after_step()

    def _hand_over(
        self, bucket: Bucket, step: Callable[[], None], publish: Callable[[], object] | None, limit: int | None
    ) -> None:
        background = self._offload_manager.background
        assert background is not None
        bucket.weights.leave()
        bucket.edits.pause()
        job = Job(step, stored_tensors_of(bucket), publish, self._offload_manager.note)
        bucket.store.hand_over(job)
        background.hand_over(job, limit)

    def take_late(self) -> set[Bucket]:
        """The buckets of the step that the thread publishes."""
        late, self._late = self._late, set()
        return late

    def forget_states(self) -> None:
        """States were loaded: the next step is one of its own, which puts them where they rest."""
        self._steady, self._offload_manager.partially_stepped = {}, ""
        self._end_early()
