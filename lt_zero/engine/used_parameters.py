"""Used parameters, late gradients, and what ``p.grad`` shows between a backward and the step.

The gradients are in the buckets' accumulators. One exchange of flags, launched when backward ends and waited for at the
step, tells all ranks which parameters any of them used (reduced_grads.py, Note [Unused parameters]) and which buckets
need a second reduction (grad_bucket.py, Note [When a bucket is ready]).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.comm.communicator import Comm
from lt_zero.comm.work import Work
from lt_zero.common.compat import without_torch_function
from lt_zero.common.timing import phase
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.grad_bucket import Reducer
from lt_zero.engine.visible_grads import Norms, ShardedGrad, is_view, replace_grad, stand_in
from lt_zero.io.thread_pool import SwapError


class UsedParameters:
    """The gradients of one engine, for the optimizer and for user code."""

    def __init__(self, comm: Comm, reducer: Reducer[Bucket], buckets: list[Bucket]) -> None:
        self._comm, self._reducer, self._buckets = comm, reducer, buckets
        self.late: set[Bucket] = set()  # buckets that got gradients after their reduction in the last backward
        self._flags: tuple[Work, Tensor] | None = None  # which parameters had a gradient on any rank
        self._hold = False  # user code reads p.grad: ``finish_reductions`` leaves it as it is
        self._shown: dict[tuple[Bucket, int], Tensor | None] = {}  # shown in p.grad; None: p.grad is a late gradient
        self._hidden: dict[tuple[Bucket, int], ShardedGrad] = {}  # of the last backward, for reuse
        self.nonfinite = False  # a loss was not finite: on this rank, after the exchange on any
        self.problem: Callable[[], SwapError | None] = lambda: None  # error of files on this rank
        self._norms: Norms | None = None  # of shown gradients, which refer to it weakly

    def record(self) -> None:
        """Called when the reductions of a backward are finished."""
        self._hidden = {}
        self._flags, self.late = None, {b for b in self._buckets if b.has_grads()}
        if self._reducer.sync:
            self._launch()
        self.show_held()

    def abort(self) -> None:
        """Drop all gradients after a failed backward, including those that it was added to."""
        self._flags, self._shown, self._hidden = None, {}, {}
        for bucket in self._buckets:
            for parameter in bucket.params:
                parameter.grad = None
            bucket.grads.clear(bucket.grads.held)

    def _launch(self) -> None:
        """Launch the exchange of flags: used parameters, buckets with late gradients, errors."""
        for bucket in self._buckets:
            bucket.edits.check()
        used = [flag for b in self._buckets for flag in b.grads.used_flags()]
        self.late = {b for b in self._buckets if b.has_grads()}
        lost = any(b.edits.lost for b in self._buckets)
        failed = self.problem() is not None
        news = [*(b in self.late for b in self._buckets), self.nonfinite, failed, lost]
        flags = torch.tensor([*used, *news], dtype=torch.uint8)
        self._flags = (self._comm.host_max(flags, "used parameters"), flags)

    def finish_reductions(self) -> Callable[[Bucket, int], bool]:
        """Finish all reductions; returns whether parameter ``index`` of a bucket has a gradient. Collective.

        Raises:
            RuntimeError: on all ranks, if an in-place edit of a sharded parameter was lost.
            SwapError: on all ranks, if files failed on one.
        """
        if not self._hold:
            self.hide()
        self._reducer.flush()
        unseen = not self._shown and any(b.has_grads() for b in self._buckets if b not in self.late)
        if self._flags is None or unseen:
            self._launch()
        assert self._flags is not None
        pending, flags = self._flags
        with phase("reduce", "used parameters"):
            pending.wait()
        row = flags.tolist()
        count = len(self._buckets) + 3
        self.nonfinite |= bool(row[-3])
        if row[-2]:
            self._flags = None
            problem = self.problem()
            raise SwapError(" ".join(self._comm.problems(str(problem) if problem else None, "files")))
        if row[-1]:
            self._raise_lost_edits()
        late = [bucket for bucket, flag in zip(self._buckets, row[-count:-3], strict=True) if flag]
        if late:
            self._reducer.reduce_again(late)
            flags[-count:] = 0
            self.late = set()
        used, flagged = set[tuple[Bucket, int]](), iter(row)
        for bucket in self._buckets:
            valid, mine = bucket.grads.valid, islice(flagged, len(bucket.params))
            used |= {(bucket, index) for index, flag in enumerate(mine) if flag and index in valid}
        if not self._hold:
            self.show(used)
        return lambda bucket, index: (bucket, index) in used and index in bucket.grads.valid

    def _raise_lost_edits(self) -> None:
        names = [name for bucket in self._buckets for name in bucket.edits.lost]
        for bucket in self._buckets:
            bucket.edits.lost = []
        self._flags = None
        every = sorted({name for some in self._comm.host_gather(names, "lost edits") for name in some})
        raise RuntimeError(
            f"Parameter {', '.join(map(repr, every[:5]))} was modified in place, but its master weights are stored "
            "elsewhere and would overwrite the edit. Wrap the edit in "
            "`with lt_zero.gathered(parameters, write=True): ...`."
        )

    def show_held(self) -> None:
        """Show all accumulated gradients, reduced or not, so that ``p.grad = None`` clears them."""
        self.show({(bucket, index) for bucket in self._buckets for index in bucket.grads.held})

    def show(self, places: set[tuple[Bucket, int]], norms: Norms | None = None) -> None:
        """Set ``p.grad`` to stand-ins for the accumulated gradients. See visible_grads.py."""
        self.hide()
        ordered = [(b, i) for b in self._buckets for i in range(len(b.params)) if (b, i) in places]
        self._norms = norms = norms or Norms(self._comm, ordered)
        views = {bucket: is_view(bucket) for bucket in {bucket for bucket, _ in places}}
        with without_torch_function():  # guards would intercept each access
            for bucket, index in places:
                parameter = bucket.params[index]
                if parameter.grad is not None:  # late: it stays there until its second reduction
                    self._shown[(bucket, index)] = None
                    continue
                hidden = None if views[bucket] else self._hidden.get((bucket, index))
                if hidden is not None:
                    hidden.refer_to(norms)
                grad = hidden if hidden is not None else stand_in((bucket, index), norms, views[bucket])
                parameter.grad = self._shown[(bucket, index)] = grad
        self._hidden = {}

    def scaled(self, places: list[tuple[Bucket, int, Parameter]], factor: Tensor | float) -> None:
        """Scale computed norms after gradients were multiplied by ``factor``. Not collective."""
        if self._norms is not None:
            self._norms.scale([(bucket, index) for bucket, index, _ in places], factor)

    def changed(self) -> None:
        """Drop computed norms after any other change of gradients. Collective."""
        if self._norms is not None:
            self._norms.forget()
            if self._hold:
                self._norms.prepare()

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Context for user code between backward and step: ``p.grad`` is set where any rank used the parameter.

        Collective. The 2-norms are computed in advance, so that one rank alone may read them.
        """
        used = self.finish_reductions()
        places = [(b, i) for b in self._buckets for i in range(len(b.params)) if used(b, i)]
        norms = Norms(self._comm, places)
        norms.prepare()
        self.show(set(places), norms)
        self._hold = True
        try:
            yield
        finally:
            self._hold = False
            self.hide()
            self.show({(bucket, index) for bucket, index in places if index in bucket.grads.held})

    def hide(self, fresh: bool = False) -> None:
        """Remove the stand-ins and apply assignments to ``p.grad``: None clears, a tensor replaces the gradient.

        With ``fresh`` a backward is running: a tensor is its gradient, and the accumulated one was cleared before.

        Raises:
            RuntimeError: a sharded gradient was replaced.
        """
        shown, self._shown = self._shown, {}
        cleared = []
        with without_torch_function():
            for (bucket, index), grad in shown.items():
                parameter = bucket.params[index]
                current = parameter.grad
                if grad is None and current is not None:
                    continue
                parameter.grad = None
                if current is None or (fresh and current is not grad):
                    cleared.append((bucket, index))
                    parameter.grad = current
                elif current is not grad:
                    replace_grad(bucket, index, current)
                elif isinstance(grad, ShardedGrad):
                    self._hidden[(bucket, index)] = grad
        self._clear(cleared, shown)

    def drop_cleared(self) -> None:
        """Clear the accumulators whose ``p.grad`` was set to None, to free memory before forward."""
        cleared = [(bucket, index) for bucket, index in self._shown if bucket.params[index].grad is None]
        self._clear(cleared, self._shown)
        for place in cleared:
            del self._shown[place]

    @staticmethod
    def _clear(cleared: list[tuple[Bucket, int]], shown: Collection[tuple[Bucket, int]]) -> None:
        gone: dict[Bucket, set[int]] = {}
        for bucket, index in cleared:
            gone.setdefault(bucket, set()).add(index)
        left = {bucket for bucket, index in shown if index not in gone.get(bucket, ())}
        for bucket, indices in gone.items():
            # Unused parameters were not shown; they are cleared with the last of the others.
            bucket.grads.clear(indices if bucket in left else bucket.grads.held)
