"""Files for FSDP, converted: Accelerate's, axolotl's, transformers', and arguments of Lightning's strategies as YAML.

Each key of such a file gets a verdict: the keys here that say the same, or why none is needed, or that another program
goes on reading it, or what to do where there is no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.document import Document
from lt_zero.config.fsdp_files import strategy_of_lightning

Status = Literal["mapped", "not needed", "elsewhere", "unsupported", "unknown"]
ZERO = "zero_optimization"
_REUSE, _REPLICAS = f"{ZERO}.stage3_max_reuse_distance", f"{ZERO}.dp_replicate_size"
_OFF = (None, False, "no", "NO", "none", "false", "False", "", "null")


@dataclass(frozen=True)
class Verdict:
    """The fate of a key.

    Attributes:
        key: dotted, as it is written.
        keys: of lt_zero, with their values, if it is mapped.
        note: why, or the remedy.
    """

    key: str
    value: Any
    status: Status
    note: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) or self.value is None else str(self.value)
        shown = value if len(value) <= 40 else f"{value[:37]}..."
        if self.status == "mapped":
            means = ", ".join(f"{key}={_shown(value)}" for key, value in self.keys.items())
            return f"{self.key}={shown} becomes {means}" + (f" ({self.note})" if self.note else "")
        return f"{self.key}={shown}: {_SAID[self.status]}: {self.note}"


_SAID = {
    "not needed": "nothing is needed",
    "elsewhere": "left where it is",
    "unsupported": "there is no counterpart",
    "unknown": "unknown",
}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Becomes:
    """Answer of a rule to a value: keys, or the status and its reason."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "mapped"
    note: str = ""


Rule = Callable[[Any, "Around"], Becomes]


@dataclass(frozen=True)
class Around:
    """The rest of a file, as rules ask for it.

    Attributes:
        nodes: machines of the run; None: the file does not say.
        block: the keys of FSDP.
        of_trainer: weights are saved by transformers or Accelerate.
    """

    nodes: int | None
    block: Mapping[str, Any]
    of_trainer: bool


def _because(note: str) -> Rule:
    return lambda value, around: Becomes({}, "not needed", note)


def _elsewhere(note: str) -> Rule:
    return lambda value, around: Becomes({}, "elsewhere", note)


def _unless_on(off: str, remedy: str) -> Rule:
    """A switch that has no counterpart: off it needs nothing."""
    return lambda value, around: (
        Becomes({}, "not needed", off) if _is_off(value) else Becomes({}, "unsupported", remedy)
    )


def _is_off(value: Any) -> bool:
    return value in ({}, []) or (not isinstance(value, (dict, list)) and value in _OFF)


def _is_on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")


def _names(value: Any) -> list[str]:
    """Class names: a list, text with commas, or classes as LightningCLI writes them."""
    items = value if isinstance(value, list) else str(value).split(",")
    found = [item.get("class_path", "") if isinstance(item, Mapping) else str(item) for item in items]
    return [name.strip() for name in found if name.strip()]


# ---- keys of FSDP ----------------------------------------------------------------------------------------------------

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # numbers: from 1
_STAYS = "units stay gathered from forward to backward, within stage3_max_reuse_distance"


def _strategy(value: Any, around: Around) -> Becomes:
    if str(value).lower() == "true":
        return Becomes({f"{ZERO}.stage": 3, _REUSE: 0})
    if str(value).lower() == "false":
        return Becomes({f"{ZERO}.stage": 3}, note=_STAYS)
    text = str(value).rpartition(".")[2].upper().lstrip("_")
    name = _STRATEGIES[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text
    if name not in _STRATEGIES:
        return Becomes({}, "unknown", f"it is none of {', '.join(_STRATEGIES)}, true and false")
    if name == "NO_SHARD":
        return Becomes({f"{ZERO}.stage": 0})
    keys: dict[str, Any] = {f"{ZERO}.stage": 3}
    if name in ("FULL_SHARD", "HYBRID_SHARD"):
        keys[_REUSE] = 0
    if not name.startswith("HYBRID"):
        return Becomes(keys, note=_STAYS if name == "SHARD_GRAD_OP" else "")
    if around.nodes is None:
        remedy = f"Write FULL_SHARD here, and {ZERO}.mics_shard_size with the ranks of a node into the result"
        return Becomes({}, "unsupported", f"the file does not say how many machines there are. {remedy}.")
    return Becomes(keys | ({_REPLICAS: around.nodes} if around.nodes > 1 else {}), note="a copy on each machine")


def _offload(value: Any, around: Around) -> Becomes:
    if isinstance(value, Mapping):
        value = value.get("offload_params", True)
    if not _is_on(value):
        return Becomes({}, "not needed", "nothing is offloaded")
    return Becomes({f"{ZERO}.{block}.device": "cpu" for block in ("offload_optimizer", "offload_param")})


def _pin(value: Any, around: Around) -> Becomes:
    if not any(_is_on(around.block.get(name)) for name in ("offload_params", "cpu_offload")):
        return Becomes({}, "not needed", "nothing is offloaded")
    return Becomes({f"{ZERO}.{block}.pin_memory": _is_on(value) for block in ("offload_optimizer", "offload_param")})


def _wrap(value: Any, around: Around) -> Becomes:
    """A policy's name, or in Lightning a set of classes."""
    if isinstance(value, (list, Mapping)):
        return _layers(value if isinstance(value, list) else [value], around)
    return Becomes({}, "not needed", "repeated blocks are units; leaf_module names others")


def _layers(value: Any, around: Around) -> Becomes:
    if not (names := _names(value or [])):
        return Becomes({}, "not needed", "repeated blocks are units")
    return Becomes({f"{ZERO}.leaf_module.classes": names})


def _recompute(value: Any, around: Around) -> Becomes:
    if _is_off(value):
        return Becomes({}, "not needed", "nothing is recomputed")
    if _is_on(value):
        return Becomes({"activation_checkpointing.mode": "full"})
    classes = value if isinstance(value, list) else [value]
    return Becomes({"activation_checkpointing.mode": "full", "activation_checkpointing.modules": _names(classes)})


def _recompute_offloaded(value: Any, around: Around) -> Becomes:
    if not _is_on(value):
        return Becomes({}, "not needed", "saved inputs stay on the device")
    return Becomes({"activation_checkpointing.cpu_checkpointing": True})


def _state_dict(value: Any, around: Around) -> Becomes:
    text = str(value).rpartition(".")[2].upper().removesuffix("_STATE_DICT")
    if text not in ("FULL", "SHARDED"):
        return Becomes(
            {}, "unsupported", "a file for each rank, which fits as many ranks only. Write SHARDED_STATE_DICT."
        )
    if not around.of_trainer:
        return Becomes({"checkpoint.format": text.lower()})
    whole, key = text == "FULL", f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    return Becomes({key: whole}, note="of saved models; training states are sharded, and resume on any number of ranks")


_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
_FULL = ("no", "fp32", "float32", "32", "none")


def _dtype(value: Any) -> str | None:
    """bf16, fp16 or fp32; None: another."""
    text = str(value).rpartition(".")[2].lower()
    return "fp32" if text in _FULL else _PRECISIONS.get(text)


def _precision(value: Any, around: Around) -> Becomes:
    if isinstance(value, Mapping):
        return _policy(value, around)
    kind = _dtype(value)
    if kind == "fp32":
        return Becomes({}, "not needed", "weights are in fp32")
    if kind is None:
        return Becomes(
            {}, "unsupported", "float8 is a matter of the model: convert its linear layers by torchao. Write bf16."
        )
    return Becomes({f"{kind}.enabled": True}, note="weights in 16 bits, master weights in fp32")


def _policy(value: Mapping[str, Any], around: Around) -> Becomes:
    """FSDP's ``MixedPrecision`` as a mapping."""
    value = value.get("init_args", value)
    keys: dict[str, Any] = {}
    dtypes = {name: _dtype(value[name]) for name in _OF_DTYPES if value.get(name) is not None}
    if unknown := [name for name in (*value, *dtypes) if name not in _OF_POLICY or dtypes.get(name, "") is None]:
        return Becomes({}, "unknown", f"{unknown[0]}={value[unknown[0]]}. Remove it, and convert again.")
    if (kind := dtypes.get("param_dtype")) in ("bf16", "fp16"):
        keys[f"{kind}.enabled"] = True
    if (kind := dtypes.get("reduce_dtype")) is not None:
        keys["communication_data_type"] = kind
    if (kind := dtypes.get("buffer_dtype")) is not None:
        keys["data_types.buffer_dtype"] = kind
    return Becomes(keys) if keys else Becomes({}, "not needed", "dtypes are those of the model")


_OF_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")
_OF_POLICY = (
    *_OF_DTYPES,
    "output_dtype",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "keep_low_precision_grads",
)


def _replicas(value: Any, around: Around) -> Becomes:
    return Becomes({_REPLICAS: int(value)}) if int(value or 1) > 1 else Becomes({}, "not needed", "ranks are one group")


def _mesh(value: Any, around: Around) -> Becomes:
    if not isinstance(value, list) or len(value) != 2:
        return Becomes({}, "unsupported", "Write [replicas, ranks of each].")
    return _replicas(value[0], around)


def _tensor(value: Any, around: Around) -> Becomes:
    size = int(value) if str(value).isdigit() else 1
    return Becomes({"tensor_parallel.autotp_size": size}) if size > 1 else Becomes({}, "not needed", "no layer is cut")


def _sequence(value: Any, around: Around) -> Becomes:
    size = int(value or 1)
    return Becomes({"sequence_parallel_size": size}) if size > 1 else Becomes({}, "not needed", "no sequence is cut")


def _data_ranks(value: Any, around: Around) -> Becomes:
    return Becomes({}, "not needed", "the ranks that other axes leave")


_ORDER = _because("the order of the last step tells what is gathered next; stage3_prefetch_bucket_size bounds it")
_SAME = "an argument of ZeroStrategy, too"
BLOCK: Mapping[str, Rule] = {
    "version": _because("there is one way of sharding"),
    "sharding_strategy": _strategy,
    "reshard_after_forward": _strategy,
    "offload_params": _offload,
    "cpu_offload": _offload,
    "cpu_offload_pin_memory": _pin,
    "auto_wrap_policy": _wrap,
    "transformer_layer_cls_to_wrap": _layers,
    "transformer_cls_names_to_wrap": _layers,
    "min_num_params": _because("repeated blocks are units"),
    "state_dict_type": _state_dict,
    "final_state_dict_type": _state_dict,
    "cpu_ram_efficient_loading": _because("from_pretrained at stage 3 reads onto shards"),
    "sync_module_states": _because("the values of rank 0 are sharded"),
    "use_orig_params": _because("parameters keep identity, shape and names"),
    "backward_prefetch": _ORDER,
    "backward_prefetch_policy": _ORDER,
    "forward_prefetch": _ORDER,
    "limit_all_gathers": _because("stage3_max_live_parameters bounds what is gathered"),
    "activation_checkpointing": _recompute,
    "activation_checkpointing_policy": _recompute,
    "activation_checkpointing_offload": _recompute_offloaded,
    "mixed_precision_policy": _precision,
    "mixed_precision": _precision,
    "ignored_modules": _unless_on("nothing is left out", "Write zero_force_param_types, whose classes stay whole."),
    "ignored_states": _unless_on("nothing is left out", "Write zero_force_param_types, whose classes stay whole."),
    "ignored_parameters": _unless_on("nothing is left out", "Write zero_force_param_types, whose classes stay whole."),
    "param_init_fn": _because("modules on the meta device are initialized by their reset_parameters"),
    "device_id": _because("each rank has the device of its number"),
    "device_mesh": _mesh,
    "xla": _unless_on("there are no TPUs", "lt_zero trains on GPUs and CPUs. Remove it."),
    "xla_fsdp_v2": _unless_on("there are no TPUs", "lt_zero trains on GPUs and CPUs. Remove it."),
    "xla_fsdp_grad_ckpt": _unless_on("there are no TPUs", "lt_zero trains on GPUs and CPUs. Remove it."),
    "xla_fsdp_settings": _unless_on("there are no TPUs", "lt_zero trains on GPUs and CPUs. Remove it."),
    # ModelParallelStrategy, and arguments of any strategy
    "data_parallel_size": _data_ranks,
    "tensor_parallel_size": _tensor,
    "save_distributed_checkpoint": lambda value, around: Becomes(
        {"checkpoint.format": "sharded" if _is_on(value) else "full"}
    ),
    **dict.fromkeys(
        (
            *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
            *("process_group_backend", "timeout"),
        ),
        _elsewhere(_SAME),
    ),
}
# ---- keys around the block -------------------------------------------------------------------------------------------

_LAUNCHER = _elsewhere("of the launcher: torchrun --nnodes, --nproc-per-node, --node-rank, --rdzv-endpoint")
_TPU = _unless_on("there are no TPUs", "lt_zero trains on GPUs and CPUs. Remove it.")


def _kind(value: Any, around: Around) -> Becomes:
    if str(value).upper() == "FSDP":
        return Becomes({}, "not needed", "ZeroStrategy, or lt_zero.as_deepspeed(), is how ranks train")
    return Becomes({}, "unsupported", "the file is for another kind of run. Write FSDP.")


def _compile(value: Any, around: Around) -> Becomes:
    block = value if isinstance(value, Mapping) else {}
    backend = str(block.get("dynamo_backend", "NO")).lower()
    if backend == "no":
        return Becomes({}, "not needed", "nothing is compiled")
    options = {name: block[f"dynamo_{name}"] for name in ("mode", "dynamic") if block.get(f"dynamo_{name}") is not None}
    if options.get("mode") == "default":
        del options["mode"]
    keys: dict[str, Any] = {"compile.disable": False, "compile.backend": backend}
    return Becomes({**keys, **({"compile.kwargs": options} if options else {})}, note="of the repeated blocks")


def _gathers(value: Any, around: Around) -> Becomes:
    if str(value).lower() in ("alltoall", "none"):
        return Becomes({}, "not needed", "heads are exchanged for tokens")
    return Becomes({"sequence_parallel.method": "gather"})


AXES: Mapping[str, Rule] = {
    "dp_replicate_size": _replicas,
    "dp_shard_size": _data_ranks,
    "tp_size": _tensor,
    "cp_size": _sequence,
    "sp_size": _sequence,
    "cp_backend": _because("there is one"),
    "sp_backend": _because("there is one"),
    "cp_comm_strategy": _gathers,
    "sp_seq_length": _because("lengths may change"),
    "sp_seq_length_is_variable": _because("lengths may change"),
    "sp_attn_implementation": _because("it is that of the model"),
}
ACCELERATE: Mapping[str, Rule] = {
    "distributed_type": _kind,
    "mixed_precision": _precision,
    "dynamo_config": _compile,
    "debug": lambda value, around: (
        Becomes({f"{ZERO}.enable_sanity_checks": True})
        if _is_on(value)
        else Becomes({}, "not needed", "collectives are compared where ranks may diverge")
    ),
    "use_cpu": _elsewhere('Trainer(accelerator="cpu"), or TrainingArguments(use_cpu=True)'),
    "compute_environment": _because("it says where the launcher runs"),
    "downcast_bf16": _because("it is for TPUs"),
    "enable_cpu_affinity": _elsewhere("of the launcher: numactl"),
    "main_training_function": _because("the script is run as it is"),
    "deepspeed_config": _unless_on("it is empty", "The file is for DeepSpeed: pass the block's file itself."),
    "megatron_lm_config": _unless_on("it is empty", "Megatron-LM has no counterpart. Remove it."),
    "fp8_config": _unless_on("nothing is in float8", "Convert linear layers by torchao. Remove the block."),
    "ipex_config": _unless_on("it is empty", "Remove it."),
    "mpirun_config": _elsewhere("of the launcher: mpirun"),
    **dict.fromkeys(
        (
            *("machine_rank", "main_process_ip", "main_process_port", "num_machines", "num_processes", "gpu_ids"),
            *("rdzv_backend", "same_network", "deepspeed_hostfile", "deepspeed_multinode_launcher"),
        ),
        _LAUNCHER,
    ),
    **dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm", "commands"), _TPU),
    "command_file": _TPU,
}


def _axolotl_bits(kind: str) -> Rule:
    def found(value: Any, around: Around) -> Becomes:
        if _is_off(value):
            return Becomes({}, "not needed", "it is switched off")
        return Becomes({f"{kind}.enabled": "auto" if value == "auto" else True}, note="also in the file of the run")

    return found


TRAINER: Mapping[str, Rule] = {
    "fsdp_version": BLOCK["version"],
    "fsdp_final_state_dict_type": _state_dict,
    "fsdp_transformer_layer_cls_to_wrap": _layers,
    "fsdp_min_num_params": BLOCK["min_num_params"],
    "deepspeed": _unless_on("it is empty", "The file names a file for DeepSpeed already: convert that one."),
    "bf16": _axolotl_bits("bf16"),
    "fp16": _axolotl_bits("fp16"),
    "dp_replicate_size": _replicas,
    "dp_shard_size": _data_ranks,
    "tensor_parallel_size": _tensor,
    "context_parallel_size": _sequence,
    "sequence_parallel_degree": _sequence,
    "fp8": _unless_on("nothing is in float8", "Convert linear layers by torchao. Remove it."),
    "fp8_enable_fsdp_float8_all_gather": _unless_on("weights are gathered in their dtype", "Write false."),
}
_OPTIONS: Mapping[str, Rule] = {  # of ``fsdp: [full_shard, auto_wrap]``
    **{name.lower(): _strategy for name in _STRATEGIES},
    "offload": lambda value, around: _offload(True, around),
    "auto_wrap": BLOCK["min_num_params"],
}
_FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


# ---- a file ----------------------------------------------------------------------------------------------------------


def verdicts(values: Mapping[str, Any]) -> list[Verdict]:
    """The verdict on each key of a file for FSDP, in its order."""
    if (path := strategy_of_lightning(values)) is not None:
        return list(_ofstrategy_of_lightning(values, path))
    block = values.get("fsdp_config")
    inner = block if isinstance(block, Mapping) else {}
    accelerate = "distributed_type" in values or "compute_environment" in values
    around = _around(values, inner, of_trainer=accelerate or bool(values.get("fsdp") or block))
    found: list[Verdict] = []
    if not accelerate and not values.get("fsdp") and not inner and values.get("fsdp_version") is None:
        return [_verdict(key, value, BLOCK, around, str(key)) for key, value in values.items()]  # the block alone
    table = ACCELERATE if accelerate else TRAINER
    for key, value in values.items():
        if key == "fsdp_config" and isinstance(value, Mapping):
            found += [_verdict(name, inside, BLOCK, around, f"{key}.{name}") for name, inside in value.items()]
        elif key == "parallelism_config" and isinstance(value, Mapping):
            for name, inside in value.items():
                short = str(name).removeprefix("parallelism_config_")
                found.append(_verdict(short, inside, AXES, around, f"{key}.{name}"))
        elif key == "fsdp" and not accelerate:
            found += _options(value, around)
        elif not accelerate and key not in table and not str(key).startswith("fsdp"):
            found.append(Verdict(str(key), value, "elsewhere", "no key of FSDP: the program goes on reading it"))
        else:
            found.append(_verdict(key, value, table, around, str(key), prefix=False))
    return found


def _around(values: Mapping[str, Any], block: Mapping[str, Any], of_trainer: bool) -> Around:
    inner = {str(key).removeprefix("fsdp_"): value for key, value in (block or values).items()}
    nodes = values.get("num_machines", values.get("num_nodes"))
    return Around(nodes if isinstance(nodes, int) else None, inner, of_trainer)


def _verdict(
    key: Any, value: Any, table: Mapping[str, Rule], around: Around, shown: str, prefix: bool = True
) -> Verdict:
    rule = table.get(str(key).removeprefix("fsdp_") if prefix else str(key))
    if rule is None:
        return Verdict(shown, value, "unknown", "no key of FSDP that is known here. Remove it, and convert again.")
    try:
        found = Becomes({}, "not needed", "it is empty") if value is None else rule(value, around)
    except (TypeError, ValueError) as error:
        return Verdict(shown, value, "unknown", f"the value cannot be read ({error})")
    return Verdict(shown, value, found.status, found.note, found.keys)


def _options(value: Any, around: Around) -> Iterator[Verdict]:
    """``fsdp`` of transformers and axolotl: a list, text with spaces, or a switch."""
    if isinstance(value, bool) or _is_off(value):
        yield Verdict("fsdp", value, "not needed", "the block fsdp_config says how")
        return
    for number, option in enumerate(value if isinstance(value, list) else str(value).split()):
        yield _verdict(option, option, _OPTIONS, around, f"fsdp[{number}]", prefix=False)


def _ofstrategy_of_lightning(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Verdict]:
    """A strategy of Lightning, in a file of LightningCLI or alone; other keys of that file stay."""
    node: Any = values
    for depth, part in enumerate(path):
        for key, value in node.items():
            if key != part:
                yield Verdict(
                    ".".join((*path[:depth], str(key))), value, "elsewhere", "LightningCLI goes on reading it"
                )
        node = node[part]
    within = ".".join(path)
    trainer = values.get("trainer", values) if path else {}
    for key, value in node.items():
        here = f"{within}.{key}".removeprefix(".")
        if key == "class_path":
            yield Verdict(here, value, "not needed", "write lt_zero.ZeroStrategy, with the result as config")
        elif key == "init_args" and isinstance(value, Mapping):
            around = _around(trainer, value, of_trainer=False)
            yield from (_verdict(name, inside, BLOCK, around, f"{here}.{name}") for name, inside in value.items())
        elif not (key == "init_args" and value is None):
            yield Verdict(here, value, "unknown", "no key beside class_path and init_args. Remove it.")


def _filled(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that are written "auto", which transformers, Accelerate or a Trainer fills."""
    return _FILLED if strategy_of_lightning(values) is None and "sharding_strategy" not in values else ()


def added(values: Mapping[str, Any]) -> list[str]:
    """Lines about keys of the result that no key of a file for FSDP becomes."""
    keys = _filled(values)
    lines = [f"{', '.join(keys)}=auto: filled from the arguments of the trainer"] if keys else []
    if "distributed_type" in values:
        lines.append(
            "gradient_clipping=auto is 1.0 in a loop of Accelerate: write the norm of its clip_grad_norm_, or 0"
        )
    return lines


def converted(values: Mapping[str, Any], found: list[Verdict]) -> dict[str, Any]:
    """The configuration that the verdicts on a file amount to.

    Raises:
        ConfigError: names the keys that have no counterpart, and those of which two say different things.
    """
    document, problems = Document({}), list[Problem]()
    for key in _filled(values):
        document.put((key,), "auto")
    said: dict[str, tuple[Any, str]] = {}
    for verdict in found:
        if verdict.status in ("unsupported", "unknown"):
            problems.append(Problem(verdict.key, str(verdict)))
        for key, value in verdict.keys.items():
            if key in said and said[key][0] != value:
                text = f"{verdict.key} means {key}={_shown(value)}, and {said[key][1]} {key}={_shown(said[key][0])}"
                problems.append(Problem(verdict.key, f"{text}. Remove one of them."))
            said.setdefault(key, (value, verdict.key))
    if f"{ZERO}.stage" not in said:
        said = {f"{ZERO}.stage": (3, "FSDP"), _REUSE: (0, "FSDP"), **said}  # FSDP's default
    if said[f"{ZERO}.stage"][0] == 0:
        dropped = (f"{ZERO}.offload", f"{ZERO}.leaf_module", _REPLICAS, _REUSE)
        said = {key: value for key, value in said.items() if not key.startswith(dropped)}  # nothing is sharded
    if problems:
        raise ConfigError(problems)
    for key, (value, _) in said.items():
        document.put(tuple(key.split(".")), value)
    return document.values
