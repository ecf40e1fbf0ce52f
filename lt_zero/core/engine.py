"""The engine: when buckets are gathered, leased and released, and when their gradients are reduced.

Note [Life of a unit in a step]
    pre-forward   gather; inputs that need a gradient are replaced by aliases whose hook marks the end of the unit's
                  backward
    post-forward  release, or keep and guard (schedule.Residency); hook the autograd nodes of the outputs
    backward      output node: take a lease, gather. Inputs' hook: all gradients are in, hand the bucket to the
                  reducer, drop the lease; released at zero leases
    end           reduce what is left in fixed order, release everything (Note [End of backward])

Note [Leases]
    A unit's weights are needed from the first of its output nodes to the last of its input gradients, once per call
    of the module. Releasing when the last weight gradient arrives would be wrong for frozen first layers; releasing
    without counting, for modules that are called twice. A unit whose inputs need no gradient keeps its lease until
    the end of backward.

Note [Aliases]
    The hook that ends a unit's backward sits on a view of each input, not on the input: a tensor that feeds every
    block (a conditioning vector) gets its whole gradient only at the very end, its alias when this block is done.

Note [End of backward]
    Hooks queue a callback that runs when the running backward is over. A caller that knows the bounds of a backward
    (the strategy) uses ``backward_pass`` instead, which also covers models without a single unit.

Note [Recomputation]
    Activation checkpointing runs a unit's forward inside backward, and stops it in the middle by an exception. So
    inside backward the pre-forward hook gathers and nothing else, the post-forward hook does nothing, and the lease
    of the original call releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.compat import in_running_backward, queue_backward_callback, without_torch_function
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.core.bucket import Bucket, State
from lt_zero.core.comm import Comm
from lt_zero.core.guard import HANDS_OUT
from lt_zero.core.ledger import GradLedger
from lt_zero.core.reducer import Reducer
from lt_zero.core.schedule import Order, Residency
from lt_zero.core.shelf import Shelves
from lt_zero.core.unit import (
    Call,
    Unit,
    hook_bare_parameters,
    hook_inputs,
    hook_nodes,
    install_root_hooks,
    install_unit_hooks,
    refuse_reentrant_checkpoint,
    refuse_ungathered,
    shares_storage,
    side_outputs,
)
from lt_zero.core.walk import iter_tensors


class Engine:
    """Runs one model with sharded optimizer states, gradients and parameters. Built by ``lt_zero.core.build``.

    Args:
        root: the model.
        units: all units but the root, in registration order.
        root_unit: what belongs to no unit, is shared by several, or is too small to shard.
        comm: the collectives.
        reducer: gradient reductions; knows all buckets.
        residency: limits on what stays gathered.
        config: what the engine was built from.
        policy: which dtype is used for what.
    """

    def __init__(
        self,
        root: nn.Module,
        units: list[Unit],
        root_unit: Unit,
        comm: Comm,
        reducer: Reducer,
        residency: Residency,
        config: ZeroConfig,
        policy: DtypePolicy,
    ) -> None:
        self.config, self.policy = config, policy
        self.kept: frozenset[Parameter] = frozenset()  # what the user wants in fp32, exports included
        self.root, self.units, self.root_unit = root, units, root_unit
        self.comm, self.reducer, self.residency = comm, reducer, residency
        self.buckets = [b for u in [*units, root_unit] for b in u.buckets]
        self.owner = {id(p): (b, i) for b in self.buckets for i, p in enumerate(b.params)}
        for unit, keep in zip(units, residency.keep_after_forward([u.numel for u in units]), strict=True):
            unit.keep = keep
        root_unit.keep = True
        self.in_backward = False
        self.backwards = 0  # that have ended
        self._explicit = False  # a backward_pass context is open
        self._create_graph = False  # the running backward builds a graph that will be walked again
        self._depth = 0  # nested forward scopes
        self._pinned: dict[Bucket, None] = {}  # used outside of their unit: stay until the end of backward
        self._outside: dict[Bucket, None] = {}  # pinned by a forward since the last step: each backward needs them
        self._forward_order: Order[Unit] = Order()
        self._backward_order: Order[Unit] = Order()
        self.ledger = GradLedger(comm, reducer, self.buckets)
        self.shelves = Shelves()  # what rests in files
        self.torn = ""  # buckets whose weights are a step ahead; see overlap.py, Note [Beside backward]
        self.handles = [h for u in units for h in install_unit_hooks(self, u)] + install_root_hooks(self)
        self.handles += hook_bare_parameters(root, self.owner, self._arm)

    # ---- hooks -------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove all hooks; parameters stay as they are."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @property
    def attached(self) -> bool:
        return bool(self.handles)

    # ---- forward -----------------------------------------------------------------------------------------------

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Around code that runs the model (a training step): root parameters are readable inside."""
        self.enter_forward()
        try:
            yield
        finally:
            self.leave_forward(None)

    def enter_forward(self) -> None:
        if self.in_backward and not in_running_backward() and not self._explicit:
            self.abort_backward()  # an exception ended it, and the caller went on
        self._depth += 1
        if self._depth == 1 and not self.in_backward:
            self._forward_order.start()
            self._gather(self.root_unit)

    def leave_forward(self, output: Any) -> None:
        if self._depth == 0:
            return  # an always-called hook after an error in front of enter_forward
        self._depth -= 1
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            hook_nodes(output, self._arm)
        if self._depth > 0:
            return
        for unit in self.units:
            unit.calls.clear()
        if torch.is_grad_enabled():
            for unit in self.units:  # prefetched but not used in this pass
                if unit.leases == 0 and not unit.keep:
                    self._release(unit)
        else:
            self._pinned.clear()
            self.release_all(keep=True)

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._gather(unit)
        if self.in_backward or in_running_backward():
            refuse_reentrant_checkpoint(unit.name)
            return None
        self._forward_order.visit(unit)
        self._prefetch(self._forward_order)
        call = Call()
        unit.calls.append(call)
        if not torch.is_grad_enabled():
            return None
        unit.awaited += 1
        return hook_inputs(args, kwargs, lambda: self.unit_done(unit, call))

    def post_forward(self, unit: Unit, output: Any) -> None:
        if self.in_backward or in_running_backward():
            return
        call = unit.calls.pop() if unit.calls else Call()
        if torch.is_grad_enabled():
            seen = (output, side_outputs(unit.module)) if unit.sharded else output
            hook_nodes(seen, lambda: self._pre_backward(unit, call))
        if not unit.sharded:
            return
        for bucket in unit.sharded:
            if any(shares_storage(t, bucket.flat) for t in iter_tensors(output)):
                self._outside[bucket] = None  # a weight, or a view of one, left the unit
                self.pin(bucket)
        if unit.calls:
            return  # an outer call of the same module is still running
        if unit.keep and (unit.backward_needs_weights if torch.is_grad_enabled() else self._fits_whole):
            for bucket in unit.sharded:
                bucket.guard()
        elif unit.leases == 0:
            self._release(unit)

    @property
    def _fits_whole(self) -> bool:
        """Whether everything may stay gathered from one evaluation batch to the next."""
        total = sum(u.numel for u in self.units) + self.root_unit.numel
        return total <= self.residency.max_live and total < self.residency.max_reuse_distance

    # ---- residency ---------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        if self.shelves.background is not None:
            for bucket in unit.buckets:
                bucket.settle()
        for bucket in unit.sharded:
            if bucket.state is State.RELEASED:
                bucket.launch_gather()
        for bucket in unit.sharded:
            bucket.gather()
            bucket.unguard()

    def _prefetch(self, order: Order[Unit]) -> None:
        if not self.comm.gathers_in_background and self.shelves.params is None:
            return
        ahead = [u for u in self.units if any(b.state is State.GATHERING for b in u.sharded)]
        flying, live = sum(u.numel for u in ahead), sum(u.numel for u in self.units if u.resident)
        limit, count = self.residency.prefetch, sum(len(u.sharded) for u in ahead)
        if self.shelves.params is not None:
            limit = min(limit, self.shelves.param_blocks.buffer_size)
        for unit in order.upcoming():
            if unit.resident:
                continue
            flying, live, count = flying + unit.numel, live + unit.numel, count + len(unit.sharded)
            if flying > limit or live > self.residency.max_live:
                return
            if self.shelves.params is not None and count > self.shelves.param_blocks.buffer_count:
                return
            for bucket in unit.sharded:
                if bucket.state is State.RELEASED:
                    bucket.launch_gather()

    def _release(self, unit: Unit) -> None:
        for bucket in unit.sharded:
            if bucket not in self._pinned:
                bucket.release()

    def release_all(self, keep: bool = False) -> None:
        """Release every sharded bucket; with ``keep``, not those that the residency rules let stay."""
        for unit in [*self.units, self.root_unit]:
            if keep and unit.keep and self._fits_whole:
                for bucket in unit.sharded:
                    bucket.guard()
            else:
                self._release(unit)

    # ---- backward ----------------------------------------------------------------------------------------------

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Around one call of backward, on every rank alike. See Note [End of backward]."""
        self._explicit = True
        self._arm()
        try:
            yield
        except BaseException:
            self.abort_backward()
            raise
        self.end_backward()

    def abort_backward(self) -> None:
        """Forget a backward that ended with an exception, so that the next step starts clean."""
        self.in_backward = self._explicit = self._create_graph = False
        self.reducer.abort()
        self.finish_steps()
        self.ledger.abort()
        for unit in [*self.units, self.root_unit]:
            unit.leases, unit.awaited, unit.visited = 0, 0, False
        self._pinned.clear()
        self.release_all()

    def _arm(self) -> None:
        if not self.in_backward:
            self.ledger.hide(fresh=in_running_backward())  # autograd must not add to what is only shown
            self.in_backward = True
            self._backward_order.start()
            self._gather(self.root_unit)
            for bucket in self._outside:
                self._pin_gathered(bucket)
            if not self._explicit:
                queue_backward_callback(self.end_backward)

    def _pre_backward(self, unit: Unit, call: Call) -> None:
        self._arm()
        if not unit.visited and unit.backward_needs_weights:
            self._refuse_ungathered([unit])
        self._create_graph |= torch.is_grad_enabled()
        unit.visited = True
        if not call.held:
            call.held = True
            unit.leases += 1
        if unit.sharded and unit.backward_needs_weights:
            self._gather(unit)
            self._backward_order.visit(unit)
            self._prefetch(self._backward_order)

    def unit_done(self, unit: Unit, call: Call) -> None:
        """The gradients of a call's inputs are there. See reducer.py, Note [When a bucket is ready]."""
        if not self.in_backward:
            return
        unit.awaited -= 0 if call.done else 1
        call.done = True
        if call.held:
            call.held = False
            unit.leases -= 1
        for bucket in unit.buckets:
            finished = unit.leases == 0 and unit.awaited <= 0 if bucket.sharding.params else bucket.grads_complete()
            if bucket.wants_grad and finished:
                self.reducer.mark_ready(bucket)
        if unit.leases == 0 and not self._keeps_for_next_use(unit):
            self._release(unit)

    def _keeps_for_next_use(self, unit: Unit) -> bool:
        """Inside an accumulation window weights do not change; with create_graph the graph will be walked again."""
        return torch.is_grad_enabled() or (not self.reducer.sync and unit.keep and self._fits_whole)

    def end_backward(self) -> None:
        """Reduce what is left, wait for it, and give back what backward held."""
        if not self.in_backward:
            return
        arrived = self.reducer.active or any(b.has_grads() for b in self.buckets)
        explicit, self.in_backward, self._explicit = self._explicit, False, False
        again, self._create_graph = self._create_graph, False
        self.backwards += 1
        if arrived:
            self._refuse_ungathered(self.units)
        # torch.autograd.grad leaves no gradients behind: nothing to reduce, on any rank.
        if arrived or explicit:
            self.reducer.finish()
            self.ledger.record()
        for unit in [*self.units, self.root_unit]:
            unit.leases, unit.visited = 0, False
        if not again:
            self._pinned.clear()
            self.release_all(keep=not self.reducer.sync)

    def _refuse_ungathered(self, units: list[Unit]) -> None:
        for unit in units:
            if not unit.visited and unit.backward_needs_weights:
                refuse_ungathered(unit, self.ledger.late)

    # ---- between backward and step -----------------------------------------------------------------------------

    def use_files(self, shelves: Shelves) -> None:
        """States rest there. Collective.

        Raises:
            SwapError: a file could not be made or written.
        """
        self.shelves = shelves
        shelves.check(self.comm, "the files of states")
        self.ledger.problem = shelves.find_problem

    @property
    def sharded_optim(self) -> bool:
        return any(b.own != (0, b.layout.numel) for b in self.buckets)

    def finish_steps(self) -> bool:
        """Wait for all steps that run in the background; returns whether there were some."""
        return self.shelves.background is not None and any([bucket.settle() for bucket in self.buckets])

    def refuse_torn(self) -> None:
        """Raise if a backward failed when some weights were updated already."""
        if self.torn:
            raise RuntimeError(
                f"A backward failed after {self.torn} had been stepped beside it, so the weights belong to no step. "
                "Load a checkpoint; zero_optimization.offload_optimizer.overlap_step=false steps after backward only."
            )

    def settle_grads(self) -> Callable[[Bucket, int], bool]:
        """Finish all reductions; returns whether parameter ``index`` of a bucket has a gradient. Collective."""
        return self.ledger.settle()

    def publish(self, buckets: set[Bucket]) -> None:
        """After a step of these buckets' master weights: bring the compute copies up to date."""
        self._outside.clear()
        for unit in self.units:
            unit.awaited = 0
        stepped = [bucket for bucket in self.buckets if bucket in buckets]
        for bucket in stepped:
            bucket.write_back()
        for bucket in stepped:
            bucket.weights.arrive()  # before another rank may read it
        self.comm.after_write()
        for pending in [bucket.launch_publish() for bucket in stepped]:
            if pending is not None:
                pending.wait()
        self.comm.before_write()  # user code may write to the parameters now
        for bucket in stepped:
            bucket.edits.note()

    def _pin_gathered(self, bucket: Bucket) -> None:
        """Autograd may have saved views of weights used outside of their unit: they stay until backward is over."""
        bucket.gather()
        bucket.unguard()
        self.pin(bucket)

    def pin(self, bucket: Bucket) -> None:
        """Keep ``bucket`` gathered until ``unpin`` or the end of the next backward."""
        self._pinned[bucket] = None

    def is_pinned(self, bucket: Bucket) -> bool:
        """Whether the running forward and backward use ``bucket`` outside of its unit."""
        return bucket in self._pinned or bucket in self._outside

    def unpin(self, bucket: Bucket) -> None:
        self._pinned.pop(bucket, None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that are not sharded (stages 0 and 1) are only accumulated locally inside."""
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    # ---- uses outside of a unit's forward ----------------------------------------------------------------------

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function that needs values was called on guarded parameters. See guard.py.

        Raises:
            RuntimeError: outside of forward and backward the values of a released parameter cannot be read.
        """
        buckets = list(dict.fromkeys(self.owner[id(p)][0] for p in parameters))
        if self.finish_steps() and not any(bucket.sharding.params for bucket in buckets):
            return func(*args, **kwargs)
        if func is Tensor.copy_ and args[0] is parameters[0] and len(parameters) == 1:
            bucket, index = self.owner[id(args[0])]
            with without_torch_function():
                bucket.write(index, args[1].expand(bucket.shapes[index]))
            return args[0]
        if self._depth > 0 or self.in_backward or in_running_backward():
            for bucket in buckets:
                self._pin_gathered(bucket)
                bucket.edits.handed_out |= func in HANDS_OUT
                if torch.is_grad_enabled():
                    self._outside[bucket] = None
            return func(*args, **kwargs)
        if all(bucket.state is State.RESIDENT for bucket in buckets):
            with without_torch_function():
                return func(*args, **kwargs)
        names = [b.layout.spans[i].name for b, i in (self.owner[id(p)] for p in parameters)]
        raise RuntimeError(
            f"The values of parameter {names[0]!r} are sharded over {self.comm.world} ranks and not in memory here "
            f"(`{getattr(func, '__name__', func)}` needs them). Wrap the code in `with lt_zero.gathered(parameter):` "
            "on every rank (`write=True` to change values); to save weights use `trainer.save_checkpoint`, "
            "`trainer.strategy.export(path)` or `trainer.strategy.lightning_module_state_dict()`."
        )
