"""All uses of private APIs of torch, Lightning, Hydra and OmegaConf, each with the versions it was checked on.

No other module of the package may access a private name: when an internal moves, only these files change. This one has
those of torch that every run uses.
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd import profiler as torch_profiler
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import _wrap as body_of_started_rank
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint
from typing_extensions import ParamSpec

from lt_zero.common.compat.of_lightning import SignalOverride as SignalOverride
from lt_zero.common.compat.of_lightning import announce_compute_dtype as announce_compute_dtype
from lt_zero.common.compat.of_lightning import announce_device as announce_device
from lt_zero.common.compat.of_lightning import asked_precision as asked_precision
from lt_zero.common.compat.of_lightning import counts_batches as counts_batches
from lt_zero.common.compat.of_lightning import is_interactive as is_interactive
from lt_zero.common.compat.of_lightning import is_plain_closure as is_plain_closure
from lt_zero.common.compat.of_lightning import load_within as load_within
from lt_zero.common.compat.of_lightning import logged_step as logged_step
from lt_zero.common.compat.of_lightning import module_from_checkpoint as module_from_checkpoint
from lt_zero.common.compat.of_lightning import open_first as open_first
from lt_zero.common.compat.of_lightning import override_dtype as override_dtype
from lt_zero.common.compat.of_lightning import rename_weights as rename_weights
from lt_zero.common.compat.of_lightning import set_device_mesh as set_device_mesh

P = ParamSpec("P")
T = TypeVar("T")

# First and last checked version of each package; `lt-zero doctor` compares them with the installed ones.
CHECKED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.15"),
    "lightning": ("2.6", "2.6"),
    "omegaconf": ("2.3", "2.3"),
    "hydra-core": ("1.3.2", "1.3.8"),
    "transformers": ("5.24", "5.24"),  # if it is installed
}


# ---- Checked on torch 2.11 to 2.15 -----------------------------------------------------------------------------------

# Functions that torch.compile calls on a parameter's gradient when it traces a module. Checked on torch 2.13 only.
TRACED = {torch.Tensor._is_view, torch.Tensor.is_conj, torch.Tensor.is_neg, torch.Tensor.untyped_storage}


def never_a_graph(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: torch.compile makes no graph of a call that code outside of all graphs makes.

    What ``function`` calls may become graphs. Called inside of a graph it is traced as any other.
    """
    dynamo = torch._C._dynamo.eval_frame  # the part in C++: the one in Python takes a second to import
    strategy = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


def evaluated_in_tracing(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: torch.compile calls it while it traces, and keeps the result as a constant.

    As ``torch.compiler.assume_constant_result``, which imports Dynamo. That takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ``__torch_function__`` of subclasses that define ``__torch_dispatch__`` only.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def process_groups() -> list[Any]:
    """The process groups of this process that are not destroyed."""
    return list(distributed_c10d._world.pg_map)


def process_groups_with_stores() -> dict[Any, Any]:
    """The process groups of this process that are not destroyed, each with its backend and its store."""
    return dict(distributed_c10d._world.pg_map)


def is_started_rank() -> bool:
    """True if torch.multiprocessing has started this process as one of several that run the same function.

    Launchers start ranks in this way (Lightning's, Accelerate's); workers of a DataLoader are started in another one.
    """
    return getattr(multiprocessing.current_process(), "_target", None) is body_of_started_rank


def destroy_group(group: Any) -> None:
    """Destroy a process group of this process, and the list that torch keeps for each name after that.

    Raises:
        ValueError: it was destroyed before, or its default group was.
    """
    torch.distributed.destroy_process_group(group)
    tags = distributed_c10d._world.tags_to_pg
    for tag in [tag for tag, groups in tags.items() if not groups]:
        del tags[tag]


class RecordedLaunch(NamedTuple):
    """A launch in torch's flight recorder.

    ``group``: the name of its process group, which a later group may have again. ``group_id``: a number that no other
    group of this process has. ``number``: that of the collective in its group, by which backends match collectives, so
    it is the same on all ranks; 0 for sends and receives, which have none. ``operation``: with its backend
    ("gloo:all_reduce"). ``ended``: whether it has ended.
    """

    group: str
    group_id: int
    number: int
    operation: str
    ended: bool


def recorded_launches() -> list[RecordedLaunch]:
    """The last launches of this process, oldest first; [] if the recorder is off (``TORCH_FR_BUFFER_SIZE=0``)."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = json.loads(dump()).get("entries", []) if dump is not None else []
        for entry in entries:
            number = 0 if entry["is_p2p"] else entry["collective_seq_id"]
            group = entry["process_group"][0]
            found.append(RecordedLaunch(group, entry["pg_id"], number, entry["profiling_name"], entry["retired"]))
    return found


def count_of_launches(group: Any) -> int:
    """A number that changes with each collective, send and receive that this process launches in a process group."""
    return int(group._get_sequence_number_for_group())


def count_of_groups() -> int:
    """The number of process groups that this process has made. All ranks make all groups, in one order."""
    return int(distributed_c10d._world.group_count)


def group_in_making(frame: Any) -> tuple[int, list[int]] | None:
    """The process group that a call of torch makes, which waits for the ranks of it; ``frame``: its innermost frame.

    Returns the number of the group, from 0, and the global ranks of it; None if it makes none, or one without a number.
    """
    while frame is not None and frame.f_code.co_filename == distributed_c10d.__file__:
        if frame.f_code is distributed_c10d._new_group_with_tag.__code__:
            name = str(frame.f_locals.get("group_name"))
            return (int(name), list(frame.f_locals["ranks"])) if name.isdecimal() else None
        frame = frame.f_back
    return None


# ``OpType`` of torch's works, as backends and the flight recorder name the operations.
_OPERATIONS = {
    0: "broadcast",
    1: "allreduce",
    3: "reduce",
    4: "allgather",
    5: "allgather",
    7: "gather",
    8: "scatter",
    9: "reducescatter",
    10: "alltoall",
    11: "alltoall",
    15: "barrier",
    16: "reducescatter",
}


def operation_of(work: Any) -> str | None:
    """The collective of a work; None for sends and receives, and for what is not known."""
    return _OPERATIONS.get(work._get_op_type())


def abort_nccl(groups: Iterable[Any]) -> None:
    """End all collectives of NCCL in ``groups``, which have it, and those to come; may block.

    In one operation, as torch's ``_abort_process_group`` does for all groups, which also ends gloo's and forgets the
    default group: one after the other could deadlock (pytorch issue 119797).
    """
    found = [group._get_backend(torch.device("cuda")) for group in groups]
    backends = [getattr(backend, "wrapped_pg", backend) for backend in found]  # wrapped by TORCH_DISTRIBUTED_DEBUG
    backends[0]._group_start()
    for backend in reversed(backends):
        backend.abort()
    backends[0]._group_end()


def name_of_split(ranks: list[int]) -> tuple[bool, int]:
    """The name of a group of ``ranks`` that ``dist.split_group`` would make: whether it is taken, and the number in it.

    The number is that of this process's groups. It falls when some are destroyed, so a name may come twice.
    """
    world = distributed_c10d._world
    name = distributed_c10d._process_group_name(ranks, use_hashed_name=True)
    return name in world.pg_names.values(), len(world.pg_names)


def process_group_backends() -> set[str]:
    """The names of backends that this torch has."""
    return set(torch.distributed.Backend.backend_list) - {torch.distributed.Backend.UNDEFINED}


def replace_tensor(parameter: torch.Tensor, made: torch.Tensor) -> None:
    """Give ``parameter`` the tensor of ``made``, which may be on another device or in another dtype.

    ``parameter`` stays the same object with its class, attributes, hooks and weak references, and loses its gradient.
    ``torch.utils.swap_tensors`` would move class and attributes to the other object, and refuses objects with weak
    references, which caches of torch and of users hold, some until the garbage collector runs. They refer to the Python
    object, which stays.

    Raises:
        RuntimeError: code in C++ has a weak reference to the tensor.
    """
    with without_torch_function():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        torch._C._swap_tensor_impl(parameter, made)
        if parameter.requires_grad:
            parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks
    if isinstance(parameter, DTensor) and isinstance(made, DTensor):
        parameter._local_tensor, parameter._spec = made._local_tensor, made._spec


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def clean_name(name: str) -> str:
    """A name of a parameter, buffer or module without what torch.compile, FSDP and checkpoint wrappers insert."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` wraps other tensors that have its values, as a DTensor does."""
    return is_traceable_wrapper_subclass(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """True if torch.export or torch.compile traces with ``tensor``, which has no memory."""
    known = sys.modules.get("torch._subclasses.fake_tensor")
    return known is not None and isinstance(tensor, known.FakeTensor)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage inside a wrapper, such as the result of a collective that runs; else ``tensor``."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the running backward.

    Only valid inside a hook of a running backward. DDP and FSDP2 rely on the same call.
    """
    Variable._execution_engine.queue_callback(callback)


def without_torch_function() -> Any:
    """Context in which tensor subclasses behave like plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator with the effects of ``torch.inference_mode(False)`` and ``torch.no_grad()``.

    It is for functions that make tensors which outlive the validation in which they may be called: in inference mode
    these could not be changed later.
    """

    @functools.wraps(function)
    def ordinarily(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return ordinarily


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator with the effect of ``torch.no_grad()`` at a tenth of its time: small functions take no longer."""

    @functools.wraps(function)
    def in_no_grad(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return in_no_grad


class WithoutGrad:
    """Context with the effect of ``torch.no_grad()`` at a tenth of its time, for a part of a function."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def refuse_reentrant_checkpoint(unit: str) -> None:
    """Raise if the forward that is running inside backward belongs to a re-entrant activation checkpoint."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise RuntimeError(
                f"Module {unit!r} is recomputed by torch.utils.checkpoint with use_reentrant=True, which runs a "
                "backward inside backward and hides when gradients are complete. Pass use_reentrant=False; to models "
                "of transformers gradient_checkpointing_kwargs={'use_reentrant': False}, or enable it before lt_zero "
                "gets the model, which then does so."
            )
        frame = frame.f_back


def replace_reentrant_checkpoints(module: torch.nn.Module) -> bool:
    """Make the activation checkpoints of transformers' models non-re-entrant; returns whether some were re-entrant.

    Their modules keep a partial function of torch's ``checkpoint``. Checked on transformers 5.24.
    """
    found = False
    for child in module.modules():
        function = child.__dict__.get("_gradient_checkpointing_func")
        if not isinstance(function, functools.partial) or function.func is not checkpoint:
            continue
        if function.keywords.get("use_reentrant", True) is not False:
            child.__dict__["_gradient_checkpointing_func"] = functools.partial(function, use_reentrant=False)
            found |= bool(child.__dict__.get("gradient_checkpointing", True))
    return found


def in_transform() -> bool:
    """True if a function that torch.func transforms (grad, vmap, jvp, jacrev, ...) is running."""
    return torch._C._functorch.maybe_current_level() is not None


@evaluated_in_tracing  # and traced again for another level of transforms
def asks_for_tangents() -> bool:
    """True if forward-mode derivatives or transforms of torch.func may be asked for here."""
    return in_transform() or torch.autograd.forward_ad._current_level >= 0


@evaluated_in_tracing
def running_transform() -> str:
    """Name of the transform that runs the calling function (torch.func or torch.jit.trace); "" if none does."""
    if in_transform():
        return "a transform of torch.func (grad, vmap, jvp, jacrev, ...)"
    return "torch.jit.trace" if torch._C._is_tracing() else ""


def outside_of_transforms() -> Any:
    """Context in which torch.func's transforms are suspended."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is a differentiable view of, or None."""
    return tensor._base


def wrapper_tensor(
    cls: type[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None = None,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """A tensor of a subclass with shape, dtype, device and strides (default: contiguous), but no memory."""
    device = device or torch.device("cpu")
    # The mode is left only where it is on, because entering a context of it is slow.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        size = torch.Size(shape)
        return torch.Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=device)


def compiled_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile(module)`` wraps, or the module itself."""
    return module._modules.get("_orig_mod") or module if type(module).__name__ == "OptimizedModule" else module


@functools.cache
def aliased_arguments(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Arguments (positions, names) that an operator of torch writes to or returns views of."""
    found = [(i, argument.name) for i, argument in enumerate(func._schema.arguments) if argument.alias_info is not None]
    return frozenset(i for i, _ in found), frozenset(name for _, name in found)


@functools.cache
def written_arguments(func: Any) -> frozenset[str]:
    """Names of the arguments that an operator of torch writes to."""
    found = (argument for argument in func._schema.arguments if argument.alias_info is not None)
    return frozenset(argument.name for argument in found if argument.alias_info.is_write)


@functools.cache
def is_view(func: Any) -> bool:
    """True if an operator of torch returns views of its first argument, and writes to none."""
    if not hasattr(func, "_schema") or written_arguments(func):
        return False
    return any(result.alias_info is not None for result in func._schema.returns)


def argument_names(func: Any) -> list[str]:
    """Names of an operator's arguments, in order."""
    return [argument.name for argument in func._schema.arguments]


def storage_info(file: str, offset: int, nbytes: int) -> Any:
    """The location of a chunk of a sharded checkpoint for torch's FileSystemReader."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes)


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of ``tensor``, which each in-place write increments."""
    with without_torch_function():
        return int(tensor._version)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """``version_of`` each tensor."""
    with without_torch_function():
        return [tensor._version for tensor in tensors]


def are_unchanged(tensors: Sequence[torch.Tensor], versions: list[int], addresses: list[int]) -> bool:
    """True if the ``tensors`` have these version counters, and these addresses of their data."""
    with without_torch_function():
        counted = [tensor._version for tensor in tensors]
        return counted == versions and [tensor.data_ptr() for tensor in tensors] == addresses


_DATA: Any = torch._C.TensorBase.data  # the descriptor


def announce_data_reads(announce: Callable[[torch.nn.Parameter], object], ids: set[int]) -> None:
    """Call ``announce(parameter)`` before any code reads ``parameter.data``. Only the first call has an effect.

    ``ids``: only of parameters with one of these ids, a set that the caller goes on changing. Others are fragments, of
    which optimizers read ``data``, and those of other models: reading them should cost next to nothing.

    What is written to ``parameter.data`` changes no version counter, so this is the only trace that a write leaves.
    Compiled code does not call it, and its writes change the counter.
    """
    if "data" in vars(torch.nn.Parameter):
        return

    get = _DATA.__get__

    def read(parameter: torch.nn.Parameter) -> Any:
        if id(parameter) in ids:
            announce(parameter)
        return get(parameter)

    torch.nn.Parameter.data = property(read, _DATA.__set__)  # type: ignore[assignment]


def can_assign_data(parameter: torch.nn.Parameter, value: torch.Tensor) -> bool:
    """True if torch lets ``parameter.data`` become ``value``: not from the host to a device of PrivateUse1 or back."""
    return bool(torch._has_compatible_shallow_copy_type(parameter, value))


def assign_data(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set ``parameter.data`` to ``value``, also where torch cannot: the object with its class and attributes stays.

    Where torch cannot, ``parameter`` loses its gradient.

    Raises:
        RuntimeError: torch cannot, and code in C++ has a weak reference to ``parameter``.
    """
    if can_assign_data(parameter, value):
        parameter.data = value
        return
    # ``data`` has a version counter of its own, which ``parameter`` gets, as it would by assignment.
    replace_tensor(parameter, torch.nn.Parameter(value.data, parameter.requires_grad))


# A number that identifies the storage of a tensor as long as it lives. Called for each tensor that autograd saves.
storage_key: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


def storage_references(storage: torch.UntypedStorage) -> int:
    """The number of tensors, views and Python objects that refer to ``storage``."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def held_by_autograd(parameter: torch.nn.Parameter) -> bool:
    """True if a node of autograd has saved ``parameter`` itself, outside of saved-tensor hooks."""
    # One reference is Python's, one that of the node that accumulates the gradient.
    return int(parameter._use_count()) > (2 if parameter.requires_grad else 1)  # type: ignore[attr-defined]


def python_references(parameter: torch.nn.Parameter) -> int:
    """The number of Python objects that refer to ``parameter``, up to a constant."""
    held_in_cpp = _references_from_cpp() and parameter._use_count() > 1  # type: ignore[attr-defined]
    return sys.getrefcount(parameter) - int(held_in_cpp)


@functools.cache
def _references_from_cpp() -> bool:
    """True if a tensor that C++ code holds as well counts one more reference in Python."""
    with torch.inference_mode(False), torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(1))
        before = sys.getrefcount(parameter)
        held = -parameter  # by the node that accumulates its gradient
        return sys.getrefcount(parameter) > before and held.requires_grad


def saves_under_hooks() -> bool:
    """True if saved-tensor hooks may be entered, which transforms of ``torch.func`` forbid."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def saved_tensor_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost saved-tensor hooks (pack, unpack) that are entered on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def leave_for_transforms(left: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``left()`` around each transform of ``torch.func`` that runs under no saved-tensor hooks.

    Such a transform disables the hooks by this function of torch's, which raises if there are any. Idempotent.
    """
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    if getattr(disable, "leaves_hooks", False):
        return

    @contextmanager
    def leave_and_disable(error_message: str) -> Iterator[None]:
        with left(), disable(error_message):
            yield

    leave_and_disable.leaves_hooks = True  # type: ignore[attr-defined]
    torch.autograd.graph.disable_saved_tensors_hooks = leave_and_disable


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All hooks around ``optimizer.step``, global ones included."""
    everywhere = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return [hook for hooks in (*everywhere, *own) for hook in hooks.values()]


def is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """True if ``Optimizer.__init__`` has run, which makes the tables of hooks; some wrappers never call it."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "_optimizer_state_dict_pre_hooks")


def bare_step(optimizer: torch.optim.Optimizer) -> Any:
    """``step`` of the optimizer's class without the hooks around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def in_running_backward() -> bool:
    """True if the calling thread is executing a backward."""
    return backward_id() != -1


def backward_id() -> int:
    """The ID of the backward that the calling thread executes, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


# Returns True if the backward that the calling thread executes retains its graph; True outside of one, too.
retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def profiling() -> bool:
    """True if a profiler of torch is recording in this process, ``emit_nvtx`` included.

    ``record_function`` costs microseconds even without a profiler, so callers check first.
    """
    return torch_profiler._is_profiler_enabled
