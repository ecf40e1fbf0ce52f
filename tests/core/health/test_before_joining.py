"""A rank that fails before it has joined, or before its model is set up: the others end, and say which and why."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.core.comm.process_groups import joining
from lt_zero.core.health import before_joining
from lt_zero.core.health.launchers import Tasks
from tests.support.matrix import only_rows

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


def _start(face: str, rank: int, broken: int) -> None:
    if face == "loop":
        if rank == broken:
            os.environ["LT_ZERO_DEBUG"] = "maybe"
        lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)
    elif face == "between":
        lt_zero.init_distributed()
        if rank == broken:
            raise UserWarning("a warning that is an error")
        lt_zero.initialize(model=nn.Linear(2, 2), config=CONFIG)
    else:
        strategy = FabricZeroStrategy(stage=1)
        if rank == broken:
            raise UserWarning("a warning that is an error")
        L.Fabric(accelerator="cpu", devices=3, strategy=strategy).launch()


def _process(face: str, rank: int, port: int, broken: int, answer: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if broken < 0 and rank == 0:
        time.sleep(1.0)
    try:
        _start(face, rank, broken)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as where an error ends a script
        answer.send(f"{type(error).__name__}: {error}")
    else:
        dist.barrier()
        answer.send("joined")
    os._exit(0)


def _answers(face: str, broken: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")  # that of the pool
    pipes = [context.Pipe() for _ in range(3)]
    processes = [
        context.Process(target=_process, args=(face, rank, port, broken, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        told = []
        for ours, _ in pipes:
            assert ours.poll(100), "no answer"
            told.append(ours.recv())
        return told
    finally:
        for process in processes:
            process.join(30)
            process.kill()


@pytest.mark.parametrize(
    ("face", "broken"),
    only_rows(
        [("loop", 1), ("between", 1)],
        [("loop", 1), ("loop", 0), ("fabric", 2), ("fabric", 0), ("between", 1), ("between", 0)],
    ),
)
def test_a_rank_that_fails_before_its_model_is_set_up(face: str, broken: int) -> None:
    point = "the model was set up" if face == "between" else "it joined the run"
    cause = "ConfigError: LT_ZERO_DEBUG='maybe' " if face == "loop" else "UserWarning: a warning that is an error"
    for rank, told in enumerate(_answers(face, broken)):
        if rank == broken:
            assert told.startswith(cause)
        else:
            assert f"Rank {broken} ended before {point}, with {cause}" in told
            assert f"Rank {rank} waited for it." in told


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "^Rank 0 cannot serve .* the port is taken, "), (1, "it is not the store of rank 0, ")]
)
def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch, rank: int, told: str) -> None:
    """Rank 0 does not say that rank 0 has ended, and the others do not wait for an answer of that program."""
    monkeypatch.setattr(before_joining, "_ANSWER_S", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        tasks = Tasks("", rank, 2, rank, "127.0.0.1", other.getsockname()[1])
        limit = timedelta(seconds=60)
        with pytest.raises(RuntimeError, match=f"{told}.* MASTER_PORT"), joining(), before_joining.met(tasks, limit):
            pass


def test_ranks_that_never_join_are_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        tasks = Tasks("", 0, 3, 0, "127.0.0.1", probe.getsockname()[1])
    told, limit = "^Ranks 1, 2 did not join the run", timedelta(seconds=0.2)
    with pytest.raises(RuntimeError, match=told), joining(), before_joining.met(tasks, limit):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("face", ["loop", "fabric"])
def test_a_late_rank_0_is_waited_for(face: str) -> None:
    assert _answers(face, -1) == ["joined"] * 3
