"""Who steps which bucket, and the steps of all but those that torch takes together.

Note [The plan of a step]
    Each bucket is stepped in one of six ways (``By``), which is decided once per step, before anything is written. The
    plan runs in their order: what moves bytes begins first, and the optimizer's own ``step`` comes last.

Note [Staged buckets]
    Where master weights or accumulators have 16 bits and the optimizer states have not, the optimizer steps fp32 copies
    of one bucket's fragments at a time. The update is computed in fp32 and rounded once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import bare_step, version_of
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.layout import Piece
from lt_zero.step.fragments import Fragments, Member
from lt_zero.step.fused_step import FusedStep, Part
from lt_zero.step.kernels import FullNorms
from lt_zero.step.overlap import Overlap

log = logging.getLogger("lt_zero")


class By(Enum):
    """Who steps a bucket, in the order of a step."""

    BACKGROUND = "the background thread, which publishes it, too"
    STREAMED = "one bucket at a time: its states are in files"
    HOST = "the kernel, one bucket at a time: copies to the device overlap with the next bucket's step"
    KERNEL = "the kernel, many buckets in a call"
    STAGED = "the optimizer, one bucket at a time, on fp32 copies"
    TORCH = "the optimizer, together with all others"


@dataclass(frozen=True)
class BucketStep:
    """One bucket in the plan of a step.

    Attributes:
        by: who steps it.
        members: its fragments on this rank.
        idle: nothing is left to step here: no rank has a gradient for it, it was stepped before, or ``parts`` step it.
        kernel: whether the kernel computes the step.
        parts: the kernel's plan, for the background thread; None: that thread only publishes.
    """

    bucket: Bucket
    by: By
    members: list[Member]
    idle: bool
    kernel: bool
    parts: list[Part] | None = None


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


class Stepper:
    """Plans and runs the steps of one optimizer, and takes the stepped fragments out of its groups.

    Args:
        fragments: of the optimizer.
        fused: its kernel; None if it has none.
        overlap: its background steps.
        norms: for an optimizer whose step is collective.
    """

    def __init__(
        self, fragments: Fragments, fused: FusedStep | None, overlap: Overlap, norms: FullNorms | None
    ) -> None:
        self._fragments, self._engine, self._optimizer = fragments, fragments.engine, fragments.optimizer
        self._fused, self._overlap, self._norms = fused, overlap, norms
        self.staging = False  # the optimizer steps a single bucket now
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the running step
        self.closure: RanClosure | None = None  # of the running step
        self._told = False
        self._torch: list[BucketStep] = []  # what the optimizer's own ``step`` updates

    # ---- the plan ----------------------------------------------------------------------------------------------

    def plan_step(self, used: dict[Bucket, list[int]]) -> list[BucketStep]:
        """Plan the step of these parameters. Collective.

        Waits for background steps of the buckets that this thread steps or publishes.
        """
        members = self._fragments.members({(bucket, index) for bucket, indices in used.items() for index in indices})
        early = self._overlap.take_early(used)
        for bucket in early:
            members.pop(bucket, None)
        for bucket in members:
            bucket.edits.check(values=True)
        if self._fused is not None and not early:
            self._fused.begin()
        late = self._overlap.plan_late(members, early, used)
        for bucket in members:
            if late.get(bucket) is None:
                bucket.wait_background_step()  # this thread steps it
        for bucket in early - late.keys():
            bucket.wait_background_step()  # this thread publishes it
            bucket.weights.note_readers()  # the rest of backward may have read unsharded parameters meanwhile
        plan = []
        for bucket, parts in late.items():
            mine, stored = members.pop(bucket, []), bucket.streamed
            idle = parts is not None or bucket in early or (stored and not any(member.used for member in mine))
            plan.append(BucketStep(bucket, By.BACKGROUND, mine, idle, True, parts))
        return plan + self._plan(members, used if self._norms is not None else (), self.taken(members))

    def _plan(
        self, members: dict[Bucket, list[Member]], together: Collection[Bucket], taken: set[Bucket]
    ) -> list[BucketStep]:
        """Plan the other buckets; those in ``together`` are stepped by all ranks, because the step is collective."""
        plan = []
        for bucket, mine in members.items():
            kernel = bucket in taken
            if bucket.streamed:
                by = By.STREAMED
            elif kernel:
                by = By.HOST if bucket.offloaded else By.KERNEL
            else:
                by = By.STAGED if bucket.staged else By.TORCH
            idle = bucket not in together and not any(member.used for member in mine)
            plan.append(BucketStep(bucket, by, mine, idle, kernel))
        return plan

    def taken(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        """The ``buckets`` that the kernel steps."""
        return self._fused.takes(buckets) if self._fused is not None else set()

    # ---- during a step -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self, plan: list[BucketStep], found_inf: Tensor | None = None, method: Callable[[], Any] | None = None
    ) -> None:
        """Run the plan up to the optimizer's own ``step``, for which the gradients are ready afterwards. Collective.

        Args:
            plan: from ``plan_step``.
            found_inf: 0D fp32; if it is not zero, the kernel writes nothing (``ShardedOptimizer.skips_on_device``).
            method: called instead of ``step``.

        Raises:
            SwapError: on all ranks, if states of one cannot be read or written.
        """
        steps = {by: [step for step in plan if step.by is by] for by in By}
        for step in steps[By.BACKGROUND]:
            if not step.idle and step.bucket.streamed:
                self._step_streamed([step], None)
            elif not step.idle:
                self._step_kernel([step])
                step.bucket.weights.refresh()  # frees its staging buffer, which earlier jobs wait for
            self._overlap.hand_over(step.bucket, step.parts)  # overlap.py, Note [Beside the next forward]
        self._step_streamed(steps[By.STREAMED], method)
        for step in steps[By.HOST]:
            if not step.idle:
                self._step_kernel([step])
                step.bucket.weights.refresh()
        self._engine.offload_manager.check(self._engine.comm, "states in files")
        self._step_kernel(steps[By.KERNEL], found_inf)
        self._fragments.drop({step.bucket for step in plan if step.by not in (By.STAGED, By.TORCH)})
        if (steps[By.STAGED] or steps[By.TORCH]) and not self._told:
            self._told = True
            name, on = type(self._optimizer).__name__, self._engine.config.fused_step
            why = self._fused.refusal() if self._fused is not None else "it has no kernel" if on else "by fused_step"
            log.info("%s is stepped by its own step, not by a kernel of lt_zero: %s", name, why)
        for step in steps[By.STAGED]:
            self._step_staged(step.bucket, step.members, method)
        self._torch = steps[By.TORCH]
        if method is None:
            for step in self._torch:
                for member in step.members:
                    member.fragment.grad = _grad_of(step.bucket, member)
            if self._norms is not None:
                self._norms.expect({step.bucket: step.members for step in self._torch})
            if self.closure is not None:
                self.closure.expect(member.fragment for step in self._torch for member in step.members)

    def _step_kernel(self, steps: list[BucketStep], found_inf: Tensor | None = None) -> None:
        if steps:
            assert self._fused is not None
            self._fused.step({step.bucket: step.members for step in steps}, found_inf)

    def _step_streamed(self, steps: list[BucketStep], method: Callable[[], Any] | None) -> None:
        """Step the buckets whose states are in files one by one: offload/store.py, ``stream``."""
        stepped = {step.bucket: step for step in steps if not step.idle}
        for bucket in self._engine.offload_manager.stream_buckets(list(stepped)) if stepped else ():
            step = stepped[bucket]
            holders = [(member.fragment, member.piece) for member in step.members]
            self._store_states(bucket, holders)
            if step.kernel and method is None:
                self._step_kernel([step])
            else:
                if bucket.grads.streamed:
                    bucket.grads.write()  # torch's step may change gradients in place
                self._step_staged(bucket, step.members, method)
            self._store_states(bucket, holders)
            bucket.weights.refresh()

    def _step_staged(self, bucket: Bucket, members: list[Member], method: Callable[[], Any] | None) -> None:
        """Step the fragments of one bucket, and take them out of the groups. See Note [Staged buckets].

        ``method`` is called instead of ``step``.
        """
        groups, mine = self._optimizer.param_groups, {id(member.fragment) for member in members}
        # Counters in groups are restored, so that only the step of the remaining fragments advances them.
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        others = [[p for p in group["params"] if id(p) not in mine] for group in groups]
        rows = [_row_of(bucket, member) for member in members]
        for member, row in zip(members, rows, strict=True):
            member.fragment.data = row.to(bucket.step_dtype, copy=True) if bucket.staged else row
            grad = _grad_of(bucket, member)
            member.fragment.grad = grad.to(bucket.step_dtype) if grad is not None else None
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        self.staging = True
        if self._norms is not None:
            self._norms.expect({bucket: members})
        try:
            if method is not None:
                method()
            else:
                if self.closure is not None:
                    self.closure.expect(member.fragment for member in members)
                args, kwargs = self.arguments
                bare_step(self._optimizer)(self._optimizer, *args, **kwargs)  # hooks run once, around the whole step
            for member, row in zip(members, rows, strict=True):
                _keep(member.fragment, row)
        finally:
            self.staging = False
            for member, row in zip(members, rows, strict=True):
                member.fragment.grad = None
                member.fragment.data = row
            for group, rest, saved in zip(groups, others, numbers, strict=True):
                group.clear()
                group.update(saved, params=rest)

    @torch.no_grad()
    def finish(self) -> None:
        """After the optimizer's own ``step``: copy weights that it assigned (``p.data``) to the master weights."""
        for step in self._torch:
            for member in step.members:
                row = _row_of(step.bucket, member)
                if _keep(member.fragment, row):
                    member.fragment.data = row
        self._torch, self.closure, self.arguments = [], None, ((), {})

    def switch(self, method: Callable[[], Any]) -> Any:
        """Call a method of the optimizer that changes weights on fragments, which the groups hold. Collective."""
        members = self._fragments.members(())
        self.run(self._plan(members, members, set()), method=method)
        result = method()
        self.finish()
        return result

    # ---- states ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def store_states(self) -> None:
        """Move loaded states to the bucket stores, bucket by bucket. Not collective."""
        self._engine.finish_steps()
        self._overlap.forget_states()
        places: dict[Bucket, list[tuple[Parameter, Piece]]] = {}
        for bucket, index, parameter in self._fragments.places():
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
            state = self._optimizer.state.get(holder, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != piece.numel:
                    continue
                store = bucket.state_store(key, value.dtype)
                if store is not None and not store.owns(value):
                    store.write()
                    state[key] = store.lend(piece.offset, value.shape).copy_(value)


def _keep(fragment: Parameter, row: Tensor) -> bool:
    """Copy a fragment that is not a view of ``row`` any more to ``row``; returns whether it was one."""
    moved = fragment.data_ptr() != row.data_ptr()
    if moved:
        row.copy_(fragment.detach())
    return moved


def _row_of(bucket: Bucket, member: Member) -> Tensor:
    """The master weights of a fragment, in its shape."""
    lo = member.piece.offset
    return bucket.weights.master_rows[lo : lo + member.piece.numel].view(member.fragment.shape)


def _grad_of(bucket: Bucket, member: Member) -> Tensor | None:
    """The gradient of a fragment, in its shape; None: no rank used it (reduced_grads.py, Note [Unused parameters])."""
    return bucket.grads.of(member.piece, write=False).view(member.fragment.shape) if member.used else None
