"""Dispatch of operations: lists of tensors are checked once, then a native kernel or its torch reference runs.

A reference is the definition of an operation: its name, signature, documentation and arithmetic. ``operator`` makes
an operation out of it, ``step_operator`` that of an optimizer step in one pass.

Note [Skipping on the device]
    The decision to skip a step may exist on the device only. So kernels take ``found_inf`` and write nothing if it is
    not zero, without a synchronization.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lt_zero.common.places import load
from lt_zero.kernels import library
from lt_zero.kernels.header import CONSTANTS, STRUCTS

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {
    torch.float32: CONSTANTS["LT_FP32"],
    torch.bfloat16: CONSTANTS["LT_BF16"],
    torch.float16: CONSTANTS["LT_FP16"],
}
_CODES = CONSTANTS["LT_CODES"]
TAKE_CODES = {"adam_step"}  # operations that take states as codes
LOW_STATE = MASTERS = (torch.float32, torch.bfloat16)
GPU_CHUNK = 1 << 24  # on a GPU every chunk costs launches, and its temporaries memory
CHUNK = 1 << 17  # elements that a reference works on at a time: its temporaries stay in the cache


# ---- checks and addresses --------------------------------------------------------------------------------------------


def check_list(
    name: str, tensors: Sequence[Tensor], like: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> torch.dtype:
    """The common dtype of ``tensors``.

    Raises:
        ValueError: they differ from ``like`` in number, size or device, are not contiguous, or do not share one of
            ``dtypes``.
    """
    if len(tensors) != len(like):
        raise ValueError(f"{name} has {len(tensors)} tensors, but {len(like)} are needed: one for each parameter.")
    dtype, device = tensors[0].dtype, like[0].device
    # One pass per property takes a quarter of the time of one loop over thousands of tensors.
    if (
        dtype in dtypes
        and {t.dtype for t in tensors} == {dtype}
        and {t.device for t in tensors} == {device}
        and (tensors is like or list(map(Tensor.numel, tensors)) == list(map(Tensor.numel, like)))
        and all(map(Tensor.is_contiguous, tensors))
    ):
        return dtype
    for number, (tensor, other) in enumerate(zip(tensors, like, strict=True)):
        if tensor.dtype not in dtypes or tensor.dtype != dtype:
            names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(
                f"{name}[{number}] has dtype {tensor.dtype}; one dtype for all of {name} is needed, out of: {names}."
            )
        if tensor.numel() != other.numel() or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{name}[{number}] has shape {tuple(tensor.shape)} on {tensor.device}, contiguous: "
                f"{tensor.is_contiguous()}; {other.numel()} contiguous elements on {device} are needed."
            )
    return dtype


def check_scalar(name: str, scalar: Tensor | None, device: torch.device) -> None:
    """Check that ``scalar`` is None or one fp32 number on ``device``.

    Raises:
        ValueError: it is not.
    """
    if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != device):
        raise ValueError(
            f"{name} has shape {tuple(scalar.shape)}, dtype {scalar.dtype}, on {scalar.device}; "
            f"one float32 number on {device} is needed."
        )


def pointers(tensors: Sequence[Tensor]) -> Any:
    """``void *[]`` of data pointers; None for an empty list."""
    return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors)) if tensors else None


def sizes(tensors: Sequence[Tensor]) -> Any:
    """``int64_t[]`` of numbers of elements."""
    return (ctypes.c_int64 * len(tensors))(*map(Tensor.numel, tensors))


def address(tensor: Tensor | None) -> int | None:
    """The address of the first element; None for None."""
    return tensor.data_ptr() if tensor is not None else None


_loaded: dict[str, ctypes.CDLL] = {}  # by type of device: libraries that ``native`` has found


def native(device: torch.device) -> ctypes.CDLL | None:
    """The library of kernels for ``device``; None if the references run."""
    found = _loaded.get(device.type)
    if found is None and device.type in ("cpu", "cuda"):
        found = library.cpu() if device.type == "cpu" else library.cuda()
        if found is not None:
            _loaded[device.type] = found
    return found


def available(device: torch.device) -> bool:
    """True if native kernels run for tensors on ``device``; compiles them on first use."""
    return native(device) is not None


def fits(out: Tensor, value: Tensor, add: bool = False) -> bool:
    """True if ``cast_scale`` (with ``add``: ``accumulate``) accepts these tensors."""
    contiguous = value.layout is torch.strided and value.is_contiguous() and out.is_contiguous()
    dtypes = out.dtype is torch.float32 if add else out.dtype in DTYPES
    return dtypes and value.dtype in DTYPES and contiguous and value.device == out.device


def call(lib: ctypes.CDLL, operation: str, device: torch.device, *args: Any) -> None:
    """Run a kernel: on torch's threads on the CPU, on the current stream on CUDA.

    Raises:
        RuntimeError: the kernel reports an error.
    """
    if device.type == "cpu":
        code = getattr(lib, f"lt_cpu_{operation}")(*args, torch.get_num_threads())
    else:
        # CUDA launches on the current device, which need not be that of the tensors.
        with torch.cuda.device(device):
            code = getattr(lib, f"lt_cuda_{operation}")(*args, torch.cuda.current_stream(device).cuda_stream)
    if code != 0:
        library.check(lib, code)


def scratch(lib: ctypes.CDLL, tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Workspace for the partial sums of CUDA kernels that return a result; None on the CPU.

    Keep it until the kernel is launched; then it may be freed, as the allocator reuses it on the same stream.
    """
    if device.type == "cpu":
        return None
    nbytes = lib.lt_cuda_scratch(len(tensors), sizes(tensors))
    return torch.empty(max(1, nbytes), dtype=torch.uint8, device=device)


def pointer(workspace: Tensor | None) -> tuple[int, ...]:
    """The argument for ``scratch``, which kernels on the CPU do not have."""
    return (workspace.data_ptr(),) if workspace is not None else ()


# ---- operators -------------------------------------------------------------------------------------------------------


def operator(
    reference: Callable[P, R],
    run: Callable[..., Any],
    *,
    written: Collection[str],
    fake: Callable[..., Any] = lambda *args, **options: None,
    empty: Callable[[], Any] = lambda: None,
) -> Callable[P, R]:
    """The operation that ``reference`` defines, as the ``torch.library`` operator ``lt_zero::name``, on any device.

    Args:
        reference: takes lists of tensors (the first one of at least one tensor) and options; it is called
            ``name_reference``.
        run: its kernel, or ``reference`` where there is none; gets lists for missing ones.
        written: the lists that are written.
        fake: the result's shape for tracing.
        empty: the result for empty lists.
    """
    name, parameters = reference.__name__.removesuffix("_reference"), inspect.signature(reference).parameters
    lists = [key for key, parameter in parameters.items() if "Sequence" in parameter.annotation]
    options = [key for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    _register(name, _schema(reference, written), [key in written for key in parameters], run, fake)
    kernel = getattr(torch.ops.lt_zero, name)
    positional = [key for key in parameters if key not in options]

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(zip(parameters, args, strict=False))
        given.update(kwargs)
        if len(given.get(positional[0], ())) == 0:
            return empty()  # type: ignore[no-any-return]
        for key in lists:
            given[key] = list(given.get(key) or ())
        return kernel(*[given.pop(key) for key in positional if key in given], **given)  # type: ignore[no-any-return]

    operation.__name__ = operation.__qualname__ = name
    return operation


def step_operator(reference: Callable[P, None], structure: type[ctypes.Structure]) -> Callable[P, None]:
    """The operation of one optimizer step.

    Args:
        reference: takes the lists ``params``, ``grads``, states and ``outs``, then options by name.
        structure: the options as the kernel takes them, by the same names.
    """
    name, parameters = reference.__name__.removesuffix("_reference"), inspect.signature(reference).parameters
    defaults = {
        key: p.default for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }
    fields = [field for field, *_ in structure._fields_]

    def run(*tensors: list[Tensor], **given: Any) -> None:
        params, grads, *states, outs = tensors
        given = {**defaults, **given}
        has_states = given.get("momentum") != 0.0  # SGD without momentum reads no state
        described = step_tensors(params, grads, states if has_states else (), outs, codes=name in TAKE_CODES, **given)
        lib = native(params[0].device)
        if lib is None:
            reference(*tensors, **given)  # type: ignore[arg-type]
            return
        numbers = structure(*[given[field] for field in fields])
        call(lib, name, params[0].device, ctypes.byref(described), ctypes.byref(numbers))

    written = [key for key, p in parameters.items() if p.kind is not p.KEYWORD_ONLY and key != "grads"]
    return operator(reference, run, written=written)


_TYPES = {"float": "float", "bool": "bool", "Tensor": "Tensor", "Tensor | None": "Tensor?"}


def _schema(reference: Callable[..., Any], written: Collection[str]) -> str:
    """The signature of a reference as ``torch.library`` writes it."""
    signature = inspect.signature(reference)
    arguments = []
    letters = iter("abcdef")
    for key, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        if "Sequence" in parameter.annotation:
            arguments.append(f"Tensor({next(letters)}!)[] {key}" if key in written else f"Tensor[] {key}")
        else:
            default = "" if parameter.default is parameter.empty else f"={parameter.default}"
            arguments.append(f"{_TYPES[parameter.annotation]} {key}{default}")
    return f"({', '.join(arguments)}) -> {'()' if signature.return_annotation == 'None' else 'Tensor'}"


def _register(
    name: str, schema: str, written: Sequence[bool], run: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    def checked(*args: Any, **options: Any) -> Any:
        # As autograd does for torch's in-place operators: reject leaves, and detect modified saved tensors.
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(*args)):
            raise RuntimeError(f"lt_zero::{name} has no gradient: call it under `torch.no_grad()`.")
        result = run(*args, **options)
        torch.autograd.graph.increment_version(_tensors(*itertools.compress(args, written)))
        return result

    def faked(*args: Any, **options: Any) -> Any:
        devices = {t.device for t in _tensors(*args, *options.values())}
        if len(devices) > 1:  # one meta tensor among others suffices to run this
            raise ValueError(f"lt_zero::{name} got tensors on {sorted(map(str, devices))}; one device is needed.")
        return fake(*args, **options)

    torch.library.define(f"lt_zero::{name}", schema)
    torch.library.impl(f"lt_zero::{name}", "default", checked)
    torch.library.register_fake(f"lt_zero::{name}", faked)


def _tensors(*args: Any) -> list[Tensor]:
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    return [item for items in lists for item in items if isinstance(item, Tensor)]


def step_tensors(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    *,
    maximize: bool = False,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Tensor | None = None,
    codes: bool = False,
    **options: Any,
) -> ctypes.Structure:
    """Check the arguments of a step and return its ``lt_tensors``, which keeps its arrays alive, but not the tensors.

    ``codes``: states may be records of codes. Other ``options`` are ignored.

    Raises:
        ValueError: a list does not match ``params``, or a dtype is not supported.
    """
    device = params[0].device
    if (step := options.get("step", 1.0)) < 1:
        raise ValueError(f"step is {step}; steps are counted from 1.")
    param_dtype = check_list("params", params, params, MASTERS)
    grad_dtype = check_list("grads", grads, params, list(DTYPES))
    coded = codes and are_coded(*states)
    if coded:
        state_code().check(states, params)
    state_dtypes = set() if coded else {check_list("state", state, params, LOW_STATE) for state in states}
    if len(state_dtypes) > 1:
        raise ValueError(f"the optimizer's states have the dtypes {sorted(map(str, state_dtypes))}; one is needed.")
    copies = list(DTYPES) if param_dtype == torch.float32 else [param_dtype]
    out_dtype = check_list("outs", outs, params, copies) if outs else param_dtype
    _check_places(places, params)
    for name, scalar in (("scale", scale), ("clip", clip), ("found_inf", found_inf)):
        check_scalar(name, scalar, device)
    return STRUCTS["lt_tensors"](
        count=len(params),
        numel=sizes(params),
        param=pointers(params),
        param_dtype=DTYPES[param_dtype],
        grad=pointers(grads),
        state1=pointers(states[0]) if states else None,
        state2=pointers(states[1]) if len(states) > 1 else None,
        out=pointers(outs),
        grad_dtype=DTYPES[grad_dtype],
        state_dtype=_CODES if coded else DTYPES[next(iter(state_dtypes), torch.float32)],
        out_dtype=DTYPES[out_dtype],
        maximize=maximize,
        scale=address(scale),
        clip=address(clip),
        found_inf=address(found_inf),
        levels=address(state_code().levels(device)) if coded else None,
        places=address(places),
        place_count=len(places) if places is not None else 0,
    )


def _check_places(places: Tensor | None, params: Sequence[Tensor]) -> None:
    if places is None:
        return
    columns = len(STRUCTS["lt_place"]._fields_)
    device = params[0].device
    fits = places.dtype == torch.int64 and places.is_contiguous() and places.device == device
    if not fits or places.dim() != 2 or places.shape[1] != columns or len(places) == 0:
        raise ValueError(
            f"places has shape {tuple(places.shape)}, dtype {places.dtype}, on {places.device}; contiguous rows of "
            f"{columns} int64 on {device} are needed."
        )
    if params[0].dtype != torch.bfloat16:
        raise ValueError(f"params has dtype {params[0].dtype}; only bfloat16 is rounded at random. Leave places out.")


def are_coded(*states: Sequence[Tensor]) -> bool:
    """True if states are records of codes (moments.py)."""
    return any(tensor.dtype == torch.uint8 for state in states for tensor in state[:1])


@dataclass(frozen=True)
class StateCode:
    """Coded optimizer states, as far as steps ask about them.

    Attributes:
        check: raises ValueError if states are no codes for these parameters.
        levels: returns the numbers that codes stand for, as the kernels read them, on a device.
        encode: writes values as codes to a row; whether the values have a sign.
        decode: the first elements (so many, 1D fp32) of a row; whether they have a sign.
    """

    check: Callable[[Sequence[Sequence[Tensor]], Sequence[Tensor]], None]
    levels: Callable[[torch.device], Tensor]
    encode: Callable[[Tensor, bool, Tensor], None]
    decode: Callable[[Tensor, int, bool], Tensor]


@functools.cache
def state_code() -> StateCode:
    """The code of states that are codes, which is imported when a step gets such states."""
    found: StateCode = load("lt_zero.kernels.moments:CODE", "optimizer_states.dtype", "moments in 8 bits")
    return found


@functools.cache
def random_rounding() -> Callable[[Tensor, Tensor, Tensor, int, int], None]:
    """``round_by_places`` (rounding.py), which is imported when a step gets places."""
    found: Callable[[Tensor, Tensor, Tensor, int, int], None] = load(
        "lt_zero.kernels.rounding:round_by_places", "bf16.stochastic_rounding", "stochastic rounding"
    )
    return found


# ---- for references --------------------------------------------------------------------------------------------------


def skipped(found_inf: Tensor | None) -> bool:
    """True if a step is skipped. Waits for the device."""
    return found_inf is not None and bool(found_inf)


def factor_of(scale: Tensor | None, clip: Tensor | None) -> Tensor | None:
    """The factor of the gradients: ``scale * clip`` in fp32; None if it is 1."""
    if scale is None or clip is None:
        return scale if clip is None else clip
    return scale * clip


def gradient(grad: Tensor, factor: Tensor | None, maximize: bool) -> Tensor:
    """The fp32 gradient that the update uses; a new tensor if it differs from ``grad``."""
    g = grad.float()
    g = g * factor if factor is not None else g
    return g.neg() if maximize else g


def store(target: Tensor | None, value: Tensor) -> None:
    """Round a state or the weights to where they are kept; no-op if that is the same tensor, or there is none."""
    if target is not None and target is not value:
        target.copy_(value)


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of fp32 numbers; torch's may be off by one ulp on the CPU."""
    return x.double().sqrt_().float()


def chunks(*lists: Sequence[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Cut the tensors of all lists alike: yields one 1D chunk per list, of at most ``CHUNK`` elements (``GPU_CHUNK``).

    A missing or empty list yields None.
    """
    count = len(lists[0] or ())
    for number in range(count):
        flat = [tensors[number].view(-1) if tensors else None for tensors in lists]
        size = CHUNK if lists[0] is None or lists[0][number].device.type == "cpu" else GPU_CHUNK
        for lo in range(0, max(row.numel() for row in flat if row is not None), size):
            yield tuple(row[lo : lo + size] if row is not None else None for row in flat)
