"""``lt_zero.initialize``: a model, its optimizer and schedule behind the interface of DeepSpeed's engine (0.19).

Names and meanings are DeepSpeed's, so that a training script only changes its import; the implementation is ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from lt_zero.common.arguments import expect
from lt_zero.common.compat import without_torch_function
from lt_zero.common.errors import ConfigError
from lt_zero.common.garbage import without_gc
from lt_zero.common.places import load
from lt_zero.config import ZeroConfig
from lt_zero.config.load import examine
from lt_zero.config.options import communication_options
from lt_zero.core.comm.launched_group import init_distributed
from lt_zero.core.comm.process_groups import joining, rank_and_size
from lt_zero.core.division import PartOfRun
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_params import restore_whole
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.health.before_joining import watch_start
from lt_zero.training.loop.engine import TrainingEngine, ended


@without_gc
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Mapping[str, Any] | str | None = None,
) -> tuple[TrainingEngine, Optimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shard a model and its optimizer: (engine, optimizer, data loader, schedule). Collective.

    Arguments are DeepSpeed's (0.19), in its order.

    Args:
        args: a namespace of which ``deepspeed_config`` is used in place of ``config``, and ``local_rank``.
        model: it is sharded in place. A ``PipelineModule`` gets a ``PipelineEngine``.
        optimizer: of its parameters, or a function of ``model_parameters`` that makes one, in place of the configured
            one.
        model_parameters: of a configured optimizer; default: all that require gradients.
        training_data: makes a data loader, with a ``DistributedSampler`` and the configured micro-batch.
        lr_scheduler: a schedule, or a function of the optimizer that makes one; default: the configured one. Stepped by
            ``engine.step``.
        distributed_port: of rank 0's host, if ``MASTER_PORT`` is not set.
        mpu: its model-parallel size is ``tensor_parallel.autotp_size``, and its groups are not used.
        dist_init_required: False: the process group exists already.
        collate_fn: of the data loader.
        config: as for ``shard``; ``config_params`` is its old name.
        mesh_param: the data ranks, and ``sequence_parallel_size``.

    Raises:
        ConfigError: the configuration has a problem, or contradicts the arguments.
        ValueError: there is no model, or no configuration; or ``mpu`` or ``mesh_param`` is of other ranks.
    """
    watch_start()
    given = config_of({"config": config, "config_params": config_params, "args": args})
    if model is None or given is None:
        lacks = "model" if model is None else "config"
        raise ValueError(f"lt_zero.initialize needs {lacks}=..., and got none. Pass it.")
    expect(model, nn.Module, "lt_zero.initialize(model=...)", "pass an nn.Module")
    loaded = examine(given, for_run=True)
    made = loaded.usable()
    kind = TrainingEngine
    if isinstance(model, PartOfRun):
        made = model.adapted(made)
        kind = load(model.loop_engine, "model", "its engine") if model.loop_engine else kind
    if dist_init_required is not False:
        with joining(communication_options(made)):
            init_distributed(distributed_port=distributed_port)
    _check_ranks(mpu, mesh_param, made)
    loaded.announce()
    _take_back(model)
    engine = kind(model, made, args)
    engine.set_up(optimizer, model_parameters, lr_scheduler)
    if training_data is not None:
        engine.read_from(engine.deepspeed_io(training_data, collate_fn=collate_fn))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def config_of(arguments: Mapping[str, Any]) -> Any:
    """The configuration among the arguments of ``initialize``; None if there is none.

    Raises:
        ConfigError: there are two that differ.
    """
    of_args = getattr(arguments.get("args"), "deepspeed_config", None)
    every = {name: arguments.get(name) for name in ("config", "config_params")} | {"args.deepspeed_config": of_args}
    given = [(name, value) for name, value in every.items() if value is not None]
    for name, value in given[1:]:
        if value is not given[0][1] and value != given[0][1]:
            text = f"lt_zero.initialize got {name}, and {given[0][0]}, which differs. Pass one of them."
            raise ConfigError(text)
    return given[0][1] if given else None


def _check_ranks(mpu: Any, mesh: Sequence[int] | None, config: ZeroConfig) -> None:
    """Check that ranks which scripts describe are those that are configured.

    Raises:
        ValueError: names the argument.
    """
    tensor = config.tensor_parallel.autotp_size
    if mpu is not None and (size := int(mpu.get_model_parallel_world_size())) != tensor:
        raise ValueError(
            f"lt_zero.initialize(mpu=...) has a model-parallel size of {size}, and tensor_parallel.autotp_size="
            f"{tensor} is configured. Make them the same, or remove mpu. Layers that a script cuts itself are not "
            "supported: lt_zero cuts whole ones."
        )
    sequence = config.sequence_parallel_size
    made = rank_and_size()[1] // (tensor * config.pipeline.ranks * sequence), sequence
    if mesh is not None and tuple(mesh) != made:
        raise ValueError(
            f"lt_zero.initialize(mesh_param={mesh!r}), but this run has the mesh {made} of data and sequence ranks. "
            "Remove the argument, and write sequence_parallel_size into the configuration."
        )


def _take_back(model: nn.Module) -> None:
    """Give a model, whose engine was destroyed, its whole weights back, in host memory. Collective."""
    with without_torch_function():
        owners = dict.fromkeys(owner_of(p) for p in model.parameters())
    for owner in owners:
        if isinstance(owner, Engine) and owner.attached and owner in ended:
            restore_whole(owner)
