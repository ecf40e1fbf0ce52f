"""Guarded parameters: sentinels for released values, and interception of functions that need values.

A sharded parameter keeps its identity, shape and dtype; only ``p.data`` changes. While its bucket is released,
``p.data`` is one NaN expanded to the full shape, and the object's class is a subclass of its own class that intercepts
every torch function called on it. Functions that need only metadata (shape, dtype, grad, ...) pass. For all others the
engine gathers the bucket inside a forward, scatters a full-size ``copy_`` (so ``load_state_dict`` works without a
context), makes views that have metadata only (lazy_tensor.py), and otherwise raises an error that names the parameter.
A parameter in use has its own class back, so the hot path costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lt_zero.common.compat import announce_data_reads, is_fake, is_wrapper, plain_tensors, without_torch_function


class Owner(Protocol):
    """Handles functions that are called on guarded parameters (an engine).

    It owns the first of ``parameters``; the others may have other owners, if code uses several models together.
    """

    def on_guarded_use(self, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
_readers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what is called before ``parameter.data`` is read
_read_ids: set[int] = set()  # the ids of these parameters, and of some that are gone
_guard_classes: dict[type, type] = {}  # a parameter's own class -> the class it has while guarded
_guards: set[type] = set()

# Functions that need no values. Assigning .grad and .requires_grad (zero_grad, toggle_optimizer, freezing) does not.
_GETTERS = (
    ("dtype", "shape", "ndim", "itemsize", "nbytes", "device", "layout", "names", "_version", "_base", "is_leaf"),
    ("requires_grad", "grad", "grad_fn", "grad_dtype", "retains_grad", "output_nr", "volatile", "_backward_hooks"),
    ("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_nested", "is_mkldnn", "is_quantized"),
    ("_post_accumulate_grad_hooks",),
)
_METHODS = (
    ("size", "numel", "nelement", "dim", "ndimension", "stride", "element_size", "storage_offset", "get_device"),
    ("is_floating_point", "is_complex", "is_contiguous", "is_pinned", "is_inference", "is_shared", "is_same_size"),
    ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__"),
    ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "new_tensor"),
)
_FUNCTIONS = (torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like)
PASSING: set[Any] = {*_FUNCTIONS, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
PASSING |= {torch.result_type, torch.randint_like, torch._has_compatible_shallow_copy_type}
PASSING |= {getattr(Tensor, name).__get__ for row in _GETTERS for name in row if hasattr(Tensor, name)}
PASSING |= {getattr(Tensor, name) for row in _METHODS for name in row if hasattr(Tensor, name)}
PASSING |= {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
# Functions that look at the metadata of their other arguments, and at the values of the first one.
_LIKE = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
# Conversions, of which many change nothing: ``module.to(the device it is on)``, ``module.float()``.
_CONVERSIONS = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
_CONVERSIONS |= {Tensor.type}
_ASSIGN_DATA = getattr(Tensor, "data").__set__  # noqa: B009
# A sentinel's strides are 0; the parameter is contiguous.
_STRIDES = {Tensor.stride, Tensor.is_contiguous}
_PASSING = PASSING - _STRIDES
_VIEWS = (
    ("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze", "expand"),
    (
        "expand_as",
        "broadcast_to",
        "t",
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "movedim",
        "moveaxis",
        "adjoint",
    ),
    (
        "narrow",
        "select",
        "split",
        "split_with_sizes",
        "tensor_split",
        "chunk",
        "unbind",
        "unfold",
        "diagonal",
        "detach",
    ),
    ("hsplit", "vsplit", "dsplit", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "view_as_real"),
    ("view_as_complex", "__getitem__", "__iter__", "alias"),
)
# Functions that return views of a tensor (in most cases: what copies asks for values).
VIEWS: set[Any] = {getattr(where, n) for where in (Tensor, torch) for row in _VIEWS for n in row if hasattr(where, n)}
VIEWS |= {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
# Writes to the results of these do not change the parameter's version counter.
HANDS_OUT = {Tensor.detach, getattr(Tensor, "data").__get__}  # noqa: B009


def guarded_parameters(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if is_guarded(value):
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from guarded_parameters(item)


def _guarded_function(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    # ``Tensor.type`` without a dtype only returns the name of one, so it needs no values.
    if func in _PASSING or (func is Tensor.type and len(args) == 1 and not kwargs):
        with without_torch_function():
            return func(*args, **kwargs)
    if changes_nothing(func, args, kwargs):
        return args[0] if func in _CONVERSIONS else None
    if func in _LIKE and not is_guarded(args[0]):
        return func(*(_plain(value) for value in args), **{key: _plain(value) for key, value in kwargs.items()})
    if func in _STRIDES:
        like = _plain(args[0])
        like = like if is_wrapper(like) else torch.empty(like.shape, device="meta")
        return func(like, *args[1:], **kwargs)
    parameters = []
    for parameter in guarded_parameters((args, kwargs)):
        if parameter in _owners:
            parameters.append(parameter)
        else:
            # No owner knows a deep copy: it is an ordinary parameter of its own.
            parameter.__class__ = type(parameter).__mro__[1]
    if not parameters:
        return func(*args, **kwargs)
    owners = [owner_of(parameter) for parameter in parameters]
    owner = owners[0]
    if owner is None or None in owners:
        raise RuntimeError(
            "A parameter of a model whose ZeRO engine is gone was read. Export or consolidate the weights before the "
            "strategy is dropped (`trainer.strategy.export(path)`), or load them from a checkpoint."
        )
    return owner.on_guarded_use(parameters, func, args, kwargs)


def changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a function of a tensor without values, ``args[0]``, returns it, or assigns its own values to it.

    ``module.to`` converts each parameter, and its gradient, and assigns the result to its ``data``.
    """
    if func == _ASSIGN_DATA:
        return args[1] is args[0]
    if func not in _CONVERSIONS or kwargs.get("memory_format") is not None:
        return False
    with without_torch_function():
        me = args[0]
        probe = torch.empty(0, dtype=me.dtype, device=me.device)
        return func(probe, *args[1:], **kwargs) is probe


def _plain(value: Any) -> Any:
    """A guarded parameter as a tensor of its shape, dtype and device; anything else itself."""
    if not isinstance(value, Tensor) or not is_guarded(value):
        return value
    with without_torch_function():
        return value.detach()


def describe(parameter: Tensor) -> str:
    """The text that ``repr`` shows of a released parameter."""
    with without_torch_function():
        return (
            f"ReleasedTensor(shape={tuple(parameter.shape)}, dtype={parameter.dtype}, "
            f"device={str(parameter.device)!r}, requires_grad={parameter.requires_grad})"
        )


def called_on_guarded(
    parameter: Tensor, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of a subclass that is no torch function, and needs the values of a guarded ``parameter``."""
    return _guarded_function(type(parameter), method, (), args, kwargs)


def called(func: Any) -> str:
    """The name of a torch function as users write it: ``.data``, not ``__get__``."""
    name = str(getattr(func, "__name__", func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return f".{attribute}" if name in ("__get__", "__set__") and attribute else name


def is_guarded(tensor: Tensor) -> bool:
    return type(tensor) in _guards


def shares_storage(tensor: Tensor, flat: Tensor) -> bool:
    """True if ``tensor`` is a view of ``flat``."""
    if is_guarded(tensor) or is_fake(tensor) or tensor.layout is not torch.strided or tensor.device != flat.device:
        return False
    address = flat.untyped_storage().data_ptr()
    return any(inner.untyped_storage().data_ptr() == address for inner in plain_tensors(tensor))


def own(parameter: Parameter, owner: Callable[[], Owner | None]) -> None:
    """Make ``owner()`` (a weak reference) the owner of ``parameter``."""
    _owners[parameter] = owner


def disown(parameter: Parameter) -> None:
    """End ``own``, and ``watch_data``."""
    _owners.pop(parameter, None)
    _readers.pop(parameter, None)


def watch_data(parameter: Parameter, call: Callable[[], object]) -> None:
    """Call ``call()``, which has no strong reference to ``parameter``, before ``parameter.data`` is read."""
    announce_data_reads(_announce, _read_ids)
    _readers[parameter] = call
    if len(_read_ids) > 2 * len(_readers) + 1000:
        _read_ids.intersection_update([id(known) for known in _readers])
    _read_ids.add(id(parameter))


def _announce(parameter: Parameter) -> None:
    if (call := _readers.get(parameter)) is not None:
        call()


def owner_of(parameter: Tensor) -> Owner | None:
    """The owner of ``parameter``: an engine, or None for an ordinary parameter."""
    owner = _owners.get(parameter)
    return owner() if owner is not None else None


def guard(parameter: Parameter) -> None:
    """Let the owner of ``parameter`` handle every use that needs values."""
    cls = type(parameter)
    if cls in _guards:
        return
    if cls not in _guard_classes:
        body: dict[str, Any] = {"__torch_function__": classmethod(_guarded_function)}
        _guard_classes[cls] = type(f"Released{cls.__name__}", (cls,), body)
        _guards.add(_guard_classes[cls])
    parameter.__class__ = _guard_classes[cls]


def unguard(parameter: Parameter) -> None:
    """Give ``parameter`` its own class back; its data must be valid."""
    cls = type(parameter)
    if cls in _guards:
        parameter.__class__ = cls.__mro__[1]


def sentinel(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the parameter's shape, dtype and device that takes the memory of one element and reads as NaN."""
    fill = float("nan") if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    return torch.full((), fill, dtype=parameter.dtype, device=parameter.device).expand(shape)


def sentinels(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """A ``sentinel`` of each of ``shapes``."""
    with torch.inference_mode(False):
        # The clone gives each sentinel an address of its own; the expanded tensor has one for all.
        one_each = sentinel(like, (len(shapes),)).clone()
        return [one.expand(shape) for one, shape in zip(one_each.unbind(), shapes, strict=True)]
