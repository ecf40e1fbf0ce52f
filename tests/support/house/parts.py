"""The parts of the package: which files make up the core, each feature and each tool.

This is the one table of them. Who moves a file moves its line here; tests/test_house.py says which file has no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

# Files without their ending, or folders with a slash at the end, relative to the package. The longest one that fits a
# file decides: a folder belongs to one part, and single files of it to others.
PARTS: dict[str, tuple[str, ...]] = {
    "core.engine": (
        "core/__init__",
        "core/engine/",
        "core/ask",
        "core/data_part",
        "core/division",
        "core/feature",
        "core/place_in_run",
        "core/rounds",
        "core/followers",
    ),
    "core.step": ("core/step/", "core/engine/optimizer_spec"),
    "core.comm": ("core/comm/",),
    "core.stores": ("core/stores/",),
    "core.health": ("core/health/", "core/engine/same_on_ranks"),
    "common": ("common/",),
    "kernels": ("kernels/",),
    "config": (
        "config/",
        "optim/from_config",
        "optim/grouping",
        "optim/params",
        "optim/registry",
        "optim/schedules",
    ),
    "checkpoint": ("checkpoint/", "core/engine/lazy_tensor", "core/engine/whole_model", "training/checkpoints"),
    "training": (
        "exchange/__init__",
        "features/__init__",
        "planning/__init__",
        "planning/check",
        "planning/forecast",
        "planning/limits",
        "planning/setup",
        "tools/__init__",
        "training/",
    ),
    "public": ("__init__", "attention", "cli", "ops", "optim/__init__", "utils", "zero"),
    "feature.activation_checkpointing": ("features/activation_checkpointing/",),
    "feature.compression": ("features/compression/",),
    # What experts, late nodes, pipelines, recomputation, sequences, sparse attention and tiles share.
    "feature.exchanges_in_layers": (
        "core/comm/layer_ranks",
        "core/comm/part_ranks",
        "core/comm/point_to_point",
        "core/comm/sequence",
    ),
    # What compression, one_bit, quantize and zero_plus_plus share.
    "feature.coded_exchange": ("exchange/compression", "exchange/encoded", "exchange/error_feedback"),
    "feature.ema": ("features/ema/",),
    "feature.experts": ("parallel/experts", "parallel/stacked_experts"),
    "feature.foreign_checkpoints": (
        "checkpoint/cast",
        "checkpoint/cli",
        "checkpoint/export",
        "checkpoint/formats/",
        "checkpoint/import_",
        "checkpoint/live_weights",
        "checkpoint/lora",
        "checkpoint/output",
        "checkpoint/universal",
        "training/lightning/weights_beside",
    ),
    "feature.late_nodes": ("features/late_nodes/",),
    "feature.low_bit_states": ("features/low_bit_states/", "kernels/moments", "kernels/rounding"),
    # Tensor, pipeline, sequence and expert ranks are axes of one mesh, which imports the parts of all of them.
    "feature.mesh": ("parallel/",),
    "feature.monitoring": (
        "training/lightning/monitor/",
        "training/loop/monitors",
        "training/overflow",
        "training/run_file",
    ),
    "feature.offload": ("features/offload/", "offload/background", "offload/host_store", "offload/nvme_store"),
    # What offload and activation_checkpointing share.
    "feature.host_memory": ("offload/",),
    "feature.one_bit": ("features/one_bit/",),
    "feature.optimizers": ("optim/adam", "optim/lamb", "optim/lion", "optim/muon"),
    "feature.pipeline": ("core/comm/stage_ranks", "parallel/pipeline/", "training/loop/pipeline_engine"),
    "feature.quantize": ("features/quantize/",),
    "feature.ray": ("ray",),
    "feature.sequences": ("parallel/sequence/",),
    "feature.sparse_attention": ("features/sparse_attention/",),
    "feature.tiles": ("features/tiles/",),
    "feature.virtual_ranks": ("features/virtual_ranks/", "training/lightning/turns/"),
    "feature.zero_plus_plus": ("features/zero_plus_plus/",),
    "tools.compare": ("tools/compare/",),
    "tools.doctor": ("tools/doctor",),
    "tools.gradient_noise": ("tools/gradient_noise/",),
    "tools.planning": ("planning/", "training/lightning/function_trial"),
    "tools.sweep": ("sweep",),
    "deepspeed": ("deepspeed/",),
}
OPTIONAL = ("feature.", "tools.", "deepspeed")  # starts of the parts without which a default fit has to run


def files_of(package: Path) -> dict[str, Path]:
    """The Python files of a package, by their names in the table."""
    return {path.relative_to(package).with_suffix("").as_posix(): path for path in sorted(package.rglob("*.py"))}


def part_of(file: str, parts: Mapping[str, tuple[str, ...]] = PARTS) -> str | None:
    """The part that a file belongs to; None if the table has none.

    Raises:
        ValueError: two parts have the same line; names both.
    """
    fits = {pattern for patterns in parts.values() for pattern in patterns if _fits(pattern, file)}
    if not fits:
        return None
    longest = max(fits, key=len)
    owners = [part for part, patterns in parts.items() if longest in patterns]
    if len(owners) > 1:
        raise ValueError(f"{longest} is in several parts: {', '.join(owners)}. Leave it in one.")
    return owners[0]


def parts_of(files: Iterable[str], parts: Mapping[str, tuple[str, ...]] = PARTS) -> dict[str, str]:
    """The part of each file; "unknown" where the table has none."""
    return {file: part_of(file, parts) or "unknown" for file in files}


def stale(files: Iterable[str], parts: Mapping[str, tuple[str, ...]] = PARTS) -> list[str]:
    """The lines of the table that fit no file."""
    known = list(files)
    return [
        pattern
        for patterns in parts.values()
        for pattern in patterns
        if not any(_fits(pattern, file) for file in known)
    ]


def is_optional(part: str) -> bool:
    """True for features and tools."""
    return part.startswith(OPTIONAL)


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _fits(pattern: str, file: str) -> bool:
    return file.startswith(pattern) if pattern.endswith("/") else file == pattern
