"""One bucket: a flat tensor with its parameters as views, gathered and released as a unit.

``flat``     the compute copy, all elements; parameters are views of it. With sharded parameters its memory is freed
             unless the bucket is gathered (flat_storage.py). Views survive that, so the views that autograd saved are
             valid again after every gather.
``weights``  this rank's master weights, or the shard of frozen weights, and the copy of them that gathers read.
``grads``    the gradient accumulator (grad_bucket.py).
``states``   optimizer states, where they are not kept beside their fragments.

Their bytes are kept in stores (offload/store.py): on the device, in host memory or in files. The two places of a bucket
say which: one for master weights, accumulator and states, one for what gathers read.

Parameters are set by ``p.data = view``: that keeps their identity and gives each a version counter of its own. If
they shared the flat tensor's counter, autograd would report "modified by an inplace operation" after each refill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.comm.communicator import Comm
from lt_zero.comm.work import Work
from lt_zero.common.flat_storage import FlatStorage, flat_empty
from lt_zero.common.timing import phase
from lt_zero.config.precision import DtypePolicy
from lt_zero.engine.grad_bucket import Accumulator
from lt_zero.engine.guard import Owner, guard, own, sentinel, unguard
from lt_zero.engine.inplace_edits import InplaceEdits
from lt_zero.engine.layout import BucketLayout, Piece, Sharding, gaps_between, plan_bucket
from lt_zero.engine.lazy_tensor import elements_of, whole
from lt_zero.offload.background import BackgroundStep, Job
from lt_zero.offload.store import DevicePlace, DeviceStore, Gather, Place, Store, Waits, put_away


class State(Enum):
    RELEASED = auto()
    GATHERING = auto()
    RESIDENT = auto()


class Weights:
    """The weights of one bucket on this rank: what the optimizer updates, and what gathers read.

    ``master``  master weights: this rank's shard, or all elements if the optimizer is not sharded. They are a slice of
                the compute copy where that stays in memory and has the master's dtype.
    ``frozen``  the shard of a frozen bucket, or its values in a wider dtype.
    ``copy``    the compute copy that a step has to update: this rank's elements of the flat tensor, or what gathers
                read while the master weights are offloaded. None: the master weights serve.

    Args:
        shard: this rank's elements (1D) of the flat tensor.
        master_dtype: dtype of the master weights.
        sharded: whether parameters are sharded, so that the flat tensor is released at times.
        gaps: elements [lo, hi) of ``shard`` that belong to no parameter.
        background: the background step of the bucket.
    """

    def __init__(
        self,
        shard: Tensor,
        master_dtype: torch.dtype,
        sharded: bool,
        gaps: list[tuple[int, int]],
        background: BackgroundStep,
    ) -> None:
        self.master_dtype, self._gaps, self._background = master_dtype, gaps, background
        self._shard, self._sharded = shard, sharded
        self.master: Store | None = None
        self.frozen: Store | None = None
        self.copy: Store | None = None
        self.written = False  # the running step has written the compute copy already

    def use(self, optim: Place, params: Place) -> None:
        """Keep master weights in ``optim``, and what gathers read in ``params``."""
        self._optim, self._params = optim, params

    # ---- construction ------------------------------------------------------------------------------------------

    def keep(self, values: Tensor, train: bool) -> None:
        """Store this rank's ``values`` (1D, as ``shard``): as master weights if ``train``, as frozen weights if not."""
        compute = self._shard.dtype
        if not train:
            dtype = compute if values.dtype == compute else self.master_dtype
            self.frozen = _stored(self._params, "weights", values, dtype)
            return
        self.master = _stored(self._optim, "master", values, self.master_dtype)
        serves = self._optim.streamed and self._params.streamed and self.master_dtype == compute
        if not self._sharded:
            self.copy = self._optim.fed(DeviceStore.of(self._shard))
        elif self._optim.offloads and not serves:  # a gather must not wait until master weights are read
            self.copy = self._optim.fed(_stored(self._params, "weights", values, compute))

    @torch.no_grad()
    def enable_training(self) -> None:
        """Make the master weights if there are none; called late when frozen parameters are unfrozen."""
        if self.trains:
            return
        frozen, self.frozen = self.frozen, None
        if self.master_is_view:
            self.master = DeviceStore.of(self._shard)
        elif frozen is None:
            self.keep(self._shard, train=True)
        elif frozen.dtype == self.master_dtype and not self._optim.offloads and not frozen.streamed:
            self.master = frozen
            self.copy = None if self._sharded else DeviceStore.of(self._shard)
        else:
            self.keep(frozen.read(), train=True)
            frozen.discard()
        put_away(self.stores())  # the bucket may never be stepped

    # ---- what there is -----------------------------------------------------------------------------------------

    @property
    def master_is_view(self) -> bool:
        """Whether the master weights are a slice of the compute copy."""
        return not self._sharded and self.master_dtype == self._shard.dtype and not self._optim.offloads

    @property
    def trains(self) -> bool:
        """Whether there are master weights."""
        return self.master is not None

    @property
    def _kept(self) -> Store | None:
        return self.master or self.frozen

    @property
    def has_master(self) -> bool:
        """Whether master or frozen weights are stored apart from the flat tensor."""
        return not self.master_is_view and self._kept is not None

    def stores(self) -> list[Store]:
        """The stores of weights."""
        return [store for store in (self.master, self.frozen, self.copy) if store is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that weights apart from the flat tensor take now."""
        copy = self.copy.nbytes if self.copy is not None and self._sharded else 0
        return copy + (self._kept.nbytes if self._kept is not None and self.has_master else 0)

    @property
    def master_rows(self) -> Tensor:
        """The master weights (1D, as ``shard``), whether or not their values are in memory."""
        assert self.master is not None
        return self.master.tensor

    @property
    def precision(self) -> torch.dtype:
        """Dtype of ``master_or_shard()``, without reading it."""
        return self._kept.dtype if self._kept is not None else self._shard.dtype

    def values(self) -> Tensor:
        """Master or frozen weights (1D, as ``shard``), read-only."""
        self._background.wait()
        assert self._kept is not None
        return self._kept.read()

    def master_or_shard(self) -> Tensor:
        """``values()``, or the flat tensor's elements if there are none (1D, as ``shard``), read-only."""
        return self.values() if self._kept is not None else self._shard

    def writable_values(self) -> Tensor:
        """Where new values are written: ``values()``, or the flat tensor's elements if there are none."""
        self._background.wait()
        return self._kept.write() if self._kept is not None else self._shard

    # ---- the copy that gathers read ----------------------------------------------------------------------------

    @property
    def gather_source(self) -> Store:
        """What a gather of sharded parameters reads (1D, as ``shard``)."""
        source = self.copy or self._kept
        assert source is not None
        return source

    def launch_gather(self, gather: Gather) -> Waits:
        """Start filling ``shard``, and the ``gather`` of it."""
        self._background.wait()
        return self.gather_source.launch_gather(self._shard, gather)

    def kernel_target(self, covers: Callable[[], bool]) -> Tensor | None:
        """Where the kernel can write the compute copy while it updates the master weights; None: ``refresh`` does.

        ``covers``: whether the kernel writes all elements but the gaps.
        """
        self.gather_source.wait_sent()
        return self.copy.kernel_target(self.master_dtype, covers) if self.copy is not None else None

    def cancel_kernel(self) -> None:
        """Forget ``kernel_target`` after the kernel failed."""
        if self.copy is not None:
            self.copy.cancel()
        self.written = False

    def refresh(self) -> None:
        """Copy the master weights, which are in memory, to the compute copy."""
        self._background.wait()
        if self.copy is not None and self.master is not None:
            self.copy.refresh(self.master, self.written, self._gaps)
        self.written = True

    def note_readers(self) -> None:
        """Before a background step: note which work queued on the device still reads the compute copy."""
        if self.copy is not None:
            self.copy.note_readers()

    def wait_copied(self) -> None:
        """Make the current stream wait until the compute copy is up to date."""
        if self.copy is not None:
            self.copy.wait_copied()

    def publishing(self) -> AbstractContextManager[object]:
        """Context in which the background thread gathers the copies of all ranks."""
        return self.copy.publishing() if self.copy is not None else nullcontext()

    def follow_edit(self) -> None:
        """After an edit of ``writable_values()``: update what gathers read, and write streamed stores."""
        if self.copy is not None and self._sharded:
            self.written = False
            self.refresh()
            self.written = False
            self.wait_copied()
        put_away(self.stores())


def _stored(place: Place, kind: str, values: Tensor, dtype: torch.dtype) -> Store:
    store = place.store(kind, values.numel(), dtype)
    store.overwrite().copy_(values)
    return store


class Bucket:
    """Parameters of one dtype that are gathered, reduced and released together.

    Args:
        name: name of the unit, for messages.
        parameters: the parameters and their names.
        dtype: dtype of the gathered weights.
        sharding: what is sharded.
        comm: the collectives.
        owner: returns the engine that handles uses of released parameters.
        policy: dtypes of master weights, accumulators and gradients in collectives.
        owners: the rank that owns each parameter; None: shards cut through parameters.
    """

    def __init__(
        self,
        name: str,
        parameters: list[tuple[str, Parameter]],
        dtype: torch.dtype,
        sharding: Sharding,
        comm: Comm,
        owner: Callable[[], Owner | None],
        policy: DtypePolicy | None = None,
        owners: Sequence[int] | None = None,
    ) -> None:
        self.name, self.sharding, self.comm = name, sharding, comm
        self.params = [p for _, p in parameters]
        self.layout: BucketLayout = plan_bucket([(n, p.shape) for n, p in parameters], comm.world, owners)
        self.shapes = [span.shape for span in self.layout.spans]
        self.dtype, policy = dtype, policy or DtypePolicy()
        # Dtypes to restore when the engine is removed; an fp64 run stays fp64.
        self.original = [dtype if dtype == torch.float64 else p.dtype for p in self.params]
        self.step_dtype = policy.step_of(dtype)
        self.shard_range = self.layout.shard(comm.rank) if sharding.optim or sharding.params else (0, self.layout.numel)
        self._pieces = self.layout.pieces(*self.shard_range)
        self._piece_of = {piece.index: piece for piece in self._pieces}  # a bucket may have thousands
        self._storage: FlatStorage | None = None
        if sharding.params:
            self._storage = FlatStorage(self.layout.numel, dtype, comm.device)
        self.flat = self._storage.tensor if self._storage else comm.allocate(self.layout.numel, dtype)  # 1D
        self.param_views = [self.flat[s.lo : s.hi].view(s.shape) for s in self.layout.spans]
        if self._storage is not None:
            self._storage.free()  # until ``adopt``: all buckets are made before the first is filled
        self.shard = self.flat[self.shard_range[0] : self.shard_range[1]]  # 1D, elements [shard_range) of ``flat``
        gaps = gaps_between(self._pieces, self.shard_range[1] - self.shard_range[0])
        self._background = BackgroundStep()
        self.weights = Weights(self.shard, policy.master_of(dtype), sharding.params, gaps, self._background)
        accumulate, wire = policy.accumulate_of(dtype), policy.wire_of(dtype)
        self.grads = Accumulator(
            name, self.params, self.layout, self.shard_range, comm, accumulate, wire, sharding.optim, self._background
        )
        self.states: dict[str, Store] = {}  # optimizer states that are kept in stores
        allocate = partial(flat_empty, device=comm.device)
        self.memory = DevicePlace(allocate, self._readable_by_peers if sharding.params else None)
        self.use(self.memory, self.memory)
        self.state = State.RESIDENT
        self._owner = owner
        self.edits = InplaceEdits(self)
        self.stepped_early = False  # in the running backward; see overlap.py, Note [Beside backward]
        self._unpublished = False  # the background step has yet to update the compute copy
        self._pending: Waits | None = None

    # ---- construction ------------------------------------------------------------------------------------------

    def use(self, optim: Place, params: Place) -> None:
        """Keep master weights, states and gradients in ``optim``, what gathers read in ``params``. Before ``adopt``."""
        self.step_place, self.gather_place = optim, params
        self.weights.use(optim, params)
        self.grads.use(optim)

    def _readable_by_peers(self, numel: int, dtype: torch.dtype) -> Tensor:
        window = self.comm.allocate(numel, dtype)
        self.comm.after_write()
        return window

    @torch.no_grad()
    def adopt(self, fetch: Callable[[Parameter], Tensor], training: bool = True) -> None:
        """Copy the parameters' values into the bucket, broadcast them from rank 0, and keep this rank's shard.

        Args:
            fetch: returns a parameter's full value.
            training: make master weights; without it they are made by ``Weights.enable_training``.
        """
        train = training and self.wants_grad
        # Values wider than the compute dtype are kept: in the master weights, or in a copy of frozen weights.
        if self._storage is not None:
            self._storage.allocate()
            for lo, hi in self.layout.gaps:
                self.flat[lo:hi].zero_()
        full, wider = self.flat, any(d.itemsize > self.dtype.itemsize for d in self.original)
        if not self.weights.master_is_view and (train or (wider and self.weights.master_dtype != self.dtype)):
            full = flat_empty(self.layout.numel, self.weights.master_dtype, self.flat.device)
        for parameter, view, span in zip(self.params, self.param_views, self.layout.spans, strict=True):
            full[span.lo : span.hi].view(span.shape).copy_(fetch(parameter))
            unguard(parameter)
            parameter.data = view
            own(parameter, self._owner)
        self.comm.broadcast(full, self.name)
        if full is not self.flat:
            self.flat.copy_(full)
            self.weights.keep(full[self.shard_range[0] : self.shard_range[1]], train)
        elif train:
            self.weights.enable_training()
        elif self.sharding.params:
            self.weights.keep(self.shard, train)
        self.edits.note()
        self.release()
        self.put_away()

    # ---- residency ---------------------------------------------------------------------------------------------

    def launch_gather(self) -> None:
        """RELEASED -> GATHERING: allocate the flat storage and start filling it."""
        assert self.state is State.RELEASED, (self.name, self.state)
        if self.stepped_early:
            raise RuntimeError(
                f"The weights of {self.name!r} are needed again after its gradients were complete, when they were "
                "updated already. Set zero_optimization.offload_optimizer.overlap_step=false."
            )
        with torch.inference_mode(False), torch.no_grad(), phase("gather", self.name):
            assert self._storage is not None
            self._storage.allocate()
            self._pending = self.weights.launch_gather(lambda own: self.comm.all_gather(self.flat, self.name, own))
        self.state = State.GATHERING

    def gather(self) -> None:
        """To RESIDENT from any state: parameters are readable afterwards."""
        if self.state is State.RELEASED:
            self.launch_gather()
        if self.state is State.GATHERING:
            with torch.inference_mode(False), torch.no_grad(), phase("gather", self.name):
                self._land()
                for parameter, view in zip(self.params, self.param_views, strict=True):
                    unguard(parameter)
                    parameter.data = view
            self.state = State.RESIDENT
            self.edits.note()

    def _land(self) -> None:
        """Wait for a gather that was launched."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None

    def release(self) -> None:
        """To RELEASED, if the parameters are sharded: free the memory and replace parameters by sentinels."""
        if not self.sharding.params or self.state is State.RELEASED:
            return
        if self.state is State.GATHERING:
            with phase("gather", self.name):
                self._land()  # a collective still writes into the memory that is freed below
            self.state = State.RELEASED
        else:
            self.edits.check()
            self.state = State.RELEASED
            with torch.inference_mode(False):
                for parameter, shape in zip(self.params, self.shapes, strict=True):
                    unguard(parameter)
                    parameter.data = sentinel(parameter, shape)
                    guard(parameter, self._owner)
        assert self._storage is not None
        self._storage.free()

    @property
    def resident(self) -> bool:
        return self.state is State.RESIDENT

    def guard(self) -> None:
        """Keep the values, but intercept uses outside of the owning unit's forward. See guard.py."""
        if self.sharding.params and self.state is State.RESIDENT:
            for parameter in self.params:
                guard(parameter, self._owner)

    def unguard(self) -> None:
        assert self.state is State.RESIDENT
        if self.sharding.params:
            for parameter in self.params:
                unguard(parameter)

    # ---- parameters --------------------------------------------------------------------------------------------

    def pieces(self) -> tuple[Piece, ...]:
        """The piece of each parameter that this rank's master weights and accumulator hold."""
        return self._pieces

    def pieces_of(self, index: int) -> list[Piece]:
        """This rank's piece of parameter ``index``: none or one."""
        piece = self._piece_of.get(index)
        return [piece] if piece is not None else []

    @property
    def wants_grad(self) -> bool:
        return any(p.requires_grad for p in self.params)

    def enable_training(self) -> None:
        """Make master weights if there are none."""
        self.weights.enable_training()

    def has_grads(self) -> bool:
        """Whether a parameter has a gradient that is not in the accumulator yet."""
        return any(p.grad is not None for p in self.params)

    def grads_complete(self) -> bool:
        """Whether each trainable parameter has received its gradient in the running backward."""
        return all(p.grad is not None for p in self.params if p.requires_grad)

    @property
    def staged(self) -> bool:
        """Whether the optimizer steps copies in another dtype. See per_bucket.py, Note [Staged buckets]."""
        return not self.step_dtype == self.weights.master_dtype == self.grads.dtype

    # ---- stores ------------------------------------------------------------------------------------------------

    @property
    def offloaded(self) -> bool:
        """Whether master weights, optimizer states and gradients are kept off the device."""
        return self.step_place.offloads

    @property
    def streamed(self) -> bool:
        """Whether a step has to read the master weights before, and to write them after."""
        return self.weights.master is not None and self.weights.master.streamed

    def state_store(self, key: str, dtype: torch.dtype) -> Store | None:
        """The store of the optimizer's element-wise state ``key``; None if states stay beside their fragments."""
        if key in self.states and self.states[key].dtype == dtype:  # else loaded from a run with other dtypes
            return self.states[key]
        store = self.step_place.state(key, self.shard.numel(), dtype)
        if store is not None:
            self.states[key] = store
        return store

    def stores(self) -> list[Store]:
        """All stores of this bucket."""
        return [*self.weights.stores(), *self.grads.stores(), *self.states.values()]

    def step_stores(self) -> list[Store]:
        """The streamed stores of master weights and optimizer states."""
        master = [self.weights.master] if self.weights.master is not None else []
        return [store for store in (*master, *self.states.values()) if store.streamed]

    def stores_of_step(self) -> list[Store]:
        """The streamed stores that a step of this bucket needs in memory and leaves to be written."""
        copy = self.weights.copy
        copies = [copy] if copy is not None and copy.streamed and copy.nbytes else []
        return [*self.step_stores(), *(self.grads.stores() if self.grads.streamed else []), *copies]

    def put_away(self) -> None:
        """Write all streamed stores and free their memory."""
        put_away(self.stores())

    # ---- steps in the background: overlap.py -------------------------------------------------------------------

    @property
    def can_step_early(self) -> bool:
        """Whether a step leaves alone what the running backward may still read."""
        # Streamed master weights are read once, so the compute copy is written with them.
        return self.sharding.params if self.streamed else self.offloaded

    def hand_over(self, job: Job) -> None:
        """Give the bucket to the background step ``job`` until ``wait_background_step``."""
        self._background.begin(job)

    def await_publication(self) -> None:
        """Guard the compute copy until ``wait_background_step``: the background step updates it."""
        if not self.sharding.params:
            self._unpublished = True
            for parameter in self.params:
                guard(parameter, self._owner)

    def publication(self) -> Callable[[], object] | None:
        """What the background calls after this rank's shard was stepped; None if nothing is sharded. Collective."""
        return self._publish if self.sharding.optim or self.sharding.params else None

    def _publish(self) -> None:
        with self.weights.publishing():
            self.comm.publish(None if self.sharding.params else self.flat).wait()

    def wait_background_step(self) -> bool:
        """Wait for this bucket's background step; returns whether one was running."""
        waited = self._background.wait()
        if self._unpublished:
            self._unpublished = False
            self.weights.wait_copied()
            for parameter in self.params:
                unguard(parameter)
            self.edits.note()
        return waited

    # ---- values ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the updated master weights to the compute copy; sharded parameters are released first."""
        if self.sharding.params:
            self.release()
        self.refresh_after_step()

    @torch.no_grad()
    def refresh_after_step(self) -> None:
        """Copy the master weights to what gathers read, or to this rank's shard of the compute copy."""
        # Streamed stores were refreshed during the step, bucket by bucket.
        if self.weights.trains and (self.offloaded or not self.sharding.params) and not self.streamed:
            self.weights.refresh()
            self.put_away()
        self.weights.written = False

    @torch.no_grad()
    def launch_publish(self) -> Work | None:
        """Start gathering the other ranks' updates into the compute copy, after ``write_back`` of all buckets."""
        if not self.weights.trains or self.sharding.params or not self.sharding.optim:
            return None
        return self.comm.all_gather(self.flat, self.name, self.flat)

    @torch.no_grad()
    def write(self, index: int, value: Tensor) -> None:
        """Set parameter ``index`` to ``value`` (full shape, the same on every rank) in every copy this rank holds."""
        self.comm.before_write()
        if self.state is State.RESIDENT:
            value = whole(value)
            self.param_views[index].copy_(value)
        for piece in self.pieces_of(index):
            row = elements_of(value, piece.lo, piece.hi)
            self.weights.writable_values()[piece.offset : piece.offset + piece.numel].copy_(row)
            self.weights.follow_edit()
        self.comm.after_write()

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Copy rank 0's values of the (resident) compute copy to the master weights of all ranks."""
        self.comm.before_write()
        self.comm.broadcast(self.flat, self.name)
        self.comm.after_write()
        self.keep_edits()
        self.edits.note()

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Copy edits of this rank's shard of the (resident) compute copy to the master weights."""
        if not self.weights.has_master:
            return
        # Only edited elements: the others are more precise in the master weights.
        if not self.offloaded:
            master = self.weights.writable_values()
            edited = master.to(self.dtype) != self.shard
            master.copy_(torch.where(edited, self.shard.to(master.dtype), master))  # does not wait for the GPU
            return
        kept = self.weights.values()
        shown = self.shard.to(kept.device)
        edited = kept.to(self.dtype) != shown
        if bool(edited.any()):
            master = self.weights.writable_values()
            master[edited] = shown[edited].to(master.dtype)
            self.weights.follow_edit()
        else:
            self.put_away()
