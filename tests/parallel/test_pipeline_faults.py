"""An error, a kill, or another way on one rank of a pipeline: named on all of them, and a late rank is no error."""

from __future__ import annotations

import gc
import math
import multiprocessing as mp
import os
import signal
import time
import warnings
import weakref
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_zero.core.step.loss_scale import NonFiniteError
from lt_zero.parallel import LayerSpec, Pipeline
from tests.support.lightning_tools import quick, sharded_trainer
from tests.support.matrix import only, only_rows
from tests.support.pipeline_module import Module
from tests.support.pipelines import mean_loss, specs
from tests.support.pool import Pool

STEP, NUMBER = 1, 2  # the batch and the micro-batch of the fault


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        raise ValueError("of a backward")


def _fail() -> None:
    raise ValueError("of a forward")


HOW = {
    "forward": _fail,
    "sleep": partial(time.sleep, 1.5),
    "barrier": lambda: dist.barrier(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Faulty(nn.Module):
    """Passes on what it gets, until the fault, on rank ``at``."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.how, self.at, self.calls = how, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()  # not that which finds the shapes
        if self.calls != STEP * 4 + NUMBER + 1 or not torch.is_grad_enabled() or dist.get_rank() != self.at:
            return x
        if self.how == "nan":
            return x * torch.nan
        if self.how == "backward":
            result: Tensor = _FailsInBackward.apply(x)  # type: ignore[no-untyped-call]
            return result
        HOW.get(self.how, lambda: None)()
        return x


class Faults(Module):
    """``how``: the fault, on rank ``at``."""

    def __init__(self, how: str, at: int, layer: int, data: int = 1) -> None:
        super().__init__(data=data)
        self.how, self.at, self.layer, self.losses_of_parts = how, at, layer, 0

    def configure_model(self) -> None:
        if self.pipe is None:
            layers = specs()
            layers.insert(self.layer, LayerSpec(Faulty, self.how, self.at))
            self.pipe = Pipeline(layers, loss_fn=self.loss)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.losses_of_parts += 1
        if self.how == "loss" and self.losses_of_parts == STEP * 4 + NUMBER + 1:
            raise KeyError("of a loss")
        return mean_loss(logits, targets)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.how == "leaves" and index == STEP and dist.get_rank() == self.at:
            self.trainer.strategy.barrier()
        return super().training_step(batch, index)


def _trainer(stages: int, pipeline: dict[str, Any], **keys: Any) -> pl.Trainer:
    config = {"pipeline": {"stages": stages, "num_microbatches": 4, **pipeline}, **keys}
    return sharded_trainer(1, config=config, use_distributed_sampler=False, max_epochs=1)


def _fit(how: str, at: int, layer: int, pipeline: dict[str, Any], data: int = 1) -> tuple[str, str]:
    """The error of this rank: its type, and its text and notes."""
    with quick():
        trainer = _trainer(dist.get_world_size() // data, pipeline)
        try:
            trainer.fit(Faults(how, at, layer, data))
        except Exception as error:
            return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


def _closed() -> None:
    """What a failed run has made is gone when the next one has begun, at the latest."""
    engines: list[Any] = []
    for _ in range(2):
        trainer, module = _trainer(2, {}), Faults("backward", 0, 1)
        with quick(), pytest.raises((ValueError, RuntimeError), match="of a backward"):
            trainer.fit(module)
        strategy: Any = trainer.strategy
        engines.append(weakref.ref(strategy.run.engine))
        del trainer, module, strategy
    gc.collect()
    assert engines[0]() is None


def test_a_failed_run_of_a_pipeline_is_closed(pool: Pool) -> None:
    pool.run(2, _closed)


LOOPED = {"schedule": "LoopedBFS", "stages_per_rank": 2}


@pytest.mark.parametrize(
    ("how", "at", "layer", "pipeline", "own"),
    [
        *only_rows(
            [("forward", 1, 6, {}, "ValueError"), ("backward", 0, 1, {}, "ValueError")],
            [
                ("forward", 1, 6, {}, "ValueError"),
                ("forward", 1, 6, {"schedule": "GPipe"}, "ValueError"),
                ("forward", 1, 8, LOOPED, "ValueError"),
                ("forward", 0, 1, {}, "ValueError"),
                ("backward", 0, 1, {}, "ValueError"),
                ("backward", 1, 6, {"schedule": "GPipe"}, "ValueError"),
                ("loss", 1, 0, {}, "KeyError"),
                ("loss", 1, 0, LOOPED, "KeyError"),
            ],
        )
    ],
)
def test_an_error_of_one_stage_is_named_on_all(
    pool: Pool, how: str, at: int, layer: int, pipeline: dict[str, Any], own: str
) -> None:
    found = pool.run(2, _fit, how, at, layer, pipeline)
    kind, text = found[at]
    assert kind == own, text
    assert f"micro-batch {NUMBER}" in text
    kind, text = found[1 - at]
    assert f"Rank {at} ended with {own}: " in text
    assert "in the transfer of '" in text
    assert " of micro-batch " in text
    assert "from stage " in text


@pytest.mark.parametrize("how", only(["leaves"], ["barrier", "leaves"]))
def test_a_rank_that_waits_elsewhere_is_named_on_all(pool: Pool, how: str) -> None:
    for kind, text in pool.run(2, _fit, how, 0, 1, {}):
        assert kind == "RuntimeError"
        assert "and not on rank " in text
        assert "begun on rank" in text


@pytest.mark.slow
def test_a_late_rank_is_no_error(pool: Pool) -> None:
    assert pool.run(2, _fit, "sleep", 1, 6, {}) == [("", "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("how", "at", "layer"), [("forward", 1, 1), ("backward", 3, 6)])
def test_an_error_of_one_stage_is_named_on_the_ranks_of_other_pipelines(
    pool: Pool, how: str, at: int, layer: int
) -> None:
    """2 stages x 2 data ranks: the rank of the other stage waits in a transfer, the others may be elsewhere."""
    found = pool.run(4, _fit, how, at, layer, {}, 2)
    assert found[at][0] == "ValueError", found[at][1]
    for rank, (_, text) in enumerate(found):
        assert rank == at or f"Rank {at} ended with ValueError: " in text
    assert " of micro-batch " in found[(at + 2) % 4][1]


def _nonfinite(setting: str, at: int) -> tuple[list[str], str, list[float], int]:
    """Warnings, the error, losses and skipped steps, where the layer on rank ``at`` returns NaN for a micro-batch."""
    trainer, module, error = _trainer(2, {}, on_nonfinite=setting), Faults("nan", at, 6 if at else 1), ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            trainer.fit(module)
        except NonFiniteError as caught:
            error = str(caught)
    told = [str(warning.message) for warning in seen if "not finite" in str(warning.message)]
    return told, error, module.losses, trainer.precision_plugin.skipped_steps


SETTINGS = list(product(["warn", "skip", "raise"], [0, 1]))


@pytest.mark.parametrize(("setting", "at"), only_rows([("raise", 0)], SETTINGS))
def test_what_is_not_finite_on_one_stage_ends_or_skips_the_step_on_all(pool: Pool, setting: str, at: int) -> None:
    for rank, (told, error, losses, skipped) in enumerate(pool.run(2, _nonfinite, setting, at)):
        assert len(told) == (rank == 0 and setting != "raise"), told
        assert skipped == (setting != "warn")
        assert len(losses) == (STEP if setting == "raise" else 4)
        assert math.isnan(losses[-1]) == (setting == "warn")
        if setting == "raise":
            assert f"on rank {at}: the first output that was not finite is that of " in error
            assert "(Faulty)" in error


def _rank(rank: int, world: int, folder: str, killed: int, layer: int, data: int, answer: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    answer.send((rank, _fit("kill", killed, layer, {}, data)))
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "data", "killed", "layer"), [(3, 1, 2, 8), (3, 1, 0, 1), (3, 1, 1, 4), (4, 2, 1, 1), (4, 2, 2, 8)]
)
def test_a_killed_rank_is_named_on_all(tmp_path: Path, world: int, data: int, killed: int, layer: int) -> None:
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    given = (world, str(tmp_path), killed, layer, data, theirs)
    processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for _ in range(world - 1):
            assert ours.poll(60)
            rank, (kind, text) = ours.recv()
            assert rank != killed
            assert kind == "RuntimeError"
            assert f"Rank {killed} ended without an error message: killed" in text
            assert " of micro-batch " in text or rank % data != killed % data
    finally:
        for process in processes:
            process.join(30)
            process.kill()


class Uneven(Module):
    """The batch of rank 1 has fewer rows."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch[: 2 if dist.get_rank() else 4], index)


def _fit_uneven() -> str:
    with quick(), pytest.raises(RuntimeError) as caught:
        _trainer(2, {}).fit(Uneven())
    return str(caught.value)


def test_batches_of_other_sizes_are_told_apart(pool: Pool) -> None:
    """They may be cut to micro-batches of one form."""
    parts = "that of rank 0 has 4 micro-batches of (1, 5) int64, and that of rank 1 2 micro-batches of (1, 5)"
    for error in pool.run(2, _fit_uneven):
        assert parts in error
