"""Translates a configuration to the options of what it configures, which do not know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn import Parameter

from lt_zero.common.boxes import ParamSpec
from lt_zero.common.codec import Codec
from lt_zero.common.fields import Block
from lt_zero.common.names import OfRanks, alone
from lt_zero.config.auto import resolve_sizes
from lt_zero.config.blocks import Aio, CommsLogger, GradientCompressionBlock, Schema
from lt_zero.config.load import ZeroConfig
from lt_zero.config.rules import one_bit
from lt_zero.core.comm.options import CommunicationOptions, RecordedCollectives
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.options import EngineOptions, LeafModules, ParamsOffload, StatesOffload
from lt_zero.core.engine.partition import hidden_size, widths_of
from lt_zero.core.stores.thread_pool import IoOptions
from lt_zero.exchange.plan import (
    MOMENTA,
    SIGNS,
    ExchangeKind,
    ExchangeOptions,
    GroupOptions,
    matching_parameters,
    none_sent_dense,
    tables_and_vectors,
)
from lt_zero.features.quantize.nf4 import RESTING
from lt_zero.kernels.codecs import TWO_BITS, TopK
from lt_zero.kernels.moments import moments_in

_Options = TypeVar("_Options", LeafModules, StatesOffload, ParamsOffload)
_INTERVAL = 16  # steps between two exchanges at last; default of ZeroOneAdam's local_step_clipper


def engine_options(config: Schema, dtypes: DtypePolicy) -> EngineOptions:
    """The options of an engine; ``dtypes``: from ``dtype_policy``."""
    zero = config.zero_optimization
    states = zero.offload_optimizer
    params = zero.param_offload
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
        moments=moments_in(dtypes.moments) if dtypes.moments is not None else None,
        resting=RESTING[config.quantize] if config.quantize is not None else None,
        sent_dense=_sent_dense(config),
    )


def communication_options(config: Schema) -> CommunicationOptions:
    """The options of the connections between ranks."""
    return CommunicationOptions(config.communication.link_timeout, config.zero_optimization.enable_sanity_checks)


def group_options(config: Schema) -> GroupOptions:
    """The options of the groups over which buckets are sharded."""
    zero = config.zero_optimization
    return GroupOptions(
        topology=config.communication.topology,
        scatters=zero.reduce_scatter,
        shards=zero.shards,
        secondary_shards=zero.secondary_shards,
        shards_optimizer=zero.stage > 0,
        sums_gradients=config.gradient_allreduce_op == "sum",
        prescales=config.prescale_gradients,
        predivide_factor=config.gradient_predivide_factor,
        late_share=config.communication.slow_node_tolerance,
        steps_beside_forward=zero.offload_optimizer.device != "none" and zero.offload_optimizer.overlap_step is True,
    )


def exchange_options(config: Schema) -> ExchangeOptions:
    """The options of exchanges of gradients and gathers of weights. A configuration asks for one exchange at most."""
    zero = config.zero_optimization
    block = config.gradient_compression
    optimizer = one_bit(config)
    kind = ExchangeKind.PLAIN
    codec = _codec_of(block)
    if config.communication.slow_node_tolerance:
        kind = ExchangeKind.TOLERANT
        codec = None
    elif zero.zero_quantized_gradients and zero.stage > 0:
        kind = ExchangeKind.QUANTIZED
        codec = None
    elif optimizer:
        kind = ExchangeKind.LOCAL_STEPS if optimizer == "zerooneadam" else ExchangeKind.MOMENTA
        codec = MOMENTA
    elif codec is not None:
        kind = ExchangeKind.COMPRESSED
    given = config.optimizer.params if config.optimizer is not None else {}
    return ExchangeOptions(
        kind=kind,
        codec=codec,
        hierarchical=kind is ExchangeKind.COMPRESSED and block.hierarchical_compress,
        interval=int(given.get("local_step_clipper", _INTERVAL)) if kind is ExchangeKind.LOCAL_STEPS else 1,
        warmup_steps=block.warmup_steps,
        quantizes_gathers=zero.zero_quantized_weights,
        quantizes_frozen=zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights,
        quantizes_updates=zero.zero_quantized_weights and zero.stage < 3,
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


def _codec_of(block: GradientCompressionBlock) -> Codec | None:
    if block.algorithm == "topk":
        return TopK(block.topk_ratio, torch.bfloat16, block.huffman_coding)
    return {"1bit": SIGNS, "2bit": TWO_BITS}.get(block.algorithm)


def _sent_dense(config: Schema) -> Callable[[nn.Module], set[Parameter]] | None:
    block = config.gradient_compression
    if one_bit(config):
        return none_sent_dense
    if block.algorithm == "none":
        return None
    if block.exclude != "auto":
        return partial(matching_parameters, patterns=block.exclude)
    return tables_and_vectors if block.algorithm == "1bit" else none_sent_dense


def _copied(options: type[_Options], block: Block) -> _Options:
    """Options whose fields have the names of keys of ``block``."""
    return options(**{field.name: getattr(block, field.name) for field in fields(options)})
