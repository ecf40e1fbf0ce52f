"""One bucket: a flat tensor with its parameters as views, gathered and released as a unit.

``flat``     the compute copy, all elements; parameters are views of it. With sharded parameters its memory is freed
             unless the bucket is gathered (flat_storage.py). Views survive that, so the views that autograd saved are
             valid again after every gather. Otherwise parameters have storages of their own in its memory, so that
             ``torch.save`` of a layer writes that layer.
``weights``  this rank's master weights, or the shard of frozen weights, and the copy of them that gathers read
             (bucket_weights.py).
``grads``    the gradient accumulator (grad_accumulator.py).
``states``   optimizer states, where they are not kept beside their fragments.

Their bytes are kept in stores (offload/store.py): on the device, in host memory or in files. The two places of a bucket
say which: one for master weights, accumulator and states, one for what gathers read.

Parameters are set by ``p.data = view``: that keeps their identity and gives each a version counter of its own. If
they shared the flat tensor's counter, autograd would report "modified by an inplace operation" after each refill.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.comm.ranks import Ranks
from lt_zero.comm.shard_group import ShardGroup
from lt_zero.comm.work import Work
from lt_zero.common.compat import assign_data, held_by_autograd, without_grad, without_torch_function
from lt_zero.common.flat_storage import FlatStorage, brief_empty, flat_empty, with_own_storage
from lt_zero.common.timing import phase
from lt_zero.engine.bucket_weights import MasterWeights
from lt_zero.engine.grad_accumulator import GradAccumulator
from lt_zero.engine.guard import Owner, disown, guard, own, sentinels, unguard, watch_data
from lt_zero.engine.inplace_edits import InplaceEdits
from lt_zero.engine.layout import Piece, gaps_between
from lt_zero.engine.lazy_tensor import elements_of, whole
from lt_zero.engine.partition import BucketPlan
from lt_zero.engine.storage_plan import StoragePlan
from lt_zero.offload.background import Job
from lt_zero.offload.store import BackgroundStep, Place, Places, Store, device_place, put_away
from lt_zero.ops.moments import MomentForm


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


class GatherStrategy:
    """Gathers the weights of the one bucket that it is made for. This class sends them as they are.

    Others are in ``exchange/``.

    Attributes:
        rounded: what was gathered last is not what the owners have.
    """

    rounded = False

    def place(self, place: Place, device: torch.device) -> Place:
        """The place of the tensor that gathers read, for a bucket that keeps it in ``place``."""
        return place

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
        self.weights = MasterWeights(self.shard, storage, gaps, *shared)
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
        self.stepped_early = False  # beside the running backward; see overlap.py, Note [Beside backward]
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
        self.places.step, self.places.gather = step, self.gathers.place(gather, self.group.device)

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
        self.live.numel += self.counted
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
        self.live.numel -= self.counted
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

    def has_grads(self) -> bool:
        """True if a parameter has a gradient that is not in the accumulator yet."""
        # Guards would intercept each access to ``.grad``, although it needs no values.
        with without_torch_function():
            return any([p.grad is not None for p in self.params])

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

    # ---- steps and gathers that go on beside the next forward: overlap.py --------------------------------------

    @property
    def can_step_early(self) -> bool:
        """True if a step writes nothing that the running backward may still read."""
        # Streamed master weights are read once, so the compute copy is written with them.
        return self.sharding.params if self.streamed else self.offloaded

    def hand_over(self, job: Job) -> None:
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
