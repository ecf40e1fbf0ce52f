"""The waits of the host for the device in each step where it waits at all: counted on a simulated device.

Stages, optimizers and offloaded states, in whose steps it waits for nothing or for one number, are in
tests/core/engine/test_host_waits.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lt_zero
from lt_zero import ops
from lt_zero.common import accelerator
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.step.loss_scale import LossScaleController
from tests.support import mixtures, pipelines
from tests.support.features import skip_without
from tests.support.happens_before import Order, places
from tests.support.lightning_tools import GPT, sharded_trainer
from tests.support.lightning_tools import ROWS as DATA
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of
from tests.support.pool import Pool
from tests.support.sequences import LENGTH, ROWS, Decoder, Rows, first, keys_of
from tests.support.simulated_device import machine
from tests.support.stream_order import TENSOR, Run, waits


class Steps(NamedTuple):
    """The waits of each step on a simulated device.

    Attributes:
        waits: for all that the device was given.
        events: for events, after which the device was given more.
    """

    waits: list[list[str]]
    events: list[list[str]]


def _run(order: Order, count: int, step: Callable[[int], object]) -> Steps:
    """The waits of ``count`` steps."""
    found = Steps([], [])
    with places(order):
        for number in range(count):
            _begin(order)
            step(number)
            _end(order, found)
    return found


def _begin(order: Order) -> None:
    order.waits.clear()
    order.events.clear()


def _end(order: Order, steps: Steps) -> None:
    steps.waits.append(list(order.waits))
    steps.events.append(list(order.events))


# ---- what is counted -------------------------------------------------------------------------------------------------


def _losses(count: int) -> Steps:
    """Losses of which nothing checks the gradients."""
    with machine() as order:
        engine = lt_zero.shard(Net(), config_of(2))
        control = LossScaleController(DtypePolicy())
        loss = next_token_loss(engine.root, 0, 0, 0)
        return _run(order, count, lambda number: control.see_loss(engine, loss))


def _checked(count: int, on_device: bool | None = None, zero: dict[str, Any] | None = None) -> Steps:
    """Steps in bf16 that are checked. ``on_device``: as ``LossScaleController`` has it."""
    policy = DtypePolicy(compute=torch.bfloat16, check_overflow=True)
    with machine() as order:
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config_of(2, zero or {}), policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sharded = lt_zero.ShardedOptimizer(engine, optimizer)
        control = LossScaleController(policy)
        control.on_device = on_device

        def step(number: int) -> None:
            optimizer.zero_grad()
            loss = next_token_loss(model, 0, 0, 0)
            control.before_backward([sharded])
            control.scaled(engine, loss).backward()
            control.step(sharded, 0, 0.5, optimizer.step)

        found = _run(order, count, step)
        engine.finish_steps()
        engine.offload_manager.close()
    return found


def _experts(size: int, recomputed: bool) -> Steps:
    """Two layers of experts."""
    with machine() as order:
        run = mixtures.start(2, size, "adamw")
        for layer in run.model.layers if recomputed else ():
            _recompute(layer)
        return _run(order, 2, run.train)


def _recompute(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def _pipeline(schedule: str, rows: list[int]) -> Steps:
    """Batches of so many rows."""
    with machine() as order:
        shape = pipelines.Ranks(pipeline=2)
        run = pipelines.start(shape, 1, "adamw", lambda: pipelines.specs(tied=False), {"schedule": schedule})
        return _run(order, len(rows), lambda number: run.step(number, rows[number], limit=0.5))


def _codes(block: dict[str, Any]) -> Steps:
    """Four buckets, of each of which a rank encodes two parts, and decodes two."""
    with machine() as order:
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config_of(2, gradient_compression=block))
        assert [bucket.plan.compresses for bucket in engine.buckets] == [True] * 4
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        lt_zero.ShardedOptimizer(engine, optimizer)

        def step(number: int) -> None:
            optimizer.zero_grad()
            next_token_loss(model, number, 0, dist.get_rank()).backward()
            optimizer.step()

        return _run(order, 2, step)


def _parts(stage: int) -> Steps:
    """The last step of ranks that keep a part each of saved inputs."""
    return Steps([waits(Run(stage, keys={**TENSOR, **_PARTITIONED}))], [])


class _Counts(Callback):
    """Counts the waits of each batch of a Trainer, from the loading of it on."""

    def __init__(self, order: Order) -> None:
        self.steps = Steps([], [])
        self._order = order
        self._stack = ExitStack()

    def on_train_start(self, *_: Any) -> None:
        self._stack.enter_context(places(self._order))
        _begin(self._order)

    def on_train_batch_end(self, *_: Any) -> None:
        _end(self._order, self.steps)
        _begin(self._order)

    def on_train_end(self, *_: Any) -> None:
        self._stack.close()


def _fit(module: pl.LightningModule, precision: str, logger: Any = False, **config: Any) -> Steps:
    """Four steps of a Trainer."""
    with machine() as order, mock.patch.object(accelerator, "peak_allocated", return_value=0):
        counts = _Counts(order)
        how: dict[str, Any] = {"max_steps": 4, "precision": precision, "gradient_clip_val": 0.5, "limit_val_batches": 0}
        how |= {"logger": logger, "log_every_n_steps": 2}
        sharded_trainer(2, config=config, callbacks=[counts], **how).fit(module)
    return counts.steps


class Tokens(pl.LightningModule):
    """Trains a decoder on batches with one more entry."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.net, self.key = Decoder(), key

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**{name: batch[name] for name in ("input_ids", "position_ids", "shift_labels")})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        more = {"attention_mask": torch.ones(ROWS, LENGTH), "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}

        def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = {**first(samples), self.key: more[self.key]}
            # In host memory, as a loader makes it.
            return {name: torch.tensor(value.tolist(), dtype=value.dtype) for name, value in batch.items()}

        return DataLoader(Rows(8), batch_size=1, collate_fn=collate)


class Moved(Tokens):
    """Its own code gets whole batches on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def _printed(precision: str) -> Steps:
    """A line after every other step. Without the first step, of which losses, and values of weights, are looked at."""
    found = _fit(GPT(rows=2 * DATA), precision, steps_per_print=2)
    return Steps(found.waits[1:], found.events[1:])


def _logged(precision: str) -> Steps:
    """Norms for a logger, after every other step."""
    found = _fit(GPT(rows=2 * DATA), precision, DummyLogger())
    return Steps([[each for each in step if "_log <" in each] for step in found.waits], [])


def _noise(found: Steps) -> Steps:
    """Those of the noise scale only."""
    return Steps([[each for each in step if "tools/gradient_noise/" in each] for step in found.waits], [])


def _noise_in_lines() -> Steps:
    """A line after every other step has the noise of the steps since the last one."""
    return _noise(_fit(GPT(rows=4 * DATA), "32-true", steps_per_print=2, gradient_noise_scale=True))


def _noise_in_events() -> Steps:
    """Events of each step of a loop have the noise."""
    with machine() as order, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}
        config |= {"csv_monitor": {"enabled": True, "output_path": folder}, "gradient_noise_scale": True}
        engine, *_ = lt_zero.initialize(model=Net(), optimizer=torch.optim.AdamW, config=config)

        def step(number: int) -> None:
            engine.backward(next_token_loss(engine, number, 0, dist.get_rank()))
            engine.step()

        found = _run(order, 3, step)
        engine.destroy()
    return _noise(found)


def _cut(module: Callable[[str], pl.LightningModule], key: str) -> Steps:
    """The waits in the cut of batches."""
    found = _fit(module(key), "32-true", **keys_of(2))
    return Steps([[each for each in step if "parallel/sequence/" in each] for step in found.waits], [])


# ---- the table -------------------------------------------------------------------------------------------------------

_TOPK: dict[str, Any] = {"algorithm": "topk", "topk_ratio": 0.1}
_PARTITIONED = {"activation_checkpointing": {"mode": "full", "partition_activations": True}}
_OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


class Row(NamedTuple):
    """Steps, and how often the host waits in each.

    Attributes:
        ranks: that take them.
        run, args: returns the steps.
        waits: for all that the device was given.
        events: for events; None: whatever they are.
    """

    ranks: int
    run: Callable[..., Steps]
    args: tuple[Any, ...]
    waits: list[int]
    events: list[int] | None = None


TABLE = {
    "a loss that nothing checks": Row(1, _losses, (52,), [1, *[0] * 49, 1, 0], [0] * 52),
    # The event is in the step before, after which the forward was launched.
    "a skip flag on the device": Row(1, _checked, (3,), [0, 0, 0], [0, 1, 1]),
    "a skip flag on the host": Row(1, _checked, (3, False), [1, 1, 1], [0, 0, 0]),
    # The flag, and the factor of clipping.
    "a skip flag of offloaded states": Row(1, _checked, (3, None, _OFFLOADED), [2, 2, 2]),
    "two layers of experts on one rank each": Row(2, _experts, (1, False), [2, 2], [0, 0]),
    "two layers of experts on two ranks": Row(2, _experts, (2, False), [2, 2], [0, 0]),
    "two layers of experts, recomputed": Row(2, _experts, (2, True), [4, 4], [0, 0]),
    # Of each part its indices, its values, and its bytes where they arrive; of each bucket the size of the longest one.
    "codes of variable size": Row(2, _codes, (_TOPK,), [28, 28]),
    "codes of variable size, Huffman": Row(2, _codes, ({**_TOPK, "huffman_coding": True},), [28, 28]),
    "saved inputs in parts": Row(2, _parts, (1,), [0]),
    "printed lines": Row(1, _printed, ("32-true",), [1, 0, 1], [0, 0, 0]),
    # The skip flag of the step is read then, not in the next one.
    "printed lines, a skip flag": Row(1, _printed, ("bf16-mixed",), [1, 0, 1], [2, 0, 2]),
    "norms for a logger": Row(1, _logged, ("32-true",), [1, 0, 1, 0]),
    "the noise scale in printed lines": Row(2, _noise_in_lines, (), [0, 1, 0, 1]),
    "the noise scale in events": Row(2, _noise_in_events, (), [1, 1, 1]),
    # Two for each form of a batch, in torch's schedules, and one for the factor of the first loss.
    "a pipeline, 1F1B": Row(2, _pipeline, ("1F1B", [8, 8, 16, 8]), [3, 0, 2, 0], [0] * 4),
    "a pipeline, GPipe": Row(2, _pipeline, ("GPipe", [8, 8, 16, 8]), [3, 0, 2, 0], [0] * 4),
    "batches with a mask": Row(2, _cut, (Tokens, "attention_mask"), [0] * 4),
    "batches with positions": Row(2, _cut, (Tokens, "position_ids"), [0] * 4),
    "batches with a mask, on the device": Row(2, _cut, (Moved, "attention_mask"), [1] * 4),
    "batches with positions, on the device": Row(2, _cut, (Moved, "position_ids"), [1] * 4),
}


@pytest.mark.parametrize("name", TABLE)
def test_waits(pool: Pool, name: str) -> None:
    row = TABLE[name]
    if row.run is _codes:
        skip_without("compression")
    skip_without(*row.args)
    if row.run is _parts:
        skip_without("activation_checkpointing")
    if row.run in (_noise_in_lines, _noise_in_events):
        skip_without("gradient_noise")
    if not ops.available(torch.device("cpu")):
        pytest.skip("the reference has to look at the skip flag")
    # On a GPU nothing goes through memory that ranks share.
    for steps in pool.run(row.ranks, row.run, *row.args, env={"LT_ZERO_SHARED_MEMORY": "0"}):
        assert [len(found) for found in steps.waits] == row.waits, steps.waits
        assert row.events is None or [len(found) for found in steps.events] == row.events, steps.events
