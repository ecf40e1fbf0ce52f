"""A node that disappears in the middle of training: the other nodes' ranks end, and their error names its host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from simulated_nodes import SimulatedNodes

import lt_zero
import lt_zero.training.loop.initialize
from lt_zero.core.comm import process_groups
from lt_zero.core.comm.options import CommunicationOptions
from lt_zero.core.comm.world import World
from lt_zero.core.health import hang_detection
from lt_zero.deepspeed import engines
from tests.conformance import faces
from tests.support.matrix import only
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of
from tests.support.paths import ROOT
from tests.support.pool import Pool
from tests.support.reach_whole import user_timeouts


def test_connections_close_if_no_kernel_answers() -> None:
    def opened() -> tuple[socket.socket, socket.socket, socket.socket]:
        listening = socket.create_server(("127.0.0.1", 0))
        calling = socket.create_connection(listening.getsockname())
        return listening, calling, listening.accept()[0]

    def limits(sockets: Sequence[socket.socket]) -> list[tuple[int, int]]:
        names = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE
        return [tuple(one.getsockopt(socket.IPPROTO_TCP, name) for name in names) for one in sockets]

    with ExitStack() as stack:
        before = [stack.enter_context(one) for one in opened()]
        unlimited = limits(before)
        with process_groups.closing_if_unanswered(True, CommunicationOptions(20.5)):
            probed = [stack.enter_context(one) for one in opened()]
            other, another = socket.socketpair()
        stack.enter_context(other)
        stack.enter_context(another)
        with process_groups.closing_if_unanswered(probed=False):  # as users have it
            others = [stack.enter_context(one) for one in opened()]
        assert limits(before) == unlimited
        assert limits(probed) == [(20_500, 6)] * 3
        assert limits(others) == [(145_000, 37)] * 3


def limits_by_face() -> dict[str, list[int]]:
    found = {}
    for number, name in enumerate(faces.FACES):
        before = user_timeouts()
        settings = faces.Settings(0, config={"communication": {"link_timeout": 7 + number}})
        limits = faces.run(name, settings, lambda face: user_timeouts())
        found[name] = sorted({*limits} - {*before})
    return found


def test_every_face_gives_links_the_time_of_the_key(pool: Pool) -> None:
    wanted = {name: [(7 + number) * 1000, (32 + number) * 1000] for number, name in enumerate(faces.FACES)}
    assert pool.run(2, limits_by_face) == [wanted] * 2


@pytest.mark.parametrize("face", [*faces.FACES, "deepspeed"])
def test_the_default_group_has_the_limit_too(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning itself waits on it after each batch: a cut link would be noticed after 15 minutes."""
    keys, opened = {"communication": {"link_timeout": 33}}, list[socket.socket]()

    def connect(*args: Any, **options: Any) -> None:
        opened.append(socket.create_server(("127.0.0.1", 0)))
        opened.append(socket.create_connection(opened[0].getsockname()))

    monkeypatch.setattr(DDPStrategy, "setup_distributed", connect)
    monkeypatch.setattr(FabricDDPStrategy, "_setup_distributed", connect)
    monkeypatch.setattr(lt_zero.training.loop.initialize, "init_distributed", connect)
    monkeypatch.setattr(lt_zero.training.loop.initialize, "TrainingEngine", mock.Mock(side_effect=StopIteration))
    monkeypatch.setattr(engines, "init_distributed", connect)
    monkeypatch.setattr(engines, "_overrides", mock.Mock(side_effect=StopIteration))
    device = [torch.device("cpu")]
    connecting = {
        "trainer": lambda: lt_zero.ZeroStrategy(config=keys, parallel_devices=device).setup_distributed(),
        "fabric": lambda: lt_zero.FabricZeroStrategy(config=keys, parallel_devices=device)._setup_distributed(),
        "loop": lambda: lt_zero.initialize(model=Net(), config=keys),
        "deepspeed": lambda: engines.initialize(model=Net(), config=keys),
    }
    with suppress(StopIteration):
        connecting[face]()
    assert opened
    with ExitStack() as stack:
        for one in opened:
            limit = stack.enter_context(one).getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == 58_000


def causes(hosts: list[str]) -> str:
    world = World.join(torch.device("cpu"))
    detector = world.detector
    assert detector is not None
    detector.ends.hosts = hosts
    return detector.ends.first_cause([rank for rank in range(3) if rank != dist.get_rank()])


def test_the_host_of_ended_ranks_is_named(pool: Pool) -> None:
    """Rank 2 has ended because of those of host a."""
    first, second, third = pool.run(3, causes, ["a", "b", "b"])
    assert first.startswith("Ranks 1, 2 (on host b) ended without an error message: killed")
    assert second.startswith("Rank 0 (on host a) ended")
    assert third.startswith("Rank 0 (on host a) ended")
    alone, *_ = pool.run(3, causes, ["a", "a", "a"])
    assert alone.startswith("Ranks 1, 2 ended without")


def causes_of_a_lost_link(words: str) -> str:
    """What rank 0 and 1 say of rank 2, whose connection ends with ``words`` of the kernel."""
    detector = World.join(torch.device("cpu")).detector
    assert detector is not None
    detector.ends.hosts = ["a", "a", "b"]
    send = dist.isend

    def lost(tensor: torch.Tensor, rank: int, *args: Any, **kwargs: Any) -> Any:
        if rank == 2:
            raise RuntimeError(f"[pair.cc:537] Read error [10.77.0.1]:9624: {words}. This is typically caused by")
        return send(tensor, rank, *args, **kwargs)

    with mock.patch.object(dist, "isend", lost):
        told = detector.explain_end()
    dist.barrier()
    return told or ""


LOST = ["Connection timed out", "No route to host", "Network is unreachable"]


@pytest.mark.parametrize("words", only(LOST[:1], LOST))
def test_a_lost_connection_is_not_told_as_a_kill(pool: Pool, words: str) -> None:
    for told in pool.run(3, causes_of_a_lost_link, words)[:2]:
        assert told.startswith(f"The connection to rank 2 (on host b) was lost ({words}): the link is cut, or"), told
        assert "memory" not in told


def test_a_connection_that_is_reset_is_told_as_a_kill(pool: Pool) -> None:
    for told in pool.run(3, causes_of_a_lost_link, "Connection reset by peer")[:2]:
        assert told.startswith("Rank 2 (on host b) ended without an error message: killed (for want of memory"), told


def pauses_after_an_end() -> list[bool]:
    """Find that rank 2 has ended; per pause after that, whether the cause was posted before it."""
    detector = World.join(torch.device("cpu")).detector
    assert detector is not None
    detector.ends.ended = lambda: [2]  # type: ignore[method-assign]
    pauses: list[bool] = []

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            pauses.append(detector.ends.posted)

    own = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    with mock.patch.object(hang_detection, "time", own):
        assert detector.explain_end() is not None
    return pauses


def test_the_rank_that_serves_the_store_lets_the_others_read_the_cause(pool: Pool) -> None:
    assert pool.run(3, pauses_after_an_end) == [[True], [], []]


def train(stage: int, started: str, patience: int) -> None:
    """Train until something fails. ``patience``: seconds for a peer's kernel."""
    dist.init_process_group("gloo")
    engine = lt_zero.shard(Net(), config_of(stage, {}, communication={"link_timeout": patience}))
    for step in range(1_000_000):
        next_token_loss(engine.root, step, 0, 0).backward()
        if step == 3:
            Path(f"{started}{dist.get_rank()}").touch()


def errors_of_others(folder: Path, stage: int, gone: int, silent: bool, patience: int = 2) -> list[str]:
    """What the ranks of the other node write when node ``gone`` disappears. ``silent``: no packet leaves it."""
    call = (
        f"from tests.core.health.test_gone_nodes import train; train({stage}, {str(folder / 'started')!r}, {patience})"
    )
    with SimulatedNodes(nodes=2, per_node=2) as nodes:
        path = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        logs = [(folder / f"{rank}.log").open("w") for rank in range(4)]
        ranks = [
            nodes.start(rank, [sys.executable, "-c", call], stderr=log, stdout=subprocess.DEVNULL, cwd=ROOT, env=path)
            for rank, log in enumerate(logs)
        ]
        while not all((folder / f"started{rank}").exists() for rank in range(4)):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.05)
        nodes.delete_node(gone, silent)
        others = [rank for rank in range(4) if rank // 2 != gone]
        for rank in others:
            assert ranks[rank].wait() != 0
    for log in logs:
        log.close()
    return [(folder / f"{rank}.log").read_text() for rank in others]


@pytest.mark.slow
@pytest.mark.nodes
@pytest.mark.parametrize(("stage", "gone", "silent"), [(2, 1, True), (3, 0, False), (0, 0, True)])
def test_others_end_and_name_the_host(stage: int, gone: int, silent: bool, tmp_path: Path) -> None:
    for text in errors_of_others(tmp_path, stage, gone, silent):
        assert f"on host node{gone}" in text


@pytest.mark.slow
@pytest.mark.nodes
@pytest.mark.parametrize("stage", [0, 2])
def test_a_cut_link_is_told_as_such(stage: int, tmp_path: Path) -> None:
    """Both nodes go on, and each says of the other that it cannot be reached."""
    call = f"from tests.core.health.test_gone_nodes import train; train({stage}, {str(tmp_path / 'started')!r}, 2)"
    with SimulatedNodes(nodes=2) as nodes:
        path = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        with ExitStack() as stack:
            logs = [stack.enter_context((tmp_path / f"{rank}.log").open("w")) for rank in range(2)]
            ranks = [
                nodes.start(rank, [sys.executable, "-c", call], stderr=log, stdout=log, cwd=ROOT, env=path)
                for rank, log in enumerate(logs)
            ]
            while not all((tmp_path / f"started{rank}").exists() for rank in range(2)):
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.05)
            nodes.cut(1)
            assert all(rank.wait() != 0 for rank in ranks)
    for rank in range(2):
        text = (tmp_path / f"{rank}.log").read_text()
        told = (
            f"The connection to rank {1 - rank} (on host node{1 - rank}) was lost (",
            f"(on host node{1 - rank}), or its",
        )
        assert any(words in text for words in told), text
        assert "for want of memory" not in text
