"""Long work is never silent: lines, bars, who shows them, and that nothing is left on the terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import lt_zero
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.open import verify
from lt_zero.common import progress_bar as room
from lt_zero.common.progress_bar import ProgressBar, duration, follow_lines, progress_bar
from lt_zero.config import ZeroConfig
from lt_zero.training.lightning.monitoring import logger_level
from tests.support.export_tools import Memory
from tests.support.features import needs
from tests.support.lightning_tools import GPT, sharded_trainer, trust
from tests.support.pool import Pool


class Clock:
    """Time passes only while somebody waits; the work is over at ``end``."""

    def __init__(self, end: float) -> None:
        self.now, self.end = 100.0, 100.0 + end
        self.at: Callable[[float], object] = lambda now: None

    def __call__(self) -> float:
        return self.now

    def over(self, seconds: float) -> bool:
        self.now = min(self.now + seconds, self.end)
        self.at(self.now - 100)
        return self.now >= self.end


def lines_of(end: float, total: float | None = None, at: Any = None, **kwargs: Any) -> list[str]:
    clock, lines = Clock(end), list[str]()
    work = ProgressBar("Sharding 24 units", total, clock=clock, **kwargs)
    clock.at = at(work) if at else clock.at
    follow_lines(work, clock.over, ["done"], lines.append)
    return [line.removeprefix("lt_zero: Sharding 24 units: ") for line in lines]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may pass in silence."""
    monkeypatch.setattr(room, "FIRST", 0.0)
    monkeypatch.setattr(room, "LINES", (0.0, 1000.0))
    monkeypatch.setattr(room, "_local_rank", None)


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


# ---- lines ---------------------------------------------------------------------------------------------------------


def test_lines_come_at_growing_intervals() -> None:
    assert lines_of(1.9) == [], "what is short is silent"
    assert lines_of(200.0) == ["2 s", "10 s", "30 s", "1 min 30 s", "2 min 30 s", "done after 3 min 20 s"]


def test_lines_say_how_far_it_is() -> None:
    def count(work: ProgressBar) -> Callable[[float], None]:
        return lambda seconds: work.advance(seconds - work.done)

    assert lines_of(12.0, 24, count) == ["2 of 24 (8 %), 2 s", "10 of 24 (42 %), 10 s", "done after 12 s"]
    assert lines_of(12.0, None, count)[:2] == ["2, 2 s", "10, 10 s"]
    gigabytes = lines_of(3.0, 4.5e9, lambda work: lambda seconds: work.reach(1.2e9), in_bytes=True)
    assert gigabytes[0] == "1.2 GB of 4.5 GB (27 %), 2 s"
    assert [duration(s) for s in (59.9, 60, 7322)] == ["59 s", "1 min 0 s", "2 h 2 min"]


def test_a_late_thread_writes_one_line() -> None:
    clock, lines = Clock(80.0), list[str]()
    work = ProgressBar("Late", clock=clock)
    clock.now += 40
    follow_lines(work, clock.over, ["stopped"], lines.append)
    assert lines == ["lt_zero: Late: 40 s", "lt_zero: Late: stopped after 1 min 20 s"]


@pytest.mark.usefixtures("at_once")
def test_errors_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), progress_bar("Loading", 3) as work:  # noqa: PT012
        work.advance(2)
        until(lambda: "lt_zero: Loading: " in sys.stderr.getvalue())  # type: ignore[attr-defined]
        raise KeyError
    assert capsys.readouterr().err.splitlines()[-1] == "lt_zero: Loading: stopped after 0 s"
    assert threading.active_count() == before


def test_counting_from_many_threads() -> None:
    work = ProgressBar("Counting")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [work.advance() for _ in range(2000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert work.done == 8000


@pytest.mark.usefixtures("at_once")
def test_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(room, "_watch", lambda work, *_: started.append(work.what))
    for name in room._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)

    def shows(**kwargs: Any) -> bool:
        started.clear()
        with progress_bar("Working", **kwargs):
            pass
        return bool(started)

    assert shows()
    assert shows(rank=0)
    assert not shows(rank=1)
    assert not shows(shown=False)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert not shows()
    assert shows(rank=0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert shows(), "Lightning starts processes of its own within a SLURM task"
    room.set_local_rank(3)
    assert not shows(), "what the strategy says counts more"
    with logger_level("error"):
        assert not shows(rank=0)
    assert shows(rank=0)


# ---- bars ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    """No fixture: pytest puts its own stderr there when the test begins."""
    with pytest.MonkeyPatch.context() as patch:
        stream = Terminal()
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stderr", stream)
        patch.setattr(room, "_REFRESH", 0.01)
        yield stream
        assert sys.stderr is stream
    assert room._display is None, "closed"
    assert room._shown == 0


@pytest.mark.usefixtures("at_once")
def test_bar_on_a_terminal() -> None:
    with on_terminal() as terminal:
        with pytest.raises(OSError, match="x"), progress_bar("Reading [/a]", 4) as work:  # noqa: PT012
            work.advance(3)
            until(lambda: "Reading [/a]" in terminal.getvalue() and "3 of 4 (75 %)" in terminal.getvalue())
            with progress_bar("Inside", 10, in_bytes=True):
                until(lambda: "0 bytes of 10 bytes" in terminal.getvalue())
                assert room._shown == 2, "one display"
            assert room._shown == 1
            raise OSError("x")
        assert "lt_zero: " not in terminal.getvalue(), "no lines"
        assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") > 0, (
            "the cursor is back"
        )


@pytest.mark.usefixtures("at_once")
def test_somebody_elses_live_display_is_left_alone() -> None:
    with on_terminal() as terminal:
        console = Console(file=terminal, force_terminal=True)
        with Progress(console=console, auto_refresh=False) as theirs:
            theirs.add_task("Theirs", total=2)
            with progress_bar("Ours"):
                until(lambda: "lt_zero: Ours: 0 s" in terminal.getvalue())
                assert room._display is None
                theirs.advance(theirs.task_ids[0])
            assert theirs.live.is_started


@pytest.mark.usefixtures("at_once")
def test_somebody_elses_tqdm_is_left_alone() -> None:
    with on_terminal() as terminal:
        from tqdm import tqdm

        with tqdm(total=2, desc="Theirs", file=terminal, leave=False, mininterval=0) as theirs:
            with progress_bar("Ours"):
                until(lambda: "lt_zero: Ours: 0 s" in terminal.getvalue())
                assert room._display is None
            theirs.update()
        text = terminal.getvalue().replace("\r", "\n").splitlines()
        assert "lt_zero: Ours: 0 s" in text, "a line of its own"


@pytest.mark.usefixtures("at_once")
def test_a_forked_child_is_not_stuck() -> None:
    with on_terminal(), progress_bar("Outside"):
        until(lambda: room._display is not None)
        with room._lock:  # as the other thread may hold it
            child = os.fork()
            if child == 0:
                os._exit(0 if room._lock.acquire(blocking=False) and room._display is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- where it is called --------------------------------------------------------------------------------------------


class Seen:
    """Notes all works, and how far they came; nothing is shown."""

    def __init__(self) -> None:
        self.works: list[ProgressBar] = []
        self.ranks: list[int | None] = []

    def watch(self, work: ProgressBar, over: threading.Event, verdict: list[str]) -> None:
        self.works.append(work)

    def far(self, start: str) -> list[tuple[float, float | None]]:
        return [(work.done, work.total) for work in self.works if work.what.startswith(start)]


def test_sharding_counts_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(room, "_watch", seen.watch)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine = lt_zero.shard(layers, ZeroConfig.of({"zero_optimization": {"stage": 3}}), group=single())
    assert seen.far("Sharding") == [(len(engine.buckets), len(engine.buckets))]


@needs("offload")
def test_files_of_states_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = Seen()
    monkeypatch.setattr(room, "_watch", seen.watch)
    monkeypatch.setattr(room, "_local_rank", None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = ZeroConfig.of({"zero_optimization": {"stage": 3, "offload_optimizer": nvme}})
    engine = lt_zero.shard(nn.Linear(64, 64), config, group=single())
    engine.offload_manager.announce(engine.buckets, 2)
    engine.offload_manager.close()
    told = [work.what.partition(str(tmp_path))[0] for work in seen.works]
    order = [start for start in ("Preparing", "Reserving", "Sharding", "Measuring") if any(start in t for t in told)]
    assert order == ["Preparing", "Reserving", "Sharding", "Measuring"]


def single() -> Any:
    from lt_zero.core.comm.shard_group import ShardGroup
    from lt_zero.core.comm.world import World

    return ShardGroup.of_all(World(None, torch.device("cpu")))


def _saved_and_loaded(folder: str, form: str) -> Any:
    seen, real = Seen(), room._watch
    room._watch = seen.watch  # type: ignore[assignment]
    try:
        config = {"checkpoint": {"format": form}}
        trainer = sharded_trainer(3, config=config, max_steps=2)
        trainer.fit(GPT(torch.distributed.get_world_size()))
        trainer.save_checkpoint(f"{folder}/x.ckpt")
        again = sharded_trainer(3, config=config, max_steps=3)
        again.fit(GPT(torch.distributed.get_world_size()), ckpt_path=f"{folder}/x.ckpt", **trust(False))
    finally:
        room._watch = real
    names = ("Sharding", "Gathering weights", "Gathering optimizer", "Saving", "Loading weights", "Loading optimizer")
    return {name: seen.far(name) for name in names}


def test_saving_and_loading_count(pool: Pool, tmp_path: Path) -> None:
    seen, nothing = pool.run(2, _saved_and_loaded, str(tmp_path), "sharded")
    assert not any(nothing.values()), "rank 0 shows it"
    for name in ("Saving", "Loading weights", "Loading optimizer"):
        ((done, total),) = seen[name]
        assert 0 < done <= total
        if name != "Loading weights":
            assert done == total
    size = sum(f.stat().st_size for f in (tmp_path / "x.ckpt").glob("*-00000.pt"))
    assert 0.1 * size < seen["Saving"][0][1] < size, "bytes of values; small tensors have larger heads"
    full, nothing = pool.run(2, _saved_and_loaded, str(tmp_path / "full"), "full")
    assert not any(nothing.values())
    for name in ("Gathering weights", "Gathering optimizer", "Loading optimizer"):
        ((done, total),) = full[name]
        assert done == total > 0
    assert len(full["Saving"]) == 1

    lines = Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_watch", lines.watch)
        verify(tmp_path / "x.ckpt")
    archive = Archive(str(tmp_path / "x.ckpt"))
    total = sum(record.nbytes for record in archive.manifest.files.values())
    archive.close()
    assert lines.far("Reading all of") == [(total, total)]


def test_bar_of_exports_knows_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(room, "_watch", seen.watch)
    source = Memory({"a": torch.ones(4), "b": torch.ones(6)})
    for shown in (True, False):
        export(source, tmp_path / "x.pt", progress=shown)
    assert seen.far("Exporting") == [(20, 20)]
