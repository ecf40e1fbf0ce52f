"""``deepspeed.zero`` and what belongs to it: sharded parameters, leaf modules, estimates of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.checkpoint.cast import some
from lt_zero.core.engine.guard import is_guarded, owner_of
from lt_zero.planning.estimate import settings_table
from lt_zero.training.loop.access import local_master

# ---- parameters ------------------------------------------------------------------------------------------------------


class ZeroParamStatus(Enum):
    """The states that DeepSpeed gives to a parameter, in ``ds_status``."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Status:
    """``ds_status``: equals the member of ``ZeroParamStatus`` that holds for a parameter now.

    While the model runs, a parameter that is used is gathered: it is available without ``GatheredParameters``.
    """

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def now(self) -> ZeroParamStatus:
        """The member that holds now."""
        parameter = self._parameter()
        if parameter is None or not is_guarded(parameter) or getattr(owner_of(parameter), "running", False):
            return ZeroParamStatus.AVAILABLE
        return ZeroParamStatus.NOT_AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self.now() is (other.now() if isinstance(other, _Status) else other)

    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        """Pickle the member that holds now: a parameter in a file has no engine."""
        return ZeroParamStatus, (self.now().value,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.now(), name)


def _part(parameter: Parameter) -> Tensor:
    """``ds_tensor``: a copy of the elements of a sharded parameter that this rank has (1D, in the parameter's dtype).

    Writing to it is an error of torch: it would change nothing.
    """
    if "ds_id" not in parameter.__dict__:
        raise AttributeError("ds_tensor: only parameters that stage 3 shards have it.")
    with torch.inference_mode():  # its tensors refuse writes
        own: Any = local_master(parameter).to(parameter.dtype, copy=True)
        own.ds_numel = own.numel()
    return own  # type: ignore[no-any-return]


_numbers = count()  # of the parameters of all models


def mark_parameters(model: nn.Module) -> None:
    """Give the parameters of a sharded model what scripts and libraries ask: ``ds_id``, ``ds_status``, their sizes,
    ``ds_persist``, which is True for those that stay whole, and ``ds_active_sub_modules``, an empty set. Give its
    modules ``ds_external_parameters()``, which has none.

    ``ds_tensor`` is computed when it is asked for, so it is an attribute of their class.
    """
    setattr(Parameter, "ds_tensor", property(_part))  # noqa: B010
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = _no_external_parameters
    for parameter in model.parameters():
        sizes = {"ds_id": next(_numbers), "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
        kept = {"ds_persist": not is_guarded(parameter), "ds_status": _Status(parameter)}
        for name, value in {**sizes, **kept, "ds_active_sub_modules": set()}.items():
            setattr(parameter, name, value)


def _no_external_parameters() -> Iterator[tuple[str, Parameter]]:
    """Names and parameters that were registered with a module that does not own them: none, see
    ``register_external_parameter``.
    """
    return iter(())


class ZeroParamType(Enum):
    """The kinds that DeepSpeed gives to a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class OffloadDeviceEnum(str, Enum):
    """Places that states are offloaded to: the values of ``offload_optimizer.device`` and ``offload_param.device``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of states that DeepSpeed's ``engine.offload_states`` takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Do nothing: a weight that is used outside of its module is gathered.

    Raises:
        TypeError: the arguments are no module and parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, Parameter):
        raise TypeError(
            f"register_external_parameter({type(module).__name__}, {type(parameter).__name__}): pass a module and one "
            "of its parameters, or remove the call, which is not needed."
        )


unregister_external_parameter = register_external_parameter


def is_zero_param(parameter: Any) -> bool:
    """True if a parameter is one of an engine."""
    return isinstance(parameter, Parameter) and owner_of(parameter) is not None


# ---- modules that are gathered as one unit at stage 3: marked in the model -------------------------------------------


_MARK = "_z3_leaf"


def leaf_modules(model: Any) -> list[nn.Module]:
    """The marked modules of a model."""
    return [m for m in model.modules() if m.__dict__.get(_MARK)] if isinstance(model, nn.Module) else []


get_z3_leaf_modules = leaf_modules


def z3_leaf_module(module: nn.Module) -> bool:
    """True if a module is marked."""
    return bool(module.__dict__.get(_MARK))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module, or take its mark away."""
    object.__setattr__(model, _MARK, bool(flag))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their class, or its name; call it before ``initialize``. Returns them.

    Raises:
        ValueError: there are none.
    """
    wanted = _listed(leaf_module_classes, "leaf_module_classes")
    return _marked(model, lambda _, module: _is_of(module, wanted), True, wanted if raise_if_not_found else None)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of ``set_z3_leaf_modules`` away. Returns the modules.

    Raises:
        ValueError: there are none.
    """
    wanted = _listed(leaf_module_classes, "leaf_module_classes")
    return _marked(model, lambda _, module: _is_of(module, wanted), False, wanted if raise_if_not_found else None)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names. Returns them, and the names without a module.

    Raises:
        ValueError: there is such a name.
    """
    return _marked_by_name(model, _listed(module_names, "module_names"), str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their full names. Returns them, and the ends without a module.

    Raises:
        ValueError: there is such an end.
    """
    wanted = _listed(module_name_suffixes, "module_name_suffixes")
    return _marked_by_name(model, wanted, str.endswith, raise_if_not_found)


def _listed(values: Any, name: str) -> list[Any]:
    if isinstance(values, (str, type)) or not isinstance(values, Sequence):
        raise TypeError(f"{name}={values!r} is no list: pass [{getattr(values, '__name__', repr(values))}].")
    return list(values)


def _is_of(module: nn.Module, wanted: Sequence[type | str]) -> bool:
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return any(isinstance(module, one) if isinstance(one, type) else one in names for one in wanted)


def _marked_by_name(
    model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], required: bool
) -> tuple[list[nn.Module], list[str]]:
    names = [name for name, _ in model.named_modules()]
    lacks = [one for one in wanted if not any(fits(name, one) for name in names)]
    if lacks and required:
        raise ValueError(
            f"{type(model).__name__} has no modules named {lacks}: it has {some(names)}. Name one of them, or pass "
            "raise_if_not_found=False."
        )
    return _marked(model, lambda name, _: any(fits(name, one) for one in wanted), True, None), lacks


def _marked(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], flag: bool, required: Sequence[Any] | None
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found and required is not None:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"No module of {type(model).__name__} is one of {list(required)}: it has modules of {', '.join(kinds)}. "
            "Name one of them, or pass raise_if_not_found=False."
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


# ---- experts: no parameter is one of DeepSpeed's MoE -----------------------------------------------------------------


def is_moe_param(param: Any) -> bool:
    """False."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): whether a model has layers of experts, and the number of these."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The parameter groups, in a list: none of them has experts. ``max_group_size`` has no effect."""
    return list(param_groups) if isinstance(param_groups, (list, tuple)) else [param_groups]


# ---- estimates of memory: tables of all ways of offload are printed --------------------------------------------------


def _table(model: Any, stage: int, num_gpus_per_node: int, num_nodes: int) -> None:
    settings_table(model, None, num_gpus_per_node * num_nodes, stage=stage, ranks_per_node=num_gpus_per_node)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 3 needs for a model; buffers are forecast, so the factor for them has no effect."""
    _table(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that stage 3 needs for so many parameters."""
    _table(total_params, 3, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs for a model; buffers are forecast, so the factor for them has no effect."""
    _table(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs for so many parameters."""
    _table(total_params, 2, num_gpus_per_node, num_nodes)
