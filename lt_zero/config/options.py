"""Translates a configuration to the options of what it configures, which do not know it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from torch import nn

from lt_zero.common.boxes import ParamSpec
from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import Block
from lt_zero.common.moment_form import PlainMoments
from lt_zero.common.names import OfRanks, alone
from lt_zero.config.auto import resolve_sizes
from lt_zero.config.blocks import Aio, CommsLogger, Schema
from lt_zero.config.load import ZeroConfig
from lt_zero.core.comm.options import CommunicationOptions, GroupOptions, RecordedCollectives
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.options import EngineOptions, LeafModules, ParamsOffload, StatesOffload
from lt_zero.core.engine.partition import hidden_size, widths_of
from lt_zero.core.stores.thread_pool import IoOptions

_Options = TypeVar("_Options", CommunicationOptions, LeafModules, StatesOffload, ParamsOffload)


def engine_options(config: Schema, dtypes: DtypePolicy) -> EngineOptions:
    """The options of an engine, before features change them (core/ask.py).

    ``dtypes``: from ``dtype_policy``, or a caller's own.

    Raises:
        ConfigError: ``dtypes`` ask for a feature, and the configuration does not.
    """
    _check_asked(config, dtypes)
    zero = config.zero_optimization
    states = zero.offload_optimizer
    params = zero.param_offload
    moments = dtypes.moments
    return EngineOptions(
        dtypes=dtypes,
        stage=zero.stage,
        shard_along=zero.shard_along,
        optimizer_is_elementwise=zero.optimizer_is_elementwise,
        fused_step=config.fused_step,
        overlap_comm=zero.overlap_comm,
        broadcast_buffers=config.broadcast_buffers,
        reduce_bucket_size=zero.reduce_bucket_size,
        allgather_bucket_size=zero.allgather_bucket_size,
        sub_group_size=zero.sub_group_size,
        param_persistence_threshold=zero.stage3_param_persistence_threshold,
        model_persistence_threshold=zero.stage3_model_persistence_threshold,
        allowed_param_types=zero.zero_allowed_param_types,
        force_param_types=zero.zero_force_param_types,
        leaf_modules=_copied(LeafModules, zero.leaf_module),
        max_live_parameters=zero.stage3_max_live_parameters,
        max_reuse_distance=zero.stage3_max_reuse_distance,
        prefetch_bucket_size=zero.stage3_prefetch_bucket_size,
        offload_states=_copied(StatesOffload, states),
        offload_params=_copied(ParamsOffload, params),
        pin_memory=states.pin_memory and params.pin_memory,
        files=io_options(config.aio),
        predivides=group_options(config).predivides,
        moments=PlainMoments(moments) if moments is not None and moments.is_floating_point else None,
    )


def _check_asked(config: Schema, dtypes: DtypePolicy) -> None:
    """Refuse dtypes whose features the configuration does not ask for: these would be left out silently."""
    if dtypes.stochastic and not config.bf16.stochastic_rounding:
        key = "bf16.stochastic_rounding"
        raise ConfigError.about(key, f"{key}=false, and the policy has stochastic=True. Set the key to true as well.")
    moments = dtypes.moments
    if moments is not None and not moments.is_floating_point and moments != config.optimizer_states.dtype:
        key = "optimizer_states.dtype"
        name = str(moments).removeprefix("torch.")
        raise ConfigError.about(key, f"{key} is not {name}, and the policy has moments={moments}. Set the key as well.")


def communication_options(config: Schema) -> CommunicationOptions:
    """The options of the connections between ranks."""
    compares = config.zero_optimization.enable_sanity_checks
    return _copied(CommunicationOptions, config.communication, compares_collectives=compares)


def group_options(config: Schema) -> GroupOptions:
    """The options of the groups over which buckets are sharded."""
    zero = config.zero_optimization
    return GroupOptions(
        topology=config.communication.topology,
        scatters=zero.reduce_scatter,
        shards=zero.shards,
        sums_gradients=config.gradient_allreduce_op == "sum",
        prescales=config.prescale_gradients,
        predivide_factor=config.gradient_predivide_factor,
    )


def io_options(aio: Aio) -> IoOptions:
    """The options of threads that read and write files."""
    return IoOptions(aio.intra_op_parallelism, aio.block_size, aio.in_flight, aio.checksum)


def recorded_collectives(block: CommsLogger) -> RecordedCollectives:
    """The collectives that a log records."""
    return RecordedCollectives(block.operations, block.debug, block.verbose)


def with_sizes(
    config: ZeroConfig, root: nn.Module, specs: Iterable[ParamSpec] = (), of_ranks: OfRanks = alone
) -> ZeroConfig:
    """The configuration with bucket sizes that were "auto" resolved for this model; ConfigError as ``hidden_size``.

    ``of_ranks``: returns what all ranks have, if their modules are parts of one model. Collective then.
    """
    return resolve_sizes(config, lambda: hidden_size(of_ranks(widths_of(root, specs))))


def _copied(options: type[_Options], block: Block, **others: Any) -> _Options:
    """Options whose fields, but for ``others``, have the names of keys of ``block``."""
    named = (field.name for field in fields(options) if field.name not in others)
    return options(**{name: getattr(block, name) for name in named}, **others)
