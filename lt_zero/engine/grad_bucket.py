"""The gradients of buckets: taken from the parameters, reduced over the ranks, accumulated until the step.

Reductions are launched in one fixed order, at most two in flight: in the first backward of a run the reverse of
registration, later the order that rank 0 saw. The remaining buckets are launched at the end of backward, so each bucket
is reduced exactly once per backward on every rank.

Note [When a bucket is ready]
    Where parameters are sharded, gathers run between the reductions, and a rank that waits for a reduction which
    another rank launches only at the end of backward would never take part in the gathers that rank needs to get there.
    So a sharded bucket is ready when backward has left its unit, whether or not this rank's data touched each of its
    parameters. Gradients that arrive later (weights read outside of their unit) stay in ``p.grad`` until the step, when
    the ranks agree on a second reduction. Other buckets are ready when all their gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lt_zero.comm.communicator import Comm
from lt_zero.common.flat_storage import flat_empty
from lt_zero.common.timing import phase
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.shard import Accumulator
from lt_zero.offload.store import Waits


class Reducer:
    """Launches and finishes the gradient reductions of one engine."""

    def __init__(self, comm: Comm, buckets: list[Bucket], overlap: bool, max_buffer: int) -> None:
        self._comm, self._overlap = comm, overlap
        self._order = list(buckets)
        # Elements of a reusable buffer; a larger bucket gets buffers of its own, freed after its reduction.
        self._largest: dict[torch.dtype, int] = {}
        for bucket in buckets:
            dtype, numel = bucket.grads.send_dtype(bucket.dtype), bucket.layout.numel
            if numel <= max_buffer:
                self._largest[dtype] = max(numel, self._largest.get(dtype, 0))
        self._head = 0
        self._ready: dict[Bucket, None] = {}  # in the order of completion in this backward
        self._learnt = False  # ``_order`` is that of rank 0
        self._buffers: dict[torch.dtype, deque[tuple[Tensor, Tensor]]] = {}  # free (send, scratch) pairs
        self._made: dict[torch.dtype, int] = {}  # number of pairs, free or not
        self._flying: deque[tuple[Bucket, Waits, tuple[Tensor, Tensor] | None]] = deque()
        self._leaving: deque[Accumulator] = deque()  # being written
        self.on_landed: Callable[[Bucket], bool] | None = None  # steps a reduced bucket early, if it returns True
        self.at_step: Callable[[], bool] = lambda: False  # reductions wait for the step (compressed_momentum.py)
        self.before_flush: Callable[[list[Bucket]], object] = lambda buckets: None  # may change what was accumulated
        self.sync = True  # False inside no_sync: buckets whose gradients are not sharded stay local

    def mark_ready(self, bucket: Bucket) -> None:
        """All gradients of ``bucket`` are there: launch its reduction when its turn has come."""
        if bucket in self._ready:
            return
        self._ready[bucket] = None
        while self._head < len(self._order):
            following = self._order[self._head]
            if following in self._ready:
                self._reduce(following)
            elif following.wants_grad:
                return
            self._head += 1

    @property
    def active(self) -> bool:
        """Whether a bucket became ready since the last backward ended."""
        return bool(self._ready)

    def finish(self) -> None:
        """End of backward: reduce the remaining buckets in order, and wait for all reductions."""
        for bucket in self._order[self._head :]:
            if bucket.wants_grad:
                self._reduce(bucket)
        self.drain()
        if not self._learnt and self.sync:
            # From now on, buckets are reduced in the order in which rank 0 completed them in this backward.
            self._learnt = True
            index = {bucket: i for i, bucket in enumerate(self._order)}
            seen = self._comm.host_broadcast([index[b] for b in self._ready], "the order of gradient buckets")
            self._order = [self._order[i] for i in dict.fromkeys([*seen, *range(len(self._order))])]
        self._head = 0
        self._ready.clear()

    def _reduce(self, bucket: Bucket) -> None:
        if (self.sync and not self.at_step()) or bucket.sharding.grads:
            self._launch(bucket)
        else:
            bucket.weights.enable_training()
            grads, add = bucket.grads, bucket.grads.local is not None
            if grads.local is None:
                grads.local = torch.empty(bucket.layout.numel, dtype=grads.dtype, device=self._comm.device)
            grads.take(grads.local, add)

    def flush(self) -> None:
        """Reduce gradients that were accumulated locally without a final synchronised backward."""
        waiting = [bucket for bucket in self._order if bucket.grads.local is not None]
        if waiting:
            self.before_flush(waiting)
            self.reduce_again(waiting)

    def reduce_again(self, buckets: list[Bucket]) -> None:
        """Reduce gradients that arrived after their bucket's reduction. Collective: the same buckets on all ranks."""
        for bucket in buckets:
            self._launch(bucket)
        self.drain()

    def _launch(self, bucket: Bucket) -> None:
        bucket.weights.enable_training()
        while len(self._flying) >= 2:
            self._land()
        grads, numel, buffers = bucket.grads, bucket.layout.numel, None
        if grads.local is not None:
            grads.take(grads.local, add=True)
            dtype = grads.send_dtype(grads.local.dtype)
            send, grads.local = grads.local.mul_(self._comm.factors(dtype)[0]).to(dtype), None
            work = grads.launch_reduce(send, send.new_empty(self._comm.scratch_numel(numel)))
        elif grads.direct:
            work = grads.launch_take()
        else:
            buffers = self._take_buffers(bucket)
            send = buffers[0][:numel]
            try:
                grads.take(send, add=False, factor=self._comm.factors(send.dtype)[0])
                work = grads.launch_reduce(send, buffers[1][:numel])
            except BaseException:
                self._give_buffers(buffers, unused=True)  # the caller may go on: out of memory, with a smaller batch
                raise
        self._flying.append((bucket, work, buffers))
        if not self._overlap:
            self._land()

    def _take_buffers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Buffers for one reduction: (send, scratch). Reusable pairs take turns (shared_memory.py)."""
        dtype, comm = bucket.grads.send_dtype(bucket.dtype), self._comm
        largest = self._largest.get(dtype, 0)
        if bucket.layout.numel > largest:
            send = flat_empty(bucket.layout.numel, dtype, comm.device)
            return send, flat_empty(comm.scratch_numel(bucket.layout.numel), dtype, comm.device)
        free = self._buffers.setdefault(dtype, deque())
        if self._made.get(dtype, 0) < comm.send_buffers:
            self._made[dtype] = self._made.get(dtype, 0) + 1
            scratch = 0 if comm.shares_sends else comm.scratch_numel(largest)
            return comm.allocate_send(largest, dtype), flat_empty(scratch, dtype, comm.device)
        return free.popleft()

    def _give_buffers(self, buffers: tuple[Tensor, Tensor], unused: bool = False) -> None:
        """Return what ``_take_buffers`` gave; ``unused``: its turn has not passed."""
        if buffers[0].numel() == self._largest.get(buffers[0].dtype):
            free = self._buffers[buffers[0].dtype]
            free.insert(0 if unused else len(free), buffers)

    def _land(self) -> None:
        bucket, pending, buffers = self._flying.popleft()
        with torch.no_grad(), phase("reduce", bucket.name):
            pending.wait()
        if buffers is not None:
            self._give_buffers(buffers)
        taken = self.on_landed is not None and self.on_landed(bucket)
        if bucket.grads.streamed and not taken:
            bucket.grads.end_use()
            self._leaving.append(bucket.grads)
            if len(self._leaving) > 1:
                self._leaving.popleft().put_away()

    def abort(self) -> None:
        """Drop a failed backward; waits for launched reductions, whose buffers are reused."""
        self.on_landed = None
        self.drain()
        self._head = 0
        self._ready.clear()

    def drain(self) -> None:
        """Wait for all launched reductions."""
        while self._flying:
            self._land()
        while self._leaving:
            self._leaving.popleft().put_away()

    @property
    def buffer_bytes(self) -> int:
        return sum(t.nbytes for free in self._buffers.values() for pair in free for t in pair)
