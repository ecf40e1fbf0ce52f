"""``communication.slow_node_tolerance``: sums go on without late members, nothing is lost, replicas stay equal."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from lt_zero.checkpoint.native.residuals import load_residuals, residual_state
from lt_zero.config.options import group_options
from lt_zero.core.ask import configure_group
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Mesh
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.features import features_of
from lt_zero.features.late_nodes.late_ranks import tolerant_sum
from lt_zero.features.late_nodes.tolerance import TolerantSum, tolerance_of
from tests.support.features import skip_without
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

SIZES = {"large": 700_001, "small": 5}  # several pieces; fewer elements than a page


def _group(share: float) -> ShardGroup:
    group = ShardGroup.of_all(World.join(torch.device("cpu")))
    config = ZeroConfig.of(config_of(0, communication={"slow_node_tolerance": share}))
    configure_group(group, group_options(config), features_of(config))
    return group


class Late:
    """Keeps the contributions of this rank back until it is told."""

    def __init__(self, tolerance: TolerantSum) -> None:
        self._send = tolerance._send
        self._kept = list[Any]()
        self.holds = False
        tolerance._send = self  # type: ignore[method-assign]
        self._lock = tolerance._changed

    def __call__(self, peer: int, kind: int, *what: Any) -> Any:
        if self.holds and kind == 0:
            self._kept.append((peer, kind, *what))
            return None
        return self._send(peer, kind, *what)

    def release(self) -> None:
        self.holds = False
        with self._lock:
            for message in self._kept:
                self._send(*message)
        self._kept.clear()


def _settled(group: ShardGroup) -> dict[str, tuple[Tensor, Tensor]]:
    assert tolerant_sum(group) is not None
    return tolerant_sum(group).unsent(lambda sent: group.world.host_gather(sent, "sent"))


def _account(late: dict[int, tuple[int, int]], share: float, turns: int) -> tuple[Any, ...]:
    """Sums of each turn; per name what this rank gave, what came with the sums, what it still owes; how much was late.

    ``late``: rank -> the turns in which its contributions are kept back. Values are small integers: sums are exact.
    """
    group = _group(share)
    tolerance = tolerant_sum(group)
    rank = dist.get_rank()
    assert tolerance is not None
    held, generator = Late(tolerance), torch.Generator().manual_seed(rank)
    first, last = late.get(rank, (turns, turns))
    sums, books = list[Any](), list[dict[str, Any]]()
    for name, numel in SIZES.items():
        zero = torch.zeros(numel, dtype=torch.float64)
        books.append({"name": name, "given": zero, "came": zero.clone(), "gradients": zero.clone()})
    for turn in range(turns):
        held.holds = first <= turn < last
        if turn == last:
            held.release()
        for book in books:
            total = torch.randint(-8, 9, (SIZES[book["name"]],), generator=generator).float()
            book["given"] += total
            for lo, hi, number in tolerance.sum(book["name"], total):
                book["came"][lo:hi] += (total[lo:hi].double() * number / dist.get_world_size()).round()
                book["gradients"][lo:hi] += number
            sums.append(total[::997].clone())
    held.release()
    owed = _settled(group)
    for book in books:
        book["owed"], book["owes"] = (value.double() for value in owed[book.pop("name")])
    tolerance.end()
    return sums, books, tolerance.missing_share()


@dataclass(frozen=True)
class LateRanks:
    """The turns of ranks, from and to, in which they are late, and the share that may be late."""

    turns: dict[int, tuple[int, int]]
    share: float


LATE = {
    "last": LateRanks({2: (2, 5)}, 0.34),
    "owner": LateRanks({0: (1, 6)}, 0.4),
    "two": LateRanks({1: (2, 4), 2: (3, 7)}, 0.67),
    "to the end": LateRanks({0: (3, 8)}, 0.34),
}


@pytest.mark.parametrize("who", only(["owner", "two"], LATE))
def test_nothing_is_lost_and_replicas_are_equal(pool: Pool, who: str) -> None:
    late = LATE[who].turns
    share = LATE[who].share
    turns = 8
    results = pool.run(3, _account, late, share, turns)
    for sums, _, missing in results:
        assert missing > 0
        assert all(map(torch.equal, sums, results[0][0]))
    for books in zip(*(books for _, books, _ in results), strict=True):
        given = sum(book["given"] for book in books)
        torch.testing.assert_close(books[0]["came"] + sum(book["owed"] for book in books), given, rtol=0, atol=0)
        gradients = books[0]["gradients"] + sum(book["owes"] for book in books)
        assert gradients.eq(turns * 3).all()


def _regained() -> Tensor:
    """How many gradients are in three sums; rank 0 owns the second one not, and begins the third one late."""
    group = _group(0.67)
    tolerance = tolerant_sum(group)
    rank = dist.get_rank()
    assert tolerance is not None
    count = torch.zeros(SIZES["small"])
    for turn in range(3):
        tolerance._late = {0: 0} if turn == 1 else {}
        dist.barrier()
        if turn == 2 and rank == 0:
            time.sleep(1.0)  # its thread has the others' contributions, and may close the sum
        for lo, hi, number in tolerance.sum("small", torch.ones(SIZES["small"])):
            count[lo:hi] += number
    ((_, owed),) = _settled(group).values()
    dist.all_reduce(owed)
    tolerance.end()
    return count + owed


def test_nothing_is_lost_when_an_owner_returns(pool: Pool) -> None:
    for count in pool.run(3, _regained):
        assert count.eq(9).all()


def _dropped() -> None:
    group = _group(0.34)
    assert tolerant_sum(group) is not None
    tolerant_sum(group).sum("large", torch.ones(SIZES["large"]))
    alive = weakref.ref(group)
    del group
    gc.collect()
    assert alive() is None
    assert not [t.name for t in threading.enumerate() if t.name.startswith("lt_zero-sums")]


def test_what_is_dropped_ends(pool: Pool) -> None:
    pool.run(3, _dropped)


def _owners() -> list[list[int]]:
    """Who is late after each turn; rank 0 owns pieces first."""
    group = _group(0.34)
    tolerance = tolerant_sum(group)
    rank = dist.get_rank()
    assert tolerance is not None
    tolerance._late.clear()  # whatever was measured
    held, found = Late(tolerance), list[list[int]]()
    for turn in range(8):
        held.holds = rank == 0 and turn < 2
        if turn == 2:
            held.release()
        dist.barrier()  # what was released has been sent before any turn begins
        tolerance.sum("large", torch.ones(SIZES["large"]))
        _settled(group) if turn >= 2 else None
        found.append(sorted(tolerance._late))
    tolerance.end()
    return found


def test_a_late_member_owns_nothing_until_it_is_on_time(pool: Pool) -> None:
    first, *others = pool.run(3, _owners)
    assert all(found == first for found in others)
    assert first[:2] == [[0], [0]]
    assert any(0 not in late for late in first[2:])  # on a busy machine others may be late in its place


# ---- in training ----------------------------------------------------------------------------------------------------


def _engine(stage: int, share: float, **zero: Any) -> tuple[Net, Engine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, zero, communication={"slow_node_tolerance": share}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    lt_zero.ShardedOptimizer(engine, optimizer)
    return model, engine, optimizer


def _train(stage: int, share: float, nodes: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        if nodes > 1:
            patch.setenv("LT_ZERO_NODE_RANK", str(dist.get_rank() * nodes // dist.get_world_size()))
            patch.setenv("LT_ZERO_SHARED_MEMORY", "0")
        model, engine, optimizer = _engine(stage, share, **zero)
    if tolerant_sum(engine.groups[0]) is not None:
        tolerant_sum(engine.groups[0])._tolerated = 0  # nobody is late, whatever the machine does besides
        tolerant_sum(engine.groups[0])._late.clear()
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
    values = full_values(engine)
    engine.world.end_run()
    return values


@pytest.mark.parametrize(
    ("ranks", "stage", "nodes", "zero"),
    only_rows(
        [(3, 0, 1, {}), (4, 3, 2, {"mics_shard_size": 2})],
        [(3, 0, 1, {}), (4, 0, 2, {}), (4, 2, 2, {"mics_shard_size": 2}), (4, 3, 2, {"mics_shard_size": 2})],
    ),
)
def test_without_late_ranks_weights_are_the_same(
    pool: Pool, ranks: int, stage: int, nodes: int, zero: dict[str, Any]
) -> None:
    plain = pool.run(ranks, _train, stage, 0.0, nodes, zero)[0]
    for values in pool.run(ranks, _train, stage, 0.5, nodes, zero):
        for name, value in plain.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-7, msg=name)


def _two_engines(shares: tuple[float, float], micro: int) -> None:
    """Two models over one group of ranks, of which one may go on without late ranks; each as in one process."""
    group = ShardGroup.of_all(World.join(torch.device("cpu")))
    size = dist.get_world_size()
    pairs = []
    for seed, share in enumerate(shares):
        torch.manual_seed(seed)
        model = Net()
        reference = copy.deepcopy(model)
        engine = lt_zero.shard(model, config_of(0, communication={"slow_node_tolerance": share}), group=group)
        tolerance = tolerant_sum(group)
        assert (tolerance is not None) == (share > 0)
        if tolerance is not None:
            tolerance._tolerated = 0  # nobody is late, whatever the machine does besides
            tolerance._late.clear()
        mine, other = (torch.optim.SGD(of.parameters(), lr=1e-1, momentum=0.9) for of in (model, reference))
        lt_zero.ShardedOptimizer(engine, mine)
        pairs.append((model, engine, mine, reference, other, tolerance))
    for step in range(3):
        for model, _, mine, reference, other, _ in pairs:
            mine.zero_grad()
            other.zero_grad()
            for part in range(micro):
                next_token_loss(model, step, part, dist.get_rank()).backward()
                for rank in range(size):
                    (next_token_loss(reference, step, part, rank) / size).backward()
            mine.step()
            other.step()
    for _, engine, _, reference, _, tolerance in pairs:
        if tolerance is not None:
            assert set(tolerance._turns.values()) == {3 * micro}, "its gradients are summed by it alone"
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)
    group.world.end_run()


@pytest.mark.parametrize(("shares", "micro"), [((0.0, 0.5), 1), ((0.5, 0.0), 2), ((0.5, 0.5), 1)])
def test_two_engines_of_one_group_sum_apart(pool: Pool, shares: tuple[float, float], micro: int) -> None:
    pool.run(2, _two_engines, shares, micro)


def _owing(share: float, saved: Any) -> tuple[Any, dict[str, Tensor]]:
    """What is owed after loading, and the weights after a step with gradients of zero."""
    model, engine, optimizer = _engine(0, share)
    assert tolerant_sum(engine.groups[0]) is not None
    tolerant_sum(engine.groups[0])._tolerated = 0
    tolerant_sum(engine.groups[0])._late.clear()
    before = full_values(engine)
    load_residuals(engine, saved)
    owed = residual_state(engine, sharded=False)
    (0.0 * next_token_loss(model, 0, 0, 0)).backward()
    optimizer.step()
    after = full_values(engine)
    assert residual_state(engine, sharded=False) is None  # it is in the weights now
    engine.world.end_run()
    return owed, {name: before[name] - after[name] for name in after}


def test_what_is_owed_is_in_checkpoints(pool: Pool) -> None:
    """The sum of four late gradients is in the mean of the next step, which has them and one of each rank."""
    shapes = {name: p.shape for name, p in Net().named_parameters()}
    worker = {name: torch.randn(1, *shape) for name, shape in shapes.items()}
    saved = {"steps": 0, "units": dict.fromkeys(shapes, 0.5), "worker": worker, "server": {}}
    saved["counts"] = dict.fromkeys(shapes, 4.0)
    for ranks in (2, 3):
        owed, change = pool.run(ranks, _owing, 0.5, saved)[0]
        for name, rows in worker.items():
            torch.testing.assert_close(owed["worker"][name] * owed["units"][name], rows * 0.5)
            assert owed["counts"][name] == pytest.approx(4.0)
            # 0.5 is the unit of two ranks: the saved rows are sums.
            torch.testing.assert_close(change[name], 0.1 * rows[0] * 0.5 * ranks / (ranks + 4), msg=name)


def _not_finite() -> list[bool]:
    """Rank 1 has a loss that is not finite; the others learn of it a step later, as nobody waits for that."""
    model, engine, optimizer = _engine(0, 0.5)
    known = []
    for step in range(3):
        optimizer.zero_grad()
        if dist.get_rank() == 1 and step == 0:
            engine.unused_parameters.nonfinite = True
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
        known.append(engine.unused_parameters.nonfinite)
    engine.world.end_run()
    return known


def test_ranks_learn_a_step_later_of_what_is_not_finite(pool: Pool) -> None:
    assert pool.run(2, _not_finite) == [[False, True, False]] * 2


def _runs_twice() -> list[str]:
    before = set(threading.enumerate())
    group = _group(0.5)
    assert tolerant_sum(group) is not None
    for _ in range(2):
        total = torch.full((3000,), float(dist.get_rank()))
        tolerant_sum(group).sum("one", total)
        tolerant_sum(group).end()
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("lt_zero-sums")]


def test_threads_end_with_a_run_and_come_back(pool: Pool) -> None:
    assert pool.run(3, _runs_twice) == [[]] * 3


def test_an_end_is_told_to_the_others_if_one_has_ended() -> None:
    """Else their threads wait for it, and the end of their run with them."""
    tolerance, told = object.__new__(TolerantSum), list[int]()
    tolerance._members = 3
    tolerance._me = 1
    tolerance._running = True
    tolerance._changed = threading.Condition()
    tolerance._started = []
    tolerance._senders = {}

    def send(peer: int, kind: int) -> None:
        if peer == 0:
            raise RuntimeError("Connection closed by peer")
        told.append(peer)

    with mock.patch.object(tolerance, "_send", send):
        tolerance.end()
    assert told == [2, 2], "a contribution and a sum"


def _alive(turns: int) -> int:
    group, numel = _group(0.5), 3001
    assert tolerant_sum(group) is not None
    for _ in range(turns):
        tolerant_sum(group).sum("one", torch.full((numel,), float(dist.get_rank())))
    tolerant_sum(group).end()
    gc.collect()
    pieces = {hi - lo for lo, hi in tolerant_sum(group)._streams[0].spans}
    return sum(type(one) is Tensor and one.dim() == 1 and one.numel() in pieces for one in gc.get_objects())


def test_what_has_left_is_not_kept(pool: Pool) -> None:
    few, many = (max(pool.run(3, _alive, turns)) for turns in (5, 40))
    assert many < few + 10, "of 40 sums as many tensors are alive as of 5"


# ---- what cannot be had ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "sharded", "shards", "per_node", "backend", "words"),
    [
        (0.5, False, 4, 1, "nccl", ["0.5", "nccl", "Remove the key"]),
        (0.5, True, 4, 2, "gloo", ["every rank needs", "stage=0", "mics_shard_size=2"]),
        (0.5, True, 4, 4, "gloo", ["every rank needs", "stage=0."]),
        (0.2, False, 4, 1, "gloo", ["0 of 4 ranks", "at least 0.25"]),
        (0.25, False, 4, 2, "gloo", ["1 of 4 ranks", "a node has 2 ranks", "at least 0.5"]),
    ],
)
def test_what_cannot_be_had_is_an_error(
    share: float, sharded: bool, shards: int, per_node: int, backend: str, words: list[str]
) -> None:
    nodes = [list(range(first, first + per_node)) for first in range(0, 4, per_node)]
    with pytest.raises(ConfigError, match=r"communication.slow_node_tolerance") as caught:
        tolerance_of(share, sharded, Mesh(4, 0, shards), nodes, backend, torch.device("cpu"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_members_are_nodes_or_ranks() -> None:
    nodes = [[0, 1], [2, 3], [4, 5]]
    assert tolerance_of(0.34, False, Mesh(6, 0, 6), nodes, "gloo", torch.device("cpu")) == (2, 1)
    assert tolerance_of(0.34, False, Mesh(6, 0, 6), [list(range(6))], "gloo", torch.device("cpu")) == (1, 2)
    assert tolerance_of(0.99, True, Mesh(6, 0, 2), nodes, "gloo", torch.device("cpu")) == (2, 2)


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_compression": {"algorithm": "1bit"}},
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}},
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
    ],
)
def test_other_sums_are_refused(more: dict[str, Any]) -> None:
    skip_without(more)
    with pytest.raises(ConfigError, match=r"slow_node_tolerance=0.5 lets .* asks for other sums"):
        ZeroConfig.of({"communication": {"slow_node_tolerance": 0.5}, "zero_optimization": {"stage": 0}, **more})


def test_a_loss_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss scale differs in fp16. Train in bf16"):
        lt_zero.shard(Net(), {"communication": {"slow_node_tolerance": 0.5}, "fp16": {"enabled": True}})
