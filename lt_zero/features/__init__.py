"""Features of a run beside sharding: each folder is one, and can be taken out. Here is the table of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from lt_zero.common.errors import ConfigError
from lt_zero.common.fields import Block
from lt_zero.common.places import is_there, load
from lt_zero.core.feature import Entry, Feature, registered

_ZERO = "zero_optimization"


def _of_zero_plus_plus(key: str, first_stage: int, least: int = 1) -> Entry:
    """The row of a key of ``zero_optimization`` that asks for ZeRO++ from a stage on, and with a value of ``least``."""

    def is_asked(config: Any) -> bool:
        zero = config.zero_optimization
        return bool(zero.stage >= first_stage and getattr(zero, key) >= least)

    return Entry("ZeRO++", "lt_zero.features.zero_plus_plus.feature:ZeroPlusPlus", f"{_ZERO}.{key}", is_asked)


def _of_parts(name: str, key: str, is_asked: Callable[[Any], bool]) -> Entry:
    """The row of a key by which ranks have parts of a model, or of what it is trained on."""
    return Entry(name, "lt_zero.parallel.feature:Parallelism", key, is_asked)


def _of_pipelines(key: str, is_asked: Callable[[Any], bool]) -> Entry:
    """The row of a key of ``pipeline`` that asks for pipelines, whose ranks are an axis of the mesh."""
    place = "lt_zero.parallel.pipeline.feature:Pipelines"
    return Entry("pipeline parallelism", place, f"pipeline.{key}", lambda config: is_asked(config.pipeline))


def _with_block(name: str, place: str, key: str, block: str, off: Mapping[str, Any]) -> Entry:
    """The row of a feature that brings a block, and is off while keys of the block have the values ``off``."""

    def is_asked(config: Any) -> bool:
        found = getattr(config, key.partition(".")[0])
        return any(getattr(found, name) != value for name, value in off.items())

    return Entry(name, place, key, is_asked, block, off)


_TABLE = (
    _of_parts("tensor parallelism", "tensor_parallel.autotp_size", lambda c: c.tensor_parallel.autotp_size > 1),
    _of_parts("pipeline parallelism", "pipeline.stages", lambda c: c.pipeline.ranks > 1),
    _of_pipelines("stages", lambda block: block.ranks > 1),
    _of_pipelines("activation_checkpoint_interval", lambda block: block.activation_checkpoint_interval > 0),
    _of_parts("sequence parallelism", "sequence_parallel_size", lambda c: c.sequence_parallel_size > 1),
    _of_parts("expert parallelism", "expert_parallel.autoep_size", lambda c: c.expert_parallel.ranks > 1),
    _of_parts("the mesh of ranks", "data_parallel_size", lambda c: c.data_parallel_size is not None),
    _with_block(
        name="computation in tiles",
        place="lt_zero.features.tiles.feature:Tiles",
        key="long_sequences",
        block="lt_zero.features.tiles.keys:LongSequences",
        off={"tiled_mlp": False, "tiled_loss": False},
    ),
    Entry(
        name="moments in 8 bits",
        place="lt_zero.features.low_bit_states.moments:CodedStates",
        key="optimizer_states.dtype",
        asked=lambda config: config.optimizer_states.dtype == torch.int8,
    ),
    Entry(
        name="stochastic rounding",
        place="lt_zero.features.low_bit_states.rounding:RandomRounding",
        key="bf16.stochastic_rounding",
        asked=attrgetter("bf16.stochastic_rounding"),
    ),
    Entry(
        name="quantization of frozen weights",
        place="lt_zero.features.quantize.feature:Quantize",
        key="quantize",
        asked=lambda config: config.quantize is not None,
    ),
    _of_zero_plus_plus("zero_quantized_weights", 1),
    _of_zero_plus_plus("zero_quantized_nontrainable_weights", 3),
    _of_zero_plus_plus("zero_hpz_partition_size", 3, least=2),
    _of_zero_plus_plus("zero_quantized_gradients", 1),
    Entry(
        name="the tolerance of late nodes",
        place="lt_zero.features.late_nodes.feature:LateNodes",
        key="communication.slow_node_tolerance",
        asked=lambda config: config.communication.slow_node_tolerance > 0,
    ),
    Entry(
        name="the exchange of 1-bit optimizers",
        place="lt_zero.features.one_bit.feature:OneBit",
        key="optimizer.type",
        asked=attrgetter("one_bit"),
    ),
    _with_block(
        name="virtual ranks",
        place="lt_zero.features.virtual_ranks.feature:VirtualRanks",
        key="reproducible",
        block="lt_zero.features.virtual_ranks.keys:Reproducible",
        off={"virtual_ranks": None},
    ),
    _with_block(
        name="gradient compression",
        place="lt_zero.features.compression.feature:Compression",
        key="gradient_compression.algorithm",
        block="lt_zero.features.compression.keys:GradientCompressionBlock",
        off={"algorithm": "none"},
    ),
    Entry(
        name="sparse attention",
        place="lt_zero.features.sparse_attention.feature:BlockSparseAttention",
        key="sparse_attention",
        asked=lambda config: config.sparse_attention is not None,
        block="lt_zero.features.sparse_attention.keys:SparseAttention",
    ),
    Entry(
        name="activation checkpointing",
        place="lt_zero.features.activation_checkpointing.feature:ActivationCheckpoints",
        key="activation_checkpointing.mode",
        asked=lambda config: config.activation_checkpointing.mode != "none",
    ),
    Entry(
        name="the record of a run",
        place="lt_zero.tools.compare.feature:Recording",
        key="LT_ZERO_RECORD",
        asked=lambda config: bool(os.environ.get("LT_ZERO_RECORD")),
    ),
    Entry(
        name="digests of the weights",
        place="lt_zero.tools.compare.feature:WeightDigests",
        key="LT_ZERO_DIGESTS",
        asked=lambda config: bool(os.environ.get("LT_ZERO_DIGESTS")),
    ),
    Entry(
        name="the gradient noise scale",
        place="lt_zero.tools.gradient_noise.feature:Noise",
        key="gradient_noise_scale",
        asked=lambda config: config.gradient_noise_scale,
    ),
    Entry(
        name="offload",
        place="lt_zero.features.offload.feature:OffloadedStates",
        key=f"{_ZERO}.offload_optimizer",
        asked=lambda config: config.zero_optimization.offload_optimizer.device != "none",
    ),
    Entry(
        name="offload",
        place="lt_zero.features.offload.feature:OffloadedStates",
        key=f"{_ZERO}.offload_param",
        asked=lambda config: config.zero_optimization.param_offload.device != "none",
    ),
)


def table() -> tuple[Entry, ...]:
    """All features in their order: lt_zero's, then those that packages have added.

    Raises:
        ValueError: a package's feature has a name of lt_zero's.
    """
    own = {entry.name for entry in _TABLE}
    for entry in registered():
        if entry.name in own:
            raise ValueError(f"register({entry.name!r}): lt_zero has a feature of this name: rename yours.")
    return (*_TABLE, *registered())


class MissingBlock(NamedTuple):
    """A block whose feature is not installed.

    Attributes:
        error: what to say where it is used.
        off: as in its row of the table.
    """

    error: ConfigError
    off: Mapping[str, Any] | None

    def is_off(self, value: Any) -> bool:
        """True if a configuration that has ``value`` for the block does not ask for the feature."""
        if value is None or value is False:
            return True
        if self.off is None or not isinstance(value, Mapping):
            return False
        # A key that is not written has its default, with which the feature is off.
        return all(value.get(key, default) == default for key, default in self.off.items())


@cache
def own_blocks() -> dict[str, type[Block] | MissingBlock]:
    """The blocks that lt_zero's features bring, by their keys."""
    found: dict[str, type[Block] | MissingBlock] = {}
    for entry in _TABLE:
        if entry.block is not None:
            try:
                found[entry.block_key] = _imported(entry, entry.block)
            except ConfigError as error:
                found[entry.block_key] = MissingBlock(error, entry.off)
    return found


def registered_blocks() -> dict[str, type[Block]]:
    """The blocks that features of other packages bring, by their keys."""
    return {entry.block_key: _imported(entry, entry.block) for entry in registered() if entry.block is not None}


def blocks() -> dict[str, type[Block]]:
    """The blocks that features bring, by their keys, without those that are not installed."""
    own = {key: block for key, block in own_blocks().items() if not isinstance(block, MissingBlock)}
    return own | registered_blocks()


def _imported(entry: Entry, block: type[Block] | str) -> type[Block]:
    if not isinstance(block, str):
        return block
    found: type[Block] = load(block, entry.key, entry.name)
    return found


def asks(config: Any, key: str) -> bool:
    """True if a configuration asks for a feature by ``key``, which a row of the table has."""
    return any(entry.is_asked(config) for entry in _TABLE if entry.key == key)


def is_installed(folder: str) -> bool:
    """True if the feature of that folder is there: what plans suggest has to be."""
    return is_there(f"{__name__}.{folder}")


def features_of(config: Any) -> list[Feature]:
    """The features that a configuration asks for, in the order of the table; those of other packages come last.

    Several keys may ask for one feature, by rows with the same place.

    Raises:
        ConfigError: one is not installed; names its key.
    """
    found: dict[str, Feature] = {}
    for entry in table():
        if entry.place not in found and entry.is_asked(config):
            found[entry.place] = load(entry.place, entry.key, entry.name)(config)
    return list(found.values())


def require(key: str) -> None:
    """Check that the feature of a key can be used; for what imports a part of it in a function.

    Args:
        key: of a row of the table.

    Raises:
        ConfigError: it is not installed; names the key.
    """
    for entry in _TABLE:
        if entry.key == key:
            load(entry.place, entry.key, entry.name)
