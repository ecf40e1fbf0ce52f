"""Answers to transformers and Accelerate about DeepSpeed beside its modules: the package's metadata, skipped steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import torch

from lt_zero.common.tensor_tree import map_tensors
from lt_zero.loop.engine import TrainingEngine


class DeepSpeedDistribution(Distribution):
    """The metadata of the package ``deepspeed``: both libraries take it for installed, in this version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        known = filename == "METADATA"
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {self._version}\n" if known else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


class SkippedStep:
    """Truth value: whether an engine skipped its last step. It is computed on use, because it waits for the step."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.global_steps > 0 and not engine.was_step_applied()


def tell_skipped_steps(engine: TrainingEngine) -> None:
    """Give an optimizer under fp16 ``overflow``, by which Accelerate knows that a schedule has to wait."""
    optimizer: Any = engine.optimizer
    if optimizer is not None and engine.fp16_enabled():
        optimizer.overflow = SkippedStep(engine)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies on ``device`` of all tensors in nested containers."""
    found = dict(item) if isinstance(item, Mapping) else item
    return map_tensors(found, lambda value: value.detach().clone().to(device))
