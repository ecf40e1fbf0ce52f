"""Blocks of what is divided between ranks, sent and offloaded: ZeRO, compression, and parallelism beside data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.fields import Block, Elements, Folder, Names, Positive, Real, Whole, key, lower, scalars
from lt_zero.common.numbers import to_whole_number
from lt_zero.core.comm.options import CommunicationOptions


def _stage(value: Any) -> Any:
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("0", "1", "2", "3")):
        raise ValueError("it is not one of 0, 1, 2, 3")
    return value


def _no_switch(value: Any) -> Any:
    """``to_whole_number`` for a choice of numbers: to Python, True is one of 1, 2, 3."""
    if isinstance(value, bool):
        raise ValueError("it is true or false, not a number")
    return to_whole_number(value)


def _whole_pages(value: int) -> int:
    if value % 4096:
        raise ValueError(f"{value} is not a multiple of 4096, as direct I/O requires")
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from None
    return value


def _one_if_zero(value: Any) -> Any:
    """0 ranks along an axis, which turn it off, are 1; any other value stays as it is."""
    number = to_whole_number(value)
    return 1 if type(number) is int and number == 0 else value


def _stages(value: Any) -> Any:
    number = _one_if_zero(to_whole_number(value))
    if number != "auto" and (type(number) is not int or number < 1):
        raise ValueError('it is neither "auto" nor a whole number of ranks, such as 2; 0 or 1: none')
    return number


one_if_zero = BeforeValidator(_one_if_zero)


# ---- ZeRO and offload ------------------------------------------------------------------------------------------------


class LeafModule(Block):
    """Modules to gather as one unit although the model does not repeat them."""

    classes: Names = key((), "class names, bare or dotted, of unit modules (DeepSpeed: transformers' MoE blocks)")
    names: Names = key((), "full names of unit modules")
    name_suffixes: Names = key((), "suffixes of names of unit modules")


Device = Literal["none", "cpu", "nvme"]


class _Offload(Block):
    device: Device = key("none", "where to offload to")
    nvme_path: Folder | None = key(None, "folder for the files, on a fast local disk")
    pin_memory: bool = key(True, "use pinned host memory if there is a GPU; false in either block applies to both")


class OffloadOptimizer(_Offload):
    """The ``zero_optimization.offload_optimizer`` block."""

    buffer_count: Positive = key(4, "maximum buckets in memory at a time, with nvme")
    pipeline_read: bool = key(True, "read the next bucket during the step of the current one (DeepSpeed: false)")
    pipeline_write: bool = key(True, "write the previous bucket during the step of the current one (DeepSpeed: false)")
    fast_init: bool = key(False, "true: write weights to files as they are initialized (DeepSpeed: false)")
    ratio: Real = key(1.0, "fraction of the elements to offload", ge=0, le=1)
    overlap_step: bool | Literal["auto"] = key(
        "auto", "overlap the step with backward (auto), also with the next forward (true), or not at all (false)"
    )


class OffloadParam(_Offload):
    """The ``zero_optimization.offload_param`` block."""

    device: Device = key(
        "none",
        "where to offload to; trained parameters need offload_optimizer too, as they are gathered from "
        "the master weights",
    )
    buffer_count: Positive = key(5, "maximum buckets to read ahead, with nvme")
    buffer_size: Positive = key(100_000_000, "elements to read ahead, with nvme; one unit may be larger")
    max_in_cpu: Elements = key(0, "elements to keep in host memory even with nvme (DeepSpeed: 1e9)")


class Aio(Block):
    """The ``aio`` block: how files are read and written."""

    block_size: Annotated[Positive, AfterValidator(_whole_pages)] = key(
        4 << 20, "bytes per request, a multiple of 4096 (DeepSpeed: 1048576)"
    )
    queue_depth: Positive = key(8, "maximum requests in flight per tensor")
    intra_op_parallelism: Positive = key(4, "number of I/O threads (DeepSpeed: 1)")
    single_submit: bool = key(False, "true: one request in flight per tensor, like queue_depth=1")
    overlap_events: bool = key(True, "false: one request in flight per tensor, like queue_depth=1")
    checksum: bool = key(False, "verify a checksum of the data on every read")

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return 1 if self.single_submit or not self.overlap_events else self.queue_depth


class ZeroOptimization(Block):
    """The ``zero_optimization`` block."""

    stage: Annotated[int, BeforeValidator(_stage)] = key(
        0, "0: nothing sharded, 1: optimizer, 2: + gradients, 3: + parameters", ge=0, le=3
    )
    overlap_comm: bool = key(
        True,
        "reduce gradients during backward, gather updated weights during forward (DeepSpeed: true at stage 3 only)",
    )
    shard_along: Literal["element", "parameter"] = key(
        "element",
        "where shards begin: at any element, or at parameter boundaries, so that optimizers see whole "
        "matrices; the latter pads buckets: examples/gpt.py with 24 layers by 0, 1 and 2 % at 2, 4 and 8 ranks at "
        "stages 1 and 2, by 25, 42 and 175 % at stage 3, where each layer is a bucket",
    )
    optimizer_is_elementwise: bool = key(
        False,
        "true: each element of the optimizer's update depends on that element of weights, gradients and states alone, "
        "so that shards may cut parameters; for optimizers that lt_zero cannot try out",
    )
    contiguous_gradients: bool = key(True, "true: copy gradients into one flat buffer per bucket as they are produced")
    reduce_scatter: bool = key(True, "false: all-reduce and keep the own shard (no effect if CPU ranks share memory)")
    reduce_bucket_size: Positive = key(
        500_000_000, "maximum elements of a gradient bucket; a larger parameter gets a bucket of its own"
    )
    allgather_bucket_size: Positive = key(500_000_000, "maximum elements per all-gather of parameters (stages 1, 2)")
    stage3_prefetch_bucket_size: Elements = key(
        50_000_000, "elements to prefetch; a unit may be larger if no other is prefetched; 0: none"
    )
    stage3_param_persistence_threshold: Elements = key(
        100_000, "parameters with fewer elements are not sharded (DeepSpeed: with at most as many)"
    )
    stage3_model_persistence_threshold: Elements | None = key(
        None,
        "maximum elements of the model that are not sharded, smallest parameters first; null: no limit "
        "(DeepSpeed: in model order)",
    )
    stage3_max_live_parameters: Elements = key(
        1_000_000_000, "maximum gathered elements per rank; beyond it nothing is kept gathered or prefetched"
    )
    stage3_max_reuse_distance: Elements = key(
        1_000_000_000, "keep a parameter gathered if it is used again within this many elements; 0: release at once"
    )
    leaf_module: LeafModule = key(LeafModule(), "modules to gather as one unit although the model does not repeat them")
    zero_allowed_param_types: Names = key((), "class names of modules: at stage 3 only these are sharded; empty: all")
    zero_force_param_types: Names = key((), "class names of modules whose parameters are not sharded at stage 3")
    mics_shard_size: Whole = key(
        -1,
        "shard over groups of so many neighbouring ranks, which hold a full copy each, instead of all ranks (MiCS); "
        "-1: all ranks",
        ge=-1,
    )
    dp_replicate_size: Positive = key(
        1,
        "so many groups of neighbouring ranks shard, and hold a full copy each (FSDP's hybrid sharding): "
        "mics_shard_size is then the data ranks divided by it; 1: all ranks are one group",
    )
    zero_quantized_weights: bool = key(
        False,
        "gather parameters (stages 1, 2: updates) as 8 bits of an element (ZeRO++, qwZ); master weights stay exact",
    )
    zero_quantized_nontrainable_weights: bool = key(False, "the same for frozen parameters only (stage 3)")
    zero_hpz_partition_size: Whole = key(
        1,
        "so many neighbouring ranks (a node) keep a second copy of the parameters, which gathers read until the "
        "weights change (ZeRO++, hpZ; stage 3); 1: none",
        ge=0,
    )
    zero_quantized_gradients: bool = key(
        False,
        "reduce gradients as 8 bits of an element inside a node, as 4 bits between nodes (ZeRO++, qgZ)",
    )
    sync_bn_in_backward: bool = key(False, "compute batch norm statistics over all ranks")
    enable_sanity_checks: bool = key(False, "compare each collective across ranks before launch, like LT_ZERO_DEBUG=1")
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer(), "where optimizer states are stored")
    offload_param: OffloadParam = key(OffloadParam(), "where parameter shards are stored (stage 3)")
    load_from_fp32_weights: bool = key(True, "false: on resume, master weights start from those in the compute dtype")
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False, "one 16-bit file of all weights next to each checkpoint"
    )
    sub_group_size: Elements = key(
        1_000_000_000, "maximum elements of a bucket if the optimizer is offloaded; 0: one bucket per parameter"
    )

    @property
    def replicas_by(self) -> str:
        """The name of the key by which several groups of ranks shard, each of which holds a full copy; "": none does.

        That is so at stage 0, too, where the key has no effect.
        """
        if self.mics_shard_size > 0:
            return "mics_shard_size"
        return "dp_replicate_size" if self.dp_replicate_size > 1 else ""

    def shards(self, world: int) -> int:
        """Number of shards that ``world`` ranks cut tensors into.

        Raises:
            ConfigError: ``mics_shard_size`` or ``dp_replicate_size`` does not divide ``world``, or they contradict.
        """
        if self.stage == 0 or not self.replicas_by:
            return world
        replicas = self._divisor("dp_replicate_size", self.dp_replicate_size, world)
        if self.mics_shard_size < 1:
            return world // replicas
        shards = self._divisor("mics_shard_size", self.mics_shard_size, world)
        if replicas not in (1, world // shards):
            key = "zero_optimization.dp_replicate_size"
            text = f"{key}={replicas}, but zero_optimization.mics_shard_size={shards} makes {world // shards} groups "
            raise ConfigError([Problem(key, f"{text}of the {world} ranks. Remove one of them.")])
        return shards

    def secondary_shards(self, world: int) -> int:
        """Number of ranks, of ``world``, that share a second copy of the parameters; 1: there is none.

        Raises:
            ConfigError: ``zero_hpz_partition_size`` does not divide ``world``.
        """
        wanted = self.zero_hpz_partition_size if self.stage == 3 and world > 1 else 1
        return self._divisor("zero_hpz_partition_size", max(wanted, 1), world)

    def _divisor(self, name: str, size: int, world: int) -> int:
        if world % size:
            key = f"zero_optimization.{name}"
            fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            text = f"{key}={size} does not divide the {world} ranks that a parameter is sharded over (with tensor "
            text = f"{text}parallelism the data ranks): write one of {fitting}"
            raise ConfigError([Problem(key, f"{text}, or remove the key.")])
        return size

    @property
    def param_offload(self) -> OffloadParam:
        """``offload_param``, or its defaults below stage 3, where parameters are not sharded."""
        return self.offload_param if self.stage == 3 else OffloadParam()


# ---- what ranks send -------------------------------------------------------------------------------------------------


class Communication(Block):
    """The ``communication`` block: collectives over several nodes."""

    topology: Annotated[Literal["auto", 1, 2, 3], BeforeValidator(_no_switch)] = key(
        "auto",
        "1: one ring of all ranks, 2: ranks of a node, then nodes, 3: a torus in 3 dimensions; auto: 2 with gloo on "
        "several nodes",
    )
    slow_node_tolerance: Real = key(
        0.0, "share of the ranks whose gradients a sum does not wait for: they are in a later one (gloo)", ge=0, lt=1
    )
    link_timeout: Real = key(
        CommunicationOptions.link_timeout,
        "seconds for which a link may be cut, or a host not answer, before ranks give each other up with an error; "
        "processes that end are noticed at once (gloo; NCCL has limits of its own)",
        ge=1,
        le=900,
    )


# ---- tensor, sequence and pipeline parallelism -----------------------------------------------------------------------

_Axis = Annotated[Literal[0, 1], BeforeValidator(_no_switch)]
_PositiveList = Annotated[tuple[Positive, ...], Field(min_length=1)]
Regexes = Annotated[
    tuple[Annotated[str, AfterValidator(_regex)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1),
]


class LayerRule(Block):
    """A rule of ``tensor_parallel.partition_config.layer_specs``."""

    patterns: Regexes = Field(description="regular expressions for full parameter names, matched from the beginning")
    partition_type: Annotated[Literal["column", "row", "skip"], lower] = key(
        "column", "column: each rank has a part of a linear layer's outputs, row: of its inputs, skip: all of it"
    )
    shape: tuple[Positive | Literal[-1] | _PositiveList, ...] | None = key(
        None, "of a layer whose output is several outputs in a row: [[sizes], -1], or [number, -1] if they are equal"
    )
    partition_dim: _Axis | None = key(None, "axis of the weight; null: 0 for column, 1 for row")
    model_types: Names | None = key(None, "model_type of the models to which the rule applies; null: any")
    gather_output: bool = key(False, "gather the output of a column layer, so that each rank has all of it")
    grad_allreduce: bool = key(False, "with skip: sum gradients over the ranks, each of which has used its part only")

    @model_validator(mode="after")
    def _consistent(self) -> LayerRule:
        kind = self.partition_type
        if kind != "column" and (self.shape is not None or self.gather_output):
            word = "gather_output" if self.gather_output else "shape"
            raise ValueError(f"{word} is of partition_type=column, not {kind}. Remove it, or change the type")
        if kind != "skip" and self.grad_allreduce:
            raise ValueError(f"grad_allreduce is of partition_type=skip, not {kind}. Remove it, or change the type")
        if self.shape is not None and (len(self.shape) != 2 or self.shape[0] == -1 or not _is_size(self.shape[1])):
            raise ValueError(
                f"shape={scalars(self.shape)} is neither [[sizes], -1] nor [number, -1]: outputs in a row along "
                "axis 0, and all inputs. Write one of these, or gather_output: true without shape"
            )
        if self.shape is not None and self.partition_dim == 1:
            raise ValueError("partition_dim=1 with shape is not supported. Remove partition_dim, or shape")
        return self


def _is_size(value: Any) -> bool:
    return isinstance(value, int)


class PartitionConfig(Block):
    """The ``tensor_parallel.partition_config`` block: which rank has which part of a layer."""

    layer_specs: tuple[LayerRule, ...] = key(
        (),
        "rules; a parameter takes the first that matches. Each has patterns, and may have partition_type: column "
        "(default), row or skip, shape: [[sizes], -1] of outputs in a row, partition_dim, model_types, gather_output, "
        "and grad_allreduce. A pattern that matches nothing is an error",
    )
    use_default_specs: bool = key(True, "rules of preset_model, if there is one, for what layer_specs does not match")
    strict_mode: bool = key(False, "raise if a linear layer matches no rule; false: each rank has all of it")
    embedding_partition_dim: _Axis = key(1, "axis along which embeddings are cut: 0, the vocabulary, or 1")
    lm_head_patterns: Names = key(
        ("lm_head", "embed_out"), "last parts of names of heads, whose outputs are gathered if a rule cuts them"
    )


class TensorParallel(Block):
    """The ``tensor_parallel`` block: ranks that have parts of each layer."""

    autotp_size: Annotated[Positive, one_if_zero] = key(
        1, "ranks that share the tensors of each layer, and see the same data; they divide all ranks (DeepSpeed: 0)"
    )
    partition_config: PartitionConfig | None = key(
        None, "how layers are cut; null: as the model's own plan (transformers) says"
    )
    preset_model: str | None = key(
        None, "a model type of transformers whose plan is used, such as llama or qwen2", min_length=1
    )


class ExpertParallel(Block):
    """The ``expert_parallel`` block: ranks that have some of a layer's experts each, and see different data."""

    enabled: bool = key(False, "put the experts of lt_zero.parallel.Experts on autoep_size ranks")
    autoep_size: Annotated[Positive, one_if_zero] = key(
        1, "ranks that share the experts of each layer; they divide the data ranks and the number of experts"
    )

    @property
    def ranks(self) -> int:
        """The number of ranks that share experts."""
        return self.autoep_size if self.enabled else 1


class SequenceParallel(Block):
    """The ``sequence_parallel`` block: how ranks with parts of the same sequences compute attention."""

    method: Annotated[Literal["ulysses", "gather"], lower] = key(
        "ulysses",
        "ulysses: ranks exchange parts of sequences for heads, whose number they divide; gather: each rank gathers "
        "keys and values of whole sequences, for any number of heads",
    )
    gather: Positive = key(
        1,
        "in how many parts keys and values are gathered, while the neighbours of a part exchange heads, for more ranks "
        "than heads; 1: of all ranks with method: gather, else of none",
    )
    zigzag: bool = key(
        False, "where keys are gathered: each rank has an early and a late part of sequences, as suits causal attention"
    )


def _partition_method(value: Any) -> Any:
    method = value.lower() if isinstance(value, str) and not value.lower().startswith("type:") else value
    if method == "best":  # DeepSpeed's default of the key that it does not read
        return "parameters"
    if isinstance(method, str) and method.lower().startswith("type:"):
        return f"type:{_regex(method[5:])}"
    if method not in ("parameters", "uniform", "time"):
        raise ValueError("it is not one of parameters, uniform, time, type:REGEX")
    return method


class PipelineParallel(Block):
    """The ``pipeline`` block: ranks that have some of a model's layers each, one after the other."""

    stages: Annotated[Literal["auto"] | Positive, BeforeValidator(_stages)] = key(
        "auto", "ranks that have layers after each other, and see the same data; auto: as the model says, or 1"
    )
    partition_method: Annotated[str, BeforeValidator(_partition_method)] = key(
        "parameters",
        "how layers are divided: parameters: equally many, uniform: equally many layers, type:REGEX: equally many "
        "layers of these classes, time: equally long forwards, measured",
    )
    schedule: Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"] = key(
        "1F1B", "order of forwards and backwards of micro-batches; the last two have several stages on each rank"
    )
    num_microbatches: Positive | None = key(
        None, "micro-batches that a batch is cut into; null: gradient_accumulation_steps, or twice the stages"
    )
    stages_per_rank: Positive | None = key(
        None, "stages on each rank, in turn; null: 2 for Interleaved1F1B and LoopedBFS, else 1"
    )
    activation_checkpoint_interval: Elements = key(0, "layers that are recomputed together in backward; 0: none")
    seed_layers: bool = key(
        False, "seed each layer by its number, so that ranks need not draw the values of others' layers"
    )

    @property
    def ranks(self) -> int:
        """``stages`` as a number."""
        return 1 if self.stages == "auto" else self.stages

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank or (2 if self.schedule in ("Interleaved1F1B", "LoopedBFS") else 1)

    @model_validator(mode="after")
    def _consistent(self) -> PipelineParallel:
        looped = self.schedule in ("Interleaved1F1B", "LoopedBFS")
        if not looped and self.chunks > 1:
            raise ValueError(
                f"stages_per_rank={self.chunks} needs schedule=Interleaved1F1B or LoopedBFS, not {self.schedule}"
            )
        return self
