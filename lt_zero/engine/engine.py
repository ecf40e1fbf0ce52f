"""The engine: when buckets are gathered, leased and released, and when their gradients are reduced.

Note [Life of a unit in a step]
    pre-forward   gather; inputs that need a gradient are replaced by aliases whose hook marks the end of the unit's
                  backward (hooks.py, Note [Aliases])
    post-forward  release, or keep and guard (schedule.Residency); hook the autograd nodes of the outputs
    backward      output node: take a lease, gather. Inputs' hook: all gradients are there, mark the bucket as ready,
                  drop the lease; released at zero leases
    end           reduce what is left in fixed order, release everything (Note [End of backward])

Note [Leases]
    A unit's weights are needed from the first of its output nodes to the last of its input gradients, once per call
    of the module. Releasing when the last weight gradient arrives would be wrong for frozen first layers; releasing
    without counting, for modules that are called twice. A unit whose inputs need no gradient keeps its lease until
    the end of backward.

Note [End of backward]
    Hooks queue an autograd callback for the end of the running backward. A caller that knows the bounds of a backward
    (the strategy) uses ``backward_pass`` instead, which also covers models without a single unit.

Note [Recomputation]
    Activation checkpointing runs a unit's forward inside backward, and stops it in the middle by an exception. So
    inside backward the pre-forward hook only gathers, the post-forward hook does nothing, and the weights are released
    with the lease of the original call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.comm.communicator import Comm
from lt_zero.common.compat import in_running_backward, queue_backward_callback
from lt_zero.common.module_hooks import ProcessLocal
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.common.timing import NOTHING, Span, UnitRanges, phase, phased, unit_range
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import DtypePolicy
from lt_zero.engine.bucket import Bucket
from lt_zero.engine.gather import Gatherer, Residency
from lt_zero.engine.grad_bucket import Reducer
from lt_zero.engine.hooks import (
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
from lt_zero.engine.offload_manager import OffloadManager
from lt_zero.engine.used_parameters import UsedParameters


class Engine(ProcessLocal):
    """Runs one model with sharded optimizer states, gradients and parameters. Built by ``lt_zero.build``.

    Args:
        root: the model.
        units: all units but the root, in registration order.
        root_unit: parameters that belong to no unit, are shared by several, or are too small to shard.
        comm: the collectives.
        reducer: gradient reductions of all buckets.
        residency: limits on what stays gathered.
        config: the configuration that the engine was built from.
        policy: dtypes of weights, gradients and master weights.
        training: train from the start; otherwise from ``begin_training`` on.
    """

    def __init__(
        self,
        root: nn.Module,
        units: list[Unit],
        root_unit: Unit,
        comm: Comm,
        reducer: Reducer[Bucket],
        residency: Residency,
        config: ZeroConfig,
        policy: DtypePolicy,
        training: bool = True,
    ) -> None:
        self.residency, self.training = residency, training
        self.config, self.policy = config, policy
        self.kept: frozenset[Parameter] = frozenset()  # parameters that the user keeps in fp32, in exports as well
        self.root, self.units, self.root_unit = root, units, root_unit
        self.comm, self.reducer = comm, reducer
        self.buckets = [b for u in [*units, root_unit] for b in u.buckets]
        self.owner = {id(p): (b, i) for b in self.buckets for i, p in enumerate(b.params)}
        self.gatherer = Gatherer(units, root_unit, comm, residency if training else residency.without_training())
        self.use_outside: Callable[..., Any] | None = None  # handles uses of guarded parameters: full_params.py
        self.in_backward = False
        self.backwards = 0  # backwards that have ended
        self._explicit = False  # a backward_pass context is open
        self._create_graph = False  # the running backward builds a graph for another backward
        self._depth = 0  # nested forward scopes
        self._span: Span = NOTHING  # timing of a backward without a backward_pass context
        self._ranges = UnitRanges()  # timing of units in the running backward
        self.used_parameters = UsedParameters(comm, reducer, self.buckets)
        self.offload_manager = OffloadManager()
        self.after_backward: list[Callable[[], None]] = []  # called at the end of a backward, also of a failed one
        self.after_step: list[Callable[[], None]] = []  # called when the compute copies are up to date
        self.handles = [h for u in units for h in install_unit_hooks(u, self.pre_forward, self.post_forward)]
        self.handles += install_root_hooks(root, self.enter_forward, self.leave_forward)
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

    @property
    def running(self) -> bool:
        """Whether a forward or a backward is running."""
        return self._depth > 0 or self.in_backward or in_running_backward()

    # ---- forward -----------------------------------------------------------------------------------------------

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Context for code that runs the model (a training step): root parameters are readable inside."""
        self.enter_forward()
        try:
            yield
        finally:
            self.leave_forward(None)

    def enter_forward(self) -> None:
        if self.in_backward and not in_running_backward() and not self._explicit:
            self.abort_backward()  # an exception ended it, and the caller caught that
        self._depth += 1
        if self._depth == 1 and not self.in_backward:
            self.used_parameters.drop_cleared()
            self.gatherer.begin_forward()

    def leave_forward(self, output: Any) -> None:
        if self._depth == 0:
            return  # always-called hook after an error before enter_forward
        self._depth -= 1
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            hook_nodes(output, self._arm)
        if self._depth > 0:
            return
        for unit in reversed(self.units):
            for call in unit.calls:
                call.range.close()  # an exception ended it
            unit.calls.clear()
        if torch.is_grad_enabled():
            for unit in self.units:  # prefetched but not used in this pass
                if unit.leases == 0 and not unit.keep:
                    self.gatherer.release(unit)
        else:
            self.gatherer.end_pass(keep=True)

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recomputes = self.in_backward or in_running_backward()
        call = Call(NOTHING if recomputes else unit_range("forward", unit.name))
        self.gatherer.gather(unit)
        if recomputes:
            refuse_reentrant_checkpoint(unit.name)
            return None
        self.gatherer.visit(unit)
        unit.calls.append(call)
        if not torch.is_grad_enabled():
            return None
        unit.awaited += 1
        call.inputs = hook_inputs(args, kwargs, lambda: self.unit_done(unit, call))
        return call.inputs.value

    def post_forward(self, unit: Unit, output: Any) -> None:
        if self.in_backward or in_running_backward():
            return
        call = unit.calls.pop() if unit.calls else Call()
        call.range.close()
        given, call.inputs = call.inputs, None
        written = given.write_back() if given is not None else []
        if torch.is_grad_enabled():
            seen = (output, written, side_outputs(unit.module)) if unit.sharded else (output, written)
            hook_nodes(seen, lambda: self._pre_backward(unit, call), given)
        if not unit.sharded:
            return
        for bucket in unit.sharded:
            if any(shares_storage(t, bucket.flat) for t in iter_tensors((output, written))):
                self.gatherer.pin_in_backward(bucket)  # a weight, or a view of one, left the unit
                self.gatherer.pin(bucket)
        if unit.calls:
            return  # an outer call of the same module is still running
        if unit.keep and (unit.backward_needs_weights if torch.is_grad_enabled() else self.gatherer.fits_whole):
            self.gatherer.guard(unit)
        elif unit.leases == 0:
            self.gatherer.release(unit)

    # ---- backward ----------------------------------------------------------------------------------------------

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Context for one backward, on all ranks. See Note [End of backward]."""
        self._explicit = True
        self._arm()
        try:
            yield
        except BaseException:
            self.abort_backward()
            raise
        self.end_backward()

    def abort_backward(self) -> None:
        """Drop the state of a backward that ended with an exception."""
        self.in_backward = self._explicit = self._create_graph = False
        self._ranges.leave()
        self._span.close()
        self.reducer.abort()
        self.finish_steps()
        self.used_parameters.abort()
        for unit in [*self.units, self.root_unit]:
            unit.leases, unit.awaited, unit.visited = 0, 0, False
        self.gatherer.end_pass()
        self._tell(self.after_backward)

    def _arm(self) -> None:
        if not self.in_backward:
            self.used_parameters.hide(fresh=in_running_backward())  # autograd must not add to visible gradients
            self.in_backward = True
            if not self._explicit:
                self._span = phase("backward").open()
            self.gatherer.begin_backward()
            if not self._explicit:
                queue_backward_callback(self.end_backward)

    def _pre_backward(self, unit: Unit, call: Call) -> None:
        self._arm()
        self._ranges.enter(unit.name)
        if not unit.visited and unit.backward_needs_weights:
            self._refuse_ungathered([unit])
        self._create_graph |= torch.is_grad_enabled()
        unit.visited = True
        if not call.held:
            call.held = True
            unit.leases += 1
        if unit.sharded and unit.backward_needs_weights:
            self.gatherer.gather(unit)
            if torch.is_grad_enabled():
                self._keep_for_new_graph(unit)
            self.gatherer.visit(unit, backward=True)

    def unit_done(self, unit: Unit, call: Call) -> None:
        """Called when a call's input gradients are there. See grad_bucket.py, Note [When a bucket is ready]."""
        if not self.in_backward:
            return
        self._ranges.leave(unit.name)
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
            self.gatherer.release(unit)

    def _keep_for_new_graph(self, unit: Unit) -> None:
        """Pin weights under create_graph: the nodes of this backward save them, and those nodes have no hooks."""
        for bucket in unit.sharded:
            self.gatherer.pin_in_backward(bucket)
            self.gatherer.pin(bucket)

    def _keeps_for_next_use(self, unit: Unit) -> bool:
        """Whether weights stay gathered: in an accumulation window they do not change, and create_graph needs them."""
        return torch.is_grad_enabled() or (not self.reducer.sync and unit.keep and self.gatherer.fits_whole)

    def end_backward(self) -> None:
        """Reduce the remaining gradients, wait for all reductions, and release what backward held."""
        if not self.in_backward:
            return
        self._ranges.leave()
        arrived = self.reducer.active or any(b.has_grads() for b in self.buckets)
        explicit, self.in_backward, self._explicit = self._explicit, False, False
        again, self._create_graph = self._create_graph, False
        self.backwards += 1
        if arrived:
            self._refuse_ungathered(self.units)
        # torch.autograd.grad leaves no gradients behind: nothing to reduce, on any rank.
        if arrived or explicit:
            self.reducer.finish()
            self.used_parameters.record()
        else:
            self.used_parameters.show_held()
        for unit in [*self.units, self.root_unit]:
            unit.leases, unit.visited = 0, False
        if not again:
            self.gatherer.end_pass(keep=not self.reducer.sync)
        self._tell(self.after_backward)
        self._span.close()

    @staticmethod
    def _tell(listeners: list[Callable[[], None]]) -> None:
        for listener in listeners:
            listener()

    def _refuse_ungathered(self, units: list[Unit]) -> None:
        for unit in units:
            if not unit.visited and unit.backward_needs_weights:
                refuse_ungathered(unit, self.used_parameters.late)

    # ---- between backward and step -----------------------------------------------------------------------------

    def attach_offload_manager(self, offload_manager: OffloadManager) -> None:
        """Attach the offload manager. Collective.

        Raises:
            SwapError: a file could not be created or written.
        """
        self.offload_manager = offload_manager
        self.gatherer.use(offload_manager)
        offload_manager.check(self.comm, "the files of states")
        self.used_parameters.problem = offload_manager.find_problem

    def begin_training(self) -> None:
        """Make master weights, and keep weights gathered as the limits allow. No-op if done before."""
        if not self.training:
            self.training = True
            self.gatherer.limit(self.residency)
            for bucket in self.buckets:
                if bucket.wants_grad:
                    bucket.weights.enable_training()

    @property
    def sharded_optim(self) -> bool:
        return any(b.shard_range != (0, b.layout.numel) for b in self.buckets)

    def finish_steps(self) -> bool:
        """Wait for all background steps; returns whether one was running."""
        return self.offload_manager.overlaps and any([bucket.wait_background_step() for bucket in self.buckets])

    def finish_reductions(self) -> Callable[[Bucket, int], bool]:
        """Finish all reductions; returns whether parameter ``index`` of a bucket has a gradient. Collective."""
        return self.used_parameters.finish_reductions()

    @phased("publish")
    def publish(self, buckets: set[Bucket]) -> None:
        """Update the compute copies of ``buckets`` after their master weights were stepped."""
        self.gatherer.after_step()
        for unit in self.units:
            unit.awaited = 0
        stepped = [bucket for bucket in self.buckets if bucket in buckets]
        for bucket in stepped:
            bucket.write_back()
        for bucket in stepped:
            bucket.weights.wait_copied()  # other ranks read it next
        self.comm.after_write()
        for pending in [bucket.launch_publish() for bucket in stepped]:
            if pending is not None:
                pending.wait()
        self.comm.before_write()  # user code may write to the parameters now
        for bucket in stepped:
            bucket.edits.note()
        self._tell(self.after_step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which unsharded gradients (stages 0 and 1) are accumulated locally and not reduced."""
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    # ---- uses outside of a unit's forward ----------------------------------------------------------------------

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that needs the values of guarded ``parameters``. See guard.py."""
        assert self.use_outside is not None
        return self.use_outside(self, parameters, func, args, kwargs)
