"""How an optimizer's ``step`` goes through buckets one by one: those in files, in host memory, or with copies.

Note [Staged buckets]
    Where master weights or accumulators have 16 bits and the optimizer's state has not, the fragments of one bucket at
    a time become fp32 copies for a ``step`` of their own. The update is computed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import bare_step, version_of
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.grad_accumulator import Accumulator
from lt_zero.engine.layout import Piece
from lt_zero.step.fused_step import Member, Part

if TYPE_CHECKING:
    from lt_zero.step.sharded_optimizer import ShardedOptimizer


class RanClosure:
    """What ``step`` gets as its closure: forward and backward ran before, because ``step`` works on fragments.

    Args:
        name: of the optimizer's class.
        result: of the pass that ran.
    """

    def __init__(self, name: str, result: Any) -> None:
        self.name, self.result = name, result
        self.called = False
        self._called_now = False  # by the running step
        self._before: list[tuple[Parameter, int, Tensor | None]] = []  # fragment, version, gradient

    def expect(self, fragments: Iterable[Parameter]) -> None:
        """A step of these begins."""
        self._before = [(fragment, version_of(fragment), fragment.grad) for fragment in fragments]
        self.renew()

    def renew(self) -> None:
        """A step calls the step of its parent class."""
        self._called_now = False

    def __call__(self) -> Any:
        """The result of the pass that ran.

        Raises:
            RuntimeError: this is not the first call, or weights or gradients have changed since: another pass is meant.
        """
        changed = any(version_of(f) != version or f.grad is not grad for f, version, grad in self._before)
        if changed or self._called_now:
            raise RuntimeError(
                f"{self.name}.step evaluates its closure {'again' if self.called else 'at other weights'}, but "
                "ZeRO runs forward and backward once per step, before the optimizer gets this rank's part of weights "
                "and gradients. Use an optimizer that needs one pass per step, such as AdamW, or train with DDP."
            )
        self.called = self._called_now = True
        return self.result


class Stepper:
    """Steps buckets of one optimizer, whose groups hold fragments, and takes these out of the groups."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self._sharded, self._engine, self._optimizer = sharded, sharded.engine, sharded.optimizer
        self._fused, self._overlap = sharded.fused, sharded.overlap
        self.staging = False  # the running step of the optimizer is of one bucket only
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the running step
        self.closure: RanClosure | None = None  # among them

    # ---- during a step -----------------------------------------------------------------------------------------

    def hand_over(self, plans: dict[Bucket, list[Part] | None], members: dict[Bucket, list[Member]]) -> None:
        """Give the planned buckets to the thread. See overlap.py, Note [Beside the next forward]."""
        for bucket, parts in plans.items():
            mine = {bucket: members.pop(bucket)} if bucket in members else {}
            if mine and "master" in bucket.store.stored:
                self.step_resting(mine)
            elif mine and self._fused is not None:
                self._fused.step(mine)
                bucket.weights.refresh()  # now: jobs before it wait for the buffer that it holds
            self._overlap.hand_over(bucket, parts)

    @torch.no_grad()
    def step_resting(
        self,
        members: dict[Bucket, list[Member]],
        together: Collection[Bucket] = (),
        method: Callable[[], Any] | None = None,
    ) -> None:
        """Step the buckets whose states rest in files, one by one.

        See offload/nvme_files.py, Note [Streaming buckets].

        ``together``: buckets that all ranks step, also if they hold nothing of what is used, as the step is collective.
        ``method``: called in the place of ``step``.
        """
        here = {b: b in together or any(member.used for member in members[b]) for b in members}
        resting = [b for b in members if "master" in b.store.stored and here[b]]
        idle = [b for b in members if "master" in b.store.stored and b not in resting]
        taken = self._sharded.taken(resting)
        for bucket in self._engine.offload_manager.stream_buckets(resting) if resting else ():
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
            if bucket.grads.rests:
                bucket.store.stored["grad"].bring()  # torch's step may change gradients in place
            self.step_staged(bucket, members, method)
        self._shelve_state(bucket, holders)
        bucket.weights.refresh()

    def step_host(self, members: dict[Bucket, list[Member]]) -> None:
        """Step what the kernel takes in host memory bucket by bucket: copies go to the device meanwhile."""
        taken, done = self._sharded.taken(b for b in members if b.store.host_optim), set[int]()
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

        ``method``: called in the place of ``step``.
        """
        groups, mine = self._optimizer.param_groups, {id(member.fragment) for member in members}
        # What an optimizer counts per group is counted once, by the step of the rest.
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
        """Take over weights that the optimizer has assigned (``p.data = ...``) where it should have written."""
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
        """Put states that were loaded where they rest, bucket by bucket. Not collective."""
        self._engine.finish_steps()
        self._overlap.forget_states()
        places: dict[Bucket, list[tuple[Parameter, Piece]]] = {}
        for bucket, index, parameter in self._sharded.places():
            if "master" in bucket.store.stored:
                places.setdefault(bucket, []).extend((parameter, piece) for piece in bucket.pieces_of(index))
        for bucket, holders in places.items():
            for home in bucket.store.step_tensors():
                home.bring()
            self._shelve_state(bucket, holders)
            bucket.store.tidy()

    def _shelve_state(self, bucket: Bucket, holders: list[tuple[Parameter, Piece]]) -> None:
        """Move element-wise states that somebody else made (a first step, a checkpoint) to where the bucket's rest."""
        for holder, piece in holders:
            state = self._optimizer.state.get(holder, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != piece.numel:
                    continue
                home = bucket.store.state_tensor(key, value.dtype)
                if home is not None and not home.owns(value):
                    home.bring()
                    state[key] = home.lend(piece.offset, value.shape).copy_(value)


def _keep(fragment: Parameter, row: Tensor) -> bool:
    """Put the result of a step of a copy, or of an optimizer that assigns ``p.data``, where the weights lie."""
    moved = fragment.data_ptr() != row.data_ptr()
    if moved:
        row.copy_(fragment.detach())
    return moved


def _row_of(flat: Tensor, member: Member) -> Tensor:
    return flat[member.piece.offset : member.piece.offset + member.piece.numel]


def grad_of(grads: Accumulator, member: Member) -> Tensor | None:
    """The gradient of a fragment, in its shape; None if no rank has one.

    See reduced_grads.py, Note [Unused parameters].
    """
    return grads.of(member.piece, write=False).view(member.fragment.shape) if member.used else None
