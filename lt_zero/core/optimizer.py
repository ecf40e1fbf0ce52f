"""Any element-wise torch optimizer on fragments: the user's object, its groups and its class stay.

Note [Narrowing]
    At rest ``param_groups[i]["params"]`` are the module's parameters, because schedulers, callbacks and
    ``toggle_optimizer`` look there. For the duration of ``step`` they are replaced by this rank's fragments, flat
    pieces of the master weights whose ``.grad`` is a piece of the accumulator. State lives per fragment and is shown
    under its parameter. A fragment that is a whole parameter has the parameter's shape.

Note [Unused parameters]
    A zero gradient is not "no gradient": AdamW would decay and move a parameter that no rank used. The ranks agree
    on which parameters were used, and the others' fragments have ``grad=None`` for this step.

Note [Staged buckets]
    Where master weights or accumulators have 16 bits and the optimizer's state has not, the fragments of one bucket at
    a time become fp32 copies for a ``step`` of their own. The update is computed in fp32 and rounded once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.compat import bare_step
from lt_zero.core.accumulator import Accumulator
from lt_zero.core.bucket import Bucket
from lt_zero.core.engine import Engine
from lt_zero.core.fused import FusedAdam, Member, Part
from lt_zero.core.grads import is_view
from lt_zero.core.layout import ALIGN, Piece
from lt_zero.core.overlap import Overlap
from lt_zero.core.supported import check_supported, states_per_element
from lt_zero.offload.pool import SwapError


class ShardedOptimizer:
    """What the engine does around one optimizer's ``step`` and ``zero_grad``.

    Args:
        engine: owns the parameters; parameters it does not own are stepped as they are.
        optimizer: any ``torch.optim.Optimizer`` whose update is element-wise.

    Raises:
        TypeError: the optimizer needs whole matrices, sparse gradients or repeated closures.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        check_supported(optimizer, engine.sharded_optim or engine.shelves.optim is not None)
        if engine.shelves.optim is not None:
            engine.shelves.require(engine.comm, states_per_element(optimizer))
        self.engine, self.optimizer = engine, optimizer
        self._fragments: dict[int, list[Parameter]] = {}
        self._wide: list[list[Parameter]] | None = None
        self.loss_scale = 1.0  # that the accumulated gradients carry; see gate.py
        self.found_inf: Tensor | None = None  # 0D fp32: the kernel skips the step if it is not zero
        self.before_state_dict: Callable[[], object] = lambda: None  # waits for the outcome of the last step
        self.by_bucket = False  # who asks for a state dict reads states in files bucket by bucket
        self._depth = 0  # nested calls of step
        self._entered = 0  # after how many backwards the running step began
        self._early: set[Bucket] = set()  # stepped beside the last backward, by the running step
        self._staging = False  # the running step is of one bucket's copies
        fused = engine.config.fused_step and FusedAdam.fits(optimizer)
        self.fused = FusedAdam(optimizer) if fused else None
        self.overlap = Overlap(self)
        if engine.torn:
            warnings.warn(f"Training goes on although {engine.torn} are a step ahead: load a checkpoint.", stacklevel=3)
            engine.torn = ""
        self._adopt_state()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._on_state_dict)
        _intercept_zero_grad(optimizer, self)

    # ---- fragments ---------------------------------------------------------------------------------------------

    def fragments(self, parameter: Parameter) -> list[Parameter]:
        """This rank's pieces of ``parameter`` (none or one), or itself if the engine does not own it."""
        place = self.engine.owner.get(id(parameter))
        if place is None:
            return [parameter]
        bucket, index = place
        if id(parameter) not in self._fragments:
            bucket.weights.enable_training()
            shape = torch.Size(bucket.shapes[index])
            home = bucket.shelf.homes.get("master")
            self._fragments[id(parameter)] = [
                Parameter(_shaped(bucket.weights.master_rows[p.offset : p.offset + p.numel], shape))
                if home is None
                else cast(Parameter, home.lend(p.offset, _shape_of(p, shape), Parameter))
                for p in bucket.pieces_of(index)
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
        for bucket, index, _ in self._places():
            found.setdefault(bucket, set()).add(index)
        return found

    def _places(self) -> list[tuple[Bucket, int, Parameter]]:
        owner = self.engine.owner
        return [(*owner[id(p)], p) for p in self.parameters() if id(p) in owner]

    def _used(self) -> dict[Bucket, list[int]]:
        """The parameters that have a gradient on any rank, in order. Collective."""
        used = self.engine.settle_grads()
        found: dict[Bucket, list[int]] = {}
        for bucket, index, _ in self._places():
            if used(bucket, index):
                found.setdefault(bucket, []).append(index)
        return {bucket: sorted(indices) for bucket, indices in found.items()}

    def _foreign_grads(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if id(p) not in self.engine.owner and p.grad is not None]

    def grads(self) -> list[Tensor]:
        """This rank's part (1D rows) of the reduced gradients, where any rank has one. Collective.

        Neighbours in a bucket share a row, with the zeros between them.
        """
        return [row for rows in self.grads_by_bucket(write=True) for row in rows]

    def grads_by_bucket(self, write: bool = False) -> Iterator[list[Tensor]]:
        """``grads``, bucket by bucket: what rests in a file is here until the next is asked for. Collective.

        ``write``: they are changed.
        """
        for bucket, indices in self._used().items():
            yield _rows(bucket, indices, write)
            bucket.grads.stow()
        yield self._foreign_grads()

    @torch.no_grad()
    def multiply_grads(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by one fp32 number (0D), now or in the kernel that steps them. Collective."""
        used, places = self._used(), self._places()
        self.engine.ledger.scaled(places, factor)
        deferring = self._deferring(used)
        for bucket, indices in used.items():
            if bucket in deferring:
                bucket.grads.defer(factor)
                continue
            bucket.grads.widen_fp16()
            for row in _rows(bucket, indices):
                row.mul_(factor.to(row.device))
            bucket.grads.stow()
        for grad in self._foreign_grads():
            grad.mul_(factor)

    def _deferring(self, used: Iterable[Bucket]) -> set[Bucket]:
        """See fused.py, Note [Deferred factor]. A view in ``p.grad`` can be read without anybody noticing."""
        mine = self.indices()
        return {b for b in self._taken(used) if b.grads.valid <= mine[b] and not is_view(b)}

    def _taken(self, buckets: Iterable[Bucket]) -> set[Bucket]:
        return self.fused.takes(buckets) if self.fused is not None else set()

    def skips_on_device(self) -> bool:
        """Whether all of a step goes through kernels that take ``found_inf``."""
        places = self._places()
        buckets = {bucket for bucket, _, _ in places}
        if any(bucket.shelf.moves_optim for bucket in buckets):
            return False  # what the kernel does not write would be copied or written all the same
        return len(places) == len(self.parameters()) and self._taken(buckets) == buckets

    def uncount_step(self) -> None:
        """The last step was skipped on the device: its number is that of the next one."""
        assert self.fused is not None
        self.fused.uncount()

    def has_grads(self) -> bool:
        """Whether any rank has a gradient for this optimizer; the same answer on all ranks. Collective."""
        used = self.engine.settle_grads()
        foreign = any(p.grad is not None for p in self.parameters() if id(p) not in self.engine.owner)
        return foreign or any(used(b, i) for b, i, _ in self._places())

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply what was accumulated so far, reduced or not. Not collective."""
        self.engine.ledger.scaled(self._places(), factor)
        for bucket, index, _ in self._places():
            span, grads = bucket.layout.spans[index], bucket.grads
            if grads.local is not None:
                grads.local[span.lo : span.hi].mul_(factor)
            for piece in bucket.pieces_of(index) if index in grads.valid else ():
                grads.of(piece).mul_(factor)
            grads.stow()

    def members(self, used: Callable[[Bucket, int], bool]) -> dict[Bucket, list[Member]]:
        """The fragments by bucket, in order."""
        found: dict[Bucket, list[Member]] = {}
        for bucket, index, parameter in self._places():
            members = found.setdefault(bucket, [])
            for piece, fragment in zip(bucket.pieces_of(index), self.fragments(parameter), strict=True):
                members.append(Member(parameter, fragment, piece, used(bucket, index)))
        return {bucket: sorted(members, key=lambda m: m.piece.offset) for bucket, members in found.items()}

    def _on_state_dict(self, optimizer: Optimizer) -> None:
        self.before_state_dict()
        self.engine.finish_steps()
        if not self.by_bucket:
            for bucket in {bucket for bucket, _, _ in self._places()}:
                for home in bucket.shelf.step_homes():
                    home.bring()  # whoever has it may edit it

    # ---- step --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._staging:
            return None
        if self._wide is not None and self._entered == self.engine.backwards:
            self._depth += 1  # a subclass calls its parent's step, and torch calls the hooks for both
            return None
        if self.loss_scale != 1.0:
            raise RuntimeError(
                f"The gradients of this {type(optimizer).__name__} still carry the loss scale {self.loss_scale:g}. In "
                "manual optimization step the optimizer that `self.optimizers()` returns: it unscales first."
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is not None:
            with torch.enable_grad():  # the closure runs backward; step must see its result, on fragments
                result = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: result}
        self.engine.refuse_torn()
        used = self._used()
        known = {(bucket, index) for bucket, indices in used.items() for index in indices}
        members = self.members(lambda bucket, index: (bucket, index) in known)
        self._early = self.overlap.take_early(members)
        if self.fused is not None and not self._early:
            self.fused.begin()
        plans = self.overlap.plan_late(members, self._early, used)
        self.narrow()
        self._depth, self._entered = 1, self.engine.backwards
        self.engine.comm.before_write()
        try:
            self._hand_over(plans, members)
            self._step_resting(members)
            self._step_host(members)
            self.engine.shelves.check(self.engine.comm, "states in files")
        except SwapError:
            self.widen()
            raise
        self._drop_buckets({*self._early, *plans})
        taken = self._taken(members)
        fused = {bucket: members.pop(bucket) for bucket in list(members) if bucket in taken}
        if self.fused is not None and fused:
            self.fused.step(fused, self.found_inf)
            self._drop({id(member.fragment) for bucket in fused.values() for member in bucket})
        for bucket, fragments in members.items():
            if bucket.staged:
                self._step_staged(bucket, fragments)
                continue
            grads = bucket.grads
            for member in fragments:
                member.fragment.grad = _grad_of(grads, member)
        return args, kwargs

    def _drop_buckets(self, done: set[Bucket]) -> None:
        if done:
            self._drop({id(f) for bucket, _, p in self._places() if bucket in done for f in self.fragments(p)})

    def _hand_over(self, plans: dict[Bucket, list[Part] | None], members: dict[Bucket, list[Member]]) -> None:
        """See overlap.py, Note [Beside the next forward]."""
        for bucket, parts in plans.items():
            mine = {bucket: members.pop(bucket)} if bucket in members else {}
            if mine and "master" in bucket.shelf.homes:
                self._step_resting(mine)
            elif mine and self.fused is not None:
                self.fused.step(mine)
            self.overlap.hand_over(bucket, parts)

    def _drop(self, done: set[int]) -> None:
        """Take fragments that were stepped out of the groups, until ``widen``."""
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in done]

    @torch.no_grad()
    def _step_resting(self, members: dict[Bucket, list[Member]]) -> None:
        """Step the buckets whose states rest in files, one by one. See offload/home.py, Note [Walking]."""
        resting = [b for b in members if "master" in b.shelf.homes and any(m.used for m in members[b])]
        idle = [b for b in members if "master" in b.shelf.homes and b not in resting]
        taken = self._taken(resting)
        for bucket in self.engine.shelves.walk(resting) if resting else ():
            self._step_resting_bucket(bucket, members.pop(bucket), bucket in taken)
        for bucket in idle:
            self._drop({id(member.fragment) for member in members.pop(bucket)})

    def _step_host(self, members: dict[Bucket, list[Member]]) -> None:
        """Step what the kernel takes in host memory bucket by bucket: copies go to the device meanwhile."""
        taken = self._taken(b for b in members if b.shelf.host_optim)
        for bucket in [b for b in members if b in taken]:
            assert self.fused is not None
            self.fused.step({bucket: members[bucket]})
            bucket.weights.refresh()
            self._drop({id(member.fragment) for member in members.pop(bucket)})

    def _step_resting_bucket(self, bucket: Bucket, members: list[Member], taken: bool) -> None:
        holders = [(member.fragment, member.piece) for member in members]
        self._shelve_state(bucket, holders)
        if self.fused is not None and taken:
            self.fused.step({bucket: members}, self.found_inf)
            self._drop({id(fragment) for fragment, _ in holders})
        else:
            if bucket.grads.rests:
                bucket.shelf.homes["grad"].bring()  # torch's step may change gradients in place
            self._step_staged(bucket, members)
        self._shelve_state(bucket, holders)
        bucket.weights.refresh()

    @torch.no_grad()
    def shelve_states(self) -> None:
        """Put states that were loaded where they rest, bucket by bucket. Not collective."""
        self.engine.finish_steps()
        self.overlap.forget_states()
        places: dict[Bucket, list[tuple[Parameter, Piece]]] = {}
        for bucket, index, parameter in self._places():
            if "master" in bucket.shelf.homes:
                places.setdefault(bucket, []).extend((parameter, piece) for piece in bucket.pieces_of(index))
        for bucket, holders in places.items():
            for home in bucket.shelf.step_homes():
                home.bring()
            self._shelve_state(bucket, holders)
            bucket.shelf.tidy()

    def _shelve_state(self, bucket: Bucket, holders: list[tuple[Parameter, Piece]]) -> None:
        """Move element-wise states that somebody else made (a first step, a checkpoint) to where the bucket's rest."""
        for holder, piece in holders:
            state = self.optimizer.state.get(holder, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != piece.numel:
                    continue
                home = bucket.shelf.state_home(key, value.dtype)
                if home is not None and not home.owns(value):
                    home.bring()
                    state[key] = home.lend(piece.offset, value.shape).copy_(value)

    @torch.no_grad()
    def _step_staged(self, bucket: Bucket, members: list[Member]) -> None:
        """Step the fragments of one bucket, and take them out of the groups. See Note [Staged buckets]."""
        groups, mine = self.optimizer.param_groups, {id(member.fragment) for member in members}
        # What an optimizer counts per group is counted once, by the step of the rest.
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        others = [[p for p in group["params"] if id(p) not in mine] for group in groups]
        weights, grads = bucket.weights, bucket.grads
        rows = [_row_of(weights.master_rows, member).view(member.fragment.shape) for member in members]
        for member, row in zip(members, rows, strict=True):
            member.fragment.data = row.to(bucket.step_dtype, copy=True) if bucket.staged else row
            grad = _grad_of(grads, member)
            member.fragment.grad = grad.to(bucket.step_dtype) if grad is not None else None
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        self._staging = True
        try:
            bare_step(self.optimizer)(self.optimizer)  # hooks run once, around the whole step
            for member, row in zip(members, rows, strict=True):
                row.copy_(member.fragment) if bucket.staged else None
        finally:
            self._staging = False
            for member, row in zip(members, rows, strict=True):
                member.fragment.grad = None
                member.fragment.data = row
            for group, rest, saved in zip(groups, others, numbers, strict=True):
                group.clear()
                group.update(saved, params=rest)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._staging:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self.widen()
        self.engine.publish({bucket for bucket, _, _ in self._places()} - self.overlap.take_late())
        self.overlap.forget_early(self._early)
        self._early = set()

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
        """Forget the accumulated gradients of this optimizer's parameters.

        Gradients that ``p.grad`` shows are forgotten when it is set to None; inside ``no_sync`` none is shown.
        """
        for bucket, which in self.indices().items():
            bucket.grads.clear(which)

    @torch.no_grad()
    def zero_grads(self) -> None:
        """Set the accumulated gradients of this optimizer's parameters to zero; they count as used."""
        for bucket, index, _ in self._places():
            bucket.settle()
            span, grads = bucket.layout.spans[index], bucket.grads
            if grads.local is not None:
                grads.local[span.lo : span.hi].zero_()
            for piece in bucket.pieces_of(index):
                if grads.accumulated:
                    grads.of(piece).zero_()
            grads.stow()

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


def _row_of(flat: Tensor, member: Member) -> Tensor:
    return flat[member.piece.offset : member.piece.offset + member.piece.numel]


def _grad_of(grads: Accumulator, member: Member) -> Tensor | None:
    return grads.of(member.piece, write=False).view(member.fragment.shape) if member.used else None


def _rows(bucket: Bucket, indices: list[int], write: bool = True) -> list[Tensor]:
    """The accumulated gradients of these parameters; pieces with nothing but alignment between them as one row.

    Without ``write`` for reading only.
    """
    edges: list[list[int]] = []
    wanted = set(indices)
    for piece in bucket.pieces():
        if piece.index not in wanted:
            continue
        if edges and piece.offset - edges[-1][1] < ALIGN and piece.index - 1 in wanted:
            edges[-1][1] = piece.offset + piece.numel
        else:
            edges.append([piece.offset, piece.offset + piece.numel])
    bucket.grads.settle_factor()
    if not edges:
        return []
    grad = bucket.grads.grad if write else bucket.grads.read()
    assert grad is not None
    return [grad[lo:hi] for lo, hi in edges]


def _shaped(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A piece that is the whole parameter gets its shape; others stay 1D."""
    return row.view(shape) if row.numel() == torch.Size(shape).numel() else row


def _shape_of(piece: Piece, shape: torch.Size) -> torch.Size:
    """See ``_shaped``."""
    return shape if piece.numel == shape.numel() else torch.Size([piece.numel])


def _intercept_zero_grad(optimizer: Optimizer, sharded: ShardedOptimizer) -> None:
    """Make ``zero_grad`` clear the accumulators too.

    By class, not on the instance: Lightning's optimizer wrapper is a dynamic subclass of the optimizer's class and
    would not see an attribute of the instance. Name and module stay, so checkpoints and loggers see no difference.
    """
    cls = type(optimizer)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        cls.zero_grad(self, set_to_none)
        self._lt_zero.clear_grads() if set_to_none else self._lt_zero.zero_grads()

    optimizer._lt_zero = sharded  # type: ignore[attr-defined]
    optimizer.__class__ = type(
        cls.__name__, (cls,), {"zero_grad": zero_grad, "__module__": cls.__module__, "_lt_zero_made": True}
    )
