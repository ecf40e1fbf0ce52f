"""One bucket: a flat tensor with its parameters as views, gathered and released as a unit.

``flat``     the compute copy, all elements; parameters are views of it. With sharded parameters its memory is freed
             unless the bucket is gathered (flat_storage.py). Views survive that, so the views that autograd saved are
             valid again after every gather. Otherwise parameters have storages of their own in its memory, so that
             ``torch.save`` of a layer writes that layer.
``weights``  this rank's master weights, or the shard of frozen weights, and the copy of them that gathers read
             (bucket_weights.py).
``grads``    the gradient accumulator (grad_accumulator.py).
``states``   optimizer states, where they are not kept beside their fragments.

Their bytes are kept in stores (core/stores/store.py): on the device, in host memory or in files. The two places of a
bucket say which: one for master weights, accumulator and states, one for what gathers read.

Parameters are set by ``p.data = view``: that keeps their identity and gives each a version counter of its own. If
they shared the flat tensor's counter, autograd would report "modified by an inplace operation" after each refill.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero import kernels as ops
from lt_zero.common import accelerator
from lt_zero.common.compat import (
    are_unchanged,
    assign_data,
    held_by_autograd,
    in_running_backward,
    versions_of,
    without_grad,
    without_torch_function,
)
from lt_zero.common.flat_storage import FlatStorage, brief_empty, flat_empty, with_own_storage
from lt_zero.common.moment_form import MomentForm
from lt_zero.common.phases import phase
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket_weights import MasterWeights
from lt_zero.core.engine.grad_accumulator import GradAccumulator
from lt_zero.core.engine.guard import Owner, disown, guard, own, sentinels, unguard, watch_data
from lt_zero.core.engine.layout import Piece, gaps_between
from lt_zero.core.engine.lazy_tensor import elements_of, whole
from lt_zero.core.engine.partition import BucketPlan
from lt_zero.core.engine.step_flags import Section
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.core.stores.store import Awaited, BackgroundStep, Place, Places, Store, device_place, put_away

_ROW = 1024  # words per row of a digest, which does not see permutations within a row


class State(Enum):
    RELEASED = auto()
    GATHERING = auto()
    RESIDENT = auto()


@dataclass
class InFlight:
    """Counts of what is being gathered."""

    numel: int = 0  # elements
    buckets: int = 0

    def add(self, numel: int, buckets: int) -> None:
        self.numel, self.buckets = self.numel + numel, self.buckets + buckets


@dataclass
class Live:
    """Counts of what the buckets that share this object have gathered, or are gathering."""

    numel: int = 0
    in_flight: InFlight = field(default_factory=InFlight)

    def add(self, numel: int) -> None:
        """Count ``numel`` more elements, which may be negative."""
        self.numel += numel


class GatherStrategy:
    """Gathers the weights of the one bucket that it is made for. This class sends them as they are.

    Others are in ``features/``.

    Attributes:
        rounded: what was gathered last is not what the owners have.
    """

    rounded = False

    def place(self, place: Place, device: torch.device) -> Place:
        """The place of the tensor that gathers read, for a bucket that keeps it in ``place``."""
        return place

    def check_training(self, name: str) -> None:
        """Raise ConfigError if the weights, as they are kept, cannot be trained. ``name``: of the bucket."""

    def prepare(self, bucket: Bucket, exact: bool) -> bool:
        """Choose how the gather that ``launch`` starts next fills the flat tensor; ``exact``: without rounding.

        Returns whether it reads ``MasterWeights.gather_source``.
        """
        return True

    def launch(self, bucket: Bucket) -> Work:
        """Start filling the (allocated) flat tensor for computation."""
        with bucket.weights.gather_source.source(bucket.shard) as own:
            return bucket.group.all_gather(bucket.flat, bucket.name, own)

    def finish(self, bucket: Bucket) -> None:
        """Note that the flat tensor is filled."""

    def publish(self, bucket: Bucket) -> Work:
        """Start gathering all ranks' updates of the compute copy, which is not sharded."""
        return bucket.group.all_gather(bucket.flat, bucket.name, bucket.flat)

    def publish_in_background(self, bucket: Bucket) -> Work:
        """``publish``, after a background step."""
        return bucket.group.background_gather(bucket.flat)

    def weights_changed(self) -> None:
        """Begin the next gather at the owners of the weights."""

    def decoded(self, shard: Tensor) -> Tensor:
        """This rank's ``shard`` (1D, in the compute dtype) as a gather that rounds would deliver it."""
        return shard

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes now."""
        return 0


class Bucket:
    """Parameters of one dtype that are gathered, reduced and released together.

    Args:
        storage: what is kept of it, and where.
        gathers: how its weights are gathered; of this bucket alone.
        owner: returns the engine that handles uses of released parameters.
        unpublished: buckets of its engine whose updates the thread that waits gathers, in the order of their steps.
    """

    def __init__(
        self,
        plan: BucketPlan,
        storage: StoragePlan,
        group: ShardGroup,
        gathers: GatherStrategy,
        owner: Callable[[], Owner | None],
        unpublished: deque[Bucket],
    ) -> None:
        self.name = plan.name
        self.dtype = plan.dtype
        self.sharding = plan.sharding
        self.group = group
        self.storage = storage
        self.is_wide = plan.is_wide
        self.compresses = plan.compresses
        dtype, sharding = plan.dtype, plan.sharding
        self.params = [p for _, p in plan.parameters]
        self.is_cut = storage.is_cut  # this rank steps, and gets the gradients of, a shard
        self.is_whole = storage.is_whole  # which may be all elements
        self.sums_apart = self.is_cut and group.sums_replicas_apart  # sums over replicas may be left to a later one
        self.staged = storage.staged  # see sharded_optimizer.py, Note [Staged buckets]
        self.layout = plan.layout_in(group.mesh.shards, group.size)
        self.counted = storage.counted  # elements, where ranks of all groups have to decide alike
        self.shapes = [span.shape for span in self.layout.spans]
        # Dtypes to restore when the engine is removed; an fp64 run stays fp64.
        self.original = [dtype if dtype == torch.float64 else p.dtype for p in self.params]
        self.step_dtype = storage.step
        self.moments = storage.moments
        self.rounding = storage.rounding
        self.shard_range = self.layout.shard(group.mesh.shard_rank) if self.is_cut else (0, self.layout.numel)
        self.pieces = self.layout.pieces(*self.shard_range)  # this rank's pieces
        self._piece_of = {piece.index: [piece] for piece in self.pieces}  # a bucket may have thousands
        self._storage = FlatStorage(self.layout.numel, dtype, group.device) if sharding.params else None
        self.lent = False  # released, and its memory is kept: user code, or autograd, holds weights or views of them
        self.handed_over = False  # Python objects hold the parameters themselves until the next gather
        self.changes = 0  # number of steps that changed the weights
        self.flat = self._storage.tensor if self._storage else group.allocate(self.layout.numel, dtype)  # 1D
        self.param_views = self.layout.views(self.flat)
        self.shard = self.flat[self.shard_range[0] : self.shard_range[1]]  # 1D, elements [shard_range) of ``flat``
        if self._storage is not None:
            # All buckets are made before ``load_initial`` fills the first. A slice of freed memory is an error.
            self._storage.free()
        self._background, self.gathers = BackgroundStep(), gathers
        allocate = partial(brief_empty, device=group.device)
        self.memory = device_place(allocate, group.allocate_written if sharding.params else None)
        self.places = Places(self.memory, gathers.place(self.memory, group.device))
        gaps = gaps_between(((p.offset, p.offset + p.numel) for p in self.pieces), self.shard.numel())
        shared = self._background, self.places
        self.weights = MasterWeights(self.shard, storage, gaps, *shared, gathers.check_training)
        self.grads = GradAccumulator(plan, storage, self.layout, self.pieces, self.shard_range, group, *shared)
        self.states: dict[str, Store] = {}  # optimizer states that are kept in stores
        self.beside: dict[str, Store] = {}  # states that no step reads, such as an average of the weights
        self.state = State.RESIDENT
        self.live = Live()
        # Called before a gather is launched (False) and before it is waited for (True); uneven_forwards.py.
        self.announce: Callable[[Bucket, bool], None] | None = None
        self.adopts = False  # the values of rank 0 are about to become those of all ranks: ``adopt_edits``
        self._guarded = False
        self._owner = owner
        self._sentinels: list[Tensor] = []  # one for each parameter, with sharded parameters
        self.edits = InplaceEdits(self)
        self.stepped_early = False  # beside the running backward; see core/step/background_steps.py
        self.unpublished = unpublished
        self._unpublished = False  # the compute copy awaits the background step, or ``_arriving``
        self._arriving: Work | None = None  # a gather of the other ranks' updates
        # A launched gather and what it reads; None in GATHERING: it is launched when its file was read.
        self._gathering: tuple[Work, Store] | None = None

    # ---- construction ------------------------------------------------------------------------------------------

    def set_stores(self, step: Place, gather: Place) -> None:
        """Keep master weights, states and gradients in ``step``, and what gathers read in ``gather``.

        Call it before ``load_initial``.
        """
        self.places.change(step, self.gathers.place(gather, self.group.device))

    @torch.no_grad()
    def load_initial(self, fetch: Callable[[list[Parameter]], Iterator[Tensor]]) -> None:
        """Copy the parameters' full values from ``fetch``, broadcast them from rank 0, and keep this rank's shard.

        If the plan does not train, master weights are made later, by ``MasterWeights.enable_training``.
        """
        if self._storage is not None:
            self._storage.allocate()
        for lo, hi in self.layout.gaps:  # they count in digests of the flat tensor
            self.flat[lo:hi].zero_()
        full = self.flat
        # Wider values are kept as master or frozen weights, so they arrive in a tensor of their own.
        if self.storage.fills_apart:
            full = flat_empty(self.layout.numel, self.storage.precision, self.flat.device)
        filled = self.param_views if full is self.flat else self.layout.views(full)
        values = fetch(self.params)
        for parameter, view, place in zip(self.params, self.param_views, filled, strict=True):
            # Take the value here: zip would keep it until it has the next one, with two in memory.
            place.copy_(next(values))
            unguard(parameter)
            disown(parameter)  # a weak reference, which ``assign_data`` may not meet
            assign_data(parameter, self.shown(view))
            own(parameter, self._owner)
        self._watch_data()
        self.group.broadcast(full, self.name)
        if full is not self.flat:
            self.flat.copy_(full)
            self.weights.keep(full[self.shard_range[0] : self.shard_range[1]])
        elif self.storage.trains:
            self.weights.enable_training(self.name)
        elif self.storage.keeps_frozen:
            self.weights.keep(self.shard)
        self.edits.note()
        if self.sharding.params:
            self._sentinels = sentinels(self.flat, self.shapes)
        self.release()
        self.put_away()

    def _watch_data(self) -> None:
        """Let ``edits`` know when code reads ``p.data`` of a sharded parameter."""
        if not self.sharding.params:
            return
        edits = weakref.ref(self.edits)

        def tell(index: int) -> None:
            if (found := edits()) is not None:
                found.data_is_read(index)

        for index, parameter in enumerate(self.params):
            watch_data(parameter, partial(tell, index))

    def shown(self, view: Tensor) -> Tensor:
        """The tensor of a parameter with this ``view`` of the flat tensor: with a storage of its own if that stays."""
        return with_own_storage(view) if self._storage is None else view

    def begin_early_step(self) -> None:
        """Note that it is stepped beside the running backward, in which no gather may follow."""
        self.stepped_early = True

    def end_early_step(self) -> None:
        """Note that this backward is over."""
        self.stepped_early = False

    # ---- residency ---------------------------------------------------------------------------------------------

    def launch_gather(self, exact: bool = False) -> None:
        """RELEASED -> GATHERING: start filling the flat tensor, or reading its file; ``exact``: without rounding."""
        assert self.state is State.RELEASED, (self.name, self.state)
        if self.stepped_early:
            raise RuntimeError(
                f"The weights of {self.name!r} are needed again after its gradients were complete, when they were "
                "updated already. Set zero_optimization.offload_optimizer.overlap_step=false."
            )
        if self.announce is not None:
            self.announce(self, False)
        with torch.inference_mode(False), torch.no_grad(), phase("gather", self.name):
            assert self._storage is not None
            if not self.lent:
                self._storage.note_own()
            # The background step owns what the gather reads until its job is done.
            self._background.wait()
            reads, source = self.gathers.prepare(self, exact), self.weights.gather_source
            if reads and source.streamed:
                # A collective cannot be launched before its input is there: ``finish_gather`` launches it.
                source.prefetch()
            else:
                self._launch()
        self.state = State.GATHERING
        self.live.add(self.counted)
        self.live.in_flight.add(self.counted, 1)

    def _launch(self) -> tuple[Work, Store]:
        """Allocate the flat tensor and launch the gather."""
        assert self._storage is not None
        self._storage.allocate()
        self._gathering = self.gathers.launch(self), self.weights.gather_source
        return self._gathering

    @property
    def allocated(self) -> bool:
        """True if the flat tensor has memory for values of this engine: a file that is read ahead does not need it."""
        return self.state is State.RESIDENT or self._gathering is not None

    @property
    def exact(self) -> bool:
        """True if the last gather did not round."""
        return not self.gathers.rounded

    def gather(self, exact: bool = False) -> None:
        """Go to RESIDENT from any state: parameters are readable then, without a guard. ``exact``: not rounded."""
        if exact and not self.exact:
            self.release()
        if self.state is State.RELEASED:
            self.launch_gather(exact)
        if self.state is State.GATHERING:
            with torch.inference_mode(False), torch.no_grad(), phase("gather", self.name):
                self.finish_gather()
                self._guard(False)
                for parameter, view in zip(self.params, self.param_views, strict=True):
                    parameter.data = view
            self.state = State.RESIDENT
            self.lent = False
            self.handed_over = False
            self.edits.note(released=True)
        elif self._guarded:
            self._guard(False)

    def finish_gather(self) -> None:
        """Wait for the gather, whose input may have to be read first."""
        if self.announce is not None:
            self.announce(self, True)
        work, source = self._gathering or self._launch()
        work.wait()
        source.sent()
        self._gathering = None
        self.gathers.finish(self)
        self.live.in_flight.add(-self.counted, -1)

    def release(self, searched: bool = False) -> None:
        """Go to RELEASED, if the parameters are sharded: free the memory and replace parameters by sentinels.

        Memory that something else holds weights of is kept until it lets go. The state is RELEASED all the same: which
        objects live on is not the same on all ranks. ``searched``: for edits, just before.
        """
        if self._storage is None or (self.state is State.RELEASED and not self.lent):
            return
        if self.state is State.RELEASED:
            self._hide()
            self._free()
            return
        if self.state is State.GATHERING:
            with phase("gather", self.name):
                # Wait first: a collective still writes into the memory that is freed below.
                self.finish_gather()
            self.state = State.RELEASED
        else:
            self.edits.check(released=True, searched=searched)
            self.state = State.RELEASED
            self._hide()
            if self.weights.gather_source.streamed:
                self._storage.await_readers()
        self.live.add(-self.counted)
        self._free()

    def _hide(self) -> None:
        """Replace parameters by sentinels, except those that are read without a guard, which keep the memory."""
        with torch.inference_mode(False):
            if self._guarded:
                self._guard(False)
            for parameter, value in zip(self.params, self._sentinels, strict=True):
                if not self.handed_over and not held_by_autograd(parameter):
                    parameter.data = value
            self._guard()

    def _free(self) -> None:
        assert self._storage is not None
        self.lent = self._storage.held
        if not self.lent:
            self._storage.free()

    def end_lending(self, changes: bool) -> None:
        """End graphs from before a step: anything that still holds changed weights reads NaN until the next gather."""
        self.handed_over = False
        if changes or self.lent:
            self.release()
        self.changes += changes
        if changes and self.lent:
            with torch.no_grad():
                self.flat.fill_(float("nan") if self.dtype.is_floating_point else 0)

    @property
    def resident(self) -> bool:
        return self.state is State.RESIDENT

    @property
    def readable(self) -> bool:
        """True if code outside of the owning unit's forward may read the values."""
        return self.resident and not self._guarded

    def guard(self) -> None:
        """Keep the values, but intercept uses outside of the owning unit's forward. See guard.py."""
        if self.sharding.params and self.resident and not self._guarded:
            self._guard()

    def _guard(self, on: bool = True) -> None:
        self._guarded = on
        for parameter in self.params:
            (guard if on else unguard)(parameter)

    # ---- parameters --------------------------------------------------------------------------------------------

    def pieces_of(self, index: int) -> list[Piece]:
        """This rank's piece of parameter ``index``: none or one."""
        return self._piece_of.get(index, [])

    def holders(self, index: int) -> Ranks:
        """The ranks that together have the full tensor of parameter ``index``, which may be a part of one."""
        return self.group if self.layout.spans[index].spec.is_whole else self.group.holders

    def repeats(self, index: int) -> bool:
        """True if other ranks' elements of parameter ``index`` count instead of this one's in sums over ``holders``.

        ``combine_rows`` leaves out replicas of shards by itself, but not where ranks have parts.
        """
        if self.is_whole:
            return self.group.rank > 0
        return self.group.mesh.replica > 0 and not self.layout.spans[index].spec.is_whole

    @property
    def wants_grad(self) -> bool:
        return any(p.requires_grad for p in self.params)

    def which_have_grads(self) -> list[bool]:
        """Tell of each parameter whether it has a gradient that is not in the accumulator yet."""
        # Guards would intercept each access to ``.grad``, although it needs no values.
        with without_torch_function():
            return [parameter.grad is not None for parameter in self.params]

    def has_grads(self) -> bool:
        """True if a parameter has a gradient that is not in the accumulator yet."""
        return any(self.which_have_grads())

    def grads_complete(self) -> bool:
        """True if the bucket has trainable parameters and all of them have a gradient from the running backward."""
        trainable = [p for p in self.params if p.requires_grad]
        return bool(trainable) and all([p.grad is not None for p in trainable])

    # ---- stores ------------------------------------------------------------------------------------------------

    @property
    def offloaded(self) -> bool:
        """True if master weights, optimizer states and gradients are kept off the device."""
        return self.places.step.offloads

    @property
    def streamed(self) -> bool:
        """True if a step has to read the master weights first, and to write them back afterwards."""
        return self.weights.master is not None and self.weights.master.streamed

    def state_store(self, key: str, form: MomentForm) -> Store | None:
        """The store of the optimizer's element-wise state ``key``; None if states stay beside their fragments."""
        # A store of another dtype was loaded from a run with other dtypes, and is replaced.
        if key in self.states and self.states[key].dtype == form.dtype:
            return self.states[key]
        store = self.places.step.state(key, self.shard.numel(), form)
        if store is not None:
            self.states[key] = store
        return store

    def add_beside(self, key: str, dtype: torch.dtype) -> Store:
        """A new store of elements as the master weights have, kept where optimizer states are; steps do not read it."""
        self.drop_beside(key)
        # The kind has a name of its own: an optimizer's state may have the same key.
        self.beside[key] = self.places.step.store(f"beside {key}", self.shard.numel(), dtype)
        return self.beside[key]

    def drop_beside(self, key: str) -> None:
        """Free a store of ``add_beside``, if there is one."""
        if (store := self.beside.pop(key, None)) is not None:
            store.discard()

    def stores(self) -> list[Store]:
        return [*self.weights.stores(), *self.grads.stores(), *self.states.values(), *self.beside.values()]

    def step_stores(self) -> list[Store]:
        """The streamed stores of master weights and optimizer states."""
        master = [self.weights.master] if self.weights.master is not None else []
        return [store for store in (*master, *self.states.values()) if store.streamed]

    def stores_of_step(self) -> list[Store]:
        """The streamed stores that a step of this bucket needs in memory and leaves to be written."""
        copy = self.weights.copy
        copies = [copy] if copy.streamed and copy.nbytes else []
        return [*self.step_stores(), *(self.grads.stores() if self.grads.streamed else []), *copies]

    def put_away(self) -> None:
        """Write all streamed stores and free their memory."""
        put_away(self.stores())

    # ---- steps and gathers that go on beside the next forward: core/step/background_steps.py -------------------

    @property
    def can_step_early(self) -> bool:
        """True if a step writes nothing that the running backward may still read."""
        # Streamed master weights are read once, so the compute copy is written with them.
        return self.sharding.params if self.streamed else self.offloaded

    def hand_over(self, job: Awaited) -> None:
        """Give the bucket to the background step ``job`` until ``wait_background_step``."""
        self.gathers.weights_changed()
        self._background.begin(job)

    def await_publication(self) -> Callable[[], object] | None:
        """Guard the compute copy until ``wait_background_step``: the background step updates it.

        Returns the function that the background calls after this rank's shard was stepped (collective); None if nothing
        is sharded, or if the thread that waits does that.
        """
        sharded = self.sharding.params
        if not sharded:
            self._unpublished = True
            self._guard()
            if self.sharding.optim and not self.group.gathers_in_threads:
                self.unpublished.append(self)
                return None

        def publish() -> None:
            with self.weights.copy.publishing():
                (self.group.background_fence() if sharded else self.gathers.publish_in_background(self)).wait()

        return publish if self.sharding.optim or sharded else None

    def publish_later(self, gather: Work) -> None:
        """Guard the compute copy until ``wait_background_step``, which waits for ``gather``."""
        self._unpublished, self._arriving = True, gather
        self.edits.pause()
        self._guard()

    def launch_background_gather(self) -> None:
        """Wait for the background step, and start gathering the other ranks' updates."""
        self._background.wait()
        self.weights.copy.wait_copied()
        self._arriving = self.gathers.publish_in_background(self)

    def wait_background_step(self) -> bool:
        """Wait until this bucket's step is complete; returns whether it was not."""
        waited = self._background.wait()
        if self._unpublished:
            self._unpublished, waited = False, True
            while self in self.unpublished:
                # Launch in the order of steps, which is the same on all ranks, up to this bucket: a rank that used
                # another bucket first would otherwise launch its collectives in another order.
                self.unpublished.popleft().launch_background_gather()
            if self._arriving is not None:
                with phase("gather", self.name):
                    self._arriving.wait()
                self._arriving = None
            self.weights.copy.wait_copied()
            self._guard(False)
            self.edits.note()
        return waited

    # ---- values ------------------------------------------------------------------------------------------------

    def expected_shard(self) -> Tensor:
        """The value of ``shard`` in a resident bucket without edits."""
        shard = self.weights.values().to(self.shard.device, self.shard.dtype)
        return self.gathers.decoded(shard) if self.gathers.rounded else shard

    @without_grad
    def refresh_after_step(self) -> None:
        """Copy the master weights to what gathers read, or to this rank's shard of the compute copy."""
        self.gathers.weights_changed()
        # Streamed stores were refreshed during the step, bucket by bucket.
        if self.weights.trains and (self.offloaded or not self.sharding.params) and not self.streamed:
            self.weights.refresh()
            self.put_away()
        self.weights.written = False

    @without_grad
    def launch_publish(self) -> Work | None:
        """Start gathering the other ranks' updates into the compute copy, after all buckets are refreshed."""
        if not self.weights.trains or self.sharding.params or not self.sharding.optim:
            return None
        return self.gathers.publish(self)

    def round_as_steps_do(self) -> None:
        """Restore the compute copy that the last step of a trained model left, after its weights were loaded.

        Collective.
        """
        self.wait_background_step()
        if self.weights.codec is not None and (gather := self.launch_publish()) is not None:
            gather.wait()
            self.weights.decoded_reference = None
            self.edits.note()

    @torch.no_grad()
    def write(self, index: int, value: Tensor, rounded: bool = False) -> None:
        """Set parameter ``index`` to ``value`` (full shape, the same on every rank) in every copy this rank holds.

        ``rounded``: see ``MasterWeights.load``.
        """
        # An unfinished prefetch would deliver the old values after the write.
        if self.state is State.GATHERING:
            self.release()
        if self.resident and not self.exact:
            # Gather the whole bucket again: all values that are shown are compared with master weights.
            self.gather(exact=True)
        self.group.before_write()
        self.gathers.weights_changed()
        if self.resident or self.lent:
            value = whole(value)
            self.param_views[index].copy_(value)
            self.edits.forget()
        for piece in self.pieces_of(index):
            rows = slice(piece.offset, piece.offset + piece.numel)
            self.weights.load(rows, elements_of(value, piece.lo, piece.hi), rounded)
            self.weights.follow_edit()
            self.weights.note_decoded(rows)
        self.group.after_write()

    @torch.no_grad()
    def take_loaded(self, index: int, value: Tensor, rounded: bool) -> None:
        """Take over what ``load_state_dict`` has copied to the (unsharded) compute copy of parameter ``index``.

        Elementwise and not collective. Call ``put_away`` after the last one.

        Args:
            index: of the parameter.
            value: that of the state dict (full shape).
            rounded: see ``MasterWeights.load``.
        """
        for piece in self.pieces_of(index):
            rows = slice(piece.offset, piece.offset + piece.numel)
            self.weights.load(rows, elements_of(value, piece.lo, piece.hi), rounded, self.shard[rows])
            self.weights.note_decoded(rows)

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Copy edits of the gathered copy, which are the same on all ranks, to the weights. Collective."""
        unedited = self.expected_shard()
        self.group.before_write()
        self.gathers.weights_changed()
        self.weights.keep_edits(unedited)
        self.group.after_write()
        self.edits.note()

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Copy rank 0's values of the (resident) compute copy to the master weights of all ranks."""
        self.group.before_write()
        self.gathers.weights_changed()
        self.group.broadcast(self.flat, self.name)
        self.group.after_write()
        self.weights.keep_edits()
        if self.weights.is_rounded_in_copy and not self.is_cut and self.group.size > 1:
            # Rank 0 may have loaded values that the compute copy does not show, and the others not.
            self.weights.repeat_first(self.group, self.name)
        self.edits.note()


# ---- edits of compute copies by user code: which are kept, and which are lost --------------------------------------


class InplaceEdits:
    """Detects edits of compute copies outside of ``gathered``, which the next step would overwrite.

    Where parameters are not sharded, an edit is copied to the master weights. Where they are, the edited copy is lost
    when the bucket is released: so edits that a unit's forward makes are kept when it ends (engine.py, Note [Edits in a
    forward]), and all others raise.

    Most edits change a parameter's version counter, which is checked in each backward. ``p.data.copy_(...)`` does not,
    so values are checked, too, before they are stepped or saved: by a digest on a CPU and where master weights are
    offloaded. On a GPU a digest would have to be waited for, so one kernel compares all master weights with the compute
    copy (``check_all``): parameters that are not guarded do not tell when user code reads ``p.data``. ``p.data =
    tensor`` takes a parameter out of its bucket, which changes its address; its values are copied back. Values of
    sharded parameters are compared after the first two forwards of their unit with gradients, and the first two
    without, and where user code was given a tensor whose writes no version shows.

    Attributes:
        lost: names of parameters whose edits are lost.
        handed_out: user code outside of the unit got a tensor whose writes change no version counter.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._weights = bucket.weights
        self._sharded = bucket.sharding.params
        self._edits_master = bucket.weights.plan.master_is_view  # an edit of the compute copy is one of the master
        self.lost: list[str] = []
        self.handed_out = False
        self._in_forward = False  # the unit's forward runs
        self._read: dict[int, Tensor] = {}  # in which code has read ``p.data``: parameter -> its value before
        self._versions: list[int] = []
        self._base = -1  # the address of the flat tensor with which ``_addresses`` were computed
        self._addresses: list[int] = []
        self._digest: Tensor | None = None  # the digest of this rank's shard
        self._paused = False  # master weights are ahead of the compute copy
        # Forwards with and without gradients whose values are still to be compared.
        self._watches = {True: 2, False: 2}
        self._watched = True  # whether the forward that was noted last has gradients
        self._sums: Tensor | None = None  # sums of the pieces when they were gathered for such a forward

    def note(self, released: bool = False) -> None:
        """Record the current values as unedited; ``released``: they were, and views of them may have been edited."""
        self._paused = False
        self._sums = None
        if not self._edits_master:
            before = self._versions
            self._versions = versions_of(self._bucket.params)
            if released and before != self._versions and self._weights.has_master:
                edited = zip(self._bucket.layout.spans, self._versions, before, strict=True)
                self.lost += [span.name for span, version, old in edited if version != old]
            self._watched = torch.is_grad_enabled()
            if released and self._watches[self._watched] and self._weights.has_master and not in_running_backward():
                self._sums = self._sum_pieces()
            self._digest = digest_of(self._bucket.shard) if self._has_digest else None

    def pause(self) -> None:
        """Stop checking until ``note``: the master weights are stepped before the compute copy is updated."""
        self._paused = not self._sharded

    @property
    def _has_digest(self) -> bool:
        if self._sharded:
            return False
        # On a CPU a digest is cheap: comparing values takes 4 times as long as AdamW's step.
        return self._bucket.offloaded or (not accelerator.holds(self._bucket.shard) and self._weights.has_master)

    def seen(self, digests: ComparedDigests | None = None) -> bool:
        """True if versions or the digest have changed since ``note``; waits for the device of a digest.

        ``digests``: of buckets on accelerators, compared before; None: compare the digest now.
        """
        if digests is not None and accelerator.holds(self._bucket.shard):
            return self.versions_changed() or self._bucket in digests.edited
        differs = self.differs()
        return (differs is not None and bool(differs)) or self.versions_changed()

    def versions_changed(self) -> bool:
        """True if versions have changed since ``note``, for which no device is waited for."""
        return not self._paused and versions_of(self._bucket.params) != self._versions

    def differs(self) -> Tensor | None:
        """Compare the digest with that of ``note``: a 0D bool on the device; None if it is not looked at."""
        # While paused, the compute copy is from another step than the noted values, or is being written.
        if self._paused or not self._has_digest:
            return None
        shard = self._bucket.shard
        return self._digest != digest_of(shard) if self._digest is not None else shard.new_ones((), dtype=torch.bool)

    def check(
        self,
        values: bool = False,
        released: bool = False,
        pairs: list[tuple[Tensor, Tensor]] | None = None,
        searched: bool = False,
        digests: ComparedDigests | None = None,
    ) -> None:
        """Keep the edits since ``note``, or add them to ``lost``.

        Args:
            values: check values, too.
            released: the compute copy is about to be released.
            pairs: gets what the caller gives to ``ops.take_edits`` next, to keep edits of this bucket.
            searched: ``end_forward`` has found no edit of the sharded parameters just before.
            digests: as for ``seen``.
        """
        bucket = self._bucket
        weights = self._weights
        if not bucket.resident or self._paused:
            return
        if released:
            self._read = {}
            self._in_forward = False
        if searched and not self.handed_out and self._sums is None:
            return
        if self._sharded:
            edited = [bucket.layout.spans[i].name for i in (() if searched else self._changed_by_assignment())]
        else:
            edited = self.put_back()
        if not weights.has_master:
            return
        versions = self._versions if searched else versions_of(bucket.params)
        if versions != self._versions:
            changed = zip(bucket.layout.spans, versions, self._versions, strict=True)
            edited += [span.name for span, version, before in changed if version != before]
        if self._sharded:
            if self.handed_out and not edited:
                expected = bucket.expected_shard()
                for piece in bucket.pieces:
                    rows = slice(piece.offset, piece.offset + piece.numel)
                    if not torch.equal(bucket.shard[rows], expected[rows]):
                        edited.append(bucket.layout.spans[piece.index].name)
            if released and not edited:
                edited = self._unseen(())
            self.lost += edited
        elif edited or (values and (not self._has_digest or self.seen(digests))):
            # Every rank has the whole copy, and edits it as it would without ZeRO.
            pair = weights.edit_pair() if pairs is not None else None
            if pairs is None or pair is None:
                weights.keep_edits()
            else:
                pairs.append(pair)
            self.note()
        self.handed_out = False
        if edited:
            self.note()

    def begin_forward(self) -> None:
        """Note that a forward of the unit, whose parameters are sharded, begins; the bucket is gathered."""
        self._in_forward = True

    def data_is_read(self, index: int) -> None:
        """Note that code is about to get ``p.data`` of parameter ``index``, and may write to it."""
        if self._in_forward and index not in self._read and self._bucket.readable:
            with torch.inference_mode(False), torch.no_grad():
                self._read[index] = self._bucket.param_views[index].clone()

    def end_forward(self) -> list[int]:
        """Note that a forward of the unit ends; returns the numbers of the parameters that were edited.

        Ranks that make the same edits find the same numbers: all of them look at whole parameters.
        """
        read = self._read
        self._read = {}
        self._in_forward = False
        bucket = self._bucket
        # It comes first, since it is all that most forwards need: parameters that cannot be read are sentinels.
        if not read and are_unchanged(bucket.params, self._versions, self._own_addresses()):
            return []
        if not bucket.readable:
            return []
        with torch.no_grad():
            return self._find(read, versions_of(bucket.params))

    def _find(self, read: dict[int, Tensor], versions: list[int]) -> list[int]:
        """The numbers of parameters that a forward has edited; keeps what it has assigned.

        Args:
            read: values before code has read ``p.data``, by number.
            versions: of the parameters.
        """
        bucket = self._bucket
        # A constraint that holds already is assigned again: the same values.
        changed = set(self._changed_by_assignment())
        self._put_back(sorted(changed))
        self.drop_assigned()
        changed |= {i for i, (one, other) in enumerate(zip(versions, self._versions, strict=True)) if one != other}
        changed |= {i for i, value in read.items() if not torch.equal(value, bucket.param_views[i])}
        if changed:
            # The sums are taken anew when these edits are kept.
            self.lost += self._unseen(changed)
        return sorted(changed)

    def lose(self, indices: Iterable[int]) -> None:
        """Note that edits of these parameters are lost."""
        self.lost += [self._bucket.layout.spans[index].name for index in indices]
        self.note()

    def _unseen(self, known: Collection[int]) -> list[str]:
        """Names of the parameters whose sums of bits have changed, apart from ``known`` ones. Ends the watch."""
        if self._sums is None:
            return []
        same = (self._sums == self._sum_pieces()).tolist()
        self._sums = None
        self._watches[self._watched] -= 1
        pairs = zip(self._bucket.pieces, same, strict=True)
        changed = [piece.index for piece, one in pairs if not one and piece.index not in known]
        return [self._bucket.layout.spans[index].name for index in changed]

    def forget(self) -> None:
        """Forget the noted sums of bits: the engine writes to the compute copy."""
        self._sums = None

    def _sum_pieces(self) -> Tensor:
        """The sum (1D int64) of the bits of each of this rank's pieces."""
        shard = self._bucket.shard
        words = shard.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.itemsize])
        rows = [words[piece.offset : piece.offset + piece.numel] for piece in self._bucket.pieces]
        sums = [row.sum(dtype=torch.int64) for row in rows]
        return torch.stack(sums) if sums else words.new_empty(0, dtype=torch.int64)

    def assigned(self) -> list[int]:
        """Numbers of parameters that were assigned other tensors (``p.data = tensor``), of a resident bucket."""
        if not self._bucket.resident:
            return []
        with without_torch_function():
            held = [parameter.data_ptr() for parameter in self._bucket.params]
        own = self._own_addresses()
        return [i for i, (one, other) in enumerate(zip(held, own, strict=True)) if one != other] if held != own else []

    def _own_addresses(self) -> list[int]:
        """The addresses of the parameters' views. A gather may put the flat tensor somewhere else."""
        base = self._bucket.flat.data_ptr()
        if base != self._base:
            self._base = base
            self._addresses = [view.data_ptr() for view in self._bucket.param_views]
        return self._addresses

    def _changed_by_assignment(self) -> list[int]:
        """Numbers of parameters that were assigned other values; a recomputed forward assigns the same ones again."""

        def differs(index: int) -> bool:
            value = self._bucket.params[index].data
            view = self._bucket.param_views[index]
            same = (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
            return not (same and torch.equal(value, view))

        return [index for index in self.assigned() if differs(index)]

    def put_back(self) -> list[str]:
        """Copy parameters that were assigned other tensors back to their views; returns their names.

        Those of another shape, dtype or device are ``lost``.
        """
        assigned = self.assigned()
        return self._put_back(assigned) if assigned else []

    def drop_assigned(self) -> None:
        """Give parameters that were assigned other tensors their views back, whose values stay."""
        for index in self.assigned():
            self._bucket.params[index].data = self._bucket.shown(self._bucket.param_views[index])

    @torch.no_grad()
    def _put_back(self, assigned: list[int]) -> list[str]:
        found = []
        bucket = self._bucket
        for index in assigned:
            parameter = bucket.params[index]
            view = bucket.param_views[index]
            name = bucket.layout.spans[index].name
            value = parameter.data
            if (value.shape, value.dtype, value.device) != (view.shape, view.dtype, view.device):
                self.lost.append(name)
                continue
            view.copy_(value)
            parameter.data = bucket.shown(view)
            found.append(name)
        return found


class ComparedDigests:
    """Digests of several buckets, compared on an accelerator while the host goes on; the first question waits.

    Args:
        flags: what ``InplaceEdits.differs`` said of each bucket.
    """

    def __init__(self, flags: Mapping[Bucket, Tensor | None]) -> None:
        known = {bucket: flag for bucket, flag in flags.items() if flag is not None}
        self._buckets = list(known)
        self._fetched = accelerator.fetch(torch.stack(list(known.values()))) if known else None

    @cached_property
    def edited(self) -> list[Bucket]:
        """The buckets whose digests have changed."""
        if self._fetched is None:
            return []
        copy, copied = self._fetched
        copied.synchronize()
        return [bucket for bucket, differs in zip(self._buckets, copy.tolist(), strict=True) if differs]


@torch.no_grad()
def check_all(buckets: Iterable[Bucket]) -> None:
    """Check the values of all ``buckets`` before they are stepped.

    On an accelerator in one launch, which reads each once; where master weights are offloaded, the host waits once for
    the digests of all.
    """
    some = list(buckets)
    digests = ComparedDigests({bucket: bucket.edits.differs() for bucket in some if accelerator.holds(bucket.shard)})
    pairs: list[tuple[Tensor, Tensor]] = []
    for bucket in some:
        bucket.edits.check(values=True, pairs=pairs, digests=digests)
    # One call for each dtype of compute copies.
    for dtype in dict.fromkeys(shown.dtype for _, shown in pairs):
        alike = [pair for pair in pairs if pair[1].dtype == dtype]
        ops.take_edits([master for master, _ in alike], [shown for _, shown in alike])


def lost_edits(peers: Ranks, edits: Sequence[InplaceEdits]) -> Section:
    """The flag of a step that says whether edits of a rank are lost; raises RuntimeError on all ``peers`` then."""

    def raise_lost(flags: Sequence[int]) -> None:
        if not any(flags):
            return
        names = [name for each in edits for name in each.lost]
        for each in edits:
            each.lost = []
        every = sorted({name for some in peers.host_gather(names, "lost edits") for name in some})
        raise RuntimeError(
            f"Parameter {', '.join(map(repr, every[:5]))} was modified in place, but its master weights are stored "
            "elsewhere and would overwrite the edit. Wrap the edit in "
            "`with lt_zero.gathered(parameters, write=True): ...`."
        )

    return Section("lost_edits", lambda: [any(each.lost for each in edits)], raise_lost)


def digest_of(shard: Tensor) -> Tensor:
    """A checksum (0D int64) of the bits of ``shard``, which is a multiple of 16 bytes long."""
    words = shard.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1)
    return (rows * torch.arange(1, rows.numel() + 1, device=shard.device)).sum() + words[whole:].sum()
