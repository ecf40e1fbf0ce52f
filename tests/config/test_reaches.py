"""Every key that works reaches the code that it is for: what that code does differs from what it does by default.

A key of the schema without a probe here fails ``test_every_key_has_a_probe``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_zero.config import catalog
from lt_zero.config.load import examine
from tests.support import reach_activation as a
from tests.support import reach_attention as at
from tests.support import reach_breakdown as b
from tests.support import reach_engine as e
from tests.support import reach_files as f
from tests.support import reach_loggers as log
from tests.support import reach_parallel as par
from tests.support import reach_pipeline as pipe
from tests.support import reach_profiling as prof
from tests.support import reach_tiles as tiles
from tests.support import reach_trainer as t
from tests.support import reach_whole as w
from tests.support.features import needs_all_blocks, skip_without
from tests.support.pool import Pool
from tests.support.reach_engine import Config, Lab, nested

pytestmark = pytest.mark.filterwarnings(
    "ignore:These keys have no effect here"
)  # as one of them is to be seen doing so

Z, OPTIM, PARAM, LEAF = (
    "zero_optimization.",
    "zero_optimization.offload_optimizer.",
    "zero_optimization.offload_param.",
    "zero_optimization.leaf_module.",
)
S0: Config = {Z + "stage3_param_persistence_threshold": 0}
S1, S3 = {**S0, Z + "stage": 1}, {**S0, Z + "stage": 3}
FP16, BF16 = {"fp16.enabled": True}, {"bf16.enabled": True}
NVME = {OPTIM + "device": "nvme", OPTIM + "nvme_path": "{folder}/a", OPTIM + "overlap_step": False}
NVME_PARAM = {
    **S3,
    **BF16,
    Z + "stage3_max_reuse_distance": 0,
    PARAM + "device": "nvme",
    PARAM + "nvme_path": "{folder}/a",
}
SMALL = {"fp16.initial_scale_power": 0, "fp16.hysteresis": 1, **FP16}
KEPT = {"data_types.buffer_dtype": "bf16", **BF16}
SGD = {"optimizer.type": "SGD", "optimizer.params.lr": 0.5}
WARM = {"scheduler.type": "WarmupLR", "scheduler.params.warmup_max_lr": 0.5, "scheduler.params.warmup_num_steps": 2}
FLOPS, COMMS = {"flops_profiler.enabled": True}, {"comms_logger.enabled": True}
COMET = {"comet.enabled": True}
A, S = "activation_checkpointing.", "sparse_attention."
FULL: Config = {A + "mode": "full"}
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
APART, TOGETHER = ["embedding", "head", "pair.first", "pair.second"], ["embedding", "head", "pair"]
OUTSIDE = sorted(
    [
        "embedding.weight",
        "head.weight",
        "scale",
        *(f"pair.{n}.{k}" for n in ("first", "second") for k in ("bias", "weight")),
    ]
)
G = "gradient_compression."
L = "long_sequences."
T = "tensor_parallel."
P = T + "partition_config."
SIGNS, TOPK = {G + "algorithm": "1bit"}, {G + "algorithm": "topk"}
MATRICES = sorted(
    ["head.weight", *(f"blocks.{i}.{n}.weight" for i in range(3) for n in ("down", "up"))]
    + [f"pair.{n}.weight" for n in ("first", "second")]
)
Q, SEQUENCE = "sequence_parallel.", {"sequence_parallel_size": 2}
CUT = {T + "autotp_size": 2, P + "layer_specs": [{"patterns": "up", "gather_output": True}]}
REST = {"(all others)": "whole"}
BUFFERS = {"table": "bfloat16", "rotary.angles": "float32"}


@dataclass(frozen=True)
class Probe:
    """A look at what code does.

    Attributes:
        look: what is seen under a configuration.
        value: of the key.
        was: what is seen without it.
        now: what is seen with it.
        base: keys that are there in both cases.
        at: the key that is written, if it is one of many.
    """

    look: t.Look
    value: Any
    was: Any
    now: Any
    base: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""


PROBES: dict[str, Probe] = {
    # steps
    "train_batch_size": Probe(t.run(t.refused), 8, [], ["train_batch_size"]),
    "train_micro_batch_size_per_gpu": Probe(t.run(t.refused), 8, [], ["train_micro_batch_size_per_gpu"]),
    "gradient_accumulation_steps": Probe(t.run(lambda r: r.module.batches), 3, 2, 6),
    "gradient_clipping": Probe(t.clipped, 0.001, [True, True], [False, False]),
    "on_skipped_step": Probe(
        t.overflowing(lambda r: r.module.rates, 1),
        "advance",
        [0.5, 0.25, 0.25, 0.125],
        [0.5, 0.25, 0.125, 0.0625],
        {"fp16.initial_scale_power": 4, **FP16},
    ),
    "on_min_scale": Probe(t.overflowing(t.outcome, 1, 2, 3), "warn", "LossScaleError", 1, SMALL),
    "on_nonfinite": Probe(t.overflowing(t.outcome, 1), "raise", 1, "NonFiniteError"),
    "fp16.raise_error_at_min_scale": Probe(t.overflowing(t.outcome, 1, 2, 3), False, "LossScaleError", 0, SMALL),
    "bf16.check_grad_overflow": Probe(
        t.overflowing(lambda r: r.strategy.precision_plugin.skipped_steps, 1), False, 1, 0, BF16
    ),
    "optimizer.type": Probe(
        t.optimizer(lambda o: type(o).__name__), "SGD", "AdamW", "SGD", {"optimizer.type": "AdamW"}
    ),
    "optimizer.params.<name>": Probe(
        t.optimizer(lambda o: o.param_groups[0]["momentum"]), 0.25, 0, 0.25, SGD, "optimizer.params.momentum"
    ),
    "optimizer.param_groups": Probe(
        t.optimizer(lambda o: [(len(g["params"]), g["lr"]) for g in o.param_groups]),
        [{"match": "*.weight", "lr": 0.25}],
        [(5, 0.5)],
        [(3, 0.25), (2, 0.5)],
        SGD,
    ),
    "scheduler.type": Probe(t.rates, "WarmupLR", [0.5, 0.5], [0.0, 0.0]),
    "scheduler.params.<name>": Probe(t.rates, 0.25, [0.0, 0.0], [0.25, 0.25], WARM, "scheduler.params.warmup_min_lr"),
    "fused_step": Probe(e.kernel, False, True, False),
    "ops": Probe(e.without_kernels, "required", [], ["ops"]),
    "quantize": Probe(e.refusal, 8, [], ["quantize"], S3),
    "max_cpu_gb": Probe(e.refusal, 1e-6, [], ["memory"]),
    # what is shown
    "steps_per_print": Probe(t.run(lambda r: re.findall(r"^step (\d+):", r.text, re.M)), 2, [], ["2"]),
    "wall_clock_breakdown": Probe(b.times, True, [], ["2"], {"steps_per_print": 2}),
    "gradient_noise_scale": Probe(b.noise, True, [], [2]),
    "memory_breakdown": Probe(b.memory, True, [], ["1", "2"], {"steps_per_print": 2}),
    "dump_state": Probe(t.run(lambda r: "    stage: 3\n" in r.text), True, False, True),
    "log_level": Probe(t.run(lambda r: r.module.levels), "error", {logging.NOTSET}, {logging.ERROR}),
    "disable_python_gc": Probe(t.run(lambda r: r.module.collects), True, {True}, {False}),
    # what is profiled
    "flops_profiler.enabled": Probe(prof.table(prof.counted_at), True, [], ["1"]),
    "flops_profiler.profile_step": Probe(prof.table(prof.counted_at), 2, ["1"], ["2"], FLOPS),
    "flops_profiler.module_depth": Probe(prof.table(prof.levels), 0, ["0", "1"], ["0"], FLOPS),
    "flops_profiler.top_modules": Probe(prof.table(prof.classes), 2, ["Linear"], ["Linear", "BatchNorm1d"], FLOPS),
    "flops_profiler.detailed": Probe(prof.table(prof.rows), False, ["first", "norm", "second"], [], FLOPS),
    "flops_profiler.output_file": Probe(prof.written, "{folder}/made/flops.txt", [True, False], [False, True], FLOPS),
    "flops_profiler.recompute_fwd_factor": Probe(prof.table(prof.recomputed), 0.5, [], ["80 FLOP (assumed)"], FLOPS),
    "comms_logger.enabled": Probe(prof.comms(prof.enabled), True, False, True),
    "comms_logger.verbose": Probe(prof.comms(prof.lines), True, False, True, COMMS),
    "comms_logger.prof_all": Probe(prof.comms(prof.some), False, ["broadcast", "reduce_scatter"], [], COMMS),
    "comms_logger.prof_ops": Probe(
        prof.comms(prof.some),
        ["reduce_scatter_tensor"],
        [],
        ["reduce_scatter"],
        {**COMMS, "comms_logger.prof_all": False},
    ),
    "comms_logger.debug": Probe(prof.comms(prof.named), True, False, True, COMMS),
    # what is sharded, and how
    Z + "stage": Probe(e.sharded, 2, (False, False, False), (True, True, False)),
    Z + "shard_along": Probe(w.cut, "parameter", True, False, S1),
    Z + "optimizer_is_elementwise": Probe(w.asserted, True, "TypeError", "", S1),
    "reproducible.virtual_ranks": Probe(e.sum_of_gradients, 2, "none", "fold of one rank", S1),
    "reproducible.threads": Probe(e.threads, 3, 1, 3, {**S1, "reproducible.virtual_ranks": 2}),
    "communication.slow_node_tolerance": Probe(w.tolerated, 0.5, None, 1, S0),
    "communication.link_timeout": Probe(w.link_limits, 7.5, [120_000, 145_000], [7_500, 32_500], S0),
    "communication.topology": Probe(w.dimensions, 3, [], [2, 1, 1], S1),
    Z + "mics_shard_size": Probe(w.cut, 1, True, False, S1),
    Z + "dp_replicate_size": Probe(w.cut, 2, True, False, S1),
    Z + "zero_quantized_weights": Probe(w.launched, True, [], ["encoded all-gather"], S3),
    Z + "zero_quantized_nontrainable_weights": Probe(w.launched_frozen, True, [], ["encoded all-gather"], S3),
    Z + "zero_hpz_partition_size": Probe(
        w.launched, 2, [], ["all-gather in the node"], {**S3, Z + "stage3_max_reuse_distance": 0}
    ),
    Z + "zero_quantized_gradients": Probe(w.launched, True, [], ["compressed reduction"], S1),
    Z + "overlap_comm": Probe(e.flying, False, 2, 1, S1),
    Z + "reduce_scatter": Probe(t.sent("by"), False, ["all_to_all_single"], ["all_reduce"]),
    Z + "reduce_bucket_size": Probe(e.largest, 400, 704, 376, S0),
    Z + "allgather_bucket_size": Probe(e.largest, 400, 704, 376, S1),
    Z + "sub_group_size": Probe(e.largest, 400, 704, 376, {**S1, OPTIM + "device": "cpu"}),
    Z + "stage3_prefetch_bucket_size": Probe(e.ahead, 1400, 5, 1, NVME_PARAM),
    Z + "stage3_param_persistence_threshold": Probe(e.count_whole, 11, 25, 10, {Z + "stage": 3}),
    Z + "stage3_model_persistence_threshold": Probe(
        e.count_whole, 20, 10, 2, {**S3, Z + "stage3_param_persistence_threshold": 11}
    ),
    Z + "stage3_max_live_parameters": Probe(e.gathered, 0, 6, 0, S3),
    Z + "stage3_max_reuse_distance": Probe(e.gathered, 0, 6, 0, S3),
    LEAF + "classes": Probe(e.units, ["Pair"], APART, TOGETHER, S3),
    LEAF + "names": Probe(e.units, ["pair"], APART, TOGETHER, S3),
    LEAF + "name_suffixes": Probe(e.units, ["air"], APART, TOGETHER, S3),
    Z + "zero_allowed_param_types": Probe(e.whole, ["Block"], [], OUTSIDE, S3),
    Z + "zero_force_param_types": Probe(e.whole, ["Embedding"], [], ["embedding.weight"], S3),
    Z + "sync_bn_in_backward": Probe(t.norms, True, ["BatchNorm1d"], ["SyncBatchNorm"]),
    Z + "enable_sanity_checks": Probe(t.compared, True, [False, False], [True, True]),
    # gradients on their way
    "communication_data_type": Probe(t.sent("as"), "bf16", ["float32"], ["bfloat16"]),
    "prescale_gradients": Probe(t.sent("sent", "got"), True, [3.0, 2.0], [1.5, 2.0], {"gradient_predivide_factor": 1}),
    "gradient_predivide_factor": Probe(t.sent("sent", "got"), 4, [3.0, 2.0], [0.75, 2.0]),
    "gradient_allreduce_op": Probe(t.sent("sent", "got"), "sum", [3.0, 2.0], [3.0, 4.0]),
    "broadcast_buffers": Probe(e.counts, False, [[2.0], [3.0]], [[2.0], [4.0]]),
    # host memory and files
    OPTIM + "device": Probe(f.files, "nvme", [], ["master"], {OPTIM + "nvme_path": "{folder}"}),
    OPTIM + "nvme_path": Probe(f.folder, "{folder}/b", {"a"}, {"b"}, NVME),
    OPTIM + "pin_memory": Probe(f.pinned, False, [True, True], [False], {OPTIM + "device": "cpu"}),
    OPTIM + "buffer_count": Probe(f.walked, 1, [True, True, True], [False, True, False], {**S3, **NVME}),
    OPTIM + "pipeline_read": Probe(f.walked, False, [True, True, True], [True, True, False], {**S3, **NVME}),
    OPTIM + "pipeline_write": Probe(f.walked, False, [True, True, True], [False, True, True], {**S3, **NVME}),
    OPTIM + "ratio": Probe(f.resting, 0.5, [8, 0], [6, 0], {**S3, **NVME}),
    OPTIM + "overlap_step": Probe(
        t.threads,
        False,
        {"main", "background"},
        {"main"},
        {OPTIM + "device": "nvme", OPTIM + "nvme_path": "{folder}/a"},
    ),
    PARAM + "device": Probe(
        f.files,
        "nvme",
        ["master"],
        ["master", "weights"],
        {**S3, **BF16, **NVME, PARAM + "nvme_path": "{folder}/a", PARAM + "max_in_cpu": 0},
    ),
    PARAM + "nvme_path": Probe(f.folder, "{folder}/b", {"a"}, {"b"}, NVME_PARAM),
    PARAM + "pin_memory": Probe(f.pinned, False, [True, True], [False], {**S3, PARAM + "device": "cpu"}),
    PARAM + "buffer_count": Probe(e.ahead, 3, 5, 3, NVME_PARAM),
    PARAM + "buffer_size": Probe(e.ahead, 800, 5, 1, NVME_PARAM),
    PARAM + "max_in_cpu": Probe(
        f.resting, 1000, [0, 8], [0, 6], {**S3, PARAM + "device": "nvme", PARAM + "nvme_path": "{folder}/a"}
    ),
    "aio.block_size": Probe(f.requests, 8192, [1], [8], NVME),
    "aio.queue_depth": Probe(f.in_flight, 2, 4, 2, NVME),
    "aio.intra_op_parallelism": Probe(f.in_flight, 3, 4, 3, NVME),
    "aio.single_submit": Probe(f.in_flight, True, 4, 1, NVME),
    "aio.overlap_events": Probe(f.in_flight, False, 4, 1, NVME),
    "aio.checksum": Probe(f.damage, True, "taken as it is", "found", NVME),
    # dtypes
    "fp16.enabled": Probe(e.weights, True, {"float32"}, {"float16"}),
    "bf16.enabled": Probe(e.weights, True, {"float32"}, {"bfloat16"}),
    "fp16.auto_cast": Probe(e.inputs, False, "float16", "float32", FP16),
    "fp16.fp16_master_weights_and_grads": Probe(e.master, True, {"float32"}, {"float16"}, FP16),
    "bf16.bf16_master_weights_and_grads": Probe(e.master, True, {"float32"}, {"bfloat16"}, BF16),
    "bf16.bf16_optimizer_states": Probe(
        e.moments, True, {"float32"}, {"bfloat16"}, {**BF16, "bf16.bf16_master_weights_and_grads": True}
    ),
    "bf16.stochastic_rounding": Probe(
        e.small_step, True, False, True, {**BF16, "bf16.bf16_master_weights_and_grads": True}
    ),
    "optimizer_states.dtype": Probe(e.moments, "bf16", {"float32"}, {"bfloat16"}, S3),
    "fp16_override_modules": Probe(e.in_fp32, ["head"], [], ["head"], BF16),
    "fp16.fp16_override_modules": Probe(e.in_fp32, ["head"], [], ["head"], FP16),
    "bf16.fp16_override_modules": Probe(e.in_fp32, ["head"], [], ["head"], BF16),
    "torch_autocast.enabled": Probe(e.autocast, True, "float32", "bfloat16"),
    "torch_autocast.dtype": Probe(e.autocast, "fp16", "bfloat16", "float16", {"torch_autocast.enabled": True}),
    "data_types.grad_accum_dtype": Probe(e.accumulated, "bf16", {"float32"}, {"bfloat16"}, BF16),
    "data_types.param_dtype": Probe(e.refusal, "fp16", [], ["data_types.param_dtype"], BF16),
    "data_types.buffer_dtype": Probe(e.buffers, "bf16", dict.fromkeys(BUFFERS, "float32"), BUFFERS, BF16),
    "data_types.keep_in_fp32_modules": Probe(e.buffers, [], BUFFERS, dict.fromkeys(BUFFERS, "bfloat16"), KEPT),
    # the loss scale
    "fp16.loss_scale": Probe(e.scales(), 128, 2.0**16, 128.0, FP16),
    "fp16.initial_scale_power": Probe(e.scales(), 3, 2.0**16, 8.0, FP16),
    "fp16.loss_scale_window": Probe(e.scales(False, False, False), 2, [2.0**16] * 3, [2.0**16, 2.0**16, 2.0**17], FP16),
    "fp16.hysteresis": Probe(e.scales(True), 1, [2.0**16], [2.0**15], FP16),
    "fp16.consecutive_hysteresis": Probe(
        e.scales(True, False, True), True, [2.0**16, 2.0**16, 2.0**15], [2.0**16] * 3, FP16
    ),
    "fp16.min_loss_scale": Probe(
        e.scales(True, True), 2.0**15, [2.0**15, 2.0**14], [2.0**15] * 2, {**FP16, "fp16.hysteresis": 1}
    ),
    # checkpoints
    "checkpoint.format": Probe(t.saved(Path.is_dir), "full", True, False),
    "checkpoint.async": Probe(t.savers, True, ["MainThread"], ["lt"]),
    "checkpoint.save_frozen": Probe(t.saved(t.names), False, ["first.bias", "first.weight"], ["first.weight"]),
    "checkpoint.load_module_only": Probe(t.resumed(lambda r: r.module.rates), True, [0.125], [0.5, 0.25, 0.125]),
    "checkpoint.load_optimizer_states": Probe(t.resumed(t.moment_steps), False, {3}, {1}),
    "checkpoint.load_lr_scheduler_states": Probe(
        t.resumed(lambda r: r.trainer.lr_scheduler_configs[0].scheduler.last_epoch), False, 3, 1
    ),
    Z + "load_from_fp32_weights": Probe(t.rounding, False, "as saved", "rounded"),
    Z + "stage3_gather_16bit_weights_on_model_save": Probe(
        t.saved(lambda path: [found.name for found in path.parent.glob("*.pt")]), True, [], ["last-fp16.pt"]
    ),
    # what backward computes again
    A + "mode": Probe(a.again, "selective", [], ["cheap"]),
    A + "every": Probe(a.checkpointed, 2, BLOCKS, ["blocks.0", "blocks.2"], FULL),
    A + "memory_budget": Probe(a.chosen, 0.7, BLOCKS, ["blocks.0", "blocks.1"], FULL),
    A + "modules": Probe(a.checkpointed, ["Pair"], BLOCKS, ["pair"], FULL),
    A + "cpu_checkpointing": Probe(a.place, True, None, "host", FULL),
    A + "nvme_path": Probe(a.place, "{folder}", None, "files", FULL),
    A + "contiguous_memory_optimization": Probe(a.place, True, None, "device", FULL),
    A + "number_checkpoints": Probe(a.slots, 7, 3, 7, {**FULL, A + "contiguous_memory_optimization": True}),
    A + "partition_activations": Probe(par.split, True, None, 3, {**FULL, T + "autotp_size": 2}),
    A + "synchronize_checkpoint_boundary": Probe(a.waits, True, 0, 12, FULL),
    A + "profile": Probe(a.timed, True, [], BLOCKS, FULL),
    # what is compiled
    "compile.disable": Probe(e.compiled, False, [], [(name, {"backend": "inductor"}) for name in BLOCKS]),
    "compile.backend": Probe(
        e.compiled,
        "eager",
        [(name, {"backend": "inductor"}) for name in BLOCKS],
        [(name, {"backend": "eager"}) for name in BLOCKS],
        {"compile.disable": False},
    ),
    "compile.kwargs.<name>": Probe(
        e.compiled,
        True,
        [(name, {"backend": "eager"}) for name in BLOCKS],
        [(name, {"backend": "eager", "dynamic": True}) for name in BLOCKS],
        {"compile.backend": "eager"},
        at="compile.kwargs.dynamic",
    ),
    # which blocks of the attention matrix are computed
    S + "mode": Probe(at.mode, "bigbird", None, "bigbird"),
    **{
        S + key: Probe(at.pattern(key), value, was, tuple(value) if isinstance(value, list) else value, base)
        for base, values in at.VALUES
        for key, (value, was) in values.items()
    },
    # gradients in fewer bits
    G + "algorithm": Probe(e.compressed, "1bit", [], MATRICES, S0),
    G + "exclude": Probe(e.compressed, ["Pair", "Block", "embedding.*", "scale"], MATRICES, ["head.weight"], SIGNS),
    G + "topk_ratio": Probe(e.codec, 0.5, (0.01, False), (0.5, False), TOPK),
    G + "huffman_coding": Probe(e.codec, True, (0.01, False), (0.01, True), TOPK),
    G + "hierarchical_compress": Probe(e.compresses, True, True, None, TOPK),
    G + "warmup_steps": Probe(e.compresses, 3, True, False, TOPK),
    # loggers
    "csv_monitor.enabled": Probe(log.loggers, True, [], [("CSVLogger", "DeepSpeedJobName/version_0")]),
    "csv_monitor.output_path": Probe(
        log.loggers,
        "{folder}/out",
        [("CSVLogger", "j/version_0")],
        [("CSVLogger", "out/j/version_0")],
        {"csv_monitor.enabled": True, "csv_monitor.job_name": "j"},
    ),
    "csv_monitor.job_name": Probe(
        log.loggers,
        "mine",
        [("CSVLogger", "DeepSpeedJobName/version_0")],
        [("CSVLogger", "mine/version_0")],
        {"csv_monitor.enabled": True},
    ),
    "tensorboard.enabled": Probe(log.loggers, True, [], [("TensorBoardLogger", "DeepSpeedJobName/version_0")]),
    "tensorboard.output_path": Probe(
        log.loggers,
        "{folder}/out",
        [("TensorBoardLogger", "j/version_0")],
        [("TensorBoardLogger", "out/j/version_0")],
        {"tensorboard.enabled": True, "tensorboard.job_name": "j"},
    ),
    "tensorboard.job_name": Probe(
        log.loggers,
        "mine",
        [("TensorBoardLogger", "DeepSpeedJobName/version_0")],
        [("TensorBoardLogger", "mine/version_0")],
        {"tensorboard.enabled": True},
    ),
    "wandb.enabled": Probe(log.wandb, True, [], [{"project": "deepspeed"}]),
    **{
        f"wandb.{key}": Probe(
            log.wandb, "x", [{"project": "deepspeed"}], [{"project": "deepspeed", name: "x"}], {"wandb.enabled": True}
        )
        for key, name in (("group", "group"), ("team", "entity"), ("project", "project"))
    },
    L + "tiled_mlp": Probe(tiles.seen("mlp"), True, [10], [3, 3, 4]),
    L + "mlp_tokens_per_tile": Probe(tiles.seen("mlp"), 5, [3, 3, 4], [5, 5], {L + "tiled_mlp": True}),
    L + "tiled_loss": Probe(tiles.seen("loss"), True, [], [10]),
    L + "loss_tokens_per_tile": Probe(tiles.seen("loss"), 4, [10], [4, 4, 2], {L + "tiled_loss": True}),
    T + "autotp_size": Probe(par.sizes, 2, (4, 1), (2, 2)),
    "sequence_parallel_size": Probe(par.sizes, 2, (4, 1), (2, 1)),
    "expert_parallel.enabled": Probe(par.experts, True, 1, 2, {"expert_parallel.autoep_size": 2}),
    "expert_parallel.autoep_size": Probe(par.experts, 4, 1, 4, {"expert_parallel.enabled": True}),
    Q + "method": Probe(par.sequence, "gather", ("ulysses", 1, [0, 1]), ("gather", 2, [0, 1]), SEQUENCE),
    Q + "gather": Probe(par.sequence, 2, ("ulysses", 1, [0, 1]), ("ulysses", 2, [0, 1]), SEQUENCE),
    Q + "zigzag": Probe(
        par.sequence, True, ("gather", 2, [0, 1]), ("gather", 2, [0, 3]), {**SEQUENCE, Q + "method": "gather"}
    ),
    "data_parallel_size": Probe(par.sizes, 2, (4, 1), "data_parallel_size"),
    P + "layer_specs": Probe(
        par.plan,
        [{"patterns": "up", "gather_output": True}],
        T + "autotp_size",
        {"up": "column, gathered", **REST},
        {T + "autotp_size": 2},
    ),
    P + "strict_mode": Probe(par.plan, True, {"up": "column, gathered", **REST}, P + "strict_mode", CUT),
    P + "embedding_partition_dim": Probe(
        par.plan,
        0,
        {"embed": "embedding, columns", **REST},
        {"embed": "embedding, vocabulary", **REST},
        {T + "autotp_size": 2, P + "layer_specs": [{"patterns": "embed"}]},
    ),
    P + "lm_head_patterns": Probe(
        par.plan,
        "head",
        P + "layer_specs",
        {"head": "column, gathered", **REST},
        {T + "autotp_size": 2, P + "layer_specs": [{"patterns": "head"}]},
    ),
    P + "use_default_specs": Probe(
        par.plan,
        False,
        {"embed": "embedding, columns", "up": "column, gathered", **REST},
        {"embed": "embedding, columns", **REST},
        {T + "autotp_size": 2, P + "layer_specs": [{"patterns": "embed"}], T + "preset_model": "mine"},
    ),
    T + "preset_model": Probe(
        par.plan, "mine", T + "autotp_size", {"up": "column, gathered", **REST}, {T + "autotp_size": 2}
    ),
    "pipeline.stages": Probe(pipe.ranks, 2, 1, 2),
    "pipeline.partition_method": Probe(pipe.step("cut"), "uniform", 2, 3),
    "pipeline.schedule": Probe(pipe.step("schedule"), "GPipe", "Schedule1F1B", "ScheduleGPipe"),
    "pipeline.num_microbatches": Probe(pipe.step("losses"), 3, 4, 3),
    "pipeline.stages_per_rank": Probe(pipe.step("stages"), 3, 4, 6, {"pipeline.schedule": "LoopedBFS"}),
    "pipeline.activation_checkpoint_interval": Probe(pipe.step("forwards"), 2, 20, 40),
    "pipeline.seed_layers": Probe(pipe.step("made"), True, 10, 5),
    "comet.enabled": Probe(log.comet, True, [], [{}]),
    "comet.samples_log_interval": Probe(log.comet, 7, [{}], ["comet.samples_log_interval", {}], COMET),
    **{
        f"comet.{key}": Probe(log.comet, value, [{}], [{name: value}], COMET)
        for key, name, value in (
            ("project", "project", "p"),
            ("workspace", "workspace", "w"),
            ("api_key", "api_key", "secret"),
            ("experiment_name", "name", "n"),
            ("experiment_key", "experiment_key", "a" * 32),
            ("online", "online", False),
            ("mode", "mode", "create"),
        )
    },
}

# One value is what is done in any case: (the other value, of which this is said, and other keys).
WITHOUT_CHOICE: dict[str, tuple[Any, Config]] = {
    Z + "contiguous_gradients": (False, S3),
    OPTIM + "fast_init": (False, {**S3, **NVME}),
    "bf16.immediate_grad_update": (False, BF16),
}


SEEN: dict[Any, Any] = {}  # without the key, by look and base: many keys share both


@pytest.fixture
def lab(tmp_path: Path, pool: Pool) -> Lab:
    return Lab(tmp_path, pool)


def looks(lab: Lab, *configs: Config) -> Iterator[Lab]:
    for number, _ in enumerate(configs):
        folder = lab.folder / str(number)
        folder.mkdir()
        yield Lab(folder, lab.pool)


@needs_all_blocks()
def test_every_key_has_a_probe() -> None:
    keys = {entry.key for entry in catalog.entries()}
    assert set(PROBES) | set(WITHOUT_CHOICE) == keys
    assert not set(PROBES) & set(WITHOUT_CHOICE)


@pytest.mark.parametrize("key", PROBES)
def test_value_reaches_its_code(key: str, lab: Lab) -> None:
    probe = PROBES[key]
    skip_without(*key.split("."), *(part for other in probe.base for part in other.split(".")))
    configs = (dict(probe.base), {**probe.base, probe.at or key: probe.value})
    before, after = looks(lab, *configs)
    base = (probe.look, repr(sorted(probe.base.items())))
    if base not in SEEN:
        SEEN[base] = probe.look(before, configs[0])
    was, now = SEEN[base], probe.look(after, configs[1])
    assert was == probe.was
    assert now == probe.now
    assert was != now


@pytest.mark.parametrize("key", WITHOUT_CHOICE)
def test_key_without_a_choice(key: str, lab: Lab) -> None:
    skip_without(*key.split("."))
    value, base = WITHOUT_CHOICE[key]
    configs = ({**base, key: not value}, {**base, key: value})
    told = [{n.key for n in examine(nested(config, Path())).notices if n.kind == "inactive"} for config in configs]
    assert key in told[1]
    assert key not in told[0]
    was, now = (e.trained(place, config) for place, config in zip(looks(lab, *configs), configs, strict=True))
    assert was.keys() == now.keys()
    for name in was:
        assert torch.equal(was[name], now[name]), name
