"""No face ignores a key in silence: what a Trainer reads and another face does not is refused there, or told."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from lt_zero.common import fields
from lt_zero.config.applicability import _SCRIPTS, _WITHOUT_EFFECT
from lt_zero.config.applicability import Face as Who
from lt_zero.config.cli import config_command
from tests.conformance.faces import FACES, GAS, Face, Settings, run
from tests.support.features import there
from tests.support.pool import Pool

Read = set[tuple[str, str]]  # a block's class, and a key of it


@contextmanager
def _recording() -> Iterator[Read]:
    """Which keys of a configuration are read by code outside of ``lt_zero.config``."""
    read: Read = set()
    original = fields.Block.__getattribute__

    def recorded(self: Any, name: str) -> Any:
        caller = sys._getframe(1)
        if name in type(self).model_fields and "lt_zero.config" not in caller.f_globals.get(
            "__name__", "lt_zero.config"
        ):
            read.add((type(self).__name__, name))
        return original(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields.Block, "__getattribute__", recorded)
        yield read


def _works(path: str, face: Face) -> None:
    for step in range(2):
        for micro in range(GAS):
            face.backward(step, micro)
        face.step()
    face.save(path)
    face.load(path)
    for parameter in face.net.parameters():
        lt_zero.full_master(parameter)
    # What transformers' Trainer asks the engine of a loop before it saves.
    if (asked := getattr(getattr(face, "engine", None), "zero_gather_16bit_weights_on_model_save", None)) is not None:
        asked()


def _reads(face: str, settings: Settings, folder: str) -> Read:
    """The keys that a run reads that trains, saves and loads."""
    with _recording() as read:
        run(face, settings, partial(_works, f"{folder}/{face}"))
        return set(read)


# Its other keys are read by the feature; where it was taken out nothing reads them.
_RECOMPUTED = {"activation_checkpointing": {"mode": "full"}} if there("activation_checkpointing") else {}
RUNS = [
    Settings(3, "bf16-mixed", config={**_RECOMPUTED, "steps_per_print": 1}),
    Settings(1, "16-true"),
]


def _told(face: str) -> set[tuple[str, str]]:
    """The keys that ``face`` refuses or tells to have no effect."""
    paths = [*_WITHOUT_EFFECT[Who(face)]]
    if face == "fabric":
        paths += [*_SCRIPTS, *(f"checkpoint.load_{what}" for what in ("module_only", "optimizer_states"))]
        paths.append("checkpoint.load_lr_scheduler_states")
    found = set()
    for path in paths:
        block: Any = ZeroConfig
        for name in path.split("."):
            found.add((block.__name__, name))
            block = block.model_fields[name].annotation
        if hasattr(block, "model_fields"):
            found |= {(block.__name__, name) for name in block.model_fields}
    return found


def test_a_key_that_only_a_trainer_reads_is_refused_or_told(pool: Pool, tmp_path: Path) -> None:
    read: dict[str, Read] = {}
    for who in FACES:
        found = [pool.run(1, _reads, who, settings, str(tmp_path))[0] for settings in RUNS]
        read[who] = set.union(*found)
    assert {("Checkpoint", "format"), ("ZeroConfig", "steps_per_print"), ("ZeroConfig", "comet")} <= read["trainer"]
    for face in ("fabric", "loop"):
        assert read["trainer"] - read[face] - _told(face) == set(), face


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "csv_monitor": {"enabled": True, "job_name": "mine"},
    "memory_breakdown": False,
}
STATUSES = {
    "trainer": {"steps_per_print": "works", "optimizer.params.lr": "auto", "csv_monitor.job_name": "works"},
    "fabric": {
        "train_micro_batch_size_per_gpu": "no effect",
        "gradient_accumulation_steps": "error",
        "steps_per_print": "no effect",
        "optimizer.type": "error",
        "csv_monitor.job_name": "no effect",
    },
    "loop": {
        "train_micro_batch_size_per_gpu": "works",
        "gradient_accumulation_steps": "works",
        "optimizer.params.lr": "error",
        "optimizer.type": "works",
        "memory_breakdown": "works",
        "zero_optimization.reduce_bucket_size": "auto",
    },
}


@pytest.mark.parametrize("face", FACES)
def test_config_check_tells_what_a_face_does_not_do(tmp_path: Path, face: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIG))
    result = CliRunner().invoke(config_command, ["check", str(file), "--face", face])
    rows = [re.fullmatch(r"(.{9})  \S+ +([\w.]+)(: .*)?", line) for line in result.output.splitlines()]
    lines = {row[2]: row[1].strip() for row in rows if row is not None}
    assert {key: lines.get(key) for key in STATUSES[face]} == STATUSES[face]
    assert result.exit_code == (face != "trainer")


def test_what_a_face_refuses_is_an_error() -> None:
    config = {key: CONFIG[key] for key in ("optimizer", "zero_optimization")}
    with pytest.raises(ConfigError, match=r"optimizer.params.lr=.auto. has no Trainer here"):
        lt_zero.initialize(model=torch.nn.Linear(2, 2), config={**config, "train_micro_batch_size_per_gpu": 4})
    with pytest.raises(ConfigError) as caught:
        lt_zero.FabricZeroStrategy(config={**CONFIG, "checkpoint": {"load_module_only": True}})
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"optimizer", "gradient_accumulation_steps", "checkpoint.load_module_only", "optimizer.params.lr"}
