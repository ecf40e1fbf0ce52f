"""Faults of the network, on simulated nodes; and ranks that do not compute the same."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulated_nodes import INTERFACE, PORT, SimulatedNodes

from lt_zero.checkpoint.native.archive import Archive
from tests.faults.case import Case, Outcome
from tests.faults.forked import Rank, start, until
from tests.faults.relay import Relay, Rule
from tests.support.nodes import unavailable

STEPS = 30
START_S, END_S = 180.0, 120.0  # for ranks to come to a step, and to the end; the machine may be busy
RANKS = "tests.faults.network_ranks:train"
IMPATIENT = {"communication": {"link_timeout": 5}}  # other connections close 25 seconds later
LOST = ("was lost (", "its link is cut", "ended without an error message", "has ended or left the process group")


class Run:
    """Ranks of a training, on ``nodes`` or, without, on this machine's loopback."""

    def __init__(self, folder: Path, nodes: SimulatedNodes | None, world: int = 2, **options: Any) -> None:
        self.folder, self.nodes, self.began = folder, nodes, time.monotonic()
        self.ranks: list[Rank] = []
        options = {"folder": str(folder), "steps": STEPS, **options}
        for rank in range(world):
            if nodes is not None:
                place, node = nodes.environment(rank), nodes.holder(rank)
            else:
                place, node = _loopback(rank, world, str(folder)), None
            self.ranks.append(start(RANKS, options, place, folder / f"{rank}.log", node))

    def told(self, name: str, rank: int) -> str:
        """What a rank has written under ``name``; "" if it has not yet."""
        try:
            return (self.folder / f"{name}-{rank}").read_text()
        except FileNotFoundError:
            return ""

    def reach(self, name: str, step: int = 0) -> bool:
        """Wait until all ranks have come to ``step``, or told ``name``; returns whether they have."""

        def there() -> bool:
            files = [self.folder / f"{name}-{rank}" for rank in range(len(self.ranks))]
            return all(file.exists() and int(file.read_text() or 0) >= step for file in files)

        until(lambda: there() or any(rank.poll() is not None for rank in self.ranks), START_S)
        return there()

    def end(self, seconds: float, ranks: Sequence[int] | None = None) -> bool:
        """Wait until ranks have ended; those that have not are killed. Returns whether all had."""
        awaited = [self.ranks[rank] for rank in ranks or range(len(self.ranks))]
        ended = until(lambda: all(rank.poll() is not None for rank in awaited), seconds)
        for rank in self.ranks:
            rank.kill()
        return ended

    def output(self) -> str:
        """The end of what the ranks have printed."""
        parts = []
        for number, rank in enumerate(self.ranks):
            text = rank.log.read_text(errors="replace") if rank.log.exists() else ""
            parts.append(f"--- rank {number}, exit status {rank.poll()}\n{text[-3000:]}")
        return "\n".join(parts)

    def failed(self, what: str) -> Outcome:
        return Outcome(False, what, self.output())

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def exact(self, seconds: float = END_S) -> Outcome:
        """All came to the end, with the weights of a run to which nothing happened."""
        if not self.end(seconds):
            return self.failed(f"no end {seconds:.0f} s later")
        if any(rank.poll() for rank in self.ranks):
            return self.failed("ended, where it has to go on")
        got = {self.told("digest", rank) for rank in range(len(self.ranks))}
        if got != {reference(len(self.ranks))}:
            return self.failed("went on with other weights")
        return Outcome(True, "went on, the same weights to the bit")

    def alike(self) -> Outcome:
        """All came to the end, with the same weights."""
        if not self.end(END_S) or any(rank.poll() for rank in self.ranks):
            return self.failed("did not come to the end")
        if len({self.told("digest", rank) for rank in range(len(self.ranks))}) > 1:
            return self.failed("ranks ended with different weights")
        return Outcome(True, "the same weights on all ranks")

    def named(self, words: Sequence[str], seconds: float, ranks: Sequence[int] | None = None) -> Outcome:
        """The given ranks ended with an error that has one of the words, in time."""
        began = time.monotonic()
        if not self.end(seconds, ranks):
            return self.failed(f"no end after {seconds:.0f} s")
        took = time.monotonic() - began
        for rank in ranks or range(len(self.ranks)):
            text = self.ranks[rank].log.read_text(errors="replace")
            if not self.ranks[rank].poll():
                return self.failed(f"rank {rank} came to its end without an error")
            if not any(word in text for word in words):
                return self.failed(f"rank {rank} names no cause")
        return Outcome(True, f"named error on {len(ranks or self.ranks)} ranks", f"{took:.1f} s")


def _loopback(rank: int, world: int, folder: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    port = 20_000 + random.Random(folder).randrange(9_000)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "faults"}
    return {**{key: str(value) for key, value in numbers.items()}, **names, "GLOO_SOCKET_IFNAME": "lo"}


@functools.cache
def reference(world: int) -> str:
    """The digest of the weights after ``STEPS`` without a fault, in a loop at stage 0: as of all faces and stages."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), None, world, stage=0, pause=0.0)
        ended = run.end(START_S)
        if not ended or not run.told("digest", 0):
            raise RuntimeError(f"the reference did not train:\n{run.output()}")
        return run.told("digest", 0)


# ---- links ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to a run, and what has to come of it.

    Attributes:
        act: is called once the ranks have come to ``at``; with a relay in place of the bridge if ``relayed``.
        outcome: what came of it.
        at: what all ranks have told before: ``step`` is the third one.
        options: of the training.
        nodes: how many there are.
    """

    act: Callable[[SimulatedNodes, Rule, Run], None]
    outcome: Callable[[Run], Outcome]
    at: str = "step"
    options: dict[str, Any] = field(default_factory=dict)
    nodes: int = 2
    relayed: bool = False


def _play(fault: Fault, seed: int, folder: Path) -> Outcome:
    if reason := unavailable():
        return Outcome(False, f"cannot simulate nodes: {reason}")
    options, rule = dict(fault.options), Rule()
    if options.get("wait_for"):
        options["wait_for"] = str(folder / options["wait_for"])
    reference(fault.nodes)
    with SimulatedNodes(fault.nodes) as nodes, ExitStack() as stack:
        run = Run(folder, nodes, fault.nodes, **options)
        stack.callback(lambda: [rank.kill() for rank in run.ranks])
        if fault.relayed:  # no process is forked from now on, as this starts a thread
            stack.enter_context(Relay(nodes, rule, seed))
        if not run.reach(fault.at, 3 if fault.at == "step" else 0):
            return run.failed("did not come to where the fault is")
        fault.act(nodes, rule, run)
        return fault.outcome(run)


def _restore(nodes: SimulatedNodes, node: int) -> None:
    nodes._spaces[node].run("ip", "link", "set", INTERFACE, "up")


def cut(seconds: float, node: int = 1) -> Callable[[SimulatedNodes, Rule, Run], None]:
    """Cut the link of a node, and restore it; for good if ``seconds`` is 0."""

    def act(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
        nodes.cut(node)
        if seconds:
            time.sleep(seconds)
            _restore(nodes, node)

    return act


def _cut_at_start(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    (run.folder / "go").touch()
    time.sleep(0.15)
    cut(5)(nodes, rule, run)


def _cut_before_start(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    nodes.cut(1)
    (run.folder / "go").touch()
    time.sleep(5)
    _restore(nodes, 1)


def _slow(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    nodes.set_rate(1, 0.5)


def _delete_link(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    nodes._spaces[1].run("ip", "link", "del", INTERFACE)


def _reset(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    nodes._spaces[1].run("ss", "-K", "dst", nodes.address(0))


def _change(**values: Any) -> Callable[[SimulatedNodes, Rule, Run], None]:
    def act(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
        for name, value in values.items():
            setattr(rule, name, value)

    return act


def _block_store_at_start(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    rule.blocked = {PORT}
    (run.folder / "go").touch()
    time.sleep(8)
    rule.blocked = set()


def _kill(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    # The process that is killed is the one in the node, as the scheduler would.
    nodes._spaces[1].run("sh", "-c", "true")
    nodes.delete_node(1)


def _power_off(nodes: SimulatedNodes, rule: Rule, run: Run) -> None:
    nodes.delete_node(1, silent=True)


def _exact(run: Run) -> Outcome:
    return run.exact()


def _exact_and_saved(run: Run) -> Outcome:
    found = run.exact()
    if found.ok:
        for folder in _checkpoints(run.folder):
            Archive(str(folder)).verify()
            return Outcome(True, f"{found.what}, checkpoint complete")
        return run.failed("went on without a checkpoint")
    return found


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "saved").rglob("manifest.json") if ".tmp" not in str(path))


def _lost_without_checkpoint(run: Run) -> Outcome:
    """An error; and of the save that was cut nothing is left that passes for a checkpoint and is none."""
    found = _lost(run)
    if found.ok:
        for folder in _checkpoints(run.folder):
            try:
                Archive(str(folder)).verify()
            except Exception as error:
                return Outcome(False, "left a checkpoint that is damaged", str(error))
    return found


def _lost(run: Run) -> Outcome:
    return run.named(LOST, 100)


def _survivors_within_seconds(run: Run) -> Outcome:
    others = [rank for rank in range(len(run.ranks)) if rank != 1]
    return run.named(LOST, 30, others)


def _survivors(run: Run) -> Outcome:
    return run.named(LOST, 100, [rank for rank in range(len(run.ranks)) if rank != 1])


_GO: dict[str, Any] = {"at": "begun", "options": {"wait_for": "go"}}


def _with(**options: Any) -> dict[str, Any]:
    return {"options": options}


FAULTS: dict[str, Fault] = {
    **{
        f"link cut for 5 s, {face}, stage {stage}": Fault(cut(5), _exact, **_with(face=face, stage=stage))
        for face, stage in (("loop", 2), ("fabric", 3), ("trainer", 1))
    },
    "link cut for 60 s, loop, stage 2": Fault(cut(60), _exact),
    "link cut for 60 s, trainer, stage 3": Fault(cut(60), _exact, **_with(face="trainer", stage=3)),
    "link cut for good, loop, stage 0": Fault(cut(0), _lost, **_with(stage=0, config=IMPATIENT)),
    "link cut for good, trainer, stage 3": Fault(cut(0), _lost, **_with(face="trainer", stage=3, config=IMPATIENT)),
    "one of three nodes cut for good": Fault(cut(0), _lost, nodes=3, **_with(config=IMPATIENT)),
    "store's host cut for 5 s": Fault(cut(5, 0), _exact),
    "store's host cut for good": Fault(cut(0, 0), _lost, **_with(config=IMPATIENT)),
    "slowed to 0.5 Mbit/s": Fault(_slow, _exact),
    "each packet 60 ms late": Fault(_change(delay=0.06), _exact, relayed=True),
    "5 % of the packets lost": Fault(_change(loss=0.05), _exact, relayed=True),
    "link deleted": Fault(_delete_link, _lost, **_with(config=IMPATIENT)),
    "connections reset": Fault(_reset, _lost),
    "node killed": Fault(_kill, _survivors_within_seconds, nodes=3),
    "node without power": Fault(_power_off, _survivors, nodes=3, **_with(config=IMPATIENT)),
    "store's port blocked at the start for 8 s": Fault(_block_store_at_start, _exact, relayed=True, **_GO),
    "store's port blocked while it trains": Fault(
        _change(blocked={PORT}), _exact, relayed=True, **_with(config=IMPATIENT)
    ),
    "cut for 5 s before ranks connect": Fault(_cut_before_start, _exact, **_GO),
    "cut for 5 s while ranks connect": Fault(_cut_at_start, _exact, **_GO),
    "cut for 5 s in a save": Fault(cut(5), _exact_and_saved, at="saving", **_with(save_at=3, stage=3)),
    "cut for good in a save": Fault(
        cut(0), _lost_without_checkpoint, at="saving", **_with(save_at=3, stage=3, config=IMPATIENT)
    ),
}


# ---- ranks that do not compute the same ----------------------------------------------------------------------------


def _diverge(what: str, face: str, stage: int, words: tuple[str, ...], folder: Path) -> Outcome:
    """The last rank has ``what`` otherwise. Without ``words`` that must not matter."""
    options: dict[str, Any] = {"face": face, "stage": stage, "differs": what, "pause": 0.0}
    if what == "checkpoint":
        for name, steps in (("start", 4), ("older", 3)):
            (folder / name).mkdir()
            made = Run(folder / name, None, 2, stage=stage, steps=steps, save_at=steps, pause=0.0)
            if not made.end(START_S) or any(rank.poll() for rank in made.ranks):
                return made.failed("could not save what to load")
            saved = folder / name / "saved"
            for file in (*folder.joinpath(name).glob("*-[01]"), *folder.joinpath(name).glob("*.log")):
                file.unlink()
            for entry in list(saved.iterdir()):
                shutil.move(str(entry), folder / name / entry.name)
    if what in ("forward", "gathered"):
        options.update(alone_at=STEPS // 2)
    if not words:
        reference(2)
    run = Run(folder, None, 2, **options)
    if what == "threads":  # which change the last bits of what a rank computes
        return run.alike()
    # Of a loop that is shorter on one rank, only the other can know.
    waiting = [0] if what == "batches" and face == "loop" else None
    return run.named(words, 120, waiting) if words else run.exact()


_ALIKE = ("Every rank has ", "differ", "different")
DIVERGENCES: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("seed", "loop", 2, ()),
    ("threads", "loop", 3, ()),
    ("lr", "loop", 2, _ALIKE),
    ("lr", "trainer", 3, _ALIKE),
    ("optimizer", "fabric", 1, _ALIKE),
    ("batches", "trainer", 3, _ALIKE),
    ("batches", "loop", 2, (*_ALIKE, *LOST)),
    ("model", "loop", 3, _ALIKE),
    ("config", "fabric", 2, _ALIKE),
    ("checkpoint", "loop", 2, _ALIKE),
    ("gathered", "loop", 3, _ALIKE),
    ("forward", "loop", 3, ()),  # one more, in evaluation: its gathers are those that the next step would make
]


def cases(seed: int) -> list[Case]:
    """Links first: the longest waits begin first."""
    found = [Case("network", name, functools.partial(_play, fault, seed)) for name, fault in FAULTS.items()]
    found.sort(key=lambda case: "60 s" not in case.name)
    for what, face, stage, words in DIVERGENCES:
        run = functools.partial(_diverge, what, face, stage, words)
        found.append(Case("divergence", f"another {what}, {face}, stage {stage}", run))
    return found
