"""Gradients as ``p.grad`` shows them between a backward and the step, and the parameters that any rank used.

The gradients are in the buckets' accumulators. After a backward ``p.grad`` of every reduced parameter is a stand-in, so
that ``optimizer.zero_grad()``, norm logging and manual clipping work: setting it to None clears the gradient. Where a
rank holds the full gradient (stage 0, and stage 1 inside of an accumulation window) the stand-in is a view of it.
Where such a gradient lacks a deferred factor, the stand-in is a ``ShardedGrad`` that multiplies when it is read. A
sharded gradient has a ``ShardedGrad``, too, which supports what needs no gather: norms over all ranks (one all-reduce
for all parameters), and what is computed element by element (sharded_grad.py). All else raises and names a remedy.

One exchange of flags (step_flags.py), launched when backward ends and waited for at the step, tells all ranks which
parameters any of them used (reduced_grads.py, Note [Unused parameters]), and which buckets need a second reduction
(grad_reducer.py, Note [When a bucket is ready]). What others have to tell travels with it. Where ranks do not wait for
late ones (``GradientExchange.sums_late``, stage 0) a step waits for the flags of the step before, every
parameter counts as used, and there are no second reductions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import without_torch_function
from lt_zero.common.phases import phase
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.shard_group import ShardGroup, combine_rows
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import GradientExchange
from lt_zero.core.engine.grad_accumulator import GradState
from lt_zero.core.engine.grad_reducer import GradReducer
from lt_zero.core.engine.parts import Parts
from lt_zero.core.engine.sharded_grad import REMEDY, Place, ShardedGrad, ShardedValues, is_whole, local_rows, stand_in
from lt_zero.core.engine.step_flags import ExchangedFlags, Section, StepFlags
from lt_zero.core.stores.store import Store

if TYPE_CHECKING:
    from lt_zero.common.norms import VectorNorm


def is_view(bucket: Bucket) -> bool:
    """True if ``p.grad`` is, or may be, a view of the accumulator."""
    local = bucket.grads.local
    # Where replicas are summed once a step, a view kept over a micro-batch would show one replica's part of the sum.
    apart = bucket.grads.sums is GradState.PARTIAL or bucket.sums_apart
    if local is None and (bucket.offloaded or bucket.grads.lacks_factor or apart):
        return False
    dtype = local.dtype if local is not None else bucket.grads.values.dtype
    return is_whole(bucket) and dtype == bucket.dtype


def _row_of_views(bucket: Bucket) -> Tensor | None:
    """The gradients (1D, all elements) of which ``p.grad`` shows views; None: it shows stand-ins."""
    grads = bucket.grads
    if not is_view(bucket) or not (grads.accumulated or grads.local is not None):
        return None
    return grads.local if grads.local is not None else grads.write()


def _with_gradients(places: set[Place]) -> set[Place]:
    """Those of the parameters that still have their gradients."""
    return {place for place in places if place[1] in place[0].grads.valid}


def _replace(bucket: Bucket, index: int, value: Tensor, parts: Parts) -> None:
    """Copy a tensor that was assigned to ``p.grad`` to the accumulator.

    The parameter counts as used from then on, unless the tensor is zero: a loop over all gradients, such as
    ``p.grad = 0.5 * p.grad``, leaves the zeros of unused parameters what they are.

    Raises:
        RuntimeError: the gradient is sharded.
    """
    if isinstance(value, ShardedValues) and value._owners()[:2] == (bucket, index):
        for row, new in zip(local_rows(bucket, index), value._rows(False), strict=True):
            _assign(bucket, row, new)
        bucket.grads.put_away()
        return
    if not is_whole(bucket):
        name = bucket.layout.spans[index].name
        raise RuntimeError(f"`p.grad` of {name!r} was replaced, but its gradient is sharded over the ranks. {REMEDY}")
    for local in local_rows(bucket, index):
        _assign(bucket, local, parts.cut(bucket.params[index], value).reshape(-1))
    bucket.grads.put_away()
    if index not in bucket.grads.used and bool(value.any()):
        bucket.grads.note_used(index)


def _assign(bucket: Bucket, row: Tensor, value: Tensor) -> None:
    """Copy what the user has assigned, the same on all ranks, to a row of gradients."""
    if bucket.grads.sums is GradState.PARTIAL and not bucket.grads.stands_for_all:
        row.zero_()
    else:
        row.copy_(value)


class GradViews:
    """The gradients of one engine as ``p.grad`` shows them.

    Attributes:
        shown: what was attached to ``p.grad``; None: ``p.grad`` is a late gradient.
        norms: of attached gradients, by type, until these change.
        norm_of: makes the norm of an order.
        plain_norms: it is torch's, whose sums may be taken in any order.
        aside: nothing is attached: ``put_aside``.
        spent: a step has used, or skipped, what was accumulated.
        held: user code reads ``p.grad``, which stays attached.
        changes: counts what may change which parameters have a gradient.
        defers: the gradients will be multiplied by a factor that rounds, which is deferred. There are no views of them:
            one that user code keeps from an earlier micro-batch would lack the factor.
        complete: sums over the replicas what is not yet (``GradReducer.sum_replicas``). Collective.
    """

    def __init__(
        self,
        peers: Ranks,
        buckets: list[Bucket],
        parts: Parts,
        norm_of: Callable[[float], VectorNorm],
        plain_norms: bool,
    ) -> None:
        self._peers = peers
        self._buckets = buckets
        self._parameters = [((bucket, index), p) for bucket in buckets for index, p in enumerate(bucket.params)]
        self.parts = parts
        self.norm_of = norm_of
        self.plain_norms = plain_norms
        self.complete: Callable[[], None] = lambda: None
        self.shown: dict[Place, Tensor | None] = {}
        self._hidden: dict[Place, ShardedGrad] = {}  # stand-ins of the last backward, for reuse
        self._places: set[Place] = set()  # the places of all shown gradients
        self._accumulators: list[Store] = []  # the accumulators when gradients were attached
        self.norms: dict[float, dict[Place, Tensor]] = {}
        self.aside = self.spent = self.held = self.defers = False
        self.changes = 0

    def begin(self) -> None:
        """Note that a backward has added gradients, which no step has used."""
        self.spent, self._hidden = False, {}
        self.changes += 1

    def spend(self) -> None:
        """Note that a step has used, or skipped, what was accumulated."""
        self.spent = True

    def expect_factor(self, rounds: bool) -> None:
        """Note whether the gradients will be multiplied by a factor that ``rounds``: see ``defers``."""
        self.defers = rounds

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
            grads = bucket.grads
            if grads.local is not None or grads.sums is GradState.PARTIAL or grads.values is not accumulator:
                return False
        # Compare all parameters, not only those shown: a gradient may have been set where no rank had one.
        shown = self.shown
        with without_torch_function():
            return all([parameter.grad is shown.get(place) for place, parameter in self._parameters])

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
        # Torch's own norms of views would not be those that ``norm_of`` makes.
        hides = self.defers or not self.plain_norms
        rows = {bucket: None if hides else _row_of_views(bucket) for bucket in {bucket for bucket, _ in places}}
        # Guards would intercept each access to ``.grad``, although it needs no values.
        with without_torch_function():
            for bucket, index in places:
                parameter = bucket.params[index]
                # A late gradient stays in ``p.grad`` until its second reduction.
                if parameter.grad is not None:
                    self.shown[(bucket, index)] = None
                    continue
                row = rows[bucket]
                grad: Tensor | None
                if row is not None:
                    span = bucket.layout.spans[index]
                    grad = self.parts.show(parameter, row[span.lo : span.hi].view(span.shape))
                elif (grad := self._hidden.get((bucket, index))) is None:
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
        return stand_in(bucket.params[index], (weakref.ref(bucket), index, weakref.ref(self)))

    def detach(self, fresh: bool = False) -> None:
        """Remove the stand-ins and apply assignments to ``p.grad``: None clears, a tensor replaces the gradient.

        With ``fresh`` a backward is running: a tensor is its gradient, and the accumulated one was cleared before.
        Values that were computed from a sharded gradient were assigned in any case: autograd makes none.

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
                if current is None or (fresh and current is not grad and not isinstance(current, ShardedValues)):
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
                    self.norms.clear()
                    parameter.grad = grad

    def drop_cleared(self) -> None:
        """Clear the accumulators whose ``p.grad`` was set to None, to free memory before forward."""
        with without_torch_function():
            cleared = [place for place in self.shown if place[0].params[place[1]].grad is None]
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
        left = set[Bucket]()
        if len(cleared) < len(shown):
            left = {bucket for bucket, index in shown if index not in gone.get(bucket, ())}
        for bucket, indices in gone.items():
            # Unused parameters were not shown; they are cleared with the last of the others.
            bucket.grads.clear(indices if bucket in left else bucket.grads.held)

    def unreduced(self, places: list[tuple[Bucket, int, Parameter]]) -> list[Tensor]:
        """The gradients of these parameters that are in no accumulator yet."""
        with without_torch_function():
            return [p.grad for b, i, p in places if p.grad is not None and self.shown.get((b, i)) is None]

    @staticmethod
    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch with sharded gradients among its arguments; only code of users does."""
        from lt_zero.core.engine.sharded_calls import call

        return call(func, args, kwargs)

    # ---- norms of shown gradients ----------------------------------------------------------------------------------

    def norm(self, place: Place, norm_type: float) -> Tensor:
        """The norm (0D, fp64) of a shown gradient. The first one of a type computes all. Collective then."""
        name = place[0].layout.spans[place[1]].name
        if place[0].grads.local is not None:
            raise RuntimeError(f"Only a part of the gradient of {name!r} is reduced. Ask after the last micro-batch.")
        if norm_type not in self.norms:
            self.complete()
            self.norms[norm_type] = self._compute_norms(norm_type)
        if place not in self.norms[norm_type]:
            raise RuntimeError(f"This gradient of {name!r} is that of an earlier step. Read p.grad again.")
        return self.norms[norm_type][place]

    def _in_order(self) -> list[Place]:
        """The places of all shown gradients, in the order of parameters."""
        return [place for place, _ in self._parameters if place in self._places]

    @torch.no_grad()
    def _compute_norms(self, norm_type: float) -> dict[Place, Tensor]:
        places = self._in_order()
        kind = self.norm_of(norm_type)
        device = self._peers.device
        parts = kind.nothing(len(places), device)
        for number, (bucket, index) in enumerate(places):
            if bucket.grads.local is not None:
                continue  # not reduced: ``norm`` refuses it
            if bucket.repeats(index):
                continue
            parts[number] = kind.part(local_rows(bucket, index, write=False), device)
            if number + 1 == len(places) or places[number + 1][0] is not bucket:
                bucket.grads.put_away()
        groups = [bucket.holders(index) for bucket, index in places]
        parts = combine_rows(parts, groups, "gradient norms", kind.takes_maximum)
        return {place: norm for place, norm in zip(places, kind.finish(parts), strict=True)}

    def scaled(self, places: list[tuple[Bucket, int, Parameter]], factor: Tensor | float) -> None:
        """Scale computed norms after gradients were multiplied by ``factor`` (0D, not negative). Not collective."""
        self.norms.pop(0.0, None)  # it is no multiple: the factor may be 0
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
    """The agreement of ranks on the parameters that none of them used, and on buckets to be reduced again.

    Args:
        news: sections of others, which travel with the flags.
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
        news: Iterable[Section],
        exchange: GradientExchange,
    ) -> None:
        self._buckets = buckets
        self._views = views
        self._reducer = reducer
        views.complete = reducer.sum_replicas
        used = Section("used", self._report_used)
        late = Section("late", lambda: [bucket in self.late for bucket in self._buckets])
        nonfinite = Section("nonfinite", lambda: [self.nonfinite], self._take_nonfinite)
        self._step_flags = StepFlags(peers, [used, late, nonfinite, *news])
        self._wide: dict[ShardGroup, list[Bucket]] = {}  # of ranks with other models, which have flags of their own
        for bucket in buckets:
            if bucket.plan.is_wide:
                self._wide.setdefault(bucket.group, []).append(bucket)
        # Ranks do not wait for late ones.
        self._exchange = exchange
        self._tolerates = exchange.sums_late and any(not bucket.sharding.optim for bucket in buckets)
        self._flags: ExchangedFlags | None = None  # of the last backward
        self._wide_due = False  # the flags of ``_wide`` are not exchanged yet
        self._earlier: ExchangedFlags | None = None  # the flags of the step before, if ranks may be late
        # The result of ``finish_reductions``, and ``GradViews.changes`` then.
        self._found: tuple[set[Place], int] | None = None
        self.late: set[Bucket] = set()
        self._overdue: set[Bucket] = set()  # that were late in an earlier backward, if each is reduced by itself
        self.nonfinite = False

    def record(self) -> None:
        """Called when the reductions of a backward are finished."""
        self._views.begin()
        self._flags = None
        if self._exchange.reduces_each_backward:
            self._overdue |= self.late
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
        self._overdue.clear()
        self._views.abort()

    def _launch(self) -> ExchangedFlags:
        """Launch the exchange of flags."""
        for bucket in self._buckets:
            bucket.edits.check()
        self._wide_due = bool(self._wide)
        self._flags = self._step_flags.launch()
        return self._flags

    def _report_used(self) -> list[bool]:
        """Report which parameters had a gradient on this rank; notes the ``late`` buckets."""
        self.late = set(self._overdue)
        flags = list[bool]()
        for bucket in self._buckets:
            got = bucket.which_have_grads()
            if any(got):
                self.late.add(bucket)
            used = bucket.grads.used
            flags += [has or index in used for index, has in enumerate(got)]
        return flags

    def _take_nonfinite(self, flags: Sequence[int]) -> None:
        self.nonfinite = bool(flags[0])

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
        flags = self._launch() if self._flags is None or unseen else self._flags
        if self._tolerates:
            flags = self._of_the_step_before(flags)
        with phase("reduce", "used parameters"):
            flags.wait()
        if self._wide_due:
            self._exchange_wide(flags)
        maxima = flags.numbers()
        try:
            self._step_flags.handle(maxima)
        except RuntimeError:
            self._flags = None
            raise
        late = [bucket for bucket, flag in zip(self._buckets, maxima["late"], strict=True) if flag]
        if late:
            if self._exchange.reduces_each_backward:
                self._flags = None
                self._exchange.refuse_second_reduction(", ".join(bucket.name for bucket in late))
            if stays:
                # Detach first: the second reduction takes what ``p.grad`` has, and must not take stand-ins.
                views.detach()
                stays = False
            self._reducer.reduce_again(late)
            flags["late"].zero_()
            self.late = set()
        used = set[Place]()
        flagged = iter(maxima["used"])
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

    def _exchange_wide(self, flags: ExchangedFlags) -> None:
        """Take over the flags of buckets that ranks with other models have, too. Collective.

        Not in backward, where these ranks may wait for each other.
        """
        self._wide_due = False
        used = flags["used"].split([len(bucket.params) for bucket in self._buckets])
        late = flags["late"].split(1)
        of_bucket = dict(zip(self._buckets, zip(used, late, strict=True), strict=True))
        for group, buckets in self._wide.items():
            parts = [part for bucket in buckets for part in of_bucket[bucket]]
            mine = torch.cat(parts)
            group.host_max(mine, "used shared parameters").wait()
            for part, maxima in zip(parts, mine.split([part.numel() for part in parts]), strict=True):
                part.copy_(maxima)

    def _of_the_step_before(self, flags: ExchangedFlags) -> ExchangedFlags:
        """Keep the flags of this step; returns those of the one before, with all parameters used.

        Raises:
            RuntimeError: there are gradients that no reduction has had.
        """
        if self.late:
            self._exchange.refuse_second_reduction(", ".join(bucket.name for bucket in self.late))
        earlier = (self._earlier or self._step_flags.nothing(flags)).copied()
        self._earlier = flags
        earlier["used"].fill_(1)
        earlier["late"].zero_()
        return earlier
