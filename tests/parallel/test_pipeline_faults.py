"""An error, a kill, or another way on one rank of a pipeline: named on all of them, and a late rank is no error."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_zero.parallel import LayerSpec, Pipeline
from tests.support.lightning_tools import quick, sharded_trainer
from tests.support.matrix import only_rows
from tests.support.pipeline_module import Module
from tests.support.pipelines import mean_loss, specs
from tests.support.pool import Pool

STEP, NUMBER = 2, 2  # the batch and the micro-batch of the fault


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
    """Passes on what it gets, until the fault."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()  # not that which finds the shapes
        if self.calls != STEP * 4 + NUMBER + 1 or not torch.is_grad_enabled():
            return x
        if self.how == "backward":
            result: Tensor = _FailsInBackward.apply(x)  # type: ignore[no-untyped-call]
            return result
        HOW.get(self.how, lambda: None)()
        return x


class Faults(Module):
    """``how``: the fault, on rank ``at``."""

    def __init__(self, how: str, at: int, layer: int) -> None:
        super().__init__()
        self.how, self.at, self.layer, self.losses_of_parts = how, at, layer, 0

    def configure_model(self) -> None:
        if self.pipe is None:
            layers = specs()
            layers.insert(self.layer, LayerSpec(Faulty, self.how))
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


def _fit(how: str, at: int, layer: int, pipeline: dict[str, Any]) -> tuple[str, str]:
    """The error of this rank: its type, and its text and notes."""
    with quick():
        block = {"stages": dist.get_world_size(), "num_microbatches": 4, **pipeline}
        trainer = sharded_trainer(1, config={"pipeline": block}, use_distributed_sampler=False, max_epochs=1)
        try:
            trainer.fit(Faults(how, at, layer))
        except Exception as error:
            return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


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


@pytest.mark.parametrize("how", ["barrier", "leaves"])
def test_a_rank_that_waits_elsewhere_is_named_on_all(pool: Pool, how: str) -> None:
    for kind, text in pool.run(2, _fit, how, 0, 1, {}):
        assert kind == "RuntimeError"
        assert "and not on rank " in text
        assert "begun on rank" in text


def test_a_late_rank_is_no_error(pool: Pool) -> None:
    assert pool.run(2, _fit, "sleep", 1, 6, {}) == [("", "")] * 2


def _rank(rank: int, world: int, folder: str, layer: int, answer: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    answer.send((rank, _fit("kill", 0, layer, {})))
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "layer"), [(2, 8), (0, 1), (1, 4)])
def test_a_killed_rank_is_named_on_all(tmp_path: Path, killed: int, layer: int) -> None:
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=_rank, args=(rank, 3, str(tmp_path), layer, theirs)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        for _ in range(2):
            assert ours.poll(60)
            rank, (kind, text) = ours.recv()
            assert rank != killed
            assert kind == "RuntimeError"
            assert f"Rank {killed} ended without an error message: killed" in text
            assert " of micro-batch " in text
    finally:
        for process in processes:
            process.join(30)
            process.kill()
