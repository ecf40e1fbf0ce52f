"""The gradients of buckets: taken from the parameters, reduced over the ranks, accumulated until the step.

Reductions are launched in one fixed order, at most two in flight: in the first backward of a run the reverse of
registration, later the order that the first rank saw. The remaining buckets are launched at the end of backward, so
each bucket is reduced exactly once per backward on every rank.

Note [When a bucket is ready]
    Where parameters are sharded, gathers run between the reductions, and a rank that waits for a reduction which
    another rank launches only at the end of backward would never take part in the gathers that rank needs to get there.
    So a sharded bucket is ready when backward has left its unit, whether or not this rank's data touched each of its
    parameters. Gradients that arrive later (weights read outside of their unit) stay in ``p.grad`` until the step, when
    the ranks agree on a second reduction. Other buckets are ready when all their gradients are there.

Note [Wide buckets]
    A bucket of parameters that other ranks have in another model (weights that the first and the last stage of a
    pipeline share) is reduced at the step. In backward these ranks may wait for each other, as each gets its gradients
    from the next, so a rank that waited for this reduction before it sends them would never end. They have other
    buckets beside it, in another order. For the same reasons its parameters stay gathered.

Note [Sums over replicas]
    Shard groups (transport.py, Note [Shard groups]) sum gradients over their replicas once for all micro-batches of a
    step. In the last one this goes on beside backward, as buckets become complete. Where a step comes without one, in
    manual optimization, say, or something reads gradients before, the buckets that lack the sum get it then, all of
    them in the order of reductions: ``sum_replicas``. If more micro-batches follow, only one replica goes on with the
    sums that there are (``GradAccumulator.target``), so that the next sum counts them once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from lt_zero.common.compat import WithoutGrad
from lt_zero.common.phases import phase
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Replicas, SendBuffer
from lt_zero.core.comm.work import Done, Work
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import GradientExchange
from lt_zero.core.engine.grad_accumulator import GradAccumulator, GradState
from lt_zero.core.engine.storage_plan import largest_sends

# Two let one bucket travel while the next is copied; more would hold more send buffers.
IN_FLIGHT = 2  # reductions


class GradReducer:
    """Launches and finishes the gradient reductions of one engine.

    Args:
        peers: the ranks that have its buckets.
        buckets: in the order of the first backward.
        exchange: how ranks reduce the gradients of a bucket.
        overlap: computation goes on beside a reduction.
        max_buffer: elements of a bucket up to which its buffer is kept.
    """

    def __init__(
        self, peers: ShardGroup, buckets: list[Bucket], exchange: GradientExchange, overlap: bool, max_buffer: int
    ) -> None:
        self._peers = peers
        self._exchange = exchange
        self._overlap = overlap
        self._order = _wide_last(buckets)
        largest = largest_sends((bucket.storage for bucket in buckets), max_buffer)
        groups = dict.fromkeys(bucket.group for bucket in buckets)
        self._buffers = {group: group.send_buffers(largest[group]) for group in groups}
        self._head = 0
        self._ready: dict[Bucket, None] = {}  # in the order of completion in this backward
        self._learnt = False  # ``_order`` is that of rank 0
        self._in_flight: deque[tuple[Bucket, Work, SendBuffer | None]] = deque()
        self._leaving: deque[GradAccumulator] = deque()  # being written
        self._step: Callable[[Bucket], bool] | None = None  # see ``stepping``
        # False inside no_sync: buckets whose gradients are not sharded stay local, others are not summed over replicas.
        self.sync = True
        self._more_parts = False  # see ``expect_parts``
        self.ends_at_step = False  # any backward may be the last one of its step: replicas are summed by the step
        # That can get gradients in this backward; None: all. Of others only what was accumulated locally is reduced.
        self.scope: Collection[Bucket] | None = None

    @contextmanager
    def stepping(self, step: Callable[[Bucket], bool]) -> Iterator[None]:
        """Context of a backward: ``step`` gets each bucket as it is reduced, and steps it early if it returns True."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def expect_parts(self, more: bool) -> None:
        """Tell whether the next backward is that of a part of a micro-batch, and more follow: gradients stay local."""
        self._more_parts = more

    def mark_ready(self, bucket: Bucket) -> None:
        """Launch the reduction of ``bucket``, whose gradients are all there, when its turn has come."""
        if bucket in self._ready:
            return
        self._ready[bucket] = None
        while self._head < len(self._order):
            following = self._order[self._head]
            if following in self._ready:
                self._launch(following)
            elif self._is_awaited(following):
                return
            self._head += 1

    def _is_awaited(self, bucket: Bucket) -> bool:
        """True if this backward ends with a reduction of ``bucket``."""
        found = self.scope is None or bucket in self.scope or bucket.grads.local is not None
        return bucket.wants_grad and found

    @property
    def active(self) -> bool:
        """True if a bucket became ready since the last backward ended."""
        return bool(self._ready)

    def finish(self) -> None:
        """End of backward: reduce the remaining buckets in order, and wait for all reductions."""
        for bucket in self._order[self._head :]:
            if self._is_awaited(bucket):
                self._launch(bucket)
        if not self._divides:
            self.sum_replicas()
        self.drain()
        if not self._learnt and self.sync:
            # From now on, buckets are reduced in the order in which the first rank completed them in this backward.
            self._learnt = True
            index = {bucket: i for i, bucket in enumerate(self._order)}
            seen = self._peers.host_broadcast([index[b] for b in self._ready], "the order of gradient buckets")
            seen = [index for index in seen if not self._order[index].plan.is_wide]
            self._order = _wide_last([self._order[i] for i in dict.fromkeys([*seen, *range(len(self._order))])])
        self._head, self.scope = 0, None
        self._ready.clear()

    def _keeps_local(self, bucket: Bucket) -> bool:
        """True if the gradients of ``bucket`` from the running backward wait for a later reduction."""
        if self._exchange.reduces_each_backward:
            # Each micro-batch is reduced once, also one whose backward comes in parts.
            return bucket.plan.is_wide or self._more_parts
        waits = not self.sync or self._exchange.reduces_at_step
        return bucket.plan.is_wide or (waits and not bucket.sharding.grads)

    @property
    def _divides(self) -> bool:
        """True if the running backward leaves sums over replicas to a later one, or to the step."""
        return not self.sync or self.ends_at_step

    def flush(self) -> None:
        """Reduce gradients that were accumulated without a final synchronised backward."""
        self.sum_replicas()
        waiting = [bucket for bucket in self._order if bucket.grads.local is not None]
        if waiting:
            self._exchange.begin_flush(waiting)
            self.reduce_again(waiting)

    def sum_replicas(self) -> None:
        """Sum over the replicas what is not yet. Collective. See Note [Sums over replicas]."""
        partial = [bucket for bucket in self._order if bucket.grads.sums is GradState.PARTIAL]
        for bucket in partial:
            self._make_room()
            grads = bucket.grads
            out, dtype = grads.partial_target(), grads.send_dtype(grads.dtype)
            work = bucket.group.sum_replicas(out, dtype, bucket.name, self._buffers[bucket.group].transport)
            self._in_flight.append((bucket, work, None))
        if partial:
            self.drain()

    def reduce_again(self, buckets: list[Bucket]) -> None:
        """Reduce gradients that arrived after their bucket's reduction. Collective: the same buckets on all ranks."""
        for bucket in buckets:
            self._launch(bucket, again=True)
        self.drain()

    def _launch(self, bucket: Bucket, again: bool = False) -> None:
        """Start reducing the gradients of ``bucket``; unless ``again``, those that wait are kept on this rank."""
        if not bucket.weights.trains:  # it was unfrozen
            bucket.weights.enable_training(bucket.name)
        if not again and self._keeps_local(bucket):
            bucket.grads.accumulate_local()
            return
        self._make_room()
        grads, send = bucket.grads, self._filled_buffer(bucket)
        replicas = self._replicas(bucket, again)
        work: Work = Done()
        try:
            out, add = grads.target(replicas, whole=self._exchange.reduces_each_backward)
            if send is not None:
                work = self._exchange.reduce(bucket, out, send, add, replicas)
            else:
                grads.take(out, add)
        except BaseException:
            if send is not None:
                self._buffers[bucket.group].give_back(send, unused=True)
            raise
        self._in_flight.append((bucket, work, send))
        if not self._overlap:
            self._finish_oldest()

    def _make_room(self) -> None:
        """Finish reductions until another one may be launched."""
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_oldest()

    def _replicas(self, bucket: Bucket, again: bool) -> Replicas:
        """Choose what the next reduction of ``bucket`` sums over replicas. See Note [Sums over replicas]."""
        if not self._exchange.sums_replicas_apart(bucket):
            return Replicas.SENT
        if self._divides and not again:
            return Replicas.NOTHING
        return Replicas.RESULT if bucket.grads.sums is GradState.PARTIAL else Replicas.SENT

    def _filled_buffer(self, bucket: Bucket) -> SendBuffer | None:
        """A buffer with the gradients of ``bucket`` that are sent; None: they are not sent."""
        grads, buffers = bucket.grads, self._buffers[bucket.group]
        if grads.local is not None:
            grads.take(grads.local, add=True)
            send = buffers.filled(grads.local, grads.send_dtype(grads.local.dtype))
            # Only now: without memory for the buffer these gradients are still owed.
            grads.drop_local()
            return send
        if grads.skips_collective:
            return None
        send = buffers.take(bucket.layout.numel, grads.send_dtype(bucket.dtype))
        try:
            grads.take(send.flat, add=False, factor=send.factor)
        except BaseException:
            # After running out of memory the caller may go on with a smaller batch, and needs the buffer.
            buffers.give_back(send, unused=True)
            raise
        return send

    def _finish_oldest(self) -> None:
        bucket, work, send = self._in_flight.popleft()
        with WithoutGrad(), phase("reduce", bucket.name):
            work.wait()
            bucket.grads.arrived()
        # Only after the wait: until then the collective reads the buffer.
        if send is not None:
            self._buffers[bucket.group].give_back(send)
        taken = self._step is not None and bucket.grads.sums is not GradState.PARTIAL and self._step(bucket)
        if bucket.grads.streamed and not taken:
            bucket.grads.end_use()
            self._leaving.append(bucket.grads)
            if len(self._leaving) > 1:
                # Wait for all writes but the last, so that the accumulators do not fill the memory.
                self._leaving.popleft().put_away()

    def abort(self) -> None:
        """Drop a failed backward; waits for launched reductions."""
        self._step = None
        self.drain()
        # It may have run out of memory.
        self.free_buffers()
        self._head, self.scope = 0, None
        self._ready.clear()

    def drain(self) -> None:
        """Wait for all launched reductions."""
        while self._in_flight:
            self._finish_oldest()
        while self._leaving:
            self._leaving.popleft().put_away()

    def free_buffers(self) -> None:
        """Free an accelerator's send buffers; the next backward makes others."""
        # Not after each backward: the allocator would cut the memory up for activations, and may not find as large a
        # piece in the next one. That would cost a wait for the device, and more memory than it saves.
        for buffers in self._buffers.values():
            buffers.free()

    @property
    def buffer_bytes(self) -> int:
        return sum(buffers.nbytes for buffers in self._buffers.values())


def _wide_last(buckets: list[Bucket]) -> list[Bucket]:
    """A list of ``buckets`` in which those that other ranks have, too, come last, otherwise in their order."""
    return sorted(buckets, key=lambda bucket: bucket.plan.is_wide)
