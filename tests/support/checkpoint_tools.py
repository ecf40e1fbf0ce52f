"""What the tests of checkpoints share: everything that a run would lose, and comparisons that allow no difference."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.records import is_values, records_of
from lt_zero.checkpoint.native.saved_file import opened
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores import direct_file
from lt_zero.training.lightning.precision import sharded_of
from tests.support.lightning_tools import GPT, sharded_trainer, trust


def everything(trainer: pl.Trainer) -> dict[str, Any]:
    """All that training goes on from: full tensors on rank 0, the rest on every rank. Collective."""
    strategy: Any = trainer.strategy
    plugin = strategy.precision_plugin
    optimizers = []
    for optimizer in strategy.optimizers:
        sharded = sharded_of(optimizer)
        state = optimizer.state_dict() if sharded is None else full_optimizer_state(sharded)
        optimizers.append(copied(state))
    return {
        "weights": copied(strategy.full_state_dict()),
        "optimizers": optimizers,
        "schedulers": copied([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "precision": copied(plugin.state_dict()),
        "step": trainer.global_step,
    }


def copied(value: Any) -> Any:
    """Values as they are now."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(inner) for inner in value)
    return value


def same(got: Any, want: Any, where: str = "") -> None:
    """Exactly equal, types and dtypes of tensors included."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), where
        assert got.dtype == want.dtype, (where, got.dtype, want.dtype)
        assert got.shape == want.shape, (where, got.shape, want.shape)
        assert torch.equal(got, want), (where, got, want)
    elif isinstance(want, dict):
        assert list(map(str, got)) == list(map(str, want)), (where, list(got), list(want))
        for key in want:
            same(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, f"{where}.{number}")
    else:
        assert got == want, (where, got, want)


class Recorder(pl.Callback):
    """What was restored, before a step is made; and that training goes on from it."""

    def __init__(self) -> None:
        self.restored: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restored = everything(trainer)


def train(stage: int, module: pl.LightningModule | None = None, **options: Any) -> pl.Trainer:
    """A trainer that made two steps."""
    options = {"max_steps": 2, "limit_val_batches": 0, **options}
    trainer = sharded_trainer(stage, options.pop("zero", None), options.pop("config", None), **options)
    trainer.fit(module if module is not None else GPT(dist.get_world_size(), "adamw"))
    return trainer


def resume(
    path: str | Path, stage: int, module: pl.LightningModule | None = None, steps: int = 3, **options: Any
) -> tuple[dict[str, Any], pl.Trainer]:
    """What a fit from ``path`` starts with, and its trainer."""
    recorder = Recorder()
    options = {"max_steps": steps, "limit_val_batches": 0, **options}
    callbacks = [recorder, *options.pop("callbacks", [])]
    weights_only = options.pop("weights_only", None)
    trainer = sharded_trainer(
        stage, options.pop("zero", None), options.pop("config", None), callbacks=callbacks, **options
    )
    module = module if module is not None else GPT(dist.get_world_size(), "adamw")
    trainer.fit(module, ckpt_path=path, **trust(weights_only))
    return recorder.restored, trainer


SHARDED: dict[str, Any] = {"checkpoint": {"format": "sharded"}}


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message that a call fails with, which every rank must raise."""
    try:
        call(*args, **kwargs)
    except (CheckpointError, RuntimeError, ValueError, LookupError, OSError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def listing(folder: str | Path) -> list[str]:
    """The names in a folder, hidden ones too; ranks' numbers as ``#``."""
    return sorted(re.sub(r"-\d{5}", "-#", path.name) for path in Path(folder).iterdir())


def raised(results: list[str], *words: str) -> None:
    """Every rank's message has all words."""
    for rank, text in enumerate(results):
        for word in words:
            assert word in text, (rank, word, text)


def has_values(path: Path, start: int = 0, stop: int | None = None) -> bool:
    """Whether a file of ``torch.save``, or a part of one, has a tensor."""
    with opened(path, start, stop) as file:
        return any(map(is_values, records_of(file)))


def flip_a_value(path: Path, start: int = 0, stop: int | None = None) -> bytes:
    """One bit in the longest record, which has a tensor; returns the content before."""
    with opened(path, start, stop) as file:
        record = max(filter(is_values, records_of(file)), key=lambda record: record.size)
    good = path.read_bytes()
    data = bytearray(good)
    data[start + record.start + record.size // 2] ^= 1
    path.write_bytes(data)
    return good


class Gate:
    """Holds writers back until it is opened; fails them when it is told to."""

    def __init__(self) -> None:
        self.open, self.writing, self.most = threading.Event(), 0, 0
        self.fail = 0
        self._write = direct_file.write_some

    def __call__(self, fd: int, view: memoryview, offset: int) -> int:
        assert self.open.wait(30)
        if self.fail:
            self.fail -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, view, offset)
