"""Every key of DeepSpeed has a status: the schema has it, or the table tells what becomes of it."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lt_zero.config import ZeroConfig, catalog
from lt_zero.config import keys as key_table
from lt_zero.config.catalog import explain
from lt_zero.config.keys import KeyStatus, accepted, is_off, lookup, nearest
from lt_zero.optim import params
from tests.support.features import needs, needs_all_blocks
from tests.support.paths import DATA, ROOT

INVENTORY, CONFIGS = DATA / "deepspeed_keys.tsv", DATA / "ds_configs"
Z = "zero_optimization."

# Keys that DeepSpeed does not know, or knew long ago, and that files have all the same.
WILD = {
    "activation_checkpointing.partitioned_activations",
    "accumulate_grad_batches",
    "bf16.check_overflow",
    "bf16.consecutive_hysteresis",
    "bf16.hysteresis",
    "bf16.initial_scale_power",
    "bf16.loss_scale",
    "bf16.loss_scale_window",
    "bf16.min_loss_scale",
    "comms_config.**",
    "cuda_visible_devices",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "disable_fused_adam",
    "drop_last",
    "gradient_clip_val",
    "int8.**",
    "low_cpu_mem_usage",
    "max_grad_norm",
    "max_steps",
    "monitor_config.**",
    "num_train_epochs",
    "per_device_train_batch_size",
    "seed",
    *(f"tensor_parallel.{name}" for name in ("kernel_inject", "tensor_parallel.**")),
    *(f"monitor_config.{name}.**" for name in ("csv_monitor", "tensorboard", "wandb", "comet")),
    "veloc_config.**",
    *(f"wandb.{name}" for name in ("group_name", "team_name", "project_name", "host_name")),
    *(
        Z + name
        for name in (
            "allgather_sequential",
            "contigious_gradients",
            "cpu_offload_params",
            "find_unused_parameters",
            "gather_16bit_weights_on_model_save",
            "gather_fp16_weights_on_model_save",
            "max_live_parameters",
            "max_reuse_distance",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "param_persistence_threshold",
            "prefetch_bucket_size",
            "stage2_find_unused_parameters",
            "use_all_reduce_for_fetch_params",
        )
    ),
}


def path_of(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def in_schema(key: str) -> bool:
    """Whether it is a key that works, or a block of such keys."""
    key = key.partition("[]")[0]  # of blocks in a list
    for entry in catalog.entries():
        known, stem = entry.key, entry.key.removesuffix("<name>")
        if key == known or known.startswith(f"{key}.") or (stem != known and key.startswith(stem)):
            return True
    return False


def inventory() -> dict[str, KeyStatus | None]:
    """Each key of DeepSpeed with its row of the table. Those of other JSON files go by their names in them."""
    with INVENTORY.open(encoding="utf-8", newline="") as file:
        keys = [line[0] for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)][1:]
    found: dict[str, KeyStatus | None] = {}
    for key in keys:
        inner = key.split(").", 1)[-1]
        row = lookup(path_of(inner))
        if inner != key and (row is None or row.status != "unsupported"):
            row = lookup(path_of(key))
        found[key] = row
    return found


@needs_all_blocks()
def test_every_key_has_a_status() -> None:
    found = inventory()
    assert len(found) > 600
    without = {key for key, row in found.items() if row is None and not in_schema(key)}
    assert without == set()


def test_no_row_is_dead() -> None:
    used = {row.key for row in inventory().values() if row is not None}
    unused = {row.key for row in key_table.rows()} - used
    assert unused == WILD


def test_keys_in_the_wild_have_a_status() -> None:
    seen: set[str] = set()
    for file in CONFIGS.glob("*.json"):
        try:
            seen |= set(leaves(json.loads(file.read_text(encoding="utf-8"))))
        except json.JSONDecodeError:
            continue  # comments and the like
    assert len(seen) > 150
    assert {key for key in seen if lookup(path_of(key)) is None and not in_schema(key)} == set()


def leaves(values: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in values.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else (prefix + key,)


def test_the_table_is_in_order() -> None:
    keys = [row.key for row in key_table.rows()]
    assert keys == sorted(set(keys))
    for row in key_table.rows():
        assert row.status in key_table.STATUSES, row
        assert bool(row.to) == (row.status == "alias"), row
        assert row.note.endswith("."), row
        assert row.note == row.note.strip(), row
        assert len(row.note) <= 160, row
        assert not row.off or row.status != "no_effect", row  # it is accepted with every value
        for value in row.off.split("|") if row.off else ():
            json.loads(value)
        assert "**" not in row.key.removesuffix(".**"), row


def test_the_table_does_not_contradict_the_schema() -> None:
    for entry in catalog.entries():
        row = lookup(path_of(entry.key))
        assert row is None, f"{entry.key} works, and {row}"


def test_aliases_lead_to_keys() -> None:
    for row in key_table.aliases():
        for target in row.to.split(" and "):
            found = lookup(path_of(target))
            assert found is not None or in_schema(target) or in_schema(f"{target}.enabled"), row
            assert found is None or found.status != "alias", row


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("bfloat16.enabled", "bf16.enabled"),
        ("bfloat16", "bf16"),
        (Z + "cpu_offload", Z + "offload_optimizer.device"),
        (Z + "cpu_offload_params", Z + "offload_param.device"),
        (Z + "offload_params.nvme_path", Z + "offload_param.nvme_path"),
        (Z + "prefetch_bucket_size", Z + "stage3_prefetch_bucket_size"),
        (Z + "param_persistence_threshold", Z + "stage3_param_persistence_threshold"),
        (Z + "model_persistence_threshold", Z + "stage3_model_persistence_threshold"),
        (Z + "max_live_parameters", Z + "stage3_max_live_parameters"),
        (Z + "max_reuse_distance", Z + "stage3_max_reuse_distance"),
        (Z + "gather_16bit_weights_on_model_save", Z + "stage3_gather_16bit_weights_on_model_save"),
        (Z + "stage3_gather_fp16_weights_on_model_save", Z + "stage3_gather_16bit_weights_on_model_save"),
        (Z + "min_num_size", Z + "stage3_param_persistence_threshold"),
        (Z + "partition_activations", "activation_checkpointing.partition_activations"),
        (Z + "fast_init", Z + "offload_optimizer.fast_init"),
        (Z + "contigious_gradients", Z + "contiguous_gradients"),
        ("fp16.scale_window", "fp16.loss_scale_window"),
        ("gradient_clipping.enabled", "gradient_clipping"),
        ("gradient_clipping.clip_value", "gradient_clipping"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("aio.thread_count", "aio.intra_op_parallelism"),
        ("fp32_allreduce", "communication_data_type"),
        ("allgather_size", Z + "allgather_bucket_size"),
        ("wandb.team_name", "wandb.team"),
        ("monitor_config.tensorboard.job_name", "tensorboard.job_name"),
        ("optimizer.params.max_grad_norm", "gradient_clipping"),
    ],
)
def test_old_spellings(written: str, meant: str) -> None:
    row = lookup(path_of(written))
    assert row is not None
    assert row.status == "alias"
    assert row.targets(path_of(written)) == (meant,)
    assert meant in explain(written)


def test_one_spelling_of_two_keys() -> None:
    written = path_of(Z + "pin_memory")
    row = lookup(written)
    assert row is not None
    assert row.targets(written) == (Z + "offload_optimizer.pin_memory", Z + "offload_param.pin_memory")


@pytest.mark.parametrize(
    ("key", "row", "status"),
    [
        ("compression_training", "compression_training.**", "unsupported"),
        ("tensor_parallel.tp.tp_size", "tensor_parallel.tp.**", "no_effect"),
        ("checkpoint.writer.io_buffer_size", "checkpoint.writer.**", "no_effect"),
        ("checkpoint.writer.decoupled", "checkpoint.writer.decoupled", "unsupported"),
        ("pipeline.partition", "pipeline.partition", "alias"),
        ("pipeline.use_reentrant", "pipeline.use_reentrant", "no_effect"),
        ("optimizer.params.freeze_step", "optimizer.params.freeze_step", "no_effect"),
    ],
)
def test_the_most_specific_row_counts(key: str, row: str, status: str) -> None:
    found = lookup(path_of(key))
    assert found is not None
    assert (found.key, found.status) == (row, status)


@pytest.mark.parametrize("key", ["", "timers", "optimizer.params.lr", "optimizer", Z + "stage", "banana", "wandb"])
def test_keys_without_a_row(key: str) -> None:
    assert lookup(path_of(key)) is None


def test_a_star_is_one_segment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = ["key status to off note", "a.* later   x", "a.*.c later   y", "a.b.** later   z"]
    file = tmp_path / "keys.tsv"
    file.write_text("\n".join(row.replace(" ", "\t") for row in rows), encoding="utf-8")
    monkeypatch.setattr(key_table, "TABLE", file)
    caches = (key_table.rows, key_table._patterns)
    for cache in caches:
        cache.cache_clear()
    try:
        notes = {
            key: getattr(lookup(path_of(key)), "note", None) for key in ("a", "a.q", "a.q.c", "a.b.c", "a.b", "a.q.d")
        }
    finally:
        for cache in caches:
            cache.cache_clear()
    assert notes == {"a": None, "a.q": "x", "a.q.c": "y", "a.b.c": "z", "a.b": "z", "a.q.d": None}


def test_blocks_that_have_rows_inside() -> None:
    assert key_table.below(("timers",))
    assert key_table.below(("checkpoint", "writer"))
    assert not key_table.below(("nebula",))
    assert not key_table.below(("banana",))


@pytest.mark.parametrize(
    ("off", "value", "expected"),
    [
        ("", None, True),
        ("", False, False),
        ("false", False, True),
        ("false", 0, False),
        ("false", "false", False),
        ("0|1", 1, True),
        ("0|1", 1.0, True),
        ("0|1", True, False),
        ("-1", -1, True),
        ("true", False, False),
        ('"FAST"|"PYTHON"', "fast", True),
        ('"FAST"|"PYTHON"', "MOCK", False),
        ("false", {}, False),
        ('{"a": false}', {"a": False, "b": 1}, True),
        ('{"a": false}', {"a": True}, False),
        ('{"a": false}', {"b": 1}, False),
        ('{"a": false}', False, False),
    ],
)
def test_values_that_ask_for_nothing(off: str, value: Any, expected: bool) -> None:
    assert is_off(KeyStatus("key", "unsupported", "", off, "Note."), value) is expected


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gradient_clipp1ng", "gradient_clipping"),
        ("gradient-clipping", "gradient_clipping"),
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimisation.stage", Z + "stage"),
        ("stage", Z + "stage"),
        ("reduce_bucket_size", Z + "reduce_bucket_size"),
        (Z + "loss_scale", "fp16.loss_scale"),
        (Z + "offload_optimiser.device", Z + "offload_optimizer.device"),
        (Z + "offload_param.buffercount", Z + "offload_param.buffer_count"),
        ("fp_16.enabled", "fp16.enabled"),
        ("bf16.enable", "bf16.enabled"),
        ("wall_clock_breakdwn", "wall_clock_breakdown"),
        ("banana", None),
        ("a.b.c", None),
    ],
)
def test_the_key_that_was_meant(written: str, meant: str | None) -> None:
    assert nearest(written, accepted(ZeroConfig)) == meant


def test_a_name_that_many_blocks_have_is_not_guessed() -> None:
    keys = ["one.enabled", "two.enabled", "three.enabled"]
    assert nearest("enabled", keys) is None
    assert nearest("thre.enabled", keys) == "three.enabled"
    assert nearest("one", ["one"]) is None  # it is no other key


def test_the_table_is_read_quickly() -> None:
    times = []
    for _ in range(3):
        for cache in (key_table.rows, key_table._patterns):
            cache.cache_clear()
        start = time.thread_time()  # a busy machine does not count
        lookup(("banana",))
        times.append(time.thread_time() - start)
    assert min(times) < 0.010


@needs_all_blocks()
def test_the_catalog_has_the_whole_schema() -> None:
    found = {entry.key: entry for entry in catalog.entries()}
    bucket = found[Z + "reduce_bucket_size"]
    assert (bucket.type, bucket.default, bucket.bounds) == ("whole number", "5e8", "> 0")
    assert found[Z + "offload_optimizer.overlap_step"].type == "true, false or auto"
    assert found["checkpoint.async"].default == "false"  # under the name that users write
    assert found["communication_data_type"].type == "fp32, fp16 or bf16"
    for name in ZeroConfig.model_fields:
        assert any(key == name or key.startswith(f"{name}.") for key in found), name
    without = {entry.key for entry in found.values() if not entry.description}
    assert without <= {"fp16.fp16_override_modules", "bf16.fp16_override_modules"}


@needs_all_blocks()
def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == catalog.generate(), "run `make docs`"


def test_the_page_has_every_key() -> None:
    page = catalog.generate()
    for key in (*(entry.key for entry in catalog.working()), *(row.key for row in key_table.rows())):
        assert f"`{key}`" in page, key


def test_the_table_is_part_of_the_package() -> None:
    assert '"config/keys.tsv"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Z + "reduce_bucket_size", ["elements of a gradient bucket", "whole number, > 0", "default: 5e8"]),
        ("bucket_size", [Z + "reduce_bucket_size: ", Z + "allgather_bucket_size: "]),
        (Z + "cpu_offload", ["is read as", "none, cpu or nvme"]),
        ("offload_*.device", [Z + "offload_optimizer.device: ", Z + "offload_param.device: "]),
        (Z + "offload_param", [Z + "offload_param.nvme_path: "]),
        ("pipeline.stages", ["ranks that have layers after each other"]),
        ("pipeline.use_reentrant", ["has no effect here", "re-entrant"]),
        ("compression_training.sparse_pruning.method", ["is not supported", "accepted with: null, false"]),
        ("activation_checkpointing", ["activation_checkpointing.mode: what to recompute"]),
        pytest.param(
            "gradient_compression",
            ["gradient_compression.algorithm: topk", "gradient_compression.exclude"],
            marks=needs("compression"),
        ),
        ("zero_optimisation", ["Did you mean zero_optimization?", Z + "stage: "]),
        ("lr", ['optimizer.params.lr\n    argument of the class that optimizer.type names\n    "auto" is `lr`']),
        ("warmup_num_steps", ["scheduler.params.warmup_num_steps\n"]),
        ("banana", ["banana is not a key of lt_zero or DeepSpeed."]),
        ("stage3_prefetch", [Z + "stage3_prefetch_bucket_size\n", "also written"]),
    ],
)
def test_explanations(asked: str, says: list[str]) -> None:
    text = explain(asked)
    for part in says:
        assert part in text
    assert len(text) < 12_000
    assert asked != "lr" or "allreduce" not in text


def test_arguments_that_may_be_auto_are_the_same_for_their_classes() -> None:
    arguments = {key.rpartition(".")[2] for key in key_table.AUTO if ".params." in key}
    assert arguments == params.AUTO
