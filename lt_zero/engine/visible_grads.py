"""Gradients as ``p.grad`` shows them between a backward and the step, and the parameters that any rank used.

The gradients are in the buckets' accumulators. After a backward ``p.grad`` of every reduced parameter is a stand-in, so
that ``optimizer.zero_grad()``, norm logging and manual clipping work: setting it to None clears the gradient. Where a
rank holds the full gradient (stage 0, and stage 1 inside of an accumulation window) the stand-in is a view of it.
Where such a gradient lacks a deferred factor, the stand-in is a ``ShardedGrad`` that multiplies when it is read. A
sharded gradient has a ``ShardedGrad``, too, which supports what needs no gather: norms over all ranks (one all-reduce
for all parameters), and element-wise changes in place, of the rank's own piece. All else raises and names a remedy.

One exchange of flags, launched when backward ends and waited for at the step, tells all ranks which parameters any of
them used (reduced_grads.py, Note [Unused parameters]), which buckets need a second reduction (grad_reducer.py,
Note [When a bucket is ready]), and whether all step with the same options (same_on_ranks.py). Where ranks do not wait
for late ones (``communication.slow_node_tolerance``, stage 0) a step waits for the flags of the step before, every
parameter counts as used, and there are no second reductions.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.comm.ranks import Ranks
from lt_zero.comm.shard_group import ShardGroup, combine_rows
from lt_zero.comm.work import Done, Work
from lt_zero.common.compat import TRACED, without_torch_function
from lt_zero.common.tensor_tree import iter_tensors, map_tensors
from lt_zero.common.timing import phase
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.buffers import BufferSync
from lt_zero.engine.grad_reducer import GradReducer
from lt_zero.engine.guard import PASSING, called
from lt_zero.engine.offload_manager import OffloadManager
from lt_zero.engine.parts import Parts
from lt_zero.engine.same_on_ranks import FLAGS, SameOnRanks
from lt_zero.io.thread_pool import SwapError
from lt_zero.offload.store import Store
from lt_zero.ops.flat import wide

Place = tuple[Bucket, int]

# Functions that work on a gradient of which ranks have parts: element by element, norms, and those that return it.
IN_PLACE = {Tensor.mul_, Tensor.div_, Tensor.zero_, Tensor.clamp_, Tensor.clip_, Tensor.nan_to_num_, Tensor.neg_}
NORMS = {Tensor.norm, torch.norm, torch.linalg.vector_norm}
SAME = {getattr(Tensor, "data").__get__, Tensor.detach, Tensor.detach_}  # noqa: B009
_CONVERSIONS = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
_REMEDY = (
    "Norms (`p.grad.norm(2)`, Lightning's `grad_norm`), `p.grad = None` and in-place scaling or clamping by numbers "
    "work; on all ranks `lt_zero.full_grad(parameter)` reads all of it, and `lt_zero.set_full_grad(parameter, value)` "
    "sets it; to clip use `Trainer(gradient_clip_val=...)` or `self.clip_gradients`; stage 0 keeps whole gradients."
)


def _local(bucket: Bucket, index: int, write: bool = True) -> list[Tensor]:
    """This rank's rows (1D) of a gradient: all elements of the unreduced one, and the piece of the reduced one."""
    grads, span = bucket.grads, bucket.layout.spans[index]
    reduced = [grads.of(piece, write) for piece in bucket.pieces_of(index)] if grads.accumulated else []
    return reduced if grads.local is None else [grads.local[span.lo : span.hi], *reduced]


def _is_whole(bucket: Bucket) -> bool:
    """True if ``_local`` is a single row with all elements."""
    grads = bucket.grads
    return bucket.is_whole if grads.local is None else not grads.accumulated


def is_view(bucket: Bucket) -> bool:
    """True if ``p.grad`` is, or may be, a view of the accumulator."""
    local = bucket.grads.local
    if local is None and (bucket.offloaded or bucket.grads.lacks_factor):
        return False
    dtype = local.dtype if local is not None else bucket.grads.values.dtype
    return _is_whole(bucket) and dtype == bucket.dtype


class ShardedGrad(Tensor):
    """A gradient that is sharded over the ranks. Reading a norm is collective.

    It refers weakly to its bucket and engine: the garbage collector does not traverse ``p.grad``, so a cycle of a
    parameter, its stand-in and its bucket, with the process groups of the run, would never be freed.
    """

    _refs: tuple[weakref.ref[Bucket], int, weakref.ref[GradViews]]

    def _owners(self) -> tuple[Bucket, int, GradViews]:
        bucket, index, shown_by = self._refs[0](), self._refs[1], self._refs[2]()
        if bucket is None or shown_by is None:
            raise RuntimeError("A gradient of a model whose ZeRO engine is gone was read.")
        return bucket, index, shown_by

    def _apply(self, func: Any, *args: Any, **kwargs: Any) -> ShardedGrad:
        """Apply an element-wise in-place function to this rank's piece."""
        bucket, index, shown_by = self._owners()
        for piece in _local(bucket, index):
            func(piece, *args, **kwargs)
        bucket.grads.put_away()
        shown_by.norms.clear()
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PASSING or func in TRACED:
            with without_torch_function():
                return func(*args, **kwargs)
        if func is Tensor.__repr__:
            return f"ShardedGrad(shape={tuple(args[0].shape)}, dtype={args[0].dtype}, device={str(args[0].device)!r})"
        stand_ins = [t for t in iter_tensors(args) if isinstance(t, ShardedGrad)]
        # The whole gradient is here, and the stand-in is no view of it only because of its dtype.
        if all(_is_whole(grad._owners()[0]) for grad in stand_ins):
            whole = map_tensors(args, _accumulated)
            result = func(*whole, **map_tensors(kwargs, _accumulated))
            # An operation in place returns the stand-in, because ``p.grad *= 2`` assigns the result to ``p.grad``.
            return args[0] if args and result is whole[0] else result
        if getattr(func, "__name__", "") == "_foreach_zero_":  # optimizer.zero_grad(set_to_none=False)
            for grad in args[0]:
                grad._apply(Tensor.zero_) if isinstance(grad, ShardedGrad) else grad.zero_()
            return None
        me = args[0] if args and isinstance(args[0], ShardedGrad) else None
        if me is not None and (func in SAME or (func in _CONVERSIONS and _changes_nothing(me, func, args, kwargs))):
            return me
        given = {key: value for key, value in kwargs.items() if value not in (None, False)}
        if me is not None and func in NORMS and not given.keys() - {"p", "ord", "dtype"} and len(args) <= 2:
            order = args[1] if len(args) == 2 else given.get("p", given.get("ord", 2))
            bucket, index, shown_by = me._owners()
            norm = shown_by.norm((bucket, index), float(2 if order == "fro" else order))
            return norm.to(given.get("dtype", wide(bucket.grads.dtype)))
        others = [*args[1:], *kwargs.values()]
        if me is not None and func in IN_PLACE and not any(isinstance(o, Tensor) and o.dim() > 0 for o in others):
            return me._apply(func, *args[1:], **kwargs)
        raise RuntimeError(f"`{called(func)}` needs all of a gradient whose pieces lie on several ranks. {_REMEDY}")


@lru_cache(maxsize=1024)
def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One NaN expanded to the shape of a gradient; stand-ins are aliases of it, and it is never written."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def _changes_nothing(grad: Tensor, func: Any, args: Any, kwargs: Any) -> bool:
    """True if a conversion of ``grad`` (``args[0]``) to a device or dtype gives itself, as ``.cpu()`` does on a CPU."""
    with without_torch_function():
        probe = torch.empty(0, dtype=grad.dtype, device=grad.device)
        return func(probe, *args[1:], **kwargs) is probe


def _accumulated(tensor: Tensor) -> Tensor:
    """The accumulated gradient of a stand-in; any other tensor itself."""
    if not isinstance(tensor, ShardedGrad):
        return tensor
    bucket, index, shown_by = tensor._owners()
    local, shape = _local(bucket, index), bucket.shapes[index]  # no row if it has no elements
    value = local[0].view(shape) if local else bucket.param_views[index].new_empty(shape)
    return shown_by.parts.show(bucket.params[index], value)


def _with_gradients(places: set[Place]) -> set[Place]:
    """Those of the parameters that still have their gradients."""
    return {(bucket, index) for bucket, index in places if index in bucket.grads.valid}


def _replace(bucket: Bucket, index: int, value: Tensor, parts: Parts) -> None:
    """Copy a tensor that was assigned to ``p.grad`` to the accumulator.

    The parameter counts as used from then on, unless the tensor is zero: a loop over all gradients, such as
    ``p.grad = 0.5 * p.grad``, leaves the zeros of unused parameters what they are.

    Raises:
        RuntimeError: the gradient is sharded, or kept in another dtype or place.
    """
    if not (is_view(bucket) or (bucket.grads.lacks_factor and _is_whole(bucket))):
        name = bucket.layout.spans[index].name
        raise RuntimeError(f"`p.grad` of {name!r} was replaced, but its gradient is sharded over the ranks. {_REMEDY}")
    for local in _local(bucket, index):
        local.copy_(parts.cut(bucket.params[index], value).reshape(-1))
    if index not in bucket.grads.used and bool(value.any()):
        bucket.grads.used.add(index)


class GradViews:
    """The gradients of one engine as ``p.grad`` shows them.

    Attributes:
        shown: what was attached to ``p.grad``; None: ``p.grad`` is a late gradient.
        norms: of attached gradients, by type, until these change.
        aside: nothing is attached: ``put_aside``.
        spent: a step has used, or skipped, what was accumulated.
        held: user code reads ``p.grad``, which stays attached.
        changes: counts what may change which parameters have a gradient.
    """

    def __init__(self, peers: Ranks, buckets: list[Bucket], parts: Parts) -> None:
        self._peers, self._buckets, self.parts = peers, buckets, parts
        self.shown: dict[Place, Tensor | None] = {}
        self._hidden: dict[Place, ShardedGrad] = {}  # stand-ins of the last backward, for reuse
        self._places: set[Place] = set()  # the places of all shown gradients
        self._accumulators: list[Store] = []  # the accumulators when gradients were attached
        self.norms: dict[float, dict[Place, Tensor]] = {}
        self.aside = self.spent = self.held = False
        self.changes = 0

    def begin(self) -> None:
        """Note that a backward has added gradients, which no step has used."""
        self.spent, self._hidden = False, {}
        self.changes += 1

    def abort(self) -> None:
        """Drop all gradients: after a failed backward, including those that it was added to, and at the end of a run.

        Stand-ins would let ``module.double()`` and its like fail.
        """
        self.shown, self._hidden = {}, {}
        self.changes += 1
        for bucket in self._buckets:
            for parameter in bucket.params:
                parameter.grad = None
            bucket.grads.clear(bucket.grads.held)

    def are_reduced(self) -> bool:
        """True if all gradients are reduced, and ``p.grad`` and accumulators are as when they were attached."""
        if self.held or not self.shown:
            return False
        for bucket, accumulator in zip(self._buckets, self._accumulators, strict=True):
            if bucket.grads.local is not None or bucket.grads.values is not accumulator:
                return False
        # Compare all parameters, not only those shown: a gradient may have been set where no rank had one.
        with without_torch_function():
            places = ((bucket, index, p) for bucket in self._buckets for index, p in enumerate(bucket.params))
            return all(p.grad is self.shown.get((bucket, index)) for bucket, index, p in places)

    def put_aside(self) -> None:
        """Attach nothing until the first backward after ``aside`` is unset; clear what a step has used."""
        self.detach()
        if self.spent:
            for bucket in self._buckets:
                bucket.grads.clear(bucket.grads.held)
        self.aside, self.spent = True, False

    def attach_held(self) -> None:
        """Attach all accumulated gradients, reduced or not, so that ``p.grad = None`` clears them."""
        self.attach({(bucket, index) for bucket in self._buckets for index in bucket.grads.held})

    def attach(self, places: set[Place]) -> None:
        """Set ``p.grad`` to stand-ins for the accumulated gradients."""
        self.detach()
        if self.aside:
            return
        self._places, self.norms = places, {}
        self._accumulators = [bucket.grads.values for bucket in self._buckets]
        views = {bucket: is_view(bucket) for bucket in {bucket for bucket, _ in places}}
        # Guards would intercept each access to ``.grad``, although it needs no values.
        with without_torch_function():
            for bucket, index in places:
                parameter = bucket.params[index]
                # A late gradient stays in ``p.grad`` until its second reduction.
                if parameter.grad is not None:
                    self.shown[(bucket, index)] = None
                    continue
                local = _local(bucket, index) if views[bucket] else []
                grad: Tensor | None = self._hidden.get((bucket, index))
                if local:
                    grad = self.parts.show(parameter, local[0].view(bucket.shapes[index]))
                elif grad is None:
                    grad = self._stand_in(bucket, index)
                parameter.grad = self.shown[(bucket, index)] = grad
        self._hidden = {}

    def show_products(self, bucket: Bucket) -> None:
        """Replace the views of a bucket's gradients in ``p.grad`` by stand-ins, before a factor is deferred.

        What user code has assigned, or set to None, stays.
        """
        with without_torch_function():
            for index, parameter in enumerate(bucket.params):
                grad = self.shown.get((bucket, index))
                if grad is None or parameter.grad is not grad or isinstance(grad, ShardedGrad):
                    continue
                parameter.grad = self.shown[(bucket, index)] = self._stand_in(bucket, index)

    def _stand_in(self, bucket: Bucket, index: int) -> ShardedGrad:
        parameter = bucket.params[index]
        empty = _nothing(parameter.shape, parameter.dtype, parameter.device)
        made = empty.as_subclass(ShardedGrad)
        made._refs = weakref.ref(bucket), index, weakref.ref(self)
        return made

    def detach(self, fresh: bool = False) -> None:
        """Remove the stand-ins and apply assignments to ``p.grad``: None clears, a tensor replaces the gradient.

        With ``fresh`` a backward is running: a tensor is its gradient, and the accumulated one was cleared before.

        Raises:
            RuntimeError: a sharded gradient was replaced.
        """
        shown, self.shown = self.shown, {}
        self.changes += 1
        if not shown:
            return
        cleared = []
        with without_torch_function(), torch.no_grad():
            for (bucket, index), grad in shown.items():
                parameter = bucket.params[index]
                current = parameter.grad
                # None is shown for a late gradient, which stays for its second reduction.
                if grad is None and current is not None:
                    continue
                parameter.grad = None
                if current is None or (fresh and current is not grad):
                    cleared.append((bucket, index))
                    parameter.grad = current
                elif current is grad:
                    if isinstance(grad, ShardedGrad):
                        self._hidden[(bucket, index)] = grad
                else:
                    _replace(bucket, index, current, self.parts)
        self._clear(cleared, shown)

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Apply assignments to ``p.grad`` as ``detach`` does, and leave gradients attached. Not collective.

        Raises:
            RuntimeError: a sharded gradient was replaced.
        """
        self.drop_cleared()
        with without_torch_function():
            for (bucket, index), grad in self.shown.items():
                parameter = bucket.params[index]
                if grad is not None and (current := parameter.grad) is not None and current is not grad:
                    _replace(bucket, index, current, self.parts)
                    parameter.grad = grad

    def drop_cleared(self) -> None:
        """Clear the accumulators whose ``p.grad`` was set to None, to free memory before forward."""
        with without_torch_function():
            cleared = [(bucket, index) for bucket, index in self.shown if bucket.params[index].grad is None]
        if not cleared:
            return
        self._clear(cleared, self.shown)
        for place in cleared:
            del self.shown[place]
        self.changes += 1

    @staticmethod
    def _clear(cleared: list[Place], shown: Collection[Place]) -> None:
        gone: dict[Bucket, set[int]] = {}
        for bucket, index in cleared:
            gone.setdefault(bucket, set()).add(index)
        left = {bucket for bucket, index in shown if index not in gone.get(bucket, ())}
        for bucket, indices in gone.items():
            # Unused parameters were not shown; they are cleared with the last of the others.
            bucket.grads.clear(indices if bucket in left else bucket.grads.held)

    def unreduced(self, places: list[tuple[Bucket, int, Parameter]]) -> list[Tensor]:
        """The gradients of these parameters that are in no accumulator yet."""
        with without_torch_function():
            return [p.grad for b, i, p in places if p.grad is not None and self.shown.get((b, i)) is None]

    # ---- norms of shown gradients ----------------------------------------------------------------------------------

    def norm(self, place: Place, norm_type: float) -> Tensor:
        """The norm (0D, fp64) of a shown gradient. The first one of a type computes all. Collective then."""
        name = place[0].layout.spans[place[1]].name
        if place[0].grads.local is not None:
            raise RuntimeError(f"Only a part of the gradient of {name!r} is reduced. Ask after the last micro-batch.")
        if norm_type not in self.norms:
            self.norms[norm_type] = self._compute_norms(norm_type)
        if place not in self.norms[norm_type]:
            raise RuntimeError(f"This gradient of {name!r} is that of an earlier step. Read p.grad again.")
        return self.norms[norm_type][place]

    def _in_order(self) -> list[Place]:
        """The places of all shown gradients, in the order of parameters."""
        return [(b, i) for b in self._buckets for i in range(len(b.params)) if (b, i) in self._places]

    @torch.no_grad()
    def _compute_norms(self, norm_type: float) -> dict[Place, Tensor]:
        places = self._in_order()
        row = torch.zeros(len(places), dtype=torch.float64, device=self._peers.device)
        infinite = norm_type == float("inf")
        for number, (bucket, index) in enumerate(places):
            if bucket.grads.local is not None:
                continue  # not reduced: ``norm`` refuses it
            if bucket.repeats(index):
                continue
            for grad in _local(bucket, index, write=False):
                norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
                row[number] = norm if infinite else norm**norm_type
            if number + 1 == len(places) or places[number + 1][0] is not bucket:
                bucket.grads.put_away()
        row = combine_rows(row, [bucket.holders(index) for bucket, index in places], "gradient norms", infinite)
        row = row if infinite else row ** (1.0 / norm_type)
        return {place: row[number] for number, place in enumerate(places)}

    def scaled(self, places: list[tuple[Bucket, int, Parameter]], factor: Tensor | float) -> None:
        """Scale computed norms after gradients were multiplied by ``factor`` (0D, not negative). Not collective."""
        for table in self.norms.values():
            for bucket, index, _ in places:
                if (bucket, index) in table:
                    table[(bucket, index)] = table[(bucket, index)] * factor

    def changed(self) -> None:
        """Drop computed norms after any other change of gradients. Collective."""
        self.norms.clear()
        if self.held and self._places:
            self.norm(self._in_order()[0], 2.0)


# ---- the exchange of flags -------------------------------------------------------------------------------------------


class UnusedParameters:
    """The agreement of ranks on the parameters that none of them used, and on the news that travel with it.

    Args:
        files: swap files, whose errors on this rank are reported to the other ranks.
        same_on_ranks, buffers: their news travel with the flags.
        sums_late: reductions go on without late ranks.

    Attributes:
        late: buckets that got gradients after their reduction in the last backward.
        nonfinite: a loss was not finite: on this rank, after the exchange on any.
    """

    def __init__(
        self,
        peers: Ranks,
        buckets: list[Bucket],
        views: GradViews,
        reducer: GradReducer,
        files: OffloadManager,
        same_on_ranks: SameOnRanks,
        buffers: BufferSync,
        sums_late: bool,
    ) -> None:
        self._peers, self._buckets, self._views, self._reducer = peers, buckets, views, reducer
        self._files, self._same_on_ranks, self._buffers = files, same_on_ranks, buffers
        self._wide: dict[ShardGroup, list[Bucket]] = {}  # of ranks with other models, which have flags of their own
        for bucket in buckets:
            if bucket.is_wide:
                self._wide.setdefault(bucket.group, []).append(bucket)
        # Ranks do not wait for late ones.
        self._tolerates = sums_late and any(not bucket.sharding.optim for bucket in buckets)
        self._flags: tuple[Work, Tensor] | None = None  # which parameters had a gradient on any rank
        self._wide_due = False  # the flags of ``_wide`` are not exchanged yet
        self._earlier: tuple[Work, Tensor] | None = None  # the flags of the step before, if ranks may be late
        # The result of ``finish_reductions``, and ``GradViews.changes`` then.
        self._found: tuple[set[Place], int] | None = None
        self.late: set[Bucket] = set()
        self.nonfinite = False

    def record(self) -> None:
        """Called when the reductions of a backward are finished."""
        self._views.begin()
        self._flags = None
        if self._reducer.sync:
            self._launch()
        else:
            self.late = {b for b in self._buckets if b.has_grads()}
        self._views.attach_held()

    def abort(self) -> None:
        """Drop all gradients: after a failed backward, including those that it was added to, and at the end of a run.

        Stand-ins would let ``module.double()`` and its like fail.
        """
        self._flags = None
        self._views.abort()

    def _launch(self) -> tuple[Work, Tensor]:
        """Launch the exchange of flags: what is the same on all ranks, used parameters, late buckets, errors."""
        for bucket in self._buckets:
            bucket.edits.check()
        # Guards would intercept each access to ``.grad``, although it needs no values.
        with without_torch_function():
            got = [[p.grad is not None for p in b.params] for b in self._buckets]
        self.late = {b for b, some in zip(self._buckets, got, strict=True) if any(some)}
        used = [g or i in b.grads.used for b, some in zip(self._buckets, got, strict=True) for i, g in enumerate(some)]
        lost = any(b.edits.lost for b in self._buckets)
        files = self._files
        failed = (files.active or bool(files.others)) and files.find_problem() is not None
        news = [*(b in self.late for b in self._buckets), self.nonfinite, failed, lost]
        seen = self._buffers.report()
        every = torch.frombuffer(bytearray([*seen, *self._same_on_ranks.flags(), *used, *news]), dtype=torch.uint8)
        self._wide_due = bool(self._wide)
        work, flags = self._peers.host_max(every, "used parameters"), every[len(seen) :]
        self._buffers.exchanged(work, every[: len(seen)])
        self._flags = work, flags
        return self._flags

    def finish_reductions(self) -> set[Place]:
        """Finish all reductions; returns the parameters, as (bucket, index), that have a gradient. Collective.

        Raises:
            RuntimeError: on all ranks, if an in-place edit of a sharded parameter was lost, or they step with different
                options.
            SwapError: on all ranks, if files failed on one.
        """
        views = self._views
        stays = self._flags is not None and not self.late and views.are_reduced()
        if stays and self._found is not None and self._found[1] == views.changes:
            return _with_gradients(self._found[0])
        if views.held:
            views.take_assigned()
        elif not stays:
            views.detach()
        self._reducer.flush()
        unseen = not views.shown and any(b.has_grads() for b in self._buckets if b not in self.late)
        pending, flags = self._launch() if self._flags is None or unseen else self._flags
        if self._tolerates:
            pending, flags = self._of_the_step_before(pending, flags)
        with phase("reduce", "used parameters"):
            pending.wait()
        if self._wide_due:
            self._exchange_wide(flags)
        row, count = flags.tolist(), len(self._buckets)
        self._same_on_ranks.check(row[:FLAGS])
        self.nonfinite = bool(row[-3])
        if row[-2] or row[-1]:
            self._flags = None
            self._raise(files=bool(row[-2]))
        late = [bucket for bucket, flag in zip(self._buckets, row[-3 - count : -3], strict=True) if flag]
        if late:
            if stays:
                # Detach first: the second reduction takes what ``p.grad`` has, and must not take stand-ins.
                views.detach()
                stays = False
            self._reducer.reduce_again(late)
            flags[-count - 3 :] = 0
            self.late = set()
        used, flagged = set[Place](), iter(row[FLAGS:])
        for bucket in self._buckets:
            valid, mine = bucket.grads.valid, islice(flagged, len(bucket.params))
            used |= {(bucket, index) for index, flag in enumerate(mine) if flag and index in valid}
            # Those of which a gradient was assigned since the exchange; all others of this rank have their flags.
            used |= {(bucket, index) for index in bucket.grads.used & valid}
        if not views.held:
            if not stays or views.shown.keys() != used:
                views.attach(used)
            views.norms, self._found = {}, (used, views.changes)
        return used

    @contextmanager
    def user_access(self) -> Iterator[None]:
        """Context for user code between backward and step: ``p.grad`` is set where any rank used the parameter.

        Collective. The 2-norms are computed in advance, so that one rank alone may read them.
        """
        places, views = self.finish_reductions(), self._views
        views.attach(places)
        views.held = True
        try:
            views.changed()
            yield
        finally:
            views.held = False
            views.detach()
            views.attach({(bucket, index) for bucket, index in places if index in bucket.grads.held})

    def _exchange_wide(self, flags: Tensor) -> None:
        """Take over the flags of buckets that ranks with other models have, too. Collective.

        Not in backward, where these ranks may wait for each other.
        """
        self._wide_due = False
        starts, position = dict[Bucket, int](), FLAGS
        for bucket in self._buckets:
            starts[bucket], position = position, position + len(bucket.params)
        late = {bucket: position + number for number, bucket in enumerate(self._buckets)}
        for group, buckets in self._wide.items():
            places = [p for b in buckets for p in (*range(starts[b], starts[b] + len(b.params)), late[b])]
            mine = flags[places]
            group.host_max(mine, "used shared parameters").wait()
            flags[places] = mine

    def _of_the_step_before(self, pending: Work, flags: Tensor) -> tuple[Work, Tensor]:
        """Keep the flags of this step; returns those of the one before, with all parameters used.

        Raises:
            RuntimeError: there are gradients that no reduction has had.
        """
        if self.late:
            names = ", ".join(bucket.name for bucket in self.late)
            raise RuntimeError(
                f"Gradients of {names} were set after backward. To reduce them all ranks would have to agree, and with "
                "communication.slow_node_tolerance they do not wait for each other: remove the key, or set p.grad in a "
                "backward hook."
            )
        nothing = Done(), torch.zeros_like(flags)
        nothing[1][FLAGS // 2 : FLAGS] = 255
        (pending, flags), self._earlier = self._earlier or nothing, (pending, flags)
        pending.wait()
        flags = flags.clone()
        flags[FLAGS : -len(self._buckets) - 3] = 1
        flags[-len(self._buckets) - 3 : -3] = 0
        return Done(), flags

    def _raise(self, files: bool) -> None:
        """Raise the error of files, or of lost edits, that some rank has. Collective."""
        if files:
            problem = self._files.find_problem()
            raise SwapError(" ".join(self._peers.problems(str(problem) if problem else None, "files")))
        names = [name for bucket in self._buckets for name in bucket.edits.lost]
        for bucket in self._buckets:
            bucket.edits.lost = []
        every = sorted({name for some in self._peers.host_gather(names, "lost edits") for name in some})
        raise RuntimeError(
            f"Parameter {', '.join(map(repr, every[:5]))} was modified in place, but its master weights are stored "
            "elsewhere and would overwrite the edit. Wrap the edit in "
            "`with lt_zero.gathered(parameters, write=True): ...`."
        )
