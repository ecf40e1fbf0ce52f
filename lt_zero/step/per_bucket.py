"""Steps of one bucket at a time: buckets in files, in host memory, or with staged copies.

Note [Staged buckets]
    Where master weights or accumulators have 16 bits and the optimizer states have not, the optimizer steps fp32 copies
    of one bucket's fragments at a time. The update is computed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import bare_step, version_of
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.grad_bucket import Accumulator
from lt_zero.engine.layout import Piece
from lt_zero.step.fused_step import Member, Part

if TYPE_CHECKING:
    from lt_zero.step.sharded_optimizer import ShardedOptimizer


class RanClosure:
    """The closure that ``step`` gets: forward and backward ran before, because ``step`` works on fragments.

    Args:
        name: name of the optimizer's class.
        result: what the user's closure returned.
    """

    def __init__(self, name: str, result: Any) -> None:
        self.name, self.result = name, result
        self.called = False
        self._called_now = False  # in the running step
        self._before: list[tuple[Parameter, int, Tensor | None]] = []  # fragment, version, gradient

    def expect(self, fragments: Iterable[Parameter]) -> None:
        """Begin a step of ``fragments``."""
        self._before = [(fragment, version_of(fragment), fragment.grad) for fragment in fragments]
        self.renew()

    def renew(self) -> None:
        """Allow another call: ``step`` calls the ``step`` of its parent class."""
        self._called_now = False

    def __call__(self) -> Any:
        """The result of the user's closure.

        Raises:
            RuntimeError: on a second call, or if weights or gradients have changed: the optimizer needs another pass.
        """
        changed = any(version_of(f) != version or f.grad is not grad for f, version, grad in self._before)
        if changed or self._called_now:
            raise RuntimeError(
                f"{self.name}.step evaluates its closure {'again' if self.called else 'at other weights'}, but "
                "ZeRO runs forward and backward once per step, before the optimizer gets this rank's shard of weights "
                "and gradients. Use an optimizer that needs one pass per step, such as AdamW, or train with DDP."
            )
        self.called = self._called_now = True
        return self.result


class Stepper:
    """Steps buckets of one optimizer, whose groups hold fragments, and takes these out of the groups."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self._sharded, self._engine, self._optimizer = sharded, sharded.engine, sharded.optimizer
        self._fused, self._overlap = sharded.fused, sharded.overlap
        self.staging = False  # the optimizer steps a single bucket now
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the running step
        self.closure: RanClosure | None = None  # of the running step

    # ---- during a step -----------------------------------------------------------------------------------------

    def hand_over(self, plans: dict[Bucket, list[Part] | None], members: dict[Bucket, list[Member]]) -> None:
        """Give the planned buckets to the background thread. See overlap.py, Note [Beside the next forward]."""
        for bucket, parts in plans.items():
            mine = {bucket: members.pop(bucket)} if bucket in members else {}
            if mine and bucket.streamed:
                self.step_resting(mine)
            elif mine and self._fused is not None:
                self._fused.step(mine)
                bucket.weights.refresh()  # frees its staging buffer, which earlier jobs wait for
            self._overlap.hand_over(bucket, parts)

    @torch.no_grad()
    def step_resting(
        self,
        members: dict[Bucket, list[Member]],
        together: Collection[Bucket] = (),
        method: Callable[[], Any] | None = None,
    ) -> None:
        """Step the buckets whose states are in files one by one: offload/store.py, ``stream``.

        Args:
            members: fragments by bucket; stepped buckets are removed.
            together: buckets that every rank steps, also without used parameters, because the step is collective.
            method: called instead of ``step``.
        """
        steps = {b: b in together or any(member.used for member in members[b]) for b in members}
        stored = [b for b in members if b.streamed and steps[b]]
        idle = [b for b in members if b.streamed and b not in stored]
        taken = self._sharded.taken(stored)
        for bucket in self._engine.offload_manager.stream_buckets(stored) if stored else ():
            self._step_resting_bucket(bucket, members.pop(bucket), bucket in taken, method)
        for bucket in idle:
            self._sharded.drop({id(member.fragment) for member in members.pop(bucket)})

    def _step_resting_bucket(
        self, bucket: Bucket, members: list[Member], taken: bool, method: Callable[[], Any] | None
    ) -> None:
        holders = [(member.fragment, member.piece) for member in members]
        self._shelve_state(bucket, holders)
        if self._fused is not None and taken:
            self._fused.step({bucket: members}, self._sharded.found_inf)
            self._sharded.drop({id(fragment) for fragment, _ in holders})
        else:
            if bucket.grads.streamed:
                bucket.grads.write()  # torch's step may change gradients in place
            self.step_staged(bucket, members, method)
        self._shelve_state(bucket, holders)
        bucket.weights.refresh()

    def step_host(self, members: dict[Bucket, list[Member]]) -> None:
        """Step kernel buckets in host memory one by one, so that copies to the device overlap with the next step."""
        taken, done = self._sharded.taken(b for b in members if b.offloaded), set[int]()
        for bucket in [b for b in members if b in taken]:
            assert self._fused is not None
            mine = members.pop(bucket)
            if any(member.used for member in mine):
                self._fused.step({bucket: mine})
                bucket.weights.refresh()
            done |= {id(member.fragment) for member in mine}
        self._sharded.drop(done)

    @torch.no_grad()
    def step_staged(self, bucket: Bucket, members: list[Member], method: Callable[[], Any] | None = None) -> None:
        """Step the fragments of one bucket, and take them out of the groups. See Note [Staged buckets].

        ``method`` is called instead of ``step``.
        """
        groups, mine = self._optimizer.param_groups, {id(member.fragment) for member in members}
        # Counters in groups are restored, so that only the step of the remaining fragments advances them.
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        others = [[p for p in group["params"] if id(p) not in mine] for group in groups]
        weights, grads = bucket.weights, bucket.grads
        rows = [_row_of(weights.master_rows, member).view(member.fragment.shape) for member in members]
        for member, row in zip(members, rows, strict=True):
            member.fragment.data = row.to(bucket.step_dtype, copy=True) if bucket.staged else row
            grad = grad_of(grads, member)
            member.fragment.grad = grad.to(bucket.step_dtype) if grad is not None else None
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        self.staging = True
        if self._sharded.norms is not None:
            self._sharded.norms.expect({bucket: members})
        try:
            method() if method is not None else self._step_alone(members)
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
    def keep(self, members: dict[Bucket, list[Member]]) -> None:
        """Copy weights that the optimizer assigned (``p.data = ...``) to the master weights."""
        for bucket, mine in members.items():
            for member in mine:
                row = _row_of(bucket.weights.master_rows, member).view(member.fragment.shape)
                if _keep(member.fragment, row):
                    member.fragment.data = row

    def _step_alone(self, members: list[Member]) -> None:
        if self.closure is not None:
            self.closure.expect(member.fragment for member in members)
        args, kwargs = self.arguments
        bare_step(self._optimizer)(self._optimizer, *args, **kwargs)  # hooks run once, around the whole step

    # ---- states ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def shelve_states(self) -> None:
        """Move loaded states to the bucket stores, bucket by bucket. Not collective."""
        self._engine.finish_steps()
        self._overlap.forget_states()
        places: dict[Bucket, list[tuple[Parameter, Piece]]] = {}
        for bucket, index, parameter in self._sharded.places():
            if bucket.streamed:
                places.setdefault(bucket, []).extend((parameter, piece) for piece in bucket.pieces_of(index))
        for bucket, holders in places.items():
            for store in bucket.step_stores():
                store.write()
            self._shelve_state(bucket, holders)
            bucket.put_away()

    def _shelve_state(self, bucket: Bucket, holders: list[tuple[Parameter, Piece]]) -> None:
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


def _row_of(flat: Tensor, member: Member) -> Tensor:
    return flat[member.piece.offset : member.piece.offset + member.piece.numel]


def grad_of(grads: Accumulator, member: Member) -> Tensor | None:
    """The gradient of a fragment, in its shape; None: no rank used it (reduced_grads.py, Note [Unused parameters])."""
    return grads.of(member.piece, write=False).view(member.fragment.shape) if member.used else None
