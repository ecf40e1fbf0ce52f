"""The compute copy of a bucket: a flat tensor of which the parameters are views, and where its weights are.

With sharded parameters its memory is freed unless the bucket is gathered (flat_storage.py). Views survive that, so the
views that autograd saved are valid again after every gather. Otherwise parameters have storages of their own in its
memory, so that ``torch.save`` of a layer writes that layer.

Parameters are set by ``p.data = view``: that keeps their identity and gives each a version counter of its own. If
they shared the flat tensor's counter, autograd would report "modified by an inplace operation" after each refill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from lt_zero.common.compat import assign_data, held_by_autograd
from lt_zero.common.flat_storage import FlatStorage, with_own_storage
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.guard import Owner, disown, guard, own, sentinels, unguard
from lt_zero.core.engine.layout import BucketLayout
from lt_zero.core.engine.partition import BucketPlan


class State(Enum):
    """The place of a bucket's weights on this rank. Those that are not sharded are READABLE or UPDATING.

    LENT and RELEASED are the same to other ranks: which objects live on is not the same on all ranks.
    """

    __hash__ = object.__hash__  # Enum's is a function in Python, and each forward asks for states many times

    RELEASED = "with their owners: the memory is free, and sentinels stand for parameters"
    LENT = "as RELEASED, but user code or autograd holds weights or views of them, so the memory is kept"
    READING = "with their owners: the file of this rank's shard is read before the gather is launched"
    GATHERING = "on their way: the gather is launched"
    READABLE = "in the flat tensor"
    GUARDED = "in the flat tensor, but uses outside of the owning unit's forward are intercepted"
    UPDATING = "in the flat tensor, which awaits its step or the other ranks' updates: all uses are intercepted"


# What may follow a state; anything else is an error of this package.
_NEXT = {
    State.RELEASED: (State.READING, State.GATHERING),
    State.LENT: (State.RELEASED, State.LENT, State.READING, State.GATHERING),
    State.READING: (State.GATHERING,),
    State.GATHERING: (State.READABLE, State.RELEASED, State.LENT),
    State.READABLE: (State.GUARDED, State.UPDATING, State.RELEASED, State.LENT),
    State.GUARDED: (State.READABLE, State.RELEASED, State.LENT),
    State.UPDATING: (State.UPDATING, State.READABLE),
}
RELEASED = State.RELEASED, State.LENT  # the next use has to launch a gather
RESIDENT = State.READABLE, State.GUARDED, State.UPDATING  # the values are in memory


class ComputeCopy:
    """The flat tensor of one bucket, and what its parameters show.

    Args:
        plan: of the bucket.
        layout: of its elements.
        shard_range: the elements [lo, hi) that this rank steps.
        group: over which it is sharded.
        owner: returns the engine that handles uses of released parameters.

    Attributes:
        state: where the weights are.
        flat: all elements (1D).
        views: the parameters' elements in ``flat``, in their shapes.
        shard: this rank's elements (1D) of ``flat``.
        params: the parameters.
        original: dtypes of the parameters to restore when the engine is removed; an fp64 run stays fp64.
    """

    def __init__(
        self,
        plan: BucketPlan,
        layout: BucketLayout,
        shard_range: tuple[int, int],
        group: ShardGroup,
        owner: Callable[[], Owner | None],
    ) -> None:
        self._name = plan.name
        self.params = [p for _, p in plan.parameters]
        self._owner = owner
        self.original = [plan.dtype if plan.dtype == torch.float64 else p.dtype for p in self.params]
        self._storage: FlatStorage | None = None
        if plan.sharding.params:
            self._storage = FlatStorage(layout.numel, plan.dtype, group.device)
            self.flat = self._storage.tensor
        else:
            self.flat = group.allocate(layout.numel, plan.dtype)
        self.views = layout.views(self.flat)
        self.shard = self.flat[shard_range[0] : shard_range[1]]
        self._shapes = [span.shape for span in layout.spans]
        self._sentinels: list[Tensor] = []  # one for each parameter, with sharded parameters
        self._handed_out = False  # Python objects hold the parameters themselves until the next gather
        self.state = State.READABLE
        if self._storage is not None:
            # All buckets are made before their weights are loaded into the first. A slice of freed memory is an error.
            self._storage.free()

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self.state], (self._name, self.state, state)
        self.state = state

    # ---- parameters --------------------------------------------------------------------------------------------

    def shown(self, view: Tensor) -> Tensor:
        """The tensor of a parameter with this ``view`` of the flat tensor: with a storage of its own if that stays."""
        return with_own_storage(view) if self._storage is None else view

    def take(self, values: Iterator[Tensor], places: Sequence[Tensor]) -> None:
        """Copy the parameters' full ``values`` to ``places``, and make the parameters views of the flat tensor."""
        for parameter, view, place in zip(self.params, self.views, places, strict=True):
            # Take the value here: zip would keep it until it has the next one, with two in memory.
            place.copy_(next(values))
            unguard(parameter)
            disown(parameter)  # a weak reference, which ``assign_data`` may not meet
            assign_data(parameter, self.shown(view))
            own(parameter, self._owner)
        if self._storage is not None:
            self._sentinels = sentinels(self.flat, self._shapes)

    def show(self) -> None:
        """GATHERING -> READABLE: the flat tensor is filled, and parameters are views of it."""
        self._unguard()
        for parameter, view in zip(self.params, self.views, strict=True):
            parameter.data = view
        self._enter(State.READABLE)
        self._handed_out = False

    def guard(self) -> None:
        """READABLE -> GUARDED, see guard.py; no-op elsewhere, and where parameters are not sharded."""
        if self.state is State.READABLE and self._storage is not None:
            self._guard()
            self._enter(State.GUARDED)

    def unguard(self) -> None:
        """GUARDED -> READABLE, or no-op."""
        if self.state is State.GUARDED:
            self._unguard()
            self._enter(State.READABLE)

    def begin_update(self) -> None:
        """READABLE -> UPDATING: a step, or a gather of the other ranks' updates, goes on beside the next forward."""
        self._guard()
        self._enter(State.UPDATING)

    def end_update(self) -> None:
        """UPDATING -> READABLE: the flat tensor has the step's weights."""
        self._unguard()
        self._enter(State.READABLE)

    def _guard(self) -> None:
        for parameter in self.params:
            guard(parameter)

    def _unguard(self) -> None:
        for parameter in self.params:
            unguard(parameter)

    # ---- memory, with sharded parameters -----------------------------------------------------------------------

    def begin_gather(self) -> None:
        """Note, before a gather, which references to the memory are the engine's."""
        if self.state is not State.LENT and self._storage is not None:
            self._storage.note_own()

    def await_file(self) -> None:
        """RELEASED -> READING."""
        self._enter(State.READING)

    def allocate(self) -> None:
        """Make the memory usable; no-op if it is never freed."""
        if self._storage is not None:
            self._storage.allocate()

    def await_gather(self) -> None:
        """RELEASED, or READING -> GATHERING: the flat tensor is being filled."""
        self._enter(State.GATHERING)

    def hand_out(self) -> None:
        """Keep the memory and the parameters' values at the next release: Python objects hold the parameters."""
        self._handed_out = True

    def take_back(self) -> None:
        """End ``hand_out`` before the next gather does."""
        self._handed_out = False

    def hide(self, readers: bool) -> None:
        """Put sentinels in place of the parameters, except those that are read without a guard.

        These keep the memory. ``readers``: I/O threads may have read it.
        """
        with torch.inference_mode(False):
            if self.state is not State.READABLE:
                # A guard would intercept the assignment.
                self._unguard()
            for parameter, value in zip(self.params, self._sentinels, strict=True):
                if not self._handed_out and not held_by_autograd(parameter):
                    parameter.data = value
            self._guard()
        if readers and self._storage is not None:
            self._storage.await_readers()

    def free(self) -> None:
        """Go to RELEASED and free the memory, or to LENT if something else holds weights, until that lets go."""
        assert self._storage is not None, self._name
        if self._storage.held:
            self._enter(State.LENT)
        else:
            self._enter(State.RELEASED)
            self._storage.free()

    @torch.no_grad()
    def spoil(self) -> None:
        """Fill the lent memory with NaN: whatever holds weights of an earlier step is not to be used."""
        self.flat.fill_(float("nan") if self.flat.is_floating_point() else 0)
