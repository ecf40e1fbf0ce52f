"""The gradients of buckets: taken from the parameters, reduced over the ranks, accumulated until the step.

Reductions are launched in one fixed order, at most two in flight. A bucket becomes ready when the backward of its unit
is done, which may happen in another order on another rank (an unused unit is not ready before the end). Launches follow
``_order``, the same on all ranks: in the first backward of a run the reverse of registration, later the order that rank
0 saw. The remaining buckets are launched at the end of backward, so each bucket is reduced exactly once per backward on
every rank.

Note [When a bucket is ready]
    Where parameters are sharded, gathers run between the reductions, and a rank that waits for a reduction which
    another rank launches only at the end of backward would never take part in the gathers that rank needs to get there.
    So a sharded bucket is ready when backward has left its unit, whether or not this rank's data touched each of its
    parameters. Gradients that arrive later (weights read outside of their unit) stay in ``p.grad`` until the step, when
    the ranks agree on a second reduction. Where parameters are not sharded there are no gathers between reductions, and
    a bucket is ready when all its gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero import ops
from lt_zero.comm.communicator import Comm
from lt_zero.comm.shared_memory import SEND_BUFFERS
from lt_zero.common.flat_storage import flat_empty
from lt_zero.common.timing import phase
from lt_zero.engine.layout import BucketLayout, Piece, Sharding
from lt_zero.offload.background import BackgroundStep
from lt_zero.offload.store import Place, Store, Waits


class Accumulator:
    """The gradients of one bucket on this rank.

    The reduced ones, of the same elements as the master weights, are in a store of the place of optimizer states. They
    are valid for the parameters in ``valid``, zero in the gaps, and have yet to be multiplied by ``factor`` if there is
    one. Those of an accumulation window that were not reduced yet are in ``local`` (all elements).

    Args:
        name: name of the bucket's unit, for messages.
        params: parameters of the bucket, in order.
        layout: their offsets in the bucket.
        shard_range: the elements [lo, hi) that this rank accumulates.
        comm: the collectives.
        dtype: dtype of the accumulator.
        wire: dtype of gradients in collectives; None: chosen by ``send_dtype``.
        sharded: whether optimizer states are sharded, so that each rank needs only the sum of its shard.
        background: the background step of the bucket.
    """

    def __init__(
        self,
        name: str,
        params: list[Parameter],
        layout: BucketLayout,
        shard_range: tuple[int, int],
        comm: Comm,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        sharded: bool,
        background: BackgroundStep,
    ) -> None:
        self.dtype = dtype
        self._name, self._params, self._layout, self._comm = name, params, layout, comm
        self._numel, self._pieces = shard_range[1] - shard_range[0], layout.pieces(*shard_range)
        self._whole = shard_range == (0, layout.numel)
        self._wire, self._sharded, self._background = wire, sharded, background
        self._store: Store | None = None  # of the place, kept from step to step
        self._values: Store | None = None  # ``_store``, or what replaces it in this step; None: nothing is accumulated
        self.changes = 0  # counts changes of the gradients
        self._dropping = False  # ``_drop`` is queued
        self.factor: Tensor | None = None  # 0D fp32; see fused_step.py, Note [Deferred factor]
        self.valid: set[int] = set()  # parameters that were reduced since their gradient was cleared
        self.used: set[int] = set()  # parameters that had a gradient on this rank
        self.local: Tensor | None = None  # 1D, all elements: gradients not reduced yet (stages 0 and 1)

    def use(self, place: Place) -> None:
        """Keep the accumulator in ``place``."""
        self._place, self._store = place, None

    # ---- from the parameters to the accumulator ----------------------------------------------------------------

    def send_dtype(self, have: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of dtype ``have`` are sent: as configured, else ``have`` if that is as precise."""
        if self._wire is not None:
            return self._wire
        return have if self._sharded and self._comm.sums_wide else self.dtype

    def used_flags(self) -> list[bool]:
        """Whether each parameter has a gradient on this rank, in ``p.grad`` or in the accumulator."""
        used = self.used
        return [index in used or p.grad is not None for index, p in enumerate(self._params)]

    @torch.no_grad()
    def take(self, out: Tensor, add: bool, factor: float = 1.0) -> None:
        """Move the parameters' gradients times ``factor`` into ``out`` (1D, all elements), or add them to it.

        Absent gradients count as zeros.
        """
        targets, grads = [], []  # for the kernel: torch would need two passes
        for index, (parameter, span) in enumerate(zip(self._params, self._layout.spans, strict=True)):
            grad, target = parameter.grad, out[span.lo : span.hi].view(span.shape)
            if grad is None:
                if not add:
                    target.zero_()
                continue
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            if (grad.dtype != out.dtype or factor != 1.0) and ops.fits(out, grad, add):
                targets.append(target)
                grads.append(grad)
            elif add:
                target.add_(grad)
            elif factor == 1.0 or target.dtype.itemsize > grad.dtype.itemsize:
                target.copy_(grad)
                target.mul_(factor) if factor != 1.0 else None
            else:
                torch.mul(grad, factor, out=target)  # multiplied before it is rounded
            self.used.add(index)
            parameter.grad = None
        if targets and add:
            ops.accumulate(targets, grads)
        elif targets:
            ops.cast_scale(targets, grads, factor=factor)
        if not add:
            for lo, hi in self._layout.gaps:
                out[lo:hi].zero_()

    @torch.no_grad()
    def accumulate_local(self) -> None:
        """Add the parameters' gradients to ``local``."""
        add = self.local is not None
        if self.local is None:
            self.local = torch.empty(self._layout.numel, dtype=self.dtype, device=self._comm.device)
        self.take(self.local, add)

    def launch_reduce(self, send: Tensor, scratch: Tensor) -> Waits:
        """Start averaging ``send`` (1D, all elements) over the ranks into the accumulator."""
        self._background.wait()
        self.apply_deferred_scale()
        if self._store is None:
            self._store = self._place.store("grad", self._numel, self.dtype)
        self._values = self._values or self._store
        add = bool(self.valid)
        self.changes += 1
        self.valid.update(i for i, p in enumerate(self._params) if p.requires_grad)
        collective = self._comm.all_reduce if self._whole else self._comm.reduce_scatter
        return self._values.launch_reduce(lambda out, add: collective(out, send, scratch, add, self._name), add)

    # ---- the accumulator ---------------------------------------------------------------------------------------

    @property
    def accumulated(self) -> bool:
        """Whether there is an accumulator."""
        return self._values is not None

    @property
    def accumulated_dtype(self) -> torch.dtype:
        """Dtype of ``read()``: ``dtype``, unless the gradients were widened."""
        return self._values.dtype if self._values is not None else self.dtype

    def read(self) -> Tensor:
        """The accumulator (1D, elements [shard_range)), read-only; there must be one."""
        self._background.wait()
        assert self._values is not None
        return self._values.read()

    def write(self) -> Tensor:
        """The accumulator (1D, elements [shard_range)), for writing; there must be one."""
        self._background.wait()
        self.changes += 1
        assert self._values is not None
        return self._values.write()

    def of(self, piece: Piece, write: bool = True) -> Tensor:
        """The accumulated gradient (1D) of one of this rank's pieces; read-only without ``write``."""
        self.apply_deferred_scale()
        grad = self.write() if write else self.read()
        return grad[piece.offset : piece.offset + piece.numel]

    @property
    def held(self) -> set[int]:
        """Parameters with gradients in ``grad`` or ``local``."""
        return self.valid | self.used

    @torch.no_grad()
    def clear(self, indices: set[int]) -> None:
        """Drop the accumulated gradients of the given parameters."""
        self.changes += 1
        self.valid -= indices
        self.used -= indices
        if not self.valid and not self.used:
            if not self._dropping:
                self._dropping = True
                self._background.then(self._drop)  # the next reduction starts from zero
            return
        self._background.wait()
        for index in indices:
            span = self._layout.spans[index]
            if self.local is not None:
                self.local[span.lo : span.hi].zero_()
        for piece in self._pieces:
            if self.accumulated and piece.index in indices:
                self.of(piece).zero_()
        self.put_away()

    def _drop(self) -> None:
        self._dropping = False
        if not self.valid and not self.used:
            self.local = self.factor = None
            self.discard()
            self._values = None

    def discard(self) -> None:
        """Drop the values, which nobody will read: their file is not written."""
        if self._values is not None:
            self._values.discard()

    # ---- its store ---------------------------------------------------------------------------------------------

    def stores(self) -> list[Store]:
        """The stores of gradients."""
        return list({id(store): store for store in (self._store, self._values) if store is not None}.values())

    @property
    def streamed(self) -> bool:
        """Whether there is an accumulator that takes memory only while it is used."""
        return self._values is not None and self._values.streamed

    def end_use(self) -> None:
        """Start writing a streamed accumulator; ``put_away`` completes that."""
        self._background.wait()
        if self._values is not None:
            self._values.end_use()

    def put_away(self) -> None:
        """Write a streamed accumulator and free its memory."""
        self.end_use()
        if self._values is not None:
            self._values.wait_written()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the accumulator takes now."""
        return sum(store.nbytes for store in self.stores())

    # ---- deferred scale ----------------------------------------------------------------------------------------

    def defer(self, factor: Tensor) -> None:
        """Multiply the accumulated gradients by ``factor`` (0D fp32) later, when they are read."""
        self.changes += 1
        if self._place.offloads:
            factor = factor.cpu()  # in the background step this would wait for all work queued on the device by then
        self.factor = factor if self.factor is None else self.factor * factor

    @torch.no_grad()
    def apply_deferred_scale(self) -> None:
        """Multiply by the deferred factor."""
        self._background.wait()
        factor, self.factor = self.factor, None
        if factor is not None and self.accumulated:
            self.widen_fp16()
            grad = self.write()
            grad.mul_(factor.to(grad.device))

    def widen_fp16(self) -> None:
        """Convert an fp16 accumulator to fp32 before unscaling, where small gradients would underflow."""
        if self._values is not None and self._values.dtype == torch.float16:
            self._background.wait()
            self.changes += 1
            self._values = self._values.widened()


class Reduced(Protocol):
    """What the reducer needs of a bucket."""

    name: str
    dtype: torch.dtype
    layout: BucketLayout
    grads: Accumulator
    sharding: Sharding

    @property
    def wants_grad(self) -> bool: ...

    def enable_training(self) -> None: ...


B = TypeVar("B", bound=Reduced)


class Reducer(Generic[B]):
    """Launches and finishes the gradient reductions of one engine."""

    def __init__(self, comm: Comm, buckets: list[B], overlap: bool, max_buffer: int) -> None:
        self._comm, self._overlap = comm, overlap
        self._order = list(buckets)
        # Elements of a reusable buffer; a larger bucket gets buffers of its own, freed after its reduction.
        self._largest: dict[torch.dtype, int] = {}
        for bucket in buckets:
            dtype, numel = bucket.grads.send_dtype(bucket.dtype), bucket.layout.numel
            if numel <= max_buffer:
                self._largest[dtype] = max(numel, self._largest.get(dtype, 0))
        self._head = 0
        self._ready: set[B] = set()
        self._seen: list[B] = []  # order of completion in this backward
        self._learnt = False  # ``_order`` is that of rank 0
        self._buffers: dict[torch.dtype, deque[tuple[Tensor, Tensor]]] = {}  # free (send, scratch) pairs
        self._made: dict[torch.dtype, int] = {}  # number of pairs, free or not
        self._flying: deque[tuple[B, Waits, tuple[Tensor, Tensor] | None]] = deque()
        self._leaving: deque[Accumulator] = deque()  # being written
        self.on_landed: Callable[[B], bool] | None = None  # steps a reduced bucket early, if it returns True
        self.sync = True  # False inside no_sync: buckets whose gradients are not sharded stay local

    def mark_ready(self, bucket: B) -> None:
        """All gradients of ``bucket`` are there: launch its reduction when its turn has come."""
        if bucket in self._ready:
            return
        self._ready.add(bucket)
        self._seen.append(bucket)
        while self._head < len(self._order) and self._passes(self._order[self._head]):
            self._reduce(self._order[self._head])
            self._head += 1

    @property
    def active(self) -> bool:
        """Whether a bucket became ready since the last backward ended."""
        return bool(self._seen)

    def _passes(self, bucket: B) -> bool:
        return bucket in self._ready or not bucket.wants_grad

    def finish(self) -> None:
        """End of backward: reduce the remaining buckets in order, and wait for all reductions."""
        for bucket in self._order[self._head :]:
            self._reduce(bucket)
        self.drain()
        self._head = 0
        self._ready.clear()
        if not self._learnt and self.sync:
            self._adopt_order()
        self._seen = []

    def _adopt_order(self) -> None:
        """Set ``_order`` to the order in which rank 0 completed the buckets in the first backward. Collective."""
        self._learnt = True
        index = {bucket: i for i, bucket in enumerate(self._order)}
        seen = self._comm.host_broadcast([index[b] for b in self._seen], "the order of gradient buckets")
        rest = [i for i in range(len(self._order)) if i not in set(seen)]
        self._order = [self._order[i] for i in [*seen, *rest]]

    def _reduce(self, bucket: B) -> None:
        if not bucket.wants_grad:
            return
        bucket.enable_training()
        if not self.sync and not bucket.sharding.grads:
            bucket.grads.accumulate_local()
            return
        self._launch(bucket)

    def flush(self) -> None:
        """Reduce gradients that were accumulated locally without a final synchronised backward."""
        for bucket in self._order:
            if bucket.grads.local is not None:
                self._launch(bucket)
        self.drain()

    def reduce_again(self, buckets: list[B]) -> None:
        """Reduce gradients that arrived after their bucket's reduction. Collective: the same buckets on all ranks."""
        for bucket in buckets:
            bucket.enable_training()
            self._launch(bucket)
        self.drain()

    def _launch(self, bucket: B) -> None:
        while len(self._flying) >= 2:
            self._land()
        grads, numel, buffers = bucket.grads, bucket.layout.numel, None
        if grads.local is not None:
            grads.take(grads.local, add=True)
            dtype = grads.send_dtype(grads.local.dtype)
            send, grads.local = grads.local.mul_(self._comm.factors(dtype)[0]).to(dtype), None
            scratch = torch.empty_like(send)
        else:
            buffers = self._take_buffers(bucket)
            send, scratch = buffers[0][:numel], buffers[1][:numel]
            grads.take(send, add=False, factor=self._comm.factors(send.dtype)[0])
        self._flying.append((bucket, grads.launch_reduce(send, scratch), buffers))
        if not self._overlap:
            self._land()

    def _take_buffers(self, bucket: B) -> tuple[Tensor, Tensor]:
        """Buffers for one reduction: (send, scratch). Reusable pairs take turns (shared_memory.py)."""
        dtype, comm = bucket.grads.send_dtype(bucket.dtype), self._comm
        largest = self._largest.get(dtype, 0)
        if bucket.layout.numel > largest:
            send = flat_empty(bucket.layout.numel, dtype, comm.device)
            return send, flat_empty(bucket.layout.numel if comm.world > 1 else 0, dtype, comm.device)
        free = self._buffers.setdefault(dtype, deque())
        shared = comm.shares_memory and bucket.sharding.optim
        if self._made.get(dtype, 0) < (SEND_BUFFERS if shared else 2):
            self._made[dtype] = self._made.get(dtype, 0) + 1
            send = comm.allocate(largest, dtype)
            return send, flat_empty(0 if shared or comm.world == 1 else largest, dtype, comm.device)
        return free.popleft()

    def _land(self) -> None:
        bucket, pending, buffers = self._flying.popleft()
        with torch.no_grad(), phase("reduce", bucket.name):
            pending.wait()
        taken = self.on_landed is not None and self.on_landed(bucket)
        if bucket.grads.streamed and not taken:
            bucket.grads.end_use()
            self._leaving.append(bucket.grads)
            if len(self._leaving) > 1:
                self._leaving.popleft().put_away()
        if buffers is not None and buffers[0].numel() == self._largest.get(buffers[0].dtype):
            self._buffers[buffers[0].dtype].append(buffers)

    def abort(self) -> None:
        """Drop a failed backward; waits for launched reductions, whose buffers are reused."""
        self.on_landed = None
        self.drain()
        self._head = 0
        self._ready.clear()
        self._seen = []

    def drain(self) -> None:
        """Wait for all launched reductions."""
        while self._flying:
            self._land()
        while self._leaving:
            self._leaving.popleft().put_away()

    @property
    def buffer_bytes(self) -> int:
        return sum(t.nbytes for free in self._buffers.values() for pair in free for t in pair)
