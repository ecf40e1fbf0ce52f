"""What checkpoints of a few runs have, by name: ``tests/data/golden/manifests.txt``.

A key that another version of this package does not find makes its checkpoints unreadable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

import lt_zero
from tests.support import parallel_module, pipeline_module
from tests.support.checkpoint_tools import SHARDED
from tests.support.features import needs
from tests.support.golden import compare, only_pinned
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.pool import Pool

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
PIPELINE = {"pipeline": {"stages": 2, "num_microbatches": 2}}
# Of each run: the stage, further keys of the configuration, what makes its module, and whether weights are averaged.
SAVES: dict[str, tuple[int, dict[str, Any], Callable[[], pl.LightningModule], bool]] = {
    "stage 1": (1, {}, lambda: GPT(2, "adamw"), False),
    "stage 2, averaged weights": (2, {}, lambda: GPT(2, "sgd"), True),
    "stage 3": (3, {}, lambda: GPT(2, "adamw"), False),
    "stage 1, tensor ranks": (1, TENSOR, lambda: parallel_module.Module("adamw"), False),
    "stage 1, pipeline ranks": (1, PIPELINE, lambda: pipeline_module.Module("adamw"), False),
}


def _save(folder: str) -> None:
    for name, (stage, keys, module, averages) in SAVES.items():
        callbacks = [lt_zero.EMA(decay=0.5)] if averages else []
        options = {"max_steps": 2, "limit_val_batches": 0, "use_distributed_sampler": False, "callbacks": callbacks}
        trainer = sharded_trainer(stage, config={**SHARDED, **keys}, **options)
        trainer.fit(module())
        trainer.save_checkpoint(f"{folder}/{name}")


def _saved(path: Path) -> Iterator[str]:
    """What is saved, by name; without times, versions of packages, lengths and checksums."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    files = [file["name"] for file in manifest["files"]]
    yield f"manifest: {' '.join(manifest)}"
    yield f"format: {manifest['format']} {manifest['version']}"
    run = (f"{key} {manifest['run'][key]}" for key in ("stage", "precision", "ranks"))
    yield f"run: {', '.join(run)}"
    yield f"files: {' '.join(files)}"
    yield f"order: {' '.join(manifest['order'])}"
    yield f"aliases: {manifest['aliases']}"
    for name, entry in sorted(manifest["tensors"].items()):
        parts = ", ".join(f"{files[number]} {first}+{sizes}" for first, sizes, number, _ in entry["chunks"])
        yield f"{name}: {entry['dtype']} {entry['shape']} in {parts}"
    yield from _outline("meta", torch.load(path / "meta.pt", weights_only=True))


def _outline(path: str, value: Any) -> Iterator[str]:
    """The keys of nested containers, and the kinds of what they hold.

    Lightning's loops are its own, and the configuration's keys are in the golden file of the schema.
    """
    if isinstance(value, Tensor):
        yield f"{path}: {value.dtype} {list(value.shape)}"
    elif isinstance(value, dict) and value and path not in ("meta.loops", "meta.lt_zero.config"):
        for key, inner in value.items():
            yield from _outline(f"{path}.{key}", inner)
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        for number, inner in enumerate(value):
            yield from _outline(f"{path}.{number}", inner)
    else:
        yield f"{path}: {type(value).__name__}"


@needs("ema")
@only_pinned("torch", "lightning")
def test_what_is_saved_is_in_the_golden_file(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _save, str(tmp_path))
    compare("manifests", {name: "\n".join(_saved(tmp_path / name)) for name in SAVES})
