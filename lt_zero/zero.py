"""``lt_zero.Init``: modules are built with their parameters sharded; ``lt_zero.GatheredParameters``.

Scripts for DeepSpeed find both as ``zero.Init`` and ``zero.GatheredParameters``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from lt_zero.common import accelerator
from lt_zero.config.load import examine
from lt_zero.config.options import communication_options, group_options
from lt_zero.core.ask import configure_group
from lt_zero.core.comm.launched_group import init_distributed
from lt_zero.core.comm.process_groups import is_part, joining
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World
from lt_zero.core.engine.construction import ConstructionSharder
from lt_zero.core.engine.full_params import gathered
from lt_zero.features import features_of


class Init:
    """Context in which modules, the same on every rank, are built with their parameters sharded over all ranks.

    So no rank ever holds the whole model; with tensor parallelism ``initialize`` cuts it. Without effect below stage 3,
    with one rank, or if not ``enabled``. Arguments are DeepSpeed's (0.19), in its order.

    Args:
        module: is sharded at once, and returned in place of a context: rank 0's values are kept.
        data_parallel_group, sequence_data_parallel_group: all ranks, if given.
        mem_efficient_linear: not needed here: linear layers keep no weights for backward in any case.
        remote_device: where weights wait for ``initialize``: "none" or "cpu", where they are built; or as configured.
        pin_memory: of those; they are copied when ``initialize`` takes them over, so it makes no difference.
        config_dict_or_path: the configuration of ``initialize``; without one parameters are sharded.
        config: the same.
        enabled: whether anything is done.
        dtype: of the parameters; default: torch's.
        mpu: its model-parallel size is ``tensor_parallel.autotp_size``, if given.
        zero_param_parallel_group, param_swapper, tensor_overrides: the configuration says this; errors here unless it
            says the same.
        zero_quantized_weights, zero_quantized_nontrainable_weights: likewise.

    Raises:
        ValueError: an argument asks for what its key of the configuration does not, or for what there is not.
    """

    def __new__(cls, module: nn.Module | None = None, *args: Any, **options: Any) -> Any:
        made = super().__new__(cls)
        if module is None:
            return made
        made.__init__(None, *args, **options)  # type: ignore[misc]
        made._shard(module)
        return module

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        given = config if config is not None else config_dict_or_path
        loaded = examine(given, default_stage=3 if given is None else None, for_run=True)
        made = loaded.usable()
        loaded.announce()
        zero = made.zero_optimization
        groups = {
            "data_parallel_group": data_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
        }
        _check_groups(groups, mpu, made.tensor_parallel.autotp_size)
        placed = (None, "none", "cpu", zero.param_offload.device)
        _refuse("remote_device", None if remote_device in placed else remote_device, "device")
        _refuse("param_swapper", param_swapper, "device")
        _refuse("zero_param_parallel_group", zero_param_parallel_group, "zero_hpz_partition_size")
        _refuse("tensor_overrides", tensor_overrides, "dtype")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
            asked = {"zero_quantized_weights": zero_quantized_weights}.get(name, zero_quantized_nontrainable_weights)
            _refuse(name, None if not asked or getattr(zero, name) else True, name)
        self._dtype = dtype
        self._before = torch.float32
        self._sharder: AbstractContextManager[Any] = nullcontext()
        if enabled and zero.stage == 3:
            with joining(communication_options(made)):
                init_distributed()
            device = accelerator.default_device()
            group = ShardGroup.of_all(World.join(device, communication_options(made)))
            if group.size > 1:
                configure_group(group, group_options(made), features_of(made))
                self._sharder = ConstructionSharder(group, zero.stage3_param_persistence_threshold)

    def _shard(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module={module!r} is a {type(module).__name__}. Pass the module whose weights to shard.")
        if self._dtype is not None:
            module.to(self._dtype)
        if isinstance(self._sharder, ConstructionSharder):
            self._sharder.shard(module)

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        self._sharder.__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self._before)
        self._sharder.__exit__(*error)


def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: nn.Module | Parameter | Iterable[Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """``lt_zero.gathered``, with DeepSpeed's arguments. Collective.

    Args:
        params: a parameter, several, or a module.
        modifier_rank: whose changes are kept; None: changes of sharded parameters are an error.
        fwd_module: not needed here.
        enabled: False: do nothing.

    Raises:
        ValueError: ``modifier_rank`` is another rank than 0.
        RuntimeError: on all ranks, if parameters that are not an engine's yet were changed without ``modifier_rank``.
    """
    if modifier_rank not in (None, 0):
        raise ValueError(
            f"modifier_rank={modifier_rank}: the values of rank 0 are kept. Write 0, and change them there."
        )
    return gathered(params, write=modifier_rank == 0) if enabled else nullcontext()


_REMEDIES = {
    "device": "Configure zero_optimization.offload_param: initialize moves the weights there",
    "zero_hpz_partition_size": "Write zero_optimization.zero_hpz_partition_size into the configuration of initialize",
    "zero_quantized_weights": "Write zero_optimization.zero_quantized_weights: true into the configuration",
    "zero_quantized_nontrainable_weights": "Write zero_optimization.zero_quantized_nontrainable_weights: true into it",
    "dtype": "Pass dtype=..., and build the module on the device that you want",
}


def _refuse(name: str, value: Any, remedy: str) -> None:
    """Raise ValueError if an argument of ``Init`` has a value that only the configuration can give."""
    if value is not None:
        raise ValueError(f"zero.Init({name}={value!r}) is not supported. {_REMEDIES[remedy]}, and remove the argument.")


def _check_groups(groups: Mapping[str, Any], mpu: Any, tensor: int) -> None:
    """Check that process groups hold all ranks, and that models are cut over as many ranks as is configured.

    Raises:
        ValueError: names the argument.
    """
    for name, group in groups.items():
        if group is not None and is_part(group):
            raise ValueError(
                f"zero.Init({name}=...) has not all ranks, over which weights are sharded. Remove the argument, and "
                "for smaller groups write zero_optimization.dp_replicate_size or mics_shard_size."
            )
    if mpu is not None and (size := int(mpu.get_model_parallel_world_size())) != tensor:
        raise ValueError(
            f"zero.Init(mpu=...) has a model-parallel size of {size}, and tensor_parallel.autotp_size={tensor} is "
            "configured. Make them the same, or remove mpu."
        )
