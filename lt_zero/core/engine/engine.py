"""The engine: when buckets are gathered, leased and released, and when their gradients are reduced.

Note [Life of a unit in a step]
    pre-forward   gather; inputs that need a gradient are replaced by aliases whose hook marks the end of the unit's
                  backward (module_hooks.py, Note [Aliases])
    post-forward  release, or keep and guard (gather.py, ``Residency``); hook the autograd nodes of the outputs
    backward      output node: take a lease, gather. Inputs' hook: all gradients are there, mark the bucket as ready,
                  drop the lease; released at zero leases
    end           reduce what is left in fixed order, release everything (Note [End of backward])

Note [Leases]
    A unit's weights are needed from the first of its output nodes to the last of its input gradients, once per call
    of the module, as frozen layers and modules that are called twice show. A unit whose inputs need no gradient keeps
    its lease until the end of backward.

Note [End of backward]
    Hooks queue an autograd callback for the end of the running backward. A caller that knows the bounds of a backward
    (the strategy) uses ``backward_pass`` instead, which also covers models without a single unit.

Note [Recomputation]
    Activation checkpointing runs a unit's forward inside backward, and stops it in the middle by an exception. So
    there the pre-forward hook only gathers, the post-forward hook does nothing, and the original call has the lease.

Note [Interrupted forwards]
    torch calls the hooks after a forward for an ``Exception``, and none for KeyboardInterrupt, SystemExit and their
    like. Such a forward leaves its calls, whose aliases of inputs have hooks that refer to this engine: a cycle through
    C++, which Python's collector never frees, with the connections and threads of the run. It also leaves the hooks of
    saved_weights.py entered. So contexts around forwards end what such an error has left (``forward_scope``,
    ``ends_interrupted``). Where nothing is around a forward, the next one ends it, or the next run of the process.

Note [Edits in a forward]
    A forward may edit the weights of its own module: data-dependent initialization, constraints on norms. Each rank has
    all of them then, so a rank keeps the part of the edit that lies in its shard before the unit is released. Whether
    there is an edit is decided by whole parameters, alike on all ranks that make the same one, since keeping it may
    need a barrier. That they made the same one is compared with the next exchange (same_on_ranks.py), without a message
    of its own. Edits of parameters in parts, and of weights that rest in few bits, are reported as lost.

Note [Transforms]
    Inside of torch.func's transforms (grad, vmap, jvp, ...) nothing can be gathered: what the transform was given may
    hold the sentinels of released parameters, and it runs backward by itself. What torch.jit.trace records is run later
    without hooks. So units that are called there have to be gathered by ``lt_zero.gathered`` around it. The hooks then
    only pin them, as gradients of a loss outside of the transform may flow back through it; these are reduced at the
    end of that backward.

Note [Compiled code]
    torch.compile may trace a whole model into one graph, and would have to break it at the hooks of each unit. At units
    whose weights are whole on every rank (stages 0 to 2, small parameters at stage 3) these only order the work: steps
    that are still going on are waited for unit by unit, and gradients are reduced while backward runs. Graphs leave
    them out, see module_hooks.py, Note [Hooks and torch.compile]. Then the beginning of a forward waits for all steps,
    the first gradient of a parameter begins the backward, and its end reduces: the backward of one graph returns all
    gradients at its end anyway. Code that takes steps inside of a forward's scope (manual optimization) goes on so
    after each step. Hooks of sharded units break the graph, once per call: torch calls the module outside of it, and
    compiles its forward.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lt_zero.common.compat import (
    WithoutGrad,
    in_running_backward,
    queue_backward_callback,
    refuse_reentrant_checkpoint,
    retains_graph,
    running_transform,
)
from lt_zero.common.module_hooks import (
    Preparation,
    ProcessLocal,
    hook_forward,
    hook_inputs,
    hook_nodes,
    hook_parameters,
    hookable_modules,
)
from lt_zero.common.phases import NOTHING, TimedSpan, UnitRanges, phase, unit_range
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.buffers import BufferSync
from lt_zero.core.engine.exchange import GradientExchange
from lt_zero.core.engine.fp32_modules import find_fp32_modules
from lt_zero.core.engine.gather import Call, Gatherer, Residency, Unit
from lt_zero.core.engine.grad_reducer import GradReducer
from lt_zero.core.engine.graph_tie import Tie, held_by_modules, still_there
from lt_zero.core.engine.guard import shares_storage
from lt_zero.core.engine.inplace_edits import digest_of, lost_edits
from lt_zero.core.engine.offload import Offload
from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan
from lt_zero.core.engine.parts import Parts, Unjoined
from lt_zero.core.engine.replaced_weights import ReplacedWeights
from lt_zero.core.engine.same_on_ranks import SameOnRanks
from lt_zero.core.engine.saved_weights import SavedWeights, references_of
from lt_zero.core.engine.visible_grads import GradViews, UnusedParameters

_MODULE_INTERNALS = frozenset(vars(nn.Module()))


class Engine(ProcessLocal):
    """Runs one model with sharded optimizer states, gradients and parameters. Built by ``lt_zero.training.build``.

    Args:
        units: all units but the root, in registration order.
        root_unit: parameters that belong to no unit, are shared by several, or are too small to shard.
        groups: of the buckets; the first, which may have none, is that of the ranks with the same model.
        options: by which it was planned.
        plan: of its units and buckets.
        exchange: how ranks exchange gradients; for this engine alone.
        use_outside: handles uses of released parameters, with this engine as first argument; see guard.py, ``Owner``.
        training: train from the start; otherwise from ``begin_training`` on.
        parts: as for ``lt_zero.shard``.
    """

    is_rounded: Callable[[Bucket, Tensor], bool]  # set to loading.py, ``Loads.is_rounded``
    in_backward = False
    backwards = 0  # backwards that have ended
    stepped = False  # a step has published the weights that there are
    _explicit = False  # a backward_pass context is open
    _passed = False  # the gradients of the next backward are there: ``whole_passes``
    _create_graph = False  # the running backward builds a graph for another backward
    _depth = 0  # nested forward scopes
    _entered = 0  # the depth of the outermost module that is called; 0: none is
    _contexts = 0  # open ``ends_interrupted``

    def __init__(
        self,
        root: nn.Module,
        units: list[Unit],
        root_unit: Unit,
        groups: Sequence[ShardGroup],
        options: EngineOptions,
        plan: EnginePlan,
        offload_manager: Offload,
        exchange: GradientExchange,
        use_outside: Callable[[Engine, list[Tensor], Callable[..., Any], Any, Any], Any],
        training: bool = True,
        parts: Parts | None = None,
    ) -> None:
        self.parts: Parts = parts or Unjoined()
        self.options = options
        self.policy = options.dtypes
        self.plan = plan
        self.offload_manager = offload_manager
        self._use_outside = use_outside
        self.training = training
        # Parameters that the user keeps in fp32, in exports as well.
        self.kept = find_fp32_modules(root, self.policy.keep_fp32).parameters
        self.root = root
        self.units = units
        self.root_unit = root_unit
        self.groups = list(groups)
        world = groups[0].world
        self.world = world
        self.peers = groups[0]
        self.device = world.device
        self.everywhere = self.peers.size == world.size  # whether all ranks of the run have this module
        # Whether ranks may have other parameters, or other numbers of ranks the same.
        self.has_groups = has_groups(groups)
        self.buckets = [b for u in [*units, root_unit] for b in u.buckets]
        self.owner = {id(p): (b, i) for b in self.buckets for i, p in enumerate(b.params)}
        first_order = [b for u in reversed(units) for b in u.buckets] + root_unit.buckets  # in the first backward
        self.exchange = exchange
        exchange.bind(self.buckets)
        self.reducer = GradReducer(
            peers=self.peers,
            buckets=first_order,
            exchange=exchange,
            overlap=options.overlap_comm,
            max_buffer=options.reduce_bucket_size,
        )
        self._residency = Residency.of(options, groups)
        limits = self._residency if training else self._residency.without_training()
        # Whether the gathers of unsharded parameters after a step go on beside the next forward.
        self._publishes_later = options.overlap_comm and all(group.gathers_in_background for group in self.groups)
        self._awaits_steps = offload_manager.overlaps or self._publishes_later
        self.gatherer = Gatherer(units, root_unit, groups, limits, self._awaits_steps)
        self._ties: list[Tie[Engine]] = []  # of graphs, whose hooks the running backward has called
        self._span: TimedSpan = NOTHING  # timing of a backward without a backward_pass context
        self._ranges = UnitRanges()  # timing of units in the running backward
        self.buffers = BufferSync(root, self.peers, options.broadcast_buffers and not exchange.sums_late)
        self.same_on_ranks = SameOnRanks(self.peers, root, [p for b in self.buckets for p in b.params])
        self.grad_views = GradViews(self.peers, self.buckets, self.parts, options.norms)
        news = [
            self.buffers.section(),
            self.same_on_ranks.section(),
            offload_manager.section(self.peers),
            lost_edits(self.peers, [bucket.edits for bucket in self.buckets]),
        ]
        self.unused_parameters = UnusedParameters(
            peers=self.peers,
            buckets=self.buckets,
            views=self.grad_views,
            reducer=self.reducer,
            news=news,
            exchange=exchange,
        )
        self.finish_reductions = self.unused_parameters.finish_reductions
        self.sharded_optim = any(not b.storage.is_whole for b in self.buckets)
        self.optimizers: WeakSet[Any] = WeakSet()  # ShardedOptimizers of its parameters
        self.replaced = ReplacedWeights(self.buckets, world.rank == 0, training)
        self.before_backward: list[Callable[[], None]] = []  # called when a backward begins
        # Called at the end of a backward, also of a failed one.
        self.after_backward: list[Callable[[], None]] = [self.buffers.end_backward]
        self.before_step: list[Callable[[], None]] = []  # called before a step examines its gradients
        self.after_step: list[Callable[[], None]] = []  # called when the compute copies are up to date
        self.after_skip: list[Callable[[], None]] = []  # called when a step was skipped
        # Called before weights and states leave the engine, on all ranks.
        self.before_reading: list[Callable[[], object]] = []
        self._saved_weights = SavedWeights(units, self._need_saved)
        self._preparation = Preparation(self.finish_steps)
        world.interruptible.add(self)
        self.handles: list[Any] = []  # of what others have installed for it
        self._forwards = self._hook_model()  # handles of its own hooks, by which it runs the model
        self._of_parts: list[Any] = [] if training else self._hook_parts()  # handles
        self.attached = True  # it has the model's parameters
        self._left: list[Bucket] = []  # the buckets that it has left to other code
        self._digests: list[Tensor] = []  # their digests then; empty: steps were incomplete

    def _hook_model(self) -> list[Any]:
        """Hook the model, its units, and its parameters; returns the handles."""
        # Code may call any layer by itself, or use a weight (inside of ``gathered`` where it is sharded), and graphs of
        # torch.compile leave out hooks of modules. Then nothing that begins a backward comes before these gradients.
        parameters = dict.fromkeys(parameter for bucket in self.buckets for parameter in bucket.params)
        handles = hook_parameters(parameters, partial(_arm_at_parameter, weakref.ref(self)))
        handles += held_by_modules(self, self.root)
        for unit in self.units:
            before, after = partial(self.pre_forward, unit), partial(self.post_forward, unit)
            # See Note [Compiled code].
            handles += hook_forward(unit.module, before, after, None if unit.sharded else self._preparation)
        return handles + self._hook_scope(self.root)

    def _hook_scope(self, module: nn.Module) -> list[Any]:
        return hook_forward(
            module,
            lambda called, *_: self.enter_forward(module) if called is module else None,
            lambda called, _, output: self.leave_forward(output) if called is module else None,
        )

    def _hook_parts(self) -> list[Any]:
        """Let parts of the model be called by themselves, as encoders are in generation."""
        others = {self.root, *(child for unit in self.units for child in unit.module.modules())}
        parts = [module for _, module in hookable_modules(self.root) if module not in others]
        return [handle for part in parts for handle in self._hook_scope(part)]

    def detach(self) -> None:
        """Remove all hooks; parameters stay as they are."""
        for handle in [*self.handles, *self._forwards, *self._of_parts]:
            handle.remove()
        self.handles = []
        self._forwards = []
        self._of_parts = []
        self.attached = False

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that needs the values of released parameters; see guard.py, ``Owner``."""
        return self._use_outside(self, parameters, func, args, kwargs)

    @property
    def shards_parameters(self) -> bool:
        """True if some parameters have no values outside of the model's forwards."""
        return any(bucket.sharding.params for bucket in self.buckets)

    def rest(self, complete: bool = True) -> None:
        """Leave the model as it is to other code until ``resume``, if all of its weights are there. Idempotent.

        ``complete``: all steps are, so that what other code changes can be told from them.

        It is an ordinary module then: forwards and backwards run without the engine, gradients stay in ``p.grad``, and
        what is written to parameters is found as edits of user code are.
        """
        if self.shards_parameters or self._rests:
            return
        self._left = self._whole_buckets()
        self._digests = [digest_of(bucket.compute.flat) for bucket in self._left] if complete else []
        for handle in [*self._forwards, *self._of_parts]:
            handle.remove()
        self._forwards = []
        self._of_parts = []

    @property
    def _rests(self) -> bool:
        return self.attached and not self._forwards

    def _whole_buckets(self) -> list[Bucket]:
        """The buckets of which each rank of ``peers`` has all values of the same parameters in memory."""
        found = [bucket for bucket in self.buckets if bucket.group is self.peers and not bucket.sharding.params]
        return [bucket for bucket in found if all(span.spec.is_whole for span in bucket.layout.spans)]

    def find_changed_apart(self, incomplete: bool = False) -> list[Bucket]:
        """The buckets that other code has changed since ``rest``, not alike on all ranks. Collective.

        ``incomplete``: also those that differ now: after an incomplete step it is not known what has changed them.
        """
        mine: list[tuple[int, bool]] = []
        if self._left and (self._digests or incomplete):
            now = torch.stack([digest_of(bucket.compute.flat) for bucket in self._left]).tolist()
            before = torch.stack(self._digests).tolist() if self._digests else [None] * len(now)
            mine = [(one, one != other) for one, other in zip(now, before, strict=True)]
        told = self.peers.host_gather(mine, "digests of weights")
        if any(len(rows) != len(mine) for rows in told):
            return []  # an error has ended the run of some rank
        found = []
        for bucket, *rows in zip(self._left if mine else [], *told, strict=True):
            if any(changed for _, changed in rows) and len({digest for digest, _ in rows}) > 1:
                found.append(bucket)
        return found

    def resume(self) -> None:
        """End ``rest``: the engine runs the model again. Idempotent."""
        if self._rests:
            self._forwards = self._hook_model()
            self._of_parts = [] if self.training else self._hook_parts()
            self._left = []
            self._digests = []

    @property
    def running(self) -> bool:
        """True if a forward or a backward is running."""
        return self._depth > 0 or self.in_backward or in_running_backward()

    # ---- forward -----------------------------------------------------------------------------------------------

    @contextmanager
    def forward_scope(self, trains: bool = True) -> Iterator[None]:
        """Context for code that runs the model: root parameters are readable inside. ``trains``: a training step."""
        # A user may compile the code that enters this context, so this breaks the graph.
        with self.ends_interrupted():
            _enter_uncompiled(self, trains=trains)
            depth = self._depth
            try:
                yield
            finally:
                self._depth = depth
                _leave_uncompiled(self, None)

    @contextmanager
    def ends_interrupted(self) -> Iterator[None]:
        """Context of calls of the model: ends those that no hook ends. See Note [Interrupted forwards]."""
        depth = self._depth
        entered = self._entered
        opened = SavedWeights.count()
        self._contexts += 1
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._drop_calls(depth, entered, opened)
            raise
        finally:
            self._contexts -= 1

    def end_interrupted(self) -> None:
        """End a forward with no context around it that no hook has ended; no-op while one runs in any thread."""
        left = self._depth > 0 or any(unit.calls for unit in self.units)
        if not left or self._contexts or any(_calls_of(self.root, frame) for frame in sys._current_frames().values()):
            return
        self._drop_calls(0, 0, None)

    def _drop_calls(self, depth: int, entered: int, opened: int | None) -> None:
        """Drop what forwards have left, except those around them.

        ``depth``, ``entered``: of those around. ``opened``: saved-tensor hooks that these have entered; None: unknown.
        """
        if opened is None:
            self._saved_weights.end_pass()
        else:
            self._saved_weights.leave_interrupted(opened)
        self._depth, self._entered = depth, entered
        if depth == 0:
            self._end_calls()

    def _end_calls(self) -> None:
        """End the calls of units that an error has ended before their own hooks could."""
        for unit in reversed(self.units):
            for call in unit.calls:
                call.range.close()
                call.inputs = None  # else a cycle, see Note [Interrupted forwards]
            unit.calls.clear()

    def enter_forward(self, entry: nn.Module | None = None, trains: bool = True) -> None:
        """Begin a forward. ``entry``: the module that is called."""
        outermost = entry is not None and entry is self.root and not self._contexts and not self.in_backward
        # The module calls itself, or its last call was interrupted. Compiled code may hide a call: then it goes on.
        if self._depth > 0 and outermost and _calls_of(self.root, inspect.currentframe()) == 1:
            self._drop_calls(0, 0, None)
        if transform := running_transform():
            self._depth += 1
            self.gatherer.use_in_transform(self.root_unit, transform)
            return
        if self.in_backward and not in_running_backward() and not self._explicit:
            # The backward was ended by an exception that the caller caught.
            self.abort_backward()
        if self._depth == 0 and not self.in_backward:
            # This scope was set for a backward that never came.
            self.reducer.scope = None
        self._depth += 1
        begins = entry is not None and self._entered == 0
        self._entered = self._depth if begins else self._entered
        if self._depth == 1 and not self.in_backward:
            self.grad_views.drop_cleared()
            if self.training and trains and torch.is_grad_enabled() and (entry is None or entry.training):
                if self.replaced:
                    self.replaced.drop_returned()
                self.buffers.before_forward(self.reducer.sync)
            self.gatherer.begin_order(entry)
            self._preparation.make()
            self.gatherer.gather(self.root_unit)
            for bucket in self.root_unit.sharded:
                bucket.edits.begin_forward()
        elif begins and not self.training:
            # Generation calls a model many times in one step of the user's, and each call repeats the same order.
            self.gatherer.begin_order(entry)

    def leave_forward(self, output: Any) -> None:
        if self._depth == 0:
            # An error came before ``enter_forward``; torch calls this hook all the same.
            return
        self._entered = 0 if self._depth == self._entered else self._entered
        self._depth -= 1
        if self.in_backward or running_transform():
            return
        if torch.is_grad_enabled():
            hook_nodes(iter_tensors(output), partial(_arm_uncompiled, Tie(self)))
        if self._depth > 0:
            return
        if self._saved_weights.opened:
            self._saved_weights.end_pass()
        for bucket in self.root_unit.sharded:
            self._keep_edits(bucket)
        self._end_calls()
        if not torch.is_grad_enabled():
            self.gatherer.end_pass(keep=True)
            return
        # Release what was prefetched and not used in this pass.
        for unit in self.units:
            if unit.leases == 0 and not unit.keep:
                self.gatherer.release(unit)

    @contextmanager
    def whole_passes(self, trains: bool, buckets: Collection[Bucket]) -> Iterator[None]:
        """Context, in a step, for forwards and backwards of parts of the model, each with a scope of its own.

        ``buckets``: of these parts, which get no more gradients in the next backward after it. If it ``trains``, the
        gradients of all count from that backward on: ``zero_grad`` before it does not clear them. What a step before
        has used is cleared here.
        """
        self.refuse_inside_units("whole_passes")
        depth, entered = self._depth, self._entered
        self._depth = self._entered = 0
        if trains:
            self.grad_views.put_aside()
        try:
            yield
        except BaseException:
            if trains:
                self.abort_backward()
            raise
        finally:
            self._depth, self._entered = depth, entered
            self.grad_views.aside = False
        if trains:
            self._passed, self.reducer.scope = True, [bucket for bucket in self.buckets if bucket not in buckets]
        if depth > 0:
            self.gatherer.gather(self.root_unit)

    def refuse_inside_units(self, what: str) -> None:
        """Raise RuntimeError if the forward of a unit, which may release no other, is running."""
        if running := [unit.name for unit in self.units if unit.calls]:
            raise RuntimeError(f"`{what}` cannot be used inside of the forward of {running[-1]!r}: use it around that.")

    def rejoin(self) -> None:
        """Go on as all ranks do, after they have run different numbers of forwards. Collective."""
        self.gatherer.forget_order()
        if self._depth > 0:
            self.gatherer.gather(self.root_unit)

    def pre_forward(self, unit: Unit, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if called is not unit.module:
            return None
        if transform := running_transform():
            self.gatherer.use_in_transform(unit, transform)
            return None
        recomputes = self.in_backward or in_running_backward()
        call = Call(NOTHING if recomputes else unit_range("forward", unit.name))
        self.gatherer.gather(unit)
        if recomputes:
            refuse_reentrant_checkpoint(unit.name)
            return None
        self.gatherer.visit(unit)
        unit.calls.append(call)
        for bucket in unit.sharded:
            bucket.edits.begin_forward()
        # Without gradients, too: the forward may enable them.
        releases = bool(unit.sharded) and not self._stays_gathered(unit)
        call.saves = releases and self._saved_weights.open()
        if not torch.is_grad_enabled():
            return None
        call.references = references_of(unit) if releases else []
        unit.awaited += 1
        call.tie = Tie(self)
        call.inputs = hook_inputs(args, kwargs, partial(_end_of_call, call.tie, weakref.ref(unit), call))
        return call.inputs.value

    def _stays_gathered(self, unit: Unit) -> bool:
        """True if the weights of ``unit`` stay gathered after its forward."""
        return unit.keep and (unit.backward_needs_weights if torch.is_grad_enabled() else self.gatherer.fits_whole)

    def post_forward(self, unit: Unit, called: nn.Module, args: Any, output: Any) -> None:
        if called is not unit.module or running_transform() or self.in_backward or in_running_backward():
            return
        call = unit.calls.pop() if unit.calls else Call()
        if call.saves:
            self._saved_weights.close()
        call.range.close()
        given, call.inputs = call.inputs, None
        tie, call.tie = call.tie, None
        written = given.write_back() if given is not None else []
        tensors = list(iter_tensors((output, written)))
        if torch.is_grad_enabled():
            # With values that the forward stored in attributes of the module or its children (auxiliary losses).
            modules = unit.module.modules() if unit.sharded else ()
            stored = [value for m in modules for key, value in vars(m).items() if key not in _MODULE_INTERNALS]
            begin = partial(_begin_uncompiled, tie or Tie(self), weakref.ref(unit), call)
            hooked = hook_nodes([*tensors, *iter_tensors(stored)], begin, given)
            call.passed = not hooked
        if not unit.sharded:
            return
        for bucket in unit.sharded:
            if any([shares_storage(t, bucket.compute.flat) for t in tensors]):
                # The unit returned a weight, or a view of one, so code outside may read it until the end of backward.
                self.gatherer.pin(bucket, again=True)
        if unit.calls:
            # An outer call of the same module is still running, and needs the weights.
            return
        unedited = [bucket for bucket in unit.sharded if not self._keep_edits(bucket)]
        if self._stays_gathered(unit):
            self.gatherer.guard(unit)
        elif unit.leases == 0:
            if call.references and call.references != references_of(unit):
                for bucket in unit.sharded:
                    bucket.compute.hand_out()
            self.gatherer.release(unit, unedited)

    def _keep_edits(self, bucket: Bucket) -> bool:
        """Keep what a forward has written to its weights, if anything. See Note [Edits in a forward].

        Returns whether it has, or may have.
        """
        edited = bucket.edits.end_forward()
        if not edited:
            return not bucket.readable
        spans = bucket.layout.spans
        in_parts = bucket.group is not self.peers or not all(span.spec.is_whole for span in spans)
        if in_parts or bucket.weights.plan.codecs.rests is not None:
            bucket.edits.lose(edited)
            return True
        self.same_on_ranks.note_edits({spans[index].name: bucket.compute.views[index] for index in edited})
        bucket.keep_edits()
        return True

    # ---- backward ----------------------------------------------------------------------------------------------

    @contextmanager
    def backward_pass(self, buckets: Collection[Bucket] | None = None) -> Iterator[None]:
        """Context for one backward, on all ranks. See Note [End of backward].

        ``buckets``: that can get gradients; default: all. The same on all ranks with this model.
        """
        self._explicit = True
        self.reducer.scope = buckets if buckets is not None else self.reducer.scope
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
        self._loosen_ties()
        self._preparation.forget()
        self._ranges.leave()
        self._span.close()
        self.reducer.abort()
        self.finish_steps()
        self.unused_parameters.abort()
        for unit in [*self.units, self.root_unit]:
            unit.leases, unit.awaited = 0, 0
        self.gatherer.end_pass()
        for listener in self.after_backward:
            listener()

    def _note_tie(self, tie: Tie[Engine]) -> None:
        """Note that a backward runs the hooks of a tie. See graph_tie.py, Note [Graphs that are kept]."""
        if not retains_graph():
            self._ties.append(tie)

    def _loosen_ties(self) -> None:
        for tie in self._ties:
            tie.loosen()
        self._ties.clear()

    def _arm(self) -> None:
        """Begin a backward, unless one is running."""
        if not self.in_backward:
            # Hide first: autograd would add to the gradients that ``p.grad`` shows, and count them twice.
            self.grad_views.detach(fresh=in_running_backward())
            self.in_backward = True
            if not self._explicit:
                self._span = phase("backward").open()
            if self.replaced and self.stepped:
                self.replaced.warn_of_rounded()
            for listener in self.before_backward:
                listener()
            self.gatherer.begin_backward()
            if not self._explicit:
                queue_backward_callback(self.end_backward)

    def _pre_backward(self, unit: Unit, call: Call) -> None:
        """Begin the backward of a call."""
        self._arm()
        self._ranges.enter(unit.name)
        if torch.is_grad_enabled():
            self._create_graph = True
            self.parts.check_graph(unit.name, (p for bucket in unit.buckets for p in bucket.params))
        if not call.held:
            call.held = True
            unit.leases += 1
        if unit.sharded and unit.backward_needs_weights:
            self.gatherer.gather(unit)
            # With create_graph, the nodes of this backward save weights, and no hook gathers them later.
            if torch.is_grad_enabled():
                for bucket in unit.sharded:
                    self.gatherer.pin(bucket, again=True)
            self.gatherer.visit(unit, backward=True)

    def _need_saved(self, unit: Unit, call: Call | None, bucket: Bucket) -> None:
        """Gather a bucket whose weights autograd is about to read. See saved_weights.py, Note [Saved weights]."""
        if not in_running_backward():
            raise RuntimeError(
                f"A weight of module {unit.name!r} that autograd saved was read outside of backward, and it is sharded "
                "over the ranks. Read it inside of `with lt_zero.gathered(module):` on every rank."
            )
        if call is not None:
            self._pre_backward(unit, call)
        else:
            self._arm()
        # Another unit than its own saved this weight, so no lease has gathered the bucket.
        if not bucket.readable:
            self.gatherer.pin(bucket, again=torch.is_grad_enabled())

    def unit_done(self, unit: Unit, call: Call, grads: object = None) -> None:
        """Called when a call's input gradients are there. See grad_reducer.py, Note [When a bucket is ready].

        ``grads``: these, which are left as they are.
        """
        if not self.in_backward:
            return
        # Gather before the reduction: ranks that used weights wait in that gather, and this one would wait in a
        # reduction.
        if call.passed and not call.held:
            self._pre_backward(unit, call)
        self._ranges.leave(unit.name)
        unit.awaited -= 0 if call.done else 1
        call.done = True
        if call.held:
            call.held = False
            unit.leases -= 1
        for bucket in unit.buckets:
            if bucket.sharding.params:
                finished = unit.leases == 0 and unit.awaited <= 0 and bucket.wants_grad
            else:
                finished = bucket.grads_complete()
            if finished:
                self.reducer.mark_ready(bucket)
        # Weights do not change in an accumulation window, and create_graph needs them.
        keeps = torch.is_grad_enabled() or (not self.reducer.sync and unit.keep and self.gatherer.fits_whole)
        if unit.leases == 0 and not keeps:
            self.gatherer.release(unit)

    def end_backward(self) -> None:
        """Reduce the remaining gradients, wait for all reductions, and release what backward held."""
        if not self.in_backward:
            return
        self._ranges.leave()
        self._preparation.forget()
        arrived = self.reducer.active or any(b.has_grads() for b in self.buckets)
        explicit = self._explicit
        self.in_backward = False
        self._explicit = False
        self._loosen_ties()
        again, self._create_graph = self._create_graph, False
        self.backwards += 1
        # torch.autograd.grad leaves no gradients behind: nothing to reduce, on any rank.
        passed, self._passed = self._passed, False
        if arrived or (explicit and not passed):
            # Enter it once: the functions below would enter it for each bucket.
            with WithoutGrad():
                self.reducer.finish()
                self.unused_parameters.record()
        elif explicit:
            # When ``whole_passes`` recorded, it was not known whether the loss is finite: record again.
            self.reducer.scope = None
            self.unused_parameters.record()
        else:
            self.reducer.scope = None
            self.grad_views.attach_held()
        for unit in [*self.units, self.root_unit]:
            unit.leases = 0
        if not again:
            self.gatherer.end_pass(keep=not self.reducer.sync)
        for listener in self.after_backward:
            listener()
        self._span.close()
        if not self._awaits_steps:
            # Otherwise steps may have begun beside backward, which ``publish`` completes.
            self._prepare_again()

    def _prepare_again(self) -> None:
        """Let graphs leave out hooks as before, if code that takes steps by itself goes on with a forward."""
        if self._depth > 0:
            self._preparation.make()

    # ---- between backward and step -----------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Make master weights, and keep weights gathered as the limits allow. No-op if done before.

        Raises:
            ConfigError: weights are to be trained that cannot be.
        """
        if not self.training:
            for bucket in self.buckets:
                if bucket.wants_grad:
                    bucket.weights.check_training(bucket.name)
            for handle in self._of_parts:
                handle.remove()
            self._of_parts = []
            self.training = True
            self.replaced.begin_training()
            self.gatherer.limit(self._residency)
            for bucket in self.buckets:
                if bucket.wants_grad:
                    bucket.weights.enable_training(bucket.name)

    def finish_steps(self) -> bool:
        """Wait until the steps of all buckets are complete; returns whether one was not."""
        return self._awaits_steps and any([bucket.wait_background_step() for bucket in self.buckets])

    def prepare_reading(self) -> None:
        """Make weights and states what a checkpoint can hold: complete, and the same on all ranks. Collective.

        Raises:
            RuntimeError: on all ranks, if they have stepped with different options, or code that had the model between
                two runs has left other weights on each.
        """
        if self._rests and (differ := self.find_changed_apart()):
            raise RuntimeError(
                f"The ranks have other values of {differ[0].layout.spans[0].name!r}: since the run, code has changed "
                "the module on each rank by itself. Save one rank's with `torch.save(module.state_dict(), path)`, or "
                "begin another run (`trainer.fit`, `trainer.validate`), which gives all ranks the values of rank 0."
            )
        self.finish_steps()
        self.same_on_ranks.check_now()
        for prepare in self.before_reading:
            prepare()

    def publish(self, buckets: Set[Bucket], stepped: bool = True) -> None:
        """Update the compute copies of ``buckets`` after their master weights were changed, by a step if ``stepped``.

        Gathers that overlap with computation are waited for in the next forward, unit by unit.
        """
        with phase("publish"):
            self._preparation.forget()
            self.gatherer.after_step()
            for unit in self.units:
                unit.awaited = 0
            # Every forward begins with the root unit, so its gather is launched first.
            changed = [b for b in dict.fromkeys([*self.root_unit.buckets, *self.buckets]) if b in buckets]
            for bucket in self.buckets:
                bucket.end_lending(bucket in buckets)
            if self.replaced:
                self.replaced.forget(None if stepped else changed)
            for bucket in changed:
                bucket.refresh_after_step()
            for bucket in changed:
                # Peers may read this copy directly in the gathers below, so it has to be complete.
                bucket.weights.copy.wait_copied()
            for group in self.groups:
                group.after_write()
            # Launch all gathers before the first wait, so that they overlap; all ranks have them in the same order.
            gathers = [(bucket, bucket.launch_publish()) for bucket in changed]
            for bucket, gather in gathers:
                if gather is not None and self._publishes_later:
                    bucket.publish_later(gather)
                elif gather is not None:
                    gather.wait()
            # User code may write to the parameters from here on, so no rank may still read them.
            self.before_write()
            for bucket, gather in gathers:
                if gather is None or not self._publishes_later:
                    bucket.edits.note()
            self.stepped |= stepped
            if stepped:
                self.exchange.end_step()
                for listener in self.after_step:
                    listener()
            self._prepare_again()

    def before_write(self) -> None:
        """Wait, before a write to parameters or to what gathers read, until no rank reads them."""
        for group in self.groups:
            group.before_write()

    def leave_sums_to_steps(self, leaves: bool) -> None:
        """Let steps sum gradients over replicas (``leaves``), or the backwards outside of ``no_sync``."""
        self.reducer.ends_at_step = leaves

    def set_requires_gradient_sync(self, requires: bool) -> None:
        """Say whether backwards from now on are summed over all ranks, or as in ``no_sync``."""
        self.reducer.sync = requires

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which unsharded gradients (stages 0 and 1) stay on their rank, others in their replica."""
        before = self.reducer.sync
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(before)

    def note_loss(self, finite: bool) -> None:
        """Note whether the loss of a backward is finite; the ranks tell each other with the next exchange."""
        self.unused_parameters.nonfinite |= not finite

    def note_loaded(self, after_step: bool) -> None:
        """Note that the weights are those of a checkpoint; ``after_step``: of training. Collective then."""
        self.stepped = after_step
        for bucket in self.buckets if after_step else ():
            bucket.round_as_steps_do()


def _calls_of(module: nn.Module, frame: FrameType | None) -> int:
    """The number of running calls of ``module`` in the stack of ``frame``."""
    found = 0
    while frame is not None:
        # By name: torch.compile replaces the code.
        found += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return found


def has_groups(groups: Sequence[ShardGroup]) -> bool:
    """True if some parameters are not the same on all ranks of the run, or have a divisor of their own."""
    return len(groups) > 1 or groups[0].size < groups[0].world.size


# torch.compile breaks the graph here
_enter_uncompiled: Any = torch.compiler.disable(Engine.enter_forward)
_leave_uncompiled: Any = torch.compiler.disable(Engine.leave_forward)


# ---- hooks in graphs, see graph_tie.py, Note [Graphs that are kept]; ``grads``: of the node or parameter -------------


def _arm_at_parameter(known: weakref.ref[Engine], grads: object) -> None:
    """Begin a backward at the gradient of a parameter."""
    # All parameters of a backward call this, and one of them begins it.
    if (engine := known()) is None or not engine.in_backward:
        still_there(known)._arm()


def _arm_at_output(tie: Tie[Engine], grads: object) -> None:
    """Begin a backward at an output of the model."""
    if (engine := tie.held) is not None:
        engine._note_tie(tie)
    else:
        engine = tie.get()
    engine._arm()


def _begin_call(tie: Tie[Engine], unit: weakref.ref[Unit], call: Call, grads: object) -> None:
    """Begin the backward of a call at one of its outputs."""
    if (engine := tie.held) is not None:
        engine._note_tie(tie)
    else:
        engine = tie.get()
    engine._pre_backward(cast(Unit, unit()), call)


def _end_of_call(tie: Tie[Engine], unit: weakref.ref[Unit], call: Call, grads: object) -> None:
    """End the backward of a call at the gradients of its inputs."""
    if (engine := tie.held) is None:
        engine = tie.get()
    elif not call.held:  # otherwise the tie is noted
        engine._note_tie(tie)
    engine.unit_done(cast(Unit, unit()), call, grads)


_arm_uncompiled: Any = torch.compiler.disable(_arm_at_output)
_begin_uncompiled: Any = torch.compiler.disable(_begin_call)
