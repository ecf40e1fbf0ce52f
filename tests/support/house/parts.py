"""The parts of the package: which files make up the core, each feature and each tool.

This is the one table of them. Who moves a file moves its line here; tests/test_house.py says which file has no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

# Files without their ending, or folders with a slash at the end, relative to the package. The longest one that fits a
# file decides: a folder belongs to one part, and single files of it to others.
PARTS: dict[str, tuple[str, ...]] = {
    "core.engine": ("engine/",),
    "core.step": ("step/", "optim/spec"),
    "core.comm": ("comm/",),
    "core.stores": ("io/", "offload/store"),
    "core.health": (
        "comm/agreement",
        "comm/awaited_works",
        "comm/before_joining",
        "comm/ended_ranks",
        "comm/foreign_waits",
        "comm/hang_detection",
        "comm/launchers",
        "comm/next_run",
        "comm/other_runs",
        "comm/questions",
        "comm/verdict",
        "engine/same_on_ranks",
    ),
    "common": ("common/",),
    "kernels": ("ops/",),
    "config": (
        "config/",
        "optim/from_config",
        "optim/grouping",
        "optim/params",
        "optim/registry",
        "optim/schedules",
    ),
    "checkpoint": ("checkpoint/", "engine/lazy_tensor", "engine/whole_model", "session/checkpoints"),
    "training": (
        "build",
        "exchange/__init__",
        "exchange/choose",
        "exchange/plan",
        "lightning/",
        "loop/",
        "planning/__init__",
        "planning/check",
        "planning/forecast",
        "planning/limits",
        "planning/setup",
        "session/",
    ),
    "public": ("__init__", "cli", "inference", "optim/__init__", "utils", "zero"),
    "feature.activations": ("activation/", "offload/reuse", "offload/saved_activations"),
    "feature.compression": (
        "comm/compression",
        "exchange/encoded",
        "exchange/gradient_compression",
        "ops/codecs",
        "ops/huffman",
        "ops/quantize",
        "ops/sparsify",
    ),
    "feature.ema": ("lightning/ema", "step/average"),
    "feature.experts": ("parallel/experts", "parallel/stacked_experts"),
    "feature.foreign_checkpoints": (
        "checkpoint/cast",
        "checkpoint/cli",
        "checkpoint/export",
        "checkpoint/formats/",
        "checkpoint/import_",
        "checkpoint/last",
        "checkpoint/live_weights",
        "checkpoint/lora",
        "checkpoint/output",
        "checkpoint/universal",
    ),
    "feature.gradient_noise": ("session/gradient_noise",),
    "feature.late_nodes": ("comm/tolerance", "exchange/late_ranks"),
    "feature.low_bit_states": ("ops/moments", "ops/rounding"),
    "feature.mesh": ("comm/part_ranks", "parallel/"),
    "feature.monitoring": (
        "comm/comm_log",
        "common/timing",
        "io/run_file",
        "lightning/monitor/",
        "loop/monitors",
        "step/overflow",
    ),
    "feature.offload": (
        "engine/offload_manager",
        "io/private_folder",
        "io/swap_file",
        "loop/moved_states",
        "offload/",
        "step/overlap",
    ),
    "feature.one_bit": (
        "exchange/compressed_momentum",
        "exchange/local_steps",
        "optim/onebit",
        "optim/zero_one",
    ),
    "feature.optimizers": ("optim/adam", "optim/lamb", "optim/lion", "optim/muon", "step/full_norms"),
    "feature.pipeline": ("comm/point_to_point", "loop/pipeline_engine", "parallel/pipeline/"),
    "feature.quantize": ("exchange/quantized", "ops/nf4"),
    "feature.ray": ("ray",),
    "feature.sequences": ("comm/layer_ranks", "comm/sequence", "parallel/sequence/"),
    "feature.sparse_attention": ("attention/", "ops/attention"),
    "feature.tiles": ("tiles/",),
    "feature.zero_plus_plus": ("exchange/zero_plus_plus",),
    "tools.compare": ("session/compare", "session/recorder"),
    "tools.doctor": ("doctor",),
    "tools.planning": ("lightning/function_trial", "planning/"),
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
