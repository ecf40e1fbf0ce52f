"""A signal to one rank stops all of them after the same batch, or saves and requeues the job; nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import HashStore

from lt_zero.checkpoint.native.archive import Archive
from lt_zero.core.health.agreement import Agreement
from tests.support.lightning_tools import BATCH, GPT, assert_same, quick, sharded_trainer, weights
from tests.support.paths import ROOT, SUPPORT
from tests.support.pool import Pool

MANY = {"max_epochs": 100, "num_sanity_val_steps": 0}
SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODEID": "0",
}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """In the process of the test, whose workers call ``quick`` themselves."""
    with quick():
        yield


class Kept(OnExceptionCheckpoint):
    def teardown(self, *args: Any) -> None:
        """Lightning's removes the file when the next run ends."""


class Signal(Callback):
    """Sends one to its own process, on one rank or (None) on all, at a moment of step 2."""

    def __init__(self, rank: int | None, when: str, number: int = signal.SIGTERM) -> None:
        self.rank, self.when, self.number = rank, when, number

    def send(self, trainer: Any, when: str) -> None:
        if when == self.when and trainer.global_step == 2 and self.rank in (None, trainer.global_rank):
            self.when = "sent"
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.send(trainer, "start")
        if self.when == "waiting" and trainer.global_step == 2:  # the others come to their next collective first
            if trainer.global_rank == self.rank:
                threading.Timer(0.2, self.send, [trainer, "waiting"]).start()
            else:
                threading.Event().wait(0.5)

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.send(trainer, "step")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.send(trainer, "end")

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self.send(trainer, "validation")

    def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.send(trainer, "validated")

    def on_predict_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.predict_loop.batch_progress.current.ready == 2:
            trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 2
            self.send(trainer, "prediction")


class Stopped(GPT):
    """Predicts for longer than it takes to agree."""

    def predict_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.loader().dataset, batch_size=1)


def _stops(stage: int, rank: int | None, when: str, folder: str) -> tuple[int, int, bool, bool]:
    with quick():
        before = signal.getsignal(signal.SIGTERM)
        callbacks = [Signal(rank, when), Kept(folder, "stopped")]
        trainer = sharded_trainer(stage, callbacks=callbacks, enable_checkpointing=True, **MANY)
        module = Stopped(dist.get_world_size())
        with pytest.raises(SIGTERMException):
            trainer.predict(module) if when == "prediction" else trainer.fit(module)
        restored = signal.getsignal(signal.SIGTERM) == before
        steps, batches = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.completed
        again = sharded_trainer(stage, **(MANY | {"max_epochs": trainer.current_epoch + 2}))
        if when != "prediction":
            again.fit(module, ckpt_path=f"{folder}/stopped.ckpt")
    return steps, batches, restored, trainer.received_sigterm


@pytest.mark.parametrize(
    ("stage", "rank", "when"),
    [
        pytest.param(3, 1, "start", marks=pytest.mark.slow),
        (3, 0, "waiting"),
        pytest.param(3, 1, "validation", marks=pytest.mark.slow),
        (2, None, "step"),
        pytest.param(3, 1, "prediction", marks=pytest.mark.slow),
        pytest.param(3, 1, "waiting", marks=pytest.mark.slow),
        pytest.param(3, 0, "step", marks=pytest.mark.slow),
        pytest.param(1, 0, "end", marks=pytest.mark.slow),
        pytest.param(0, 1, "end", marks=pytest.mark.slow),
        pytest.param(2, 1, "validated", marks=pytest.mark.slow),
    ],
)
def test_sigterm_stops_all_ranks_after_the_same_batch(
    pool: Pool, tmp_path: Path, stage: int, rank: int | None, when: str
) -> None:
    env = {"LT_ZERO_SHARED_MEMORY": "0"} if when == "validation" else {}
    first, second = pool.run(2, _stops, stage, rank, when, str(tmp_path), env=env)
    assert first == second
    steps, batches, restored, received = first
    assert received
    assert restored, "the handler of before the run"
    if when != "prediction":
        assert steps == batches <= 100, "it took longer than half of the run to agree"
        saved = tmp_path / "stopped.ckpt"
        meta = Archive(saved).meta if saved.is_dir() else torch.load(saved, weights_only=False)
        assert meta["global_step"] == steps


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "rank"), [("popen", 1), ("torchrun", 0), ("torchrun", 1)])
def test_sigterm_to_one_process_of_a_real_run(tmp_path: Path, launcher: str, rank: int) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER", "LOCAL_RANK", "WORLD"))}
    env = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"] if launcher == "torchrun" else []
    command = [sys.executable, *torchrun, str(SUPPORT / "signal_script.py"), str(tmp_path)]
    run = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        pids = [tmp_path / f"{number}.pid" for number in range(2)]
        until = time.monotonic() + 90
        while not all(pid.exists() for pid in pids) and run.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int(pids[rank].read_text()), signal.SIGTERM)
        assert run.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # with the processes that it has started
    first, second = ((tmp_path / f"{number}.end").read_text() for number in range(2))
    assert first == second
    assert first.startswith("SIGTERMException ")
    Archive(tmp_path / "stopped.ckpt").verify()


STEPS = 40


def _requeues(folder: str, asynchronous: bool) -> tuple[int, list[list[str]], Any]:
    os.environ.update(SLURM, SLURM_PROCID=str(dist.get_rank()), SLURM_LOCALID=str(dist.get_rank()))
    config = {"checkpoint": {"async_save": asynchronous}}
    calls: list[list[str]] = []

    def call(command: list[str]) -> int:
        Archive(f"{folder}/hpc_ckpt_1.ckpt").verify()  # the job may end now
        calls.append(command)
        return 0

    with quick(), mock.patch.object(signal_connector, "call", call):
        options = {"default_root_dir": folder, "plugins": [SLURMEnvironment()], "max_epochs": 1, "limit_val_batches": 0}
        trainer = sharded_trainer(3, {}, config, callbacks=[Signal(1, "step", signal.SIGUSR1)], **options)
        trainer.fit(GPT(dist.get_world_size(), rows=STEPS * BATCH * 3))
        assert trainer.global_step == STEPS, "training went on"
        want = weights(trainer)
        started: list[int] = []

        class Starts(Callback):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                started.append(trainer.global_step)

        again = sharded_trainer(3, {}, config, callbacks=[Starts()], **options)
        again.fit(GPT(dist.get_world_size(), rows=STEPS * BATCH * 3))  # from the checkpoint of the job
        if got := weights(again):
            assert_same(got, want, rtol=0.0, atol=0.0)
    return started[0], calls, None


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_slurms_signal_saves_and_requeues_after_a_batch(pool: Pool, tmp_path: Path, asynchronous: bool) -> None:
    first, second = pool.run(2, _requeues, str(tmp_path), asynchronous)
    assert 2 < first[0] == second[0] < STEPS
    assert (first[1], second[1]) == ([["scontrol", "requeue", "7"]], [])


def test_one_process_stops_at_once(tmp_path: Path) -> None:
    trainer = sharded_trainer_here(callbacks=[Signal(0, "step"), Copies(), Kept(str(tmp_path), "stopped")])
    with pytest.raises(SIGTERMException):
        trainer.fit(GPT())
    assert trainer.global_step == 3
    assert Archive(tmp_path / "stopped.ckpt").meta["global_step"] == 3


class Copies(Callback):
    """A copy of what answers signals is Lightning's own."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        connector = trainer._signal_connector
        assert isinstance(connector, signal_connector._SignalConnector)
        trainer, connector.trainer = connector.trainer, None
        try:
            for made in (copy.copy(connector), pickle.loads(pickle.dumps(connector))):
                assert type(made) is signal_connector._SignalConnector
                assert made.received_sigterm is False
        finally:
            connector.trainer = trainer


def sharded_trainer_here(**kwargs: Any) -> Any:
    from lightning.pytorch import Trainer

    from lt_zero import ZeroStrategy
    from tests.support.lightning_tools import QUIET

    options = {**QUIET, "enable_checkpointing": True, **MANY, **kwargs}
    return Trainer(**options, devices=1, strategy=ZeroStrategy(stage=3))


# ---- agreeing ------------------------------------------------------------------------------------------------------


def _ranks(count: int = 2, **arguments: Any) -> list[Agreement]:
    store = HashStore()
    made = [Agreement(store, rank, count, **arguments) for rank in range(count)]
    for agreement in made:
        agreement.begin()
    return made


def test_the_point_is_the_first_that_nobody_has_passed() -> None:
    first, second = _ranks()
    assert (
        first.step_boundary(True) == second.step_boundary(True) == second.step_boundary(True) == []
    )  # the second rank is ahead
    first.request("stop")
    first.poll()  # as the thread does
    second.poll()
    assert first.step_boundary(True) == [], "the other has passed this one"
    assert first.step_boundary(True) == second.step_boundary(True) == ["stop"]
    assert first.step_boundary(True) == second.step_boundary(True) == []
    second.request("stop")
    second.request("requeue")
    second.poll()
    first.poll()
    assert second.step_boundary(True) == first.step_boundary(True) == ["requeue", "stop"]


def test_a_late_wish_is_for_the_next_time() -> None:
    first, second = _ranks()
    first.request("stop")
    first.poll()
    second.poll()
    second.request("requeue")
    assert first.step_boundary(True) == second.step_boundary(True) == ["stop"]
    second.poll()
    first.poll()
    assert first.step_boundary(True) == second.step_boundary(True) == ["requeue"]


def test_a_later_round_waits_for_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(ranks: list[int]) -> None:
        raise RuntimeError(f"waits for {ranks}")

    monkeypatch.setattr("lt_zero.core.health.agreement._CHECK_INTERVAL", 0.02)
    first, second = _ranks(check=check)
    first.request("stop")
    first.poll()
    second.poll()
    assert first.step_boundary(True) == second.step_boundary(True) == ["stop"]
    first.request("stop")
    with pytest.raises(RuntimeError, match=r"waits for \[1\]"):
        first.step_boundary(True)


def test_points_beside_training_may_differ_in_number() -> None:
    first, second = _ranks()
    for agreement, others in ((first, 3), (second, 1)):
        agreement.step_boundary(True)
        for _ in range(others):
            agreement.step_boundary(False)
    second.request("stop")
    second.poll()
    first.poll()
    assert second.step_boundary(True) == first.step_boundary(True) == ["stop"]


def test_who_is_done_stops_nobody() -> None:
    first, second = _ranks()
    second.end()
    second.end()
    first.request("stop")
    first.poll()
    assert first.step_boundary(True) == first.step_boundary(True) == []
    first.end()
    for agreement in (first, second):
        agreement.begin()
    first.request("stop")
    first.poll()
    second.poll()
    assert first.step_boundary(True) == second.step_boundary(True) == ["stop"]


def test_a_late_wish_of_a_run_that_is_over_is_dropped() -> None:
    first, second = _ranks()
    first.request("stop")
    first.poll()
    first.request("requeue")
    for agreement in (first, second):
        agreement.begin()
    first.poll()
    second.poll()
    assert first.step_boundary(True) == second.step_boundary(True) == []


def test_who_waits_for_a_rank_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(ranks: list[int]) -> None:
        assert ranks == [1]
        raise RuntimeError("Rank 1 ended")

    monkeypatch.setattr("lt_zero.core.health.agreement._CHECK_INTERVAL", 0.02)
    agreement = Agreement(HashStore(), 0, 2, check)
    agreement.begin()
    agreement.request("stop")
    with pytest.raises(RuntimeError, match="Rank 1 ended"):
        agreement.step_boundary(True)


def test_alone() -> None:
    agreement = Agreement()
    agreement.begin()
    assert agreement.step_boundary(True) == []
    agreement.request("stop")
    agreement.request("stop")
    assert agreement.step_boundary(False) == ["stop"]
    assert agreement.step_boundary(False) == []
    agreement.end()
