"""The simulated nodes that other tests and benchmarks measure on: what they connect, count, shape and leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import simulated_nodes
import torch
import torch.distributed as dist
from simulated_nodes import NodesUnavailable, SimulatedNodes

from tests.support.matrix import only
from tests.support.nodes import NodePool, Traffic
from tests.support.paths import ROOT
from tests.support.pool import WorkerError

pytestmark = pytest.mark.nodes


def networks() -> set[str]:
    """The network namespaces that have processes."""
    found = set[str]()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


def all_reduce() -> tuple[float, str, str, str, str]:
    summed = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(summed)
    places = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"), socket.gethostname()
    return summed.item(), *places, "/".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"))


def test_ranks_of_two_nodes_form_one_group(node_pool: NodePool) -> None:
    results = node_pool.run(all_reduce)
    assert [result[0] for result in results] == [10.0] * 4
    assert [result[3:] for result in results] == [
        ("node0", "0/0/0"), ("node0", "1/1/0"), ("node1", "2/0/1"), ("node1", "3/1/1")
    ]  # fmt: skip
    places = [result[1:3] for result in results]
    assert places[0] == places[1]
    assert places[2] == places[3]
    assert not {*places[0]} & {*places[2]}
    assert os.readlink("/proc/self/ns/net") not in {place for pair in places for place in pair}


def gather(numel: int) -> int:
    mine, out = torch.ones(numel), [torch.empty(numel) for _ in range(dist.get_world_size())]
    with Traffic() as traffic:
        dist.all_gather(out, mine)
    assert all(shard.eq(1).all() for shard in out)
    return traffic.sent


def test_bytes_of_an_all_gather(node_pool: NodePool) -> None:
    """gloo gathers on a ring, which leaves each node once: all shards but one pass it."""
    before = node_pool.nodes.bytes_sent()
    by_rank = node_pool.run(gather, 500_000)
    total = [after - first for after, first in zip(node_pool.nodes.bytes_sent(), before, strict=True)]
    expected = 3 * 500_000 * 4
    assert by_rank == pytest.approx([expected] * 4, rel=0.04)
    assert [by_rank[0], by_rank[2]] <= total
    assert total == pytest.approx([expected] * 2, rel=0.08)


def broadcast(numel: int) -> int:
    values = torch.full((numel,), float(dist.get_rank()))
    with Traffic() as traffic:
        dist.broadcast(values, src=0)
    assert values.eq(0).all()
    return traffic.sent


def test_what_a_node_receives_does_not_count(node_pool: NodePool) -> None:
    sent = node_pool.run(broadcast, 500_000)
    assert min(sent[:2]) > 500_000 * 4
    assert max(sent[2:]) < 500_000 * 4 / 10


def reduce_within_nodes(numel: int) -> int:
    group, _ = dist.new_subgroups(2)
    values = torch.ones(numel)
    with Traffic() as traffic:
        dist.all_reduce(values, group=group)
    assert values.eq(2).all()
    return traffic.sent


def test_ranks_of_one_node_send_nothing_to_others(node_pool: NodePool) -> None:
    assert max(node_pool.run(reduce_within_nodes, 500_000)) < 20_000


def reduce_until_alone(started: str) -> None:
    values = torch.ones(100_000)
    group = dist.new_group(timeout=timedelta(seconds=2))  # less than the pool waits for the others
    for step in range(1_000_000):
        dist.all_reduce(values, group=group)
        if step == 3:
            Path(f"{started}{dist.get_rank()}").touch()


@pytest.mark.parametrize("silent", only([False], [False, True]), ids=["killed", "cut off"])
def test_other_ranks_learn_that_a_node_is_gone(silent: bool, tmp_path: Path) -> None:
    started, problems = [tmp_path / f"started{rank}" for rank in range(4)], list[str]()

    def run(workers: NodePool) -> None:
        with pytest.raises(WorkerError) as caught:
            workers.run(reduce_until_alone, str(tmp_path / "started"))
        problems.append(str(caught.value))

    with SimulatedNodes(nodes=2, per_node=2) as nodes, closing(NodePool(nodes)) as workers:
        step = threading.Thread(target=run, args=(workers,))
        step.start()
        until(lambda: all(file.exists() for file in started))
        sent = nodes.bytes_sent()
        nodes.delete_node(1, silent)
        step.join()
        assert nodes.bytes_sent()[1] >= sent[1] > 1_000_000
    by_rank = dict(zip(range(4), problems[0].split("--- rank ")[1:], strict=True))
    assert "the worker died" in by_rank[2]
    assert "the worker died" in by_rank[3]
    assert "RuntimeError" in by_rank[0]
    assert "RuntimeError" in by_rank[1]


def until(condition: Callable[[], bool]) -> None:
    """Wait; the test's timeout ends it."""
    while not condition():
        time.sleep(0.02)


def fail_in_nodes(ranks: list[subprocess.Popen[bytes]], inside: set[str]) -> None:
    with SimulatedNodes(nodes=2) as nodes:
        ranks.append(nodes.start(1, ["sleep", "1000"]))
        inside.update(os.readlink(f"/proc/{nodes.holder(rank)}/ns/net") for rank in range(2))
        assert inside <= networks()
        raise KeyError


def test_nothing_is_left_after_an_error() -> None:
    ranks, inside = list[subprocess.Popen[bytes]](), set[str]()
    with pytest.raises(KeyError):
        fail_in_nodes(ranks, inside)
    assert len(inside) == 2
    until(lambda: not inside & networks())  # a process that was killed may take a moment on a busy machine
    assert ranks[0].returncode


SLEEPER = """
import os, sys, time
print(f"{os.readlink('/proc/self/ns/net')} {os.environ['RANK']}\\n", end="", flush=True)
time.sleep(1000)
"""


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("number", only([signal.SIGKILL], SIGNALS), ids=lambda number: number.name)
def test_nothing_is_left_after_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process = command_line("--per-node", "2", str(tmp_path / "sleeper.py"))
    assert process.stdout is not None
    inside, _ = process.stdout.readline().split()
    assert inside in networks()
    process.send_signal(number)
    process.communicate()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    until(lambda: inside not in networks())


def command_line(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.simulated_nodes", "--nodes", "2", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def test_command_line_shows_node_0_and_what_was_sent(tmp_path: Path) -> None:
    # One write per line: with PYTHONUNBUFFERED print writes in pieces, which those of the other rank may interleave.
    script = "import os, sys\nsys.stdout.write(f'{os.environ[\"RANK\"]} {sys.argv[1:]}\\n')\nsys.exit(int(sys.argv[2]))"
    (tmp_path / "script.py").write_text(script)
    process = command_line("--per-node", "2", "--slow", "1:50", "--", str(tmp_path / "script.py"), "--code", "3")
    printed, errors = process.communicate()
    lines = sorted(printed.splitlines())
    assert lines[:2] == ["0 ['--code', '3']", "1 ['--code', '3']"], errors
    assert [line.split(" sent ")[0] for line in lines[2:]] == ["node 0", "node 1"]
    assert process.returncode == 3


def test_rate_of_a_link_changes_while_ranks_run() -> None:
    with SimulatedNodes(nodes=2, mbit=100, slow={1: 20}) as nodes:
        assert [shape(nodes, rank) for rank in range(2)] == ["rate 100Mbit", "rate 20Mbit"]
        nodes.set_rate(0, 2000)
        assert [shape(nodes, rank) for rank in range(2)] == ["rate 2Gbit", "rate 20Mbit"]
        nodes.set_rate(0, None)
        assert [shape(nodes, rank) for rank in range(2)] == ["no rate", "rate 20Mbit"]


def shape(nodes: SimulatedNodes, rank: int) -> str:
    process = nodes.start(rank, ["tc", "qdisc", "show", "dev", "e0"], stdout=subprocess.PIPE, text=True)
    words = process.communicate()[0].split()
    return " ".join(words[words.index("rate") :][:2]) if "rate" in words else "no rate"


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"nodes": 0}, "0 nodes"), ({"slow": {2: 10.0}}, "no slow node 2"), ({"mbit": -1.0}, "cannot send -1.0 Mbit/s")],
)
def test_impossible_nodes_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem), SimulatedNodes(**options):
        pass


def test_reason_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_nodes.shutil, "which", lambda program: None if program == "tc" else "/bin/true")
    with pytest.raises(NodesUnavailable, match="program tc: install iproute2"), SimulatedNodes():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NodesUnavailable, match="need root"), SimulatedNodes():
        pass
