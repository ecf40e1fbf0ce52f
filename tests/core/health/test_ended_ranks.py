"""When a rank ends, the last line of the others says which one, and where its own error stands."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed import distributed_c10d

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.checkpoint.native.save import DirectoryWriter
from lt_zero.common.users_code import warn
from lt_zero.core.comm import process_groups
from lt_zero.core.comm.work import CollectiveMonitor
from lt_zero.core.comm.world import World
from lt_zero.core.health import ended_ranks, hang_detection
from lt_zero.core.health.ended_ranks import EndedRanks
from lt_zero.training import checkpoints
from tests.support.launchers import environment
from tests.support.lightning_tools import GPT, quick, sharded_trainer, torchrun_env
from tests.support.matrix import only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of
from tests.support.paths import SUPPORT
from tests.support.pool import Pool

SOCKETS = {"LT_ZERO_SHARED_MEMORY": "0"}
SCRIPT = str(SUPPORT / "launch_script.py")
SILENT = "ended without an error message: killed"


class Ends(Callback):
    """One rank ends in the second step; others may come late to find out."""

    def __init__(self, rank: int, how: str, late: float = 0.0) -> None:
        self.rank, self.how, self.late = rank, how, late

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == self.rank:
            if self.how == "raises":
                raise ValueError("broken on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == 1 and trainer.global_rank == 1:
            time.sleep(self.late)


def _killed(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_in(face: str, folder: str) -> None:
    """Save in a loop or in Fabric; one rank is killed while it writes."""
    if dist.get_rank() == 1:
        DirectoryWriter._write = _killed  # type: ignore[method-assign]
    if face == "loop":
        settings = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine, *_ = lt_zero.initialize(model=Net(), config=settings)
        engine.save_checkpoint(folder)
        return
    os.environ.update(torchrun_env())
    fabric = L.Fabric(accelerator="cpu", strategy=FabricZeroStrategy(stage=3), devices=dist.get_world_size())
    fabric.launch()
    fabric.save(f"{folder}/one", {"model": fabric.setup_module(Net())})


def _train(how: str, folder: str) -> None:
    """Without a Trainer: "set-up", "plain", "backward"; in a save: "save", "loop", "Fabric"; or in a step."""
    if how in ("loop", "Fabric"):
        _save_in(how, folder)
    elif how == "set-up":
        if dist.get_rank() == 1:
            _killed()
        lt_zero.shard(Net(), config_of(3))
    elif how == "plain":
        engine = lt_zero.shard(Net(), config_of(3, {"stage3_max_reuse_distance": 0}))
        for step in range(2):
            next_token_loss(engine.root, step, 0, 0).backward()
            if dist.get_rank() == 1:
                _killed()
    elif how == "backward":  # of which only the reductions are collectives
        engine = lt_zero.shard(Net(), config_of(2))
        loss = next_token_loss(engine.root, 0, 0, 0)
        if dist.get_rank() == 1:
            _killed()
        loss.backward()
    elif how == "save":
        trainer = sharded_trainer(3, max_steps=1)
        trainer.fit(GPT(dist.get_world_size()))
        if dist.get_rank() == 1:
            checkpoints.write = _killed
        trainer.save_checkpoint(f"{folder}/one.ckpt")
    else:
        ends = Ends(dist.get_world_size() - 1, how, late=3.0 if dist.get_world_size() == 3 else 0.0)
        sharded_trainer(3, max_steps=3, callbacks=[ends]).fit(GPT(dist.get_world_size()))


def _rank(rank: int, world: int, folder: str, how: str, env: dict[str, str], answer: Any) -> None:
    os.environ.update(env, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        _train(how, folder)
    except BaseException as error:
        answer.send((rank, "".join(traceback.format_exception(error)).strip()))
    os._exit(1)


def _last_lines(world: int, folder: Path, how: str, env: dict[str, str]) -> dict[int, str]:
    context = mp.get_context("forkserver")  # that of the pool
    ours, theirs = context.Pipe()
    arguments = [(rank, world, str(folder), how, env, theirs) for rank in range(world)]
    processes = [context.Process(target=_rank, args=args) for args in arguments]
    for process in processes:
        process.start()
    told: dict[int, str] = {}
    try:
        for _ in range(world if how == "raises" else world - 1):
            assert ours.poll(60), f"no answer but from {sorted(told)}"
            rank, text = ours.recv()
            told[rank] = text.splitlines()[-1]
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    return told


@pytest.mark.parametrize(
    ("how", "env"),
    [
        ("killed", {}),
        ("backward", {}),
        ("set-up", {}),
        pytest.param("plain", SOCKETS, marks=pytest.mark.slow),
        pytest.param("save", {}, marks=pytest.mark.slow),
        pytest.param("loop", {}, marks=pytest.mark.slow),
        pytest.param("Fabric", {}, marks=pytest.mark.slow),
        pytest.param("killed", SOCKETS, marks=pytest.mark.slow),
    ],
    ids=["fence", "reduction", "set-up", "gather", "save", "save in a loop", "save in Fabric", "sockets"],
)
def test_a_rank_that_is_killed_is_named(pool: Pool, tmp_path: Path, how: str, env: dict[str, str]) -> None:
    told = _last_lines(2, tmp_path, how, env)
    assert told.keys() == {0}
    if how == "set-up":  # there is no more than the default group
        assert "Rank 1 ended before the model was set up: killed" in told[0]
        return
    assert f"Rank 1 {SILENT}" in told[0]
    assert told[0].endswith("The error of rank 0 follows from that.")
    assert "torchrun: --log-dir" in told[0]


@pytest.mark.parametrize("env", [{}, pytest.param(SOCKETS, marks=pytest.mark.slow)], ids=["fence", "sockets"])
def test_an_error_is_told_to_the_others(pool: Pool, tmp_path: Path, env: dict[str, str]) -> None:
    told = _last_lines(2, tmp_path, "raises", env)
    assert told[1] == "ValueError: broken on purpose"
    assert "Rank 1 ended with ValueError: broken on purpose (" in told[0]
    assert "test_ended_ranks.py:" in told[0]
    assert told[0].endswith("The error of rank 0 follows from that.")


@pytest.mark.slow
def test_the_first_cause_is_named_by_all(pool: Pool, tmp_path: Path) -> None:
    """Rank 0 has ended because of rank 2 when rank 1 finds out."""
    told = _last_lines(3, tmp_path, "raises", {})
    for rank in range(2):
        assert "Rank 2 ended with ValueError: broken on purpose (" in told[rank]


def _somebody_elses() -> list[str]:
    """Errors that other errors do not lead to stay as they are, and so do those of ranks that are all there."""
    world = World.join(torch.device("cpu"))
    found = []
    for error in (ValueError("mine"), RuntimeError("mine")):
        with pytest.raises(type(error)) as caught:
            raise error
        world.explain(caught.value)
        found.append(str(caught.value))
    with pytest.raises(RuntimeError, match="invalid output") as wrong, world.explaining():
        dist.all_gather([torch.zeros(2)], torch.zeros(1))
    found.append(str(wrong.value))
    group = dist.new_group()
    if dist.get_rank() == 0:  # one waits only: gloo closes the pair of the first to give up, and the other sees that
        work = dist.irecv(torch.zeros(1), 1, group, tag=9)
        assert work is not None
        with pytest.raises(RuntimeError, match="Timed out") as wrong, world.explaining():
            work.wait(timedelta(seconds=0.2))
        world.post_error(wrong.value)
        found.append(str(wrong.value))
    dist.barrier()
    return found


def test_other_errors_stay_as_they_are(pool: Pool) -> None:
    for texts in pool.run(2, _somebody_elses):
        assert texts[:2] == ["mine", "mine"]
        assert not any("Rank" in text for text in texts)


def _caught_by_all() -> tuple[str, str, bool]:
    """What the others would be told of this rank's end, after an operation that failed on all, and then later.

    Also whether a process that ended there would wait for readers, of which there are none.
    """
    world = World.join(torch.device("cpu"))
    detector, other = world.detector, 1 - dist.get_rank()
    assert detector is not None
    detector.stop()
    with pytest.raises(ValueError, match="on purpose"), world.together("an operation"):
        raise ValueError("broken on purpose")
    dist.barrier()
    then, began = detector.ends.first_cause([other]), time.monotonic()
    detector.ends.await_readers(30)
    waits = time.monotonic() - began >= 30
    dist.barrier()
    world.host_gather(None, "something later")
    return then, detector.ends.first_cause([other]), waits


def test_an_error_that_all_caught_does_not_explain_a_later_end(pool: Pool) -> None:
    for then, later, waits in pool.run(2, _caught_by_all):
        assert not waits
        assert "ended with ValueError: broken on purpose" in then
        assert SILENT in later


def test_an_error_stays_until_the_others_have_ended_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for the failed one, and finds the error late, would name a deadlock instead."""
    monkeypatch.setattr(EndedRanks, "has_ended", lambda self, rank: False)
    store, host = dist.HashStore(), mock.Mock()  # type: ignore[attr-defined]
    first, failed = (EndedRanks(store, [0, 1], rank, host, CollectiveMonitor()) for rank in range(2))
    for ends in (first, failed):
        ends.begin("run")
    failed.tell(True, "ValueError: broken on purpose")
    failed.scopes.clear()
    with ThreadPoolExecutor(1) as thread:
        going_on = thread.submit(failed.go_on, 60.0)
        with pytest.raises(futures.TimeoutError):
            going_on.result(timeout=0.2)
        found = first.error()
        assert found is not None
        assert found[1].text == "ValueError: broken on purpose"
        first.tell(False, "rank 1 ended")
        assert going_on.result(timeout=60.0)
    assert first.error() is None


def test_an_error_that_is_taken_back_while_it_is_read_holds_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waited in the store until its timeout could neither answer others nor end a wait for them."""
    monkeypatch.setattr(EndedRanks, "has_ended", lambda self, rank: False)
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.1))
    first, failed = (EndedRanks(store, [0, 1], rank, mock.Mock(), CollectiveMonitor()) for rank in range(2))
    failed.tell(True, "ValueError: broken on purpose")
    assert first.of(1) is not None
    plain = first._store

    def check(keys: list[str]) -> bool:
        found = plain.check(keys)
        failed.begin("run")  # the other rank goes on between the look for its report and the reading of it
        return found

    first._store = mock.Mock(check=check, get=plain.get)
    assert first.of(1) is None


def test_no_rank_waits_for_those_that_came_through_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may fail alone, after the last collective: once it has caught the error, all waited for it in vain."""
    monkeypatch.setattr(EndedRanks, "has_ended", lambda self, rank: False)
    waits = AssertionError("waits for rank 0")
    monkeypatch.setattr(ended_ranks, "time", mock.Mock(monotonic=lambda: 0.0, sleep=mock.Mock(side_effect=waits)))
    store = dist.HashStore()  # type: ignore[attr-defined]
    passed, failed = (EndedRanks(store, [0, 1], rank, mock.Mock(), CollectiveMonitor()) for rank in range(2))
    world = mock.Mock()
    world.detector.ends = passed
    with World.together(world, "save"):
        pass
    world.detector.ends = failed
    world.post_error = lambda error: failed.tell(True, str(error))
    with pytest.raises(ValueError, match="no space"), World.together(world, "save"):
        raise ValueError("no space left")
    assert failed.go_on(60.0)
    assert not passed.scopes


def test_the_end_of_a_run_is_told_though_an_operation_in_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has failed in the run waits for that before it goes on; the error of the operation stays told."""
    monkeypatch.setattr(EndedRanks, "has_ended", lambda self, rank: False)
    waits = AssertionError("waits for rank 1")
    monkeypatch.setattr(ended_ranks, "time", mock.Mock(monotonic=lambda: 0.0, sleep=mock.Mock(side_effect=waits)))
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second = (EndedRanks(store, [0, 1], rank, mock.Mock(), CollectiveMonitor()) for rank in range(2))
    for ends in (first, second):
        ends.begin("run")
    world = mock.Mock()
    world.detector.ends = second
    world.post_error = lambda error: second.tell(True, str(error))
    with pytest.raises(ValueError, match="no space"), World.together(world, "save"):
        raise ValueError("no space left")
    first.tell(True, "broken in the run")
    first.scopes.clear()
    second.end_run()
    assert first.go_on(60.0)
    told = first.of(1)
    assert told is not None
    assert told.text == "no space left"


class _Member:
    def __init__(self) -> None:
        self.told: list[BaseException | None] = []

    def end_process(self, error: BaseException | None) -> bool:
        self.told.append(error)
        return False

    def abort(self) -> None:
        pass

    def leave(self) -> None:
        pass


@pytest.mark.parametrize("chains", [False, True])
def test_a_hook_that_was_installed_later_hides_no_error(monkeypatch: pytest.MonkeyPatch, chains: bool) -> None:
    member, error = _Member(), ValueError("broken on purpose")
    monkeypatch.setattr(ended_ranks, "_members", {member})
    monkeypatch.setattr(ended_ranks, "_installed", [lambda *args: None])
    monkeypatch.setattr(sys, "excepthook", lambda *args: ended_ranks._uncaught(*args) if chains else None)
    monkeypatch.setattr(sys, "last_value", error, raising=False)  # as the interpreter does
    sys.excepthook(ValueError, error, None)
    ended_ranks._end()
    assert member.told == ([error, None] if chains else [error])


LIGHTNING = "def call(depth, function):\n    return call(depth - 1, function) if depth else function()\n"


def _lightning() -> Any:
    """A function of Lightning that calls another at the end of many frames."""
    frames: dict[str, Any] = {"__name__": "lightning.fake"}
    exec(compile(LIGHTNING, "lightning/fake.py", "exec"), frames)
    return frames["call"]


def test_warnings_point_at_the_line_that_called_lightning() -> None:
    with pytest.warns(UserWarning, match="told") as caught:
        _lightning()(9, partial(warn, "told"))
    assert [entry.filename for entry in caught] == [__file__]


def _raise_through_lightning(first: Exception, error: Exception) -> None:
    """Raise ``error`` in the user's code while it handles ``first``; many frames of Lightning have called each."""

    def training_step(raised: Exception) -> None:
        raise raised

    try:
        _lightning()(9, partial(training_step, first))
    except type(first):
        _lightning()(9, partial(training_step, error))


@pytest.mark.parametrize("whole", [False, True])
def test_an_own_error_is_printed_without_the_frames_of_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    """The user's frames stay, of the error and of the one before it; the others go to a file."""
    monkeypatch.setattr(ended_ranks, "_members", {_Member()})
    monkeypatch.setattr(ended_ranks, "_installed", [sys.__excepthook__])
    monkeypatch.setenv("LT_ZERO_DEBUG", str(int(whole)))
    with pytest.raises(ValueError, match="on purpose") as caught:
        _raise_through_lightning(KeyError("first"), ValueError("broken on purpose"))
    error = caught.value
    before = traceback.format_exception(error)
    ended_ranks._uncaught(ValueError, error, error.__traceback__)
    assert traceback.format_exception(error) == before  # for debuggers
    told = capsys.readouterr().err
    if whole:
        assert told == "".join(before)
        return
    *shown, last = told.splitlines()
    assert [line for line in shown if "fake.py" in line] == []
    assert sum("in training_step" in line for line in shown) == 2
    assert "KeyError: 'first'" in shown
    assert shown[-1] == "ValueError: broken on purpose"
    place = r"test_ended_ranks\.py:\d+\)"
    found = re.search(rf"^\[rank0\]: Rank 0 ended with ValueError: broken on purpose \(.*{place}.*: (\S+\.txt)$", last)
    assert found is not None
    assert Path(found[1]).read_text(encoding="utf-8") == "".join(before)
    Path(found[1]).unlink()


@pytest.mark.parametrize("whole", [False, True])
def test_the_text_of_an_error_that_a_process_hands_on_has_no_frames_of_packages(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """As torch.multiprocessing hands it to the notebook or script that has started the processes."""
    monkeypatch.setenv("LT_ZERO_DEBUG", str(int(whole)))
    with pytest.raises(ValueError, match="on purpose") as caught:
        ended_ranks.call_with_short_errors(_raise_through_lightning, KeyError("first"), ValueError("on purpose"))
    text = "".join(traceback.format_exception(caught.value))
    assert ("fake.py" in text) == whole
    assert text.count("in training_step") == 2
    if not whole:
        last = text.splitlines()[-1]
        assert last.startswith("Rank 0 ended with ValueError: on purpose (")
        path = Path(last.rpartition(": ")[2])
        assert "fake.py" in path.read_text(encoding="utf-8")
        path.unlink()


HOOKS = ("on_save_checkpoint", "configure_optimizers", "on_train_epoch_start", "on_validation_batch_end")
MORE_HOOKS = (
    "setup",
    "on_fit_start",
    "train_dataloader",
    "on_train_epoch_end",
    "on_load_checkpoint",
    "configure_model",
)


def _fails_in_hook(hook: str, stage: int, folder: str) -> str:
    """The error of a fit, which may resume, in which one rank's hook fails."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("broken on purpose")

    with quick():
        saves = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
        options: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True, "limit_val_batches": 1}
        resume = None
        if hook == "on_load_checkpoint":
            sharded_trainer(stage, max_steps=1, **options).fit(GPT(dist.get_world_size()))
            resume, options = f"{folder}/last.ckpt", {}
        model = GPT(dist.get_world_size())
        if dist.get_rank() == dist.get_world_size() - 1:
            setattr(model, hook, fail)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            sharded_trainer(stage, max_epochs=1, **options).fit(model, ckpt_path=resume)
        _outlive(folder)
    return str(caught.value)


def _outlive(folder: str) -> None:
    """The last rank, which has caught its error, goes on until the others have left."""
    if dist.get_rank() < dist.get_world_size() - 1:
        Path(folder, f"left.{dist.get_rank()}").touch()
        return
    until = time.monotonic() + 60
    while len(list(Path(folder).glob("left.*"))) < dist.get_world_size() - 1 and time.monotonic() < until:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("hook", "stage", "world"),
    only_rows(
        [(HOOKS[0], 3, 2), (HOOKS[1], 2, 3)],
        [(hook, stage, world) for hook in HOOKS + MORE_HOOKS for stage, world in ((3, 2), (2, 3))],
    ),
)
def test_a_hook_that_fails_on_one_rank_ends_all(pool: Pool, tmp_path: Path, hook: str, stage: int, world: int) -> None:
    """Wherever the others wait: in a collective of this package, or in one of Lightning."""
    *others, own = pool.run(world, _fails_in_hook, hook, stage, str(tmp_path))
    assert own == "broken on purpose"
    for error in others:
        assert f"Rank {world - 1} ended with ValueError: broken on purpose (" in error


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
def test_the_last_line_of_a_real_run(fails: int) -> None:
    """Rank 0 serves the store from which the other reads the error."""
    command = [sys.executable, SCRIPT, "popen", f"--fail={fails}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    error = "ValueError: broken on purpose"
    told = {rank: re.findall(rf"^\[rank{rank}\]: ?(.*)$", done.stderr, re.MULTILINE) for rank in range(2)}
    assert told[fails][-2] == error
    assert told[fails][-1].startswith(f"Rank {fails} ended with {error} (")
    assert len(told[fails]) <= 12
    assert f"Rank {fails} ended with {error} (" in told[1 - fails][-1]
    assert len(told[1 - fails]) <= 10
    path = re.search(r"In full: (.*?)\)", told[1 - fails][-1])
    assert path is not None
    assert "in _run_stage" in Path(path[1]).read_text(encoding="utf-8")
    assert "c10d" not in done.stderr  # what the client of a store that is gone would log


def _comes_late() -> None:
    distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(2.5)
    assert lt_zero.shard(Net(), config_of(3)).world.size == 2
    late = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete")
    told = r"^Other ranks did not come to set up the model within 60 s.*ms for"
    with mock.patch.object(process_groups, "_meet", side_effect=late), pytest.raises(RuntimeError, match=told):
        process_groups.await_all(timedelta(minutes=1))


def test_a_rank_that_comes_late_has_not_ended(pool: Pool) -> None:
    """The default group's timeout may be shorter than what a rank does before: it loads data, or compiles."""
    pool.run(2, _comes_late)


@pytest.mark.parametrize(("error", "told"), [(RuntimeError("closed"), 1), (ValueError("destroyed"), 0)])
def test_a_store_whose_process_has_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: int
) -> None:
    """Its client would log pages after the line that names the rank. A group that was destroyed tells nothing of it."""
    ends = object.__new__(ended_ranks.EndedRanks)
    ends._ranks, ends._rank, ends._host, ends.server_gone, ends.lost = [0, 1], 1, mock.Mock(), False, {}
    monkeypatch.setattr(dist, "isend", mock.Mock(side_effect=error))
    reporter, agreement = object.__new__(hang_detection._Reporter), mock.Mock()
    reporter._store, reporter._ends, reporter.interval = dist.HashStore(), ends, 0.0  # type: ignore[attr-defined]
    thread = hang_detection.RollCall(reporter, agreement)
    agreement.poll.side_effect = lambda: ends.has_ended(1) and not ends.server_gone and ends.has_ended(0)
    monkeypatch.setattr(reporter, "poll", lambda: agreement.poll.call_count == 3)
    thread.run()
    assert agreement.poll.call_count == (1 if told else 3)
    assert reporter._store.add("listening", 0) == told


def _roll_call(monkeypatch: pytest.MonkeyPatch, store: Any, results: Any) -> mock.Mock:
    """Run a thread that answers other ranks; returns its polls, which have a mock's ``results`` as side effects."""
    reporter, ends = object.__new__(hang_detection._Reporter), mock.Mock(server_gone=False)
    reporter._store, reporter._ends, reporter.interval = store, ends, 0.0
    monkeypatch.setattr(reporter, "poll", polls := mock.Mock(side_effect=results))
    hang_detection.RollCall(reporter, mock.Mock()).run()
    return polls


def test_a_poll_that_fails_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks into other threads while they run. Nobody would find that this rank is waited for in vain."""
    some = [AttributeError("not made yet"), RuntimeError("dictionary changed size during iteration")] * 4
    results = [*some, False, *some, True]
    polls = _roll_call(monkeypatch, dist.HashStore(), results)  # type: ignore[attr-defined]
    assert polls.call_count == len(results)
    assert not caplog.records


def test_hang_detection_that_fails_again_and_again_tells_that_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = AttributeError("no such name")
    polls = _roll_call(monkeypatch, dist.HashStore(), [error] * 50)  # type: ignore[attr-defined]
    assert 1 < polls.call_count < 50
    (record,) = caplog.records
    assert "hang detection of this process has ended by an error of its own: AttributeError: no such name" in (
        record.getMessage()
    )


def test_the_thread_ends_with_its_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gone = dist.DistError("the process that serves the store has ended")
    assert _roll_call(monkeypatch, dist.HashStore(), [gone]).call_count == 1  # type: ignore[attr-defined]
    removed = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    removed.add("first", 1)

    def poll() -> bool:
        (tmp_path / "store").unlink()
        raise RuntimeError("open: No such file or directory")

    assert _roll_call(monkeypatch, removed, poll).call_count == 1
    assert not caplog.records


@pytest.mark.parametrize("follows", [True, False])
def test_nothing_polls_the_store_after_the_error_of_another_rank_is_told(
    monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """The process that serves it may end while the error is printed: the pages of a poll would be the last lines."""
    detector = object.__new__(hang_detection.HangDetector)
    detector._pid, detector.ends = os.getpid(), mock.Mock(failed=True)
    monkeypatch.setattr(detector, "explain", lambda error: follows)
    monkeypatch.setattr(detector, "stop", stop := mock.Mock())
    assert detector.end_process(RuntimeError("Connection closed by peer")) == follows
    assert stop.call_count == follows


def _part() -> float:
    world = World.join(torch.device("cpu"))
    assert world.detector is not None
    if dist.get_rank() == 1:
        time.sleep(0.5)
    before = time.monotonic()
    world.detector.ends.part(60.0)
    return time.monotonic() if dist.get_rank() == 0 else before


def test_the_rank_that_serves_the_store_parts_last(pool: Pool) -> None:
    """Ranks that end by the same error tell of it in the store: its end would be the last that they print."""
    server, other = pool.run(2, _part)
    assert server >= other


def test_an_error_in_one_line_has_its_reason_and_whole_words() -> None:
    names = ", ".join(f"'net.blocks.{number}.weight'" for number in range(20))
    reason = "and 4 more, which are not cut: they would be averaged."
    told = ended_ranks.summary(RuntimeError(f"different gradients of {names} {reason} {'Say so. ' * 60}"))
    assert f"different gradients of 'net.blocks.0.weight', ... {reason}" in told
    assert told.partition(" (")[0].endswith("Say so.")
    words = ended_ranks.summary(ValueError("once upon a midnight dreary " * 40)).partition(" ... (")[0]
    assert 250 < len(words) < 320
    assert words.rpartition(" ")[2] in ["once", "upon", "a", "midnight", "dreary"]
    # A long word takes no longer than others: 20,000 characters took 7 s.
    assert ended_ranks.shortened("x" * 1_000_000, 40) == f"{'x' * 40} ..."
    assert "3 problems: stage=7 is none" in ended_ranks.summary(ValueError("3 problems:\n  stage=7 is none\n  more"))
    assert ended_ranks.summary(KeyError()).startswith("KeyError (")
