"""``deepspeed.initialize``, ``init_distributed`` and ``DeepSpeedConfig``, with what scripts expect around them."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Mapping
from copy import copy
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import nn

from lt_zero.common.arguments import expect, expect_number
from lt_zero.config import ZeroConfig
from lt_zero.config.load import Loaded, examine, plain
from lt_zero.config.options import communication_options
from lt_zero.core.comm import launched_group, process_groups
from lt_zero.core.comm.options import CommunicationOptions
from lt_zero.core.comm.process_groups import rank_and_size
from lt_zero.core.health.before_joining import watch_start
from lt_zero.deepspeed.huggingface import mark_optimizer, parallelism_of_accelerate, unwrapped
from lt_zero.deepspeed.sequence import SequenceState
from lt_zero.deepspeed.sharding import leaf_modules, mark_parameters
from lt_zero.training.loop.engine import TrainingEngine, ended
from lt_zero.training.loop.initialize import config_of
from lt_zero.training.loop.initialize import initialize as _initialize

_ALONG = "zero_optimization.shard_along"
_TENSOR_RANKS = "_tp_size"  # the mark of ``tp_model_init``
_TENSOR = "tensor_parallel.autotp_size"
_SEQUENCE = "sequence_parallel_size"
_REPLICAS = "zero_optimization.dp_replicate_size"
_OF_ACCELERATE = {"tp_size": _TENSOR, "sp_size": _SEQUENCE, "dp_replicate_size": _REPLICAS}
_engines: list[weakref.ref[TrainingEngine]] = []  # in the order in which they were made


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``lt_zero.initialize``, in a process group of one where there is no launcher.

    Modules that ``set_z3_leaf_modules`` has marked are gathered as one unit, and norms are computed in each step.
    Without ``gradient_clipping`` in the configuration gradients are clipped to DeepSpeed's default, a norm of 1.
    """
    given = inspect.signature(_initialize).bind_partial(*args, **kwargs).arguments
    if given.get("dist_init_required") is not False:
        watch_start()
        with process_groups.joining(_connections(given)):
            init_distributed(distributed_port=given.get("distributed_port"))
    if overrides := _overrides(given):
        loaded = examine(config_of(given), overrides=overrides)
        given["config"] = loaded.usable()
        loaded.announce()
        given.pop("config_params", None)
        if getattr(given.get("args"), "deepspeed_config", None) is not None:
            given["args"] = copy(given["args"])
            given["args"].deepspeed_config = None
    elif (config := config_of(given)) is not None:
        examine(config, for_run=True).usable()  # an error leaves the engines that are in use
    _give_way(given.get("model"))
    given["optimizer"] = unwrapped(given.get("optimizer"))
    adapted = given["mpu"] if isinstance(given.get("mpu"), SequenceState) else None
    if adapted is not None:
        del given["mpu"]
    made = _initialize(**given)
    if adapted is not None:
        made[0].session.division.leave_to_user(adapted.whole_in_eval)
    made[0].tracks_norm = True
    mark_optimizer(made[0])
    if made[0].zero_optimization_stage() == 3:
        mark_parameters(made[0].module)
    _engines.append(weakref.ref(made[0]))
    return made


def _connections(given: Mapping[str, Any]) -> CommunicationOptions:
    """The options of the connections between ranks; the defaults for a configuration that is refused later."""
    config = config_of(given)
    made = _examined(config)[0].config if config is not None else None
    return communication_options(made) if made is not None else CommunicationOptions()


def _give_way(model: Any) -> None:
    """End the engines of a model that only computed with it: they have no optimizer. Then another one may take it.

    TRL makes such an engine for the log-probabilities of the model before it is trained.
    """
    for engine in filter(None, (made() for made in _engines)):
        if engine.module is model and engine.optimizer is None and engine.engine not in ended:
            engine.destroy()


class _EngineType(type):
    """Makes engines by ``initialize``, and has the attributes of ``TrainingEngine``."""

    def __call__(cls, args: Any = None, model: Any = None, *rest: Any, **options: Any) -> Any:
        names = ("optimizer", "model_parameters", "training_data", "lr_scheduler", "mpu", "dist_init_required")
        given = {"args": args, "model": model, **dict(zip((*names, "collate_fn", "config"), rest, strict=False))}
        known = inspect.signature(_initialize).parameters
        if unknown := next((name for name in options if name not in known), None):
            raise TypeError(
                f"DeepSpeedEngine({unknown}=...) is no argument of DeepSpeed's. Engines are made by engine, optimizer, "
                "loader, schedule = deepspeed.initialize(model=..., optimizer=..., training_data=..., config=...)."
            )
        return initialize(**{**given, **options})[0]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, TrainingEngine)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, TrainingEngine)

    def __getattr__(cls, name: str) -> Any:
        return getattr(TrainingEngine, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(TrainingEngine, name, value)


class DeepSpeedEngine(metaclass=_EngineType):
    """``TrainingEngine`` for ``isinstance`` and attributes; a call with DeepSpeed's arguments makes one.

    Raises:
        TypeError: an argument is none of DeepSpeed's; or a class is derived from it.
    """

    def __init_subclass__(cls, **options: Any) -> NoReturn:
        raise TypeError(
            f"{cls.__name__} derives from DeepSpeedEngine, and deepspeed.initialize makes no engines of such a class. "
            "Wrap the engine that it returns."
        )


def _overrides(given: Mapping[str, Any]) -> list[str]:
    """Keys that the marks of a model and Accelerate's sizes add to the configuration, one that optimizers of whole
    matrices (Muon) need, DeepSpeed's default of ``gradient_clipping``, and its meaning of ``train_batch_size``.

    Raises:
        ValueError: a size of ranks contradicts the configured one.
    """
    model = given.get("model")
    config = config_of(given)
    if not isinstance(model, nn.Module) or config is None:
        return []
    loaded, found = _examined(config)
    made = None if isinstance(config, ZeroConfig) else loaded.config
    if made is not None and "gradient_clipping" not in plain(made):
        found.append("gradient_clipping=1.0")
    marked = leaf_modules(model)
    asked = _asked_ranks(given)
    made = examine(config, overrides=found).config
    if made is None:  # _initialize tells why
        return found
    if marked:
        names = [name for name, module in model.named_modules() if module in marked]
        leaves = made.zero_optimization.leaf_module.names
        found.append(f"zero_optimization.leaf_module.names={[*leaves, *(n for n in names if n not in leaves)]}")
    configured: dict[str, int | None] = {
        _TENSOR: made.tensor_parallel.autotp_size,
        _SEQUENCE: made.sequence_parallel_size,
        _REPLICAS: made.zero_optimization.dp_replicate_size,
    }
    for key, (size, call) in asked.items():
        if configured[key] not in (None, 1, size):
            raise ValueError(f"{call}, but {key}={configured[key]} is configured. Make them the same.")
        found.append(f"{key}={size}")
        configured[key] = size
        if key == _TENSOR and isinstance(config, dict):
            # As in DeepSpeed: Accelerate reads there whether saved weights have to be put together.
            config["tensor_parallel"] = {**(config.get("tensor_parallel") or {}), "autotp_size": size}
    if (total := _of_data_ranks(made, configured, given.get("mpu"))) is not None:
        found.append(f"train_batch_size={total}")
    return found


def _examined(config: Any) -> tuple[Loaded, list[str]]:
    """A configuration, and the override with which it was read, if optimizers of whole matrices (Muon) need one."""
    loaded = examine(config)
    given_along = "shard_along" in (loaded.values.get("zero_optimization") or ())
    if given_along or not any(problem.key == _ALONG for problem in loaded.problems):
        return loaded, []
    found = [f"{_ALONG}=parameter"]  # DeepSpeed has no such key, and needs none
    return examine(config, overrides=found), found


def _asked_ranks(given: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Numbers of ranks that a script asks for beside its configuration: key -> the number, and the call.

    Raises:
        ValueError: two calls ask for different numbers, or for what is not here.
    """
    found: dict[str, tuple[int, str]] = {}
    marked = getattr(given.get("model"), "__dict__", {}).get(_TENSOR_RANKS)
    if marked is not None:
        found[_TENSOR] = marked, f"tp_model_init(tp_size={marked})"
    if isinstance(mpu := given.get("mpu"), SequenceState):
        found[_SEQUENCE] = mpu.size, f"register_with_transformers(sequence_parallel_size={mpu.size})"
    for argument, size in parallelism_of_accelerate().items():
        key = _OF_ACCELERATE[argument]
        call = f"ParallelismConfig({argument}={size})"
        if key in found and found[key][0] != size:
            raise ValueError(f"{call}, but {found[key][1]}. Make them the same.")
        found[key] = size, call
    return found


def _of_data_ranks(config: ZeroConfig, ranks: Mapping[str, int | None], mpu: Any) -> int | None:
    """``train_batch_size`` as it is here, where tensor ranks see the same data; None: it need not be changed.

    DeepSpeed counts tensor ranks as if they saw different data, unless there is an ``mpu`` of them.
    """
    total = config.train_batch_size
    tensor = ranks[_TENSOR] or 1
    if total is None or tensor == 1 or total % tensor or (mpu is not None and not isinstance(mpu, SequenceState)):
        return None
    micro = config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    data = rank_and_size()[1] // (tensor * (ranks[_SEQUENCE] or 1))
    return None if micro is not None and steps is not None and total == micro * steps * data else total // tensor


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **options: Any
) -> nn.Module:
    """Let ``initialize`` cut a model over ``tp_size`` ranks, as ``tensor_parallel.autotp_size`` does. Returns it.

    Args:
        dtype: of its parameters from now on; None: as they are.
        config: that of ``initialize``, which reads it.
        options: of DeepSpeed's; errors here.

    Raises:
        ValueError: an argument has to be a key of the configuration.
    """
    expect(model, nn.Module, "tp_model_init(model=...)", "pass an nn.Module")
    expect_number(tp_size, "tp_model_init(tp_size=...)", whole=True)
    if name := next((name for name, value in options.items() if value is not None), None):
        raise ValueError(
            f"tp_model_init({name}={options[name]!r}) is not supported. Remove it, and write the block tensor_parallel "
            "into the configuration of initialize."
        )
    model.__dict__[_TENSOR_RANKS] = tp_size
    return model if dtype is None else model.to(dtype)


def current_engine() -> TrainingEngine | None:
    """The engine that was made last, and is still in use."""
    while _engines and _engines[-1]() is None:
        _engines.pop()
    return _engines[-1]() if _engines else None


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """``lt_zero.init_distributed`` with DeepSpeed's order of arguments; a single process gets a group of its own."""
    launched_group.init_distributed(
        dist_backend,
        timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        auto_mpi_discovery=auto_mpi_discovery,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    if dist_init_required is not False:
        process_groups.init_alone(dist_backend, timeout)


def DeepSpeedConfig(  # noqa: N802 - DeepSpeed's name
    config: Mapping[str, Any] | str | os.PathLike[str], mpu: Any = None, mesh_device: Any = None
) -> ZeroConfig:
    """The configuration as ``lt_zero.ZeroConfig``: its blocks and keys are attributes.

    Raises:
        ConfigError: the configuration has a problem.
    """
    return examine(config, for_run=True).usable()
