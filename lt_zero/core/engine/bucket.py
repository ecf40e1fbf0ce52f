"""One bucket: a flat tensor with its parameters as views, gathered and released as a unit.

``compute``  the compute copy, all elements; parameters are views of it (compute_copy.py).
``weights``  this rank's master weights, or the shard of frozen weights, and the copy of them that gathers read
             (bucket_weights.py).
``grads``    the gradient accumulator (grad_accumulator.py).
``states``   optimizer states, where they are not kept beside their fragments (state_stores.py).
``edits``    what user code has written to the compute copy (inplace_edits.py).

Their bytes are kept in stores (core/stores/store.py): on the device, in host memory or in files. The two places of a
bucket say which: one for master weights, accumulator and states, one for what gathers read.

A bucket has two states: ``State`` (compute_copy.py) says where its weights are, and ``GradState`` (grad_accumulator.py)
what there is of its gradients. Each changes only as the table beside it says.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.common.compat import without_grad, without_torch_function
from lt_zero.common.flat_storage import brief_empty, flat_empty
from lt_zero.common.phases import phase
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket_weights import MasterWeights
from lt_zero.core.engine.compute_copy import RELEASED, RESIDENT, ComputeCopy, State
from lt_zero.core.engine.grad_accumulator import GradAccumulator, GradState
from lt_zero.core.engine.guard import Owner, watch_data
from lt_zero.core.engine.inplace_edits import InplaceEdits
from lt_zero.core.engine.layout import Piece, gaps_between
from lt_zero.core.engine.lazy_tensor import elements_of, whole
from lt_zero.core.engine.partition import BucketPlan
from lt_zero.core.engine.state_stores import StateStores
from lt_zero.core.engine.storage_plan import StoragePlan
from lt_zero.core.stores.store import Awaited, BackgroundStep, Place, Places, Store, device_place, put_away


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
        with bucket.weights.gather_source.source(bucket.compute.shard) as own:
            return bucket.group.all_gather(bucket.compute.flat, bucket.name, own)

    def finish(self, bucket: Bucket) -> None:
        """Note that the flat tensor is filled."""

    def publish(self, bucket: Bucket) -> Work:
        """Start gathering all ranks' updates of the compute copy, which is not sharded."""
        return bucket.group.all_gather(bucket.compute.flat, bucket.name, bucket.compute.flat)

    def publish_in_background(self, bucket: Bucket) -> Work:
        """``publish``, after a background step."""
        return bucket.group.background_gather(bucket.compute.flat)

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

    Attributes:
        shard_range: the elements [lo, hi) that this rank steps, and gets the gradients of: a shard, or all.
        pieces: the parameters' pieces in them.
        sums_apart: sums of gradients over replicas may be left to a later reduction.
        live: counts what is gathered; shared with other buckets.
        changes: number of steps that changed the weights.
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
        self.plan = plan
        self.storage = storage
        self.group = group
        self.gathers = gathers
        self.sums_apart = storage.is_cut and group.sums_replicas_apart
        self.params = [p for _, p in plan.parameters]
        self.layout = plan.layout_in(group.mesh.shards, group.size)
        self.shard_range = self.layout.shard(group.mesh.shard_rank) if storage.is_cut else (0, self.layout.numel)
        self.pieces = self.layout.pieces(*self.shard_range)
        self._piece_of = {piece.index: [piece] for piece in self.pieces}  # a bucket may have thousands
        self.compute = ComputeCopy(plan, self.layout, self.shard_range, group, owner)
        allocate = partial(brief_empty, device=group.device)
        self.memory = device_place(allocate, group.allocate_written if plan.sharding.params else None)
        self.places = Places(self.memory, gathers.place(self.memory, group.device))
        self._background = BackgroundStep()
        shard = self.compute.shard
        gaps = gaps_between(((p.offset, p.offset + p.numel) for p in self.pieces), shard.numel())
        shared = self._background, self.places
        self.weights = MasterWeights(shard, storage, gaps, *shared, gathers.check_training)
        self.grads = GradAccumulator(plan, storage, self.layout, self.pieces, self.shard_range, group, *shared)
        self.states = StateStores(self.places, shard.numel())
        self.edits = InplaceEdits(self.compute, self.weights, self.layout, self.pieces, self.expected_shard)
        self.live = Live()
        self.changes = 0
        self._announce: Callable[[Bucket, bool], None] | None = None  # see ``announce_gathers``
        self._gathering: tuple[Work, Store] | None = None  # in GATHERING: the gather, and what it reads
        self.unpublished = unpublished
        self._arriving: Work | None = None  # in UPDATING: a gather of the other ranks' updates

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
        compute = self.compute
        compute.allocate()
        for lo, hi in self.layout.gaps:  # they count in digests of the flat tensor
            compute.flat[lo:hi].zero_()
        full = compute.flat
        # Wider values are kept as master or frozen weights, so they arrive in a tensor of their own.
        if self.storage.fills_apart:
            full = flat_empty(self.layout.numel, self.storage.precision, full.device)
        compute.take(fetch(self.params), compute.views if full is compute.flat else self.layout.views(full))
        self._watch_data()
        self.group.broadcast(full, self.name)
        if full is not compute.flat:
            compute.flat.copy_(full)
            self.weights.keep(full[self.shard_range[0] : self.shard_range[1]])
        elif self.storage.trains:
            self.weights.enable_training(self.name)
        elif self.storage.keeps_frozen:
            self.weights.keep(compute.shard)
        self.edits.note()
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

    def count_in(self, live: Live) -> None:
        """Count what is gathered in ``live`` from now on, while nothing is."""
        self.live = live

    def announce_gathers(self, announce: Callable[[Bucket, bool], None] | None) -> None:
        """Call ``announce(self, False)`` before a gather is launched, and with True before it is waited for.

        None: no more. See uneven_forwards.py.
        """
        self._announce = announce

    # ---- where the weights are: compute_copy.py, ``State`` -----------------------------------------------------

    @property
    def state(self) -> State:
        return self.compute.state

    @property
    def released(self) -> bool:
        """True if the next use has to launch a gather."""
        return self.compute.state in RELEASED

    @property
    def resident(self) -> bool:
        """True if the values are in memory."""
        return self.compute.state in RESIDENT

    @property
    def readable(self) -> bool:
        """True if code outside of the owning unit's forward may read the values."""
        return self.compute.state is State.READABLE

    @property
    def allocated(self) -> bool:
        """True if the flat tensor has memory for values of this engine: a file that is read ahead does not need it."""
        return self.resident or self.state is State.GATHERING

    @property
    def exact(self) -> bool:
        """True if the last gather did not round."""
        return not self.gathers.rounded

    def launch_gather(self, exact: bool = False) -> None:
        """RELEASED -> GATHERING, or READING: start filling the flat tensor, or reading its file.

        ``exact``: without rounding.
        """
        assert self.released, (self.name, self.state)
        if self.grads.sums is GradState.STEPPED:
            raise RuntimeError(
                f"The weights of {self.name!r} are needed again after its gradients were complete, when they were "
                "updated already. Set zero_optimization.offload_optimizer.overlap_step=false."
            )
        if self._announce is not None:
            self._announce(self, False)
        with torch.inference_mode(False), torch.no_grad(), phase("gather", self.name):
            self.compute.begin_gather()
            # The background step owns what the gather reads until its job is done.
            self._background.wait()
            reads, source = self.gathers.prepare(self, exact), self.weights.gather_source
            if reads and source.streamed:
                # A collective cannot be launched before its input is there: ``finish_gather`` launches it.
                source.prefetch()
                self.compute.await_file()
            else:
                self._launch()
        self.live.add(self.storage.counted)
        self.live.in_flight.add(self.storage.counted, 1)

    def _launch(self) -> tuple[Work, Store]:
        """Allocate the flat tensor and launch the gather."""
        self.compute.allocate()
        self._gathering = self.gathers.launch(self), self.weights.gather_source
        self.compute.await_gather()
        return self._gathering

    def gather(self, exact: bool = False) -> None:
        """Go to READABLE from any state. ``exact``: not rounded."""
        if exact and not self.exact:
            self.release()
        if self.compute.state in RESIDENT:
            self.compute.unguard()
            return
        if self.compute.state in RELEASED:
            self.launch_gather(exact)
        with torch.inference_mode(False), torch.no_grad(), phase("gather", self.name):
            self.finish_gather()
            self.compute.show()
        self.edits.note(released=True)

    def finish_gather(self) -> None:
        """Wait for the gather, whose input may have to be read first."""
        if self._announce is not None:
            self._announce(self, True)
        work, source = self._gathering or self._launch()
        work.wait()
        source.sent()
        self.gathers.finish(self)
        self._gathering = None  # only now: after an error the next use, or the release, meets the same one
        self.live.in_flight.add(-self.storage.counted, -1)

    def release(self, searched: bool = False) -> None:
        """Go to RELEASED, if the parameters are sharded: free the memory and replace parameters by sentinels.

        Memory that something else holds weights of is kept until it lets go: LENT. ``searched``: for edits, just
        before.
        """
        state = self.compute.state
        if not self.sharding.params or state is State.RELEASED:
            return
        if state is State.LENT:
            self.compute.hide(readers=False)
        elif state in RESIDENT:
            self.edits.check_released(searched)
            self.compute.hide(readers=self.weights.gather_source.streamed)
        else:
            with phase("gather", self.name):
                # Wait first: a collective still writes into the memory that is freed below.
                self.finish_gather()
        if state is not State.LENT:
            self.live.add(-self.storage.counted)
        self.compute.free()

    def end_lending(self, changes: bool) -> None:
        """End graphs from before a step: anything that still holds changed weights reads NaN until the next gather."""
        self.compute.take_back()
        if changes or self.compute.state is State.LENT:
            self.release()
        self.changes += changes
        if changes and self.compute.state is State.LENT:
            self.compute.spoil()

    def guard(self) -> None:
        """Keep the values, but intercept uses outside of the owning unit's forward. See guard.py."""
        self.compute.guard()

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
        if self.storage.is_whole:
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

    def stores(self) -> list[Store]:
        states = self.states
        return [*self.weights.stores(), *self.grads.stores(), *states.by_key.values(), *states.beside.values()]

    def step_stores(self) -> list[Store]:
        """The streamed stores of master weights and optimizer states."""
        master = [self.weights.master] if self.weights.master is not None else []
        return [store for store in (*master, *self.states.by_key.values()) if store.streamed]

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
            self.compute.begin_update()
            if self.sharding.optim and not self.group.gathers_in_threads:
                self.unpublished.append(self)
                return None

        def publish() -> None:
            with self.weights.copy.publishing():
                (self.group.background_fence() if sharded else self.gathers.publish_in_background(self)).wait()

        return publish if self.sharding.optim or sharded else None

    def publish_later(self, gather: Work) -> None:
        """Guard the compute copy until ``wait_background_step``, which waits for ``gather``."""
        self._arriving = gather
        self.edits.pause()
        self.compute.begin_update()

    def launch_background_gather(self) -> None:
        """Wait for the background step, and start gathering the other ranks' updates."""
        self._background.wait()
        self.weights.copy.wait_copied()
        self._arriving = self.gathers.publish_in_background(self)

    def wait_background_step(self) -> bool:
        """Wait until this bucket's step is complete; returns whether it was not."""
        waited = self._background.wait()
        if self.compute.state is not State.UPDATING:
            return waited
        while self in self.unpublished:
            # Launch in the order of steps, which is the same on all ranks, up to this bucket: a rank that used
            # another bucket first would otherwise launch its collectives in another order.
            self.unpublished.popleft().launch_background_gather()
        arriving = self._arriving
        self._arriving = None
        if arriving is not None:
            with phase("gather", self.name):
                arriving.wait()
        self.weights.copy.wait_copied()
        self.compute.end_update()
        self.edits.note()
        return True

    # ---- values ------------------------------------------------------------------------------------------------

    def expected_shard(self) -> Tensor:
        """The value of this rank's shard of the compute copy in a resident bucket without edits."""
        shard = self.compute.shard
        shard = self.weights.values().to(shard.device, shard.dtype)
        return self.gathers.decoded(shard) if self.gathers.rounded else shard

    @without_grad
    def refresh_after_step(self) -> None:
        """Copy the master weights to what gathers read, or to this rank's shard of the compute copy."""
        self.gathers.weights_changed()
        # Streamed stores were refreshed during the step, bucket by bucket.
        if self.weights.trains and (self.offloaded or not self.sharding.params) and not self.streamed:
            self.weights.refresh()
            self.put_away()
        self.weights.note_kernel(writes_copy=False)

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
            self.weights.forget_decoded()
            self.edits.note()

    @torch.no_grad()
    def write(self, index: int, value: Tensor, rounded: bool = False) -> None:
        """Set parameter ``index`` to ``value`` (full shape, the same on every rank) in every copy this rank holds.

        ``rounded``: see ``MasterWeights.load``.
        """
        # An unfinished prefetch would deliver the old values after the write.
        if not self.resident and not self.released:
            self.release()
        if self.resident and not self.exact:
            # Gather the whole bucket again: all values that are shown are compared with master weights.
            self.gather(exact=True)
        self.group.before_write()
        self.gathers.weights_changed()
        if self.resident or self.state is State.LENT:
            value = whole(value)
            self.compute.views[index].copy_(value)
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
            self.weights.load(rows, elements_of(value, piece.lo, piece.hi), rounded, self.compute.shard[rows])
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
        self.group.broadcast(self.compute.flat, self.name)
        self.group.after_write()
        self.weights.keep_edits()
        if self.weights.is_rounded_in_copy and not self.storage.is_cut and self.group.size > 1:
            # Rank 0 may have loaded values that the compute copy does not show, and the others not.
            self.weights.repeat_first(self.group, self.name)
        self.edits.note()
