"""Activation checkpointing: which modules are checkpointed, how their forward is replaced, and for how long.

A checkpointed module saves only its inputs in forward, and backward runs it again. ``forward`` is replaced on the
module itself, so names, classes, state dicts and hooks stay as they are. The engine's hooks run around it: weights are
gathered when backward reaches the module's output, before the recomputation, and the graph is the one that forward
built, so leases and gradients work as without checkpointing (engine.py, Notes [Leases] and [Recomputation]). Units
inside a checkpointed module gather during its recomputation. A module that is pickled or deep-copied while it trains
gets its original forward.

A module that is traced (``block.compile()``, or part of something compiled) leaves the recomputation to the compiler.
The compiler then also keeps the saved inputs, so neither the store nor ``around`` sees them. A block that was replaced
by ``torch.compile(block)`` is checkpointed from outside in mode full: its compiled forward is called again.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lt_zero.common import accelerator
from lt_zero.common.compat import compiled_module
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.common.errors import ConfigError
from lt_zero.common.tables import show
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.config.blocks import ActivationCheckpointing, Aio, Schema
from lt_zero.config.options import io_options
from lt_zero.core.comm.part_ranks import PartRanks
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.find_units import (
    class_matches,
    class_name,
    clean_name,
    count_in_lists,
    find_repeated,
    repeated_classes,
)
from lt_zero.core.engine.partition import refuse_name
from lt_zero.core.followers import followers
from lt_zero.core.stores.io_options import IoOptions, SwapError
from lt_zero.core.stores.pinned import host_buffer
from lt_zero.features.activation_checkpointing import selective
from lt_zero.features.activation_checkpointing.budget import KEY as BUDGET_KEY
from lt_zero.features.activation_checkpointing.budget import BudgetPlan, BudgetTrial, Meter
from lt_zero.features.activation_checkpointing.partitioned import PartitionedStore
from lt_zero.features.activation_checkpointing.profile import Boundary, open_boundary
from lt_zero.features.activation_checkpointing.reuse import Arena, LoanPool, Memory
from lt_zero.features.activation_checkpointing.saved_activations import ActivationFiles, Storage
from lt_zero.features.activation_checkpointing.state import Caches, ForwardState, SavedState
from lt_zero.features.activation_checkpointing.stores import ActivationStore, InputStore

Around = Callable[[str, bool], AbstractContextManager[Any]]

_BLOCK = "activation_checkpointing"
_SPARE = 2  # slots of a block for tensors that are brought back, in addition to the stored ones
_PLACEHOLDER = torch.empty(0)  # stands for a saved tensor among the arguments


# ---- which modules -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Modules (name, module) in registration order, none inside another; ``every`` n-th of them is checkpointed."""

    modules: tuple[tuple[str, nn.Module], ...]
    every: int

    @property
    def chosen(self) -> tuple[tuple[str, nn.Module], ...]:
        return self.modules[:: self.every]

    def __str__(self) -> str:
        total = Counter(class_name(module) for _, module in self.modules)
        some = Counter(class_name(module) for _, module in self.chosen)
        return " and ".join(f"{some[name]} of {count} {name}" for name, count in total.items()) + " modules"


def find_modules(root: nn.Module, block: ActivationCheckpointing) -> Found:
    """The modules inside ``root`` to checkpoint: its repeated blocks, or modules of the configured classes.

    Raises:
        ConfigError: a name matches nothing, or no blocks are found.
    """
    key = f"{_BLOCK}.modules"
    wrapped = {inner for m in root.modules() if (inner := compiled_module(m)) is not m}
    modules = {  # with a forward; of a compiled module the wrapper
        clean_name(f"{name}.")[:-1]: module
        for name, module in root.named_modules()
        if module is not root
        and module not in wrapped
        and type(compiled_module(module)).forward is not nn.Module.forward
    }
    for wanted in block.modules:
        if not any(class_matches(compiled_module(m), (wanted,)) for m in modules.values()):
            known = sorted({class_name(m) for m in modules.values()})
            refuse_name(key, wanted, "no module inside the model is of this class", known)
    found = find_repeated(root) if not block.modules else []
    inside: set[nn.Module] = set()
    wrappers = _wrappers_of_parameters(modules)
    for name, module in modules.items():  # parents come before their children
        if class_matches(compiled_module(module), block.modules) and module not in inside:
            name, module = wrappers.get(module, (name, module))
            inside.update(module.modules())
            found.append((name, module))
    if not found:
        common = (count_in_lists(root) or Counter(map(class_name, modules.values()))).most_common(1)
        raise ConfigError.about(
            key,
            f"{_BLOCK}.mode={block.mode!r}, and {type(root).__name__} has no repeated blocks to checkpoint. Name "
            f"classes of its modules: {key}=[{common[0][0] if common else 'Block'}], or set {_BLOCK}.mode='none'.",
        )
    return Found(tuple(found), block.every)


def _wrappers_of_parameters(modules: Mapping[str, nn.Module]) -> dict[nn.Module, tuple[str, nn.Module]]:
    """Modules that peft wraps for ``target_parameters`` -> the outermost wrapper, and its name.

    The wrapper adds to parameters while its forward runs, so a recomputation of what it wraps would lack the adapters.
    """
    found: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in modules.items():
        base: Any = getattr(module, "get_base_layer", None)
        if base is not None and hasattr(module, "parameter_name"):
            found.setdefault(base(), (name, module))
    return found


def of_all_ranks(root: nn.Module, block: ActivationCheckpointing, peers: ShardGroup) -> ActivationCheckpointing:
    """The configuration for a rank with a part of a model; other ranks have the rest. Collective.

    Classes that are blocks on any rank are blocks on all; a rank without any checkpoints nothing.

    Args:
        peers: the ranks that have the same module.

    Raises:
        ConfigError: on all ranks: a name matches nothing on any of them, or none has blocks.
    """
    if block.mode == "none" or peers.size == peers.world.size:
        return block
    classes = [compiled_module(module) for module in root.modules() if module is not root]
    if block.modules:
        here = [name for name in block.modules if any(class_matches(m, (name,)) for m in classes)]
        found = set[str]().union(*peers.world.host_gather(here, "modules to checkpoint"))
    else:
        found = repeated_classes(root, peers.world)
    if not found or set(block.modules) - found:
        find_modules(root, block)  # raises: no rank has them
    mine = tuple(name for name in sorted(found) if any(class_matches(module, (name,)) for module in classes))
    return block.model_copy(update={"modules": mine} if mine else {"mode": "none"})


def check_modules(root: nn.Module, block: ActivationCheckpointing, peers: ShardGroup) -> None:
    """Raise ConfigError, on all ranks, if there is nothing to checkpoint. Collective; ``peers``: see above."""
    mine = of_all_ranks(root, block, peers)
    if mine.mode != "none":
        find_modules(root, mine)


# ---- their forward -------------------------------------------------------------------------------------------------


class Checkpointing:
    """Checkpoints modules of one model until ``remove`` is called. The modules do not refer to this object.

    Args:
        root: the model.
        block: the configuration; its ``mode`` is not none.
        store: stores saved inputs between forward and backward; None: they stay on the device.
        around: context entered around each forward and each recomputation (which may end by an exception), with the
            module's name and whether it is a recomputation.
        warns: whether this rank warns.
        meter: measures the modules until ``follow`` is called; None: nothing does.

    Raises:
        ConfigError: a name matches no module, or there is nothing to checkpoint.
    """

    def __init__(
        self,
        root: nn.Module,
        block: ActivationCheckpointing,
        store: InputStore | None = None,
        around: Around | None = None,
        warns: bool = True,
        meter: Meter | None = None,
    ) -> None:
        self.mode = block.mode
        self.store = store
        self.selective = block.mode == "selective"
        self.around: Around = around or (lambda name, recompute: nullcontext())
        self.caches = Caches(warns)
        self.found = find_modules(root, block)
        self.boundary: Boundary | None = None
        self.meter = meter
        self.where = ""  # saved inputs are stored
        self.undo = ExitStack()  # what ``install`` did to the engine
        # Trace compiled modules, so that the policy applies inside their graphs.
        if self.selective:
            modules = tuple((name, compiled_module(module)) for name, module in self.found.modules)
            self.found = Found(modules, block.every)
        for _, module in self.found.chosen:
            if isinstance(vars(module).get("forward"), _Checkpointed):
                raise RuntimeError(f"A {type(module).__name__} is checkpointed already. Detach its engine first.")
        self._forwards = [_Checkpointed(name, module, self) for name, module in self.found.chosen]

    def __str__(self) -> str:
        return f"activation checkpointing: {self.mode}, {self.found}{self.where}"

    def follow(self, recomputed: Collection[str]) -> None:
        """Recompute only the modules of these names from the next forward on, and measure no more."""
        for forward in self._forwards:
            forward.recomputes = forward.name in recomputed
            forward.meter = None

    def remove(self) -> None:
        """Restore the original forward of all modules, and free the stored inputs of an engine. Idempotent."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []
        self.undo.close()


class _Checkpointed:
    """Replaces the forward of one module. It has no ``__dict__``, since module attributes are searched for tensors."""

    __slots__ = (
        *("__wrapped__", "_active", "_caches", "_module", "_replaced", "_selective", "_store"),
        *("around", "meter", "name", "recomputes", "state"),
    )

    def __init__(self, name: str, module: nn.Module, how: Checkpointing) -> None:
        self.__wrapped__: Callable[..., Any] = module.forward
        self.name = name
        self._module = module
        self._active = True
        self._selective = how.selective
        self._store = how.store
        self.around = how.around
        self._caches = how.caches
        self.meter = how.meter
        self.recomputes = True
        self.state = ForwardState(module)
        self._replaced = vars(module).get("forward")  # an instance attribute, as torch.compile sets one
        vars(module)["forward"] = self

    def remove(self) -> None:
        # A wrapper that was installed later keeps calling this object.
        self._active = False
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._replaced is not None:
                vars(self._module)["forward"] = self._replaced

    def __reduce__(self) -> Any:  # also used by deepcopy
        return operator.getitem, ((self.__wrapped__,), 0)  # copied as the plain method of the copied module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        args, kwargs = self._caches.without(self.__wrapped__, args, kwargs)
        if not self.recomputes:
            return self.__wrapped__(*args, **kwargs)
        run = _Run(self, args, kwargs)
        if not any(tensor.requires_grad for tensor in chain(run.tensors, self._module.parameters())):
            return self.__wrapped__(*args, **kwargs)  # frozen layers before the first trainable one
        contexts = selective.contexts if self._selective else noop_context_fn
        store = self._store
        # From here on only autograd holds the tensors, or in their place what the store has made of them.
        tensors = run.begin()
        with ExitStack() as stack:
            if self.meter is not None:
                stack.enter_context(self.meter.forward(self.name, tensors))
            if store is not None:
                stack.enter_context(store.saving(self.name, tensors))
            return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(*values: Any) -> Any:
            return self.__wrapped__(*values, **kwargs)

        if self._selective:
            return checkpoint(run, *args, use_reentrant=False, context_fn=selective.traced_contexts)
        return checkpoint(run, *args, use_reentrant=False)


class _Run:
    """One call of a module, which torch runs in forward and again in backward, then with the saved tensors.

    Attributes:
        tensors: among the arguments; each is saved once, so identities are preserved. Until ``begin``.
    """

    def __init__(self, forward: _Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The meter of its forward: a choice may be made before its backward.
        self._forward = forward
        self._meter = forward.meter
        # Keep the caller's own containers: forward may write to them.
        self._first = [(args, kwargs)]
        self.tensors: list[Tensor] = []
        self._order: list[int] = []  # indices of the saved tensors, as they occur among the arguments
        indices: dict[int, int] = {}

        def take(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Parameter):
                # Parameters are never saved: the engine may release and gather them.
                return tensor
            index = indices.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
            self._order.append(index)
            return _PLACEHOLDER

        self._arguments = map_tensors((args, kwargs), take)

    def begin(self) -> list[Tensor]:
        """Copy the state that torch's checkpoint does not restore; returns the tensors, which this object drops."""
        self._state = SavedState(self._forward.state, self._first)
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        forward = self._forward
        if self._first:
            # Not kept, since the arguments would hold the inputs until backward.
            args, kwargs = self._first.pop()
            with forward.around(forward.name, False):
                output = forward.__wrapped__(*args, **kwargs)
            self._state.after_forward()
            return output
        indices = iter(self._order)

        def put(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, Parameter) else tensors[next(indices)]

        args, kwargs = map_tensors(self._arguments, put)
        with self._state.again(), forward.around(forward.name, True):
            if self._meter is not None:
                return self._meter.again(forward.name, forward.__wrapped__, args, kwargs)
            return forward.__wrapped__(*args, **kwargs)


# ---- where their inputs are kept -----------------------------------------------------------------------------------


def open_store(
    block: ActivationCheckpointing,
    device: torch.device,
    count: int,
    files: IoOptions | None = None,
    rank: int = 0,
    ranks: PartRanks | None = None,
) -> ActivationStore | None:
    """The store that the configuration asks for, with ``count`` checkpointed modules; None: inputs stay where they are.

    Args:
        files: how they are read and written.
        rank: of this process in the run.
        ranks: that may have the same inputs; None: no others.

    Raises:
        SwapError: files cannot be created in ``nvme_path`` on this rank; other ranks may have succeeded.
    """
    pinned = partial(host_buffer, pin=accelerator.is_accelerator(device))
    splitting = ranks if block.partition_activations else None
    in_host = block.cpu_checkpointing and accelerator.is_apart(device)
    in_one_block = block.contiguous_memory_optimization
    if block.nvme_path is not None:
        kept = ActivationFiles(block.nvme_path, rank, files or io_options(Aio()))
        storage = Storage(LoanPool(pinned), device, accelerator.is_apart(device), kept)
    elif in_host or in_one_block or splitting is not None:
        make = pinned if in_host else partial(torch.empty, dtype=torch.uint8, device=device)
        memory: Memory = LoanPool(make)
        if in_one_block:
            wanted = block.number_checkpoints
            memory = Arena(make, wanted or max(1, count), grows=wanted is None, spare=0 if in_host else _SPARE)
        storage = Storage(memory, device, apart=in_host)
    else:
        return None
    if splitting is not None:
        return PartitionedStore(storage, device, splitting, rank == 0)
    return ActivationStore(storage, device)


# ---- for an engine -------------------------------------------------------------------------------------------------


def install(engine: Engine, config: Schema) -> Checkpointing | Attendance | None:
    """Checkpoint the modules that the configuration selects. Collective.

    Returns:
        What ends it, which is not of the kind ``Checkpointing`` where this rank has nothing to checkpoint; None: there
        is nothing to end.

    Raises:
        ConfigError: there is nothing to checkpoint.
        SwapError: a rank cannot create files in ``nvme_path``.
    """
    world = engine.world
    block = of_all_ranks(engine.root, config.activation_checkpointing, engine.groups[0])
    if block.mode == "none" or not engine.buckets:  # without parameters nothing trains
        return _attend(engine, block)
    count = len(find_modules(engine.root, block).chosen)
    device = engine.buckets[0].compute.flat.device
    ranks = engine.parts.ranks
    assert ranks is None or isinstance(ranks, PartRanks)
    opening = world.agree("opening the folder for saved inputs", SwapError) if block.nvme_path else nullcontext()
    # Undo the set-up on an error: if another rank failed, this rank's folder would stay until the process ends.
    with ExitStack() as undo:
        with opening:
            store = open_store(block, device, count, io_options(config.aio), world.rank, ranks)
            if store is not None:
                undo.callback(store.close)
        boundary = open_boundary(block, device, world.rank, config.steps_per_print)
        around = boundary.around if boundary is not None else None
        meter = open_meter(engine.root, block, device)
        made = Checkpointing(engine.root, block, store, around, world.rank == 0, meter)
        made.boundary = boundary
        hooks: list[tuple[list[Any], Callable[[], object]]] = []
        if meter is not None and block.memory_budget is not None:
            names = tuple(name for name, _ in made.found.chosen)
            aside = store is not None
            choose = partial(_choose, made, world.rank == 0)
            hooks.append((engine.after_step, _trial(engine, block.memory_budget, meter, names, aside, choose).end_step))
        if boundary is not None:
            hooks.append((engine.after_step, boundary.end_step))
        if store is not None:
            hooks.append((engine.after_backward, store.end_backward))
            hooks.append((engine.offload_manager.others, lambda: store.problem))
        for listeners, hook in hooks:
            listeners.append(hook)
            undo.callback(listeners.remove, hook)
        made.undo = undo.pop_all()
    parts = " (a part on each tensor rank)" if block.partition_activations and ranks is not None else ""
    one = " in one block" if block.contiguous_memory_optimization else ""
    made.where = f", inputs{one}" if one else ""
    if block.nvme_path is not None:
        made.where = f", inputs in files in {block.nvme_path}"
    elif block.cpu_checkpointing:
        made.where = f", inputs in host memory{one}" + ("" if accelerator.is_apart(device) else " (the model's device)")
    if parts:
        made.where = (made.where or ", inputs on the device") + parts
    if block.memory_budget is not None:
        made.where += f", as few as memory_budget={block.memory_budget:g} allows from the third step on"
    return made


def open_meter(root: nn.Module, block: ActivationCheckpointing, device: torch.device) -> Meter | None:
    """The meter of the modules that a memory budget chooses from; None: there is no budget.

    Raises:
        ConfigError: a module is compiled.
    """
    if block.memory_budget is None:
        return None
    modules = dict(find_modules(root, block).chosen)
    for name, module in modules.items():
        if is_compiled(module):
            raise ConfigError.about(
                BUDGET_KEY,
                f"{BUDGET_KEY}={block.memory_budget:g}: {name} is compiled, and the memory inside of compiled code "
                "cannot be measured. Remove the key, and set torch._functorch.config.activation_memory_budget, which "
                "the compiler follows; or do not compile the module.",
            )
    return Meter(modules, device, block.mode == "selective")


def _trial(
    engine: Engine,
    budget: float | int,
    meter: Meter,
    names: tuple[str, ...],
    aside: bool,
    choose: Callable[[BudgetPlan | None], None],
) -> BudgetTrial:
    gather = partial(engine.world.host_gather, name="activations of checkpointed modules")
    return BudgetTrial(budget, meter, names, aside, gather, choose)


@dataclass(frozen=True)
class Attendance:
    """Takes part in the choice of other ranks, until ``remove``; this rank has nothing to checkpoint."""

    listeners: list[Callable[[], None]]
    trial: BudgetTrial

    def remove(self) -> None:
        if self.trial.end_step in self.listeners:
            self.listeners.remove(self.trial.end_step)


def _attend(engine: Engine, block: ActivationCheckpointing) -> Attendance | None:
    """Let this rank, which has nothing to checkpoint, answer the ranks that choose for a memory budget, if any do."""
    if block.memory_budget is None:
        return None
    trial = _trial(engine, block.memory_budget, Meter({}, engine.world.device, False), (), False, lambda plan: None)
    engine.after_step.append(trial.end_step)
    return Attendance(engine.after_step, trial)


def _choose(checkpointing: Checkpointing, shows: bool, plan: BudgetPlan | None) -> None:
    """Recompute what ``plan`` says, and print it if ``shows``; None: no module was recomputed so far."""
    if plan is not None:
        checkpointing.follow(plan.recomputed)
        if shows:
            show(plan.table())
        return
    checkpointing.follow([name for name, _ in checkpointing.found.chosen])
    if shows:
        text = "No checkpointed module ran in the first two steps with gradients, so none could be measured"
        warnings.warn(f"{BUDGET_KEY}: {text}. All are recomputed.", stacklevel=2)


def installed(engine: Engine) -> Checkpointing | None:
    """The installed activation checkpointing, or None."""
    handles = (follower.handle for follower in followers(engine))
    return next((handle for handle in handles if isinstance(handle, Checkpointing)), None)
