"""Other modules on one rank than on another end with an error that names them, however ranks are connected."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lt_zero
from lt_zero.core.comm.ranks import LaunchOrder
from lt_zero.core.comm.work import CollectiveId
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.gather import remedy
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from tests.support.lightning_tools import error_of_fit, quick
from tests.support.matrix import cover
from tests.support.models import WIDTH, Block, Net, next_token_loss, tokens
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool

CONNECTED = [{"LT_ZERO_SHARED_MEMORY": "1"}, {"LT_ZERO_SHARED_MEMORY": "0"}]
both = pytest.mark.parametrize("env", CONNECTED, ids=["shared", "sockets"])
RELEASE = {"stage3_max_reuse_distance": 0}


class Branching(Net):
    """Runs a module that is not in the way of the others, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2 * WIDTH, WIDTH)  # of another size than the others
        self.twin = Block()  # as large as those in ``blocks``
        self.also = ""

    def forward(self, batch: Tensor) -> Tensor:
        if self.also:
            module = getattr(self, self.also)
            module(torch.zeros(1, 2 * WIDTH if self.also == "extra" else WIDTH))
        out: Tensor = super().forward(batch)
        return out


def trained(module: nn.Module, stage: int = 3) -> tuple[Engine, Callable[[int], None]]:
    """An engine, and a step of training."""
    with quick():
        engine = lt_zero.shard(module, config_of(stage, RELEASE))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ShardedOptimizer(engine, optimizer)

    def step(number: int) -> None:
        next_token_loss(engine.root, number, 0, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return engine, step


def message_of(run: Callable[[], object]) -> str:
    """The error that it ends with."""
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value)


def _branch(which: str, when: int, rank: int) -> tuple[str, int]:
    model, reached = Branching(), [0]
    _, step = trained(model)

    def run() -> None:
        for reached[0] in range(4):
            model.also = which if reached[0] == when and dist.get_rank() == rank else ""
            step(reached[0])

    return message_of(run), reached[0]


@pytest.mark.parametrize(
    ("branch", "env"), cover([("extra", 2, 0), ("twin", 2, 1), ("extra", 0, 1)], CONNECTED), ids=str
)
def test_a_branch_on_one_rank(pool: Pool, env: dict[str, str], branch: tuple[str, int, int]) -> None:
    which, when, rank = branch
    (first, at), (second, also_at) = pool.run(2, _branch, which, when, rank, env=env)
    assert first == second
    assert f"the all-gather of '{which}" in first.lower()
    named = re.findall(r"the (?:all-gather|reduce-scatter) of '(\w+)", first, re.IGNORECASE)
    assert set(named) > {which}, "that of the other rank, too, whichever of the two is first to find out"
    assert "not on rank" in first
    assert "has to run the same modules" in first
    assert "synced_gpus=True" in first
    assert max(at, also_at) <= when + 1


def _another_block(rank: int) -> str:
    model = Net()
    with quick():
        engine = lt_zero.shard(model, config_of(3, RELEASE))
    if dist.get_rank() == rank:
        del model.blocks[1]
    with pytest.raises(RuntimeError) as caught:
        next_token_loss(engine.root, 0, 0, 0).backward()
    return str(caught.value)


@both
def test_both_modules_are_named(pool: Pool, env: dict[str, str]) -> None:
    messages = pool.run(2, _another_block, 1, env=env)
    assert len(set(messages)) == 1
    assert "The all-gather of 'blocks.1' was begun on rank 0 (" in messages[0]
    assert "and not on rank 1, which waits in the all-gather of 'blocks.2' (" in messages[0]


def _generates(rank: int, length: int) -> tuple[str, list[int]]:
    """Texts of different lengths, between steps."""
    model = Net()
    engine, step = trained(model)
    ended = []

    def run() -> None:
        step(0)
        with torch.no_grad():
            for _ in range(length if dist.get_rank() == rank else 1):
                engine.root(tokens(0, 0, 0))
        for number in range(1, 3):
            step(number)
            ended.append(number)

    return message_of(run), ended


@pytest.mark.parametrize(("rank", "env"), cover([0, 1], CONNECTED))
def test_texts_of_different_lengths(pool: Pool, env: dict[str, str], rank: int) -> None:
    (first, ended), (second, also_ended) = pool.run(2, _generates, rank, 3, env=env)
    assert first == second
    found = re.search(
        r"was begun on rank (\d) \(tests/\S+:\d+\) and not on rank (\d), which waits in .*\(tests/", first
    )
    assert found is not None, first
    assert set(found.groups()) == {"0", "1"}
    assert "synced_gpus=True" in first
    assert not ended + also_ended


def _generates_gathered() -> None:
    model = Net()
    engine, step = trained(model)
    step(0)
    with lt_zero.gathered(model), torch.no_grad():
        for _ in range(1 + 2 * dist.get_rank()):
            model(tokens(0, 0, 0))
    step(1)
    with torch.no_grad():
        for _ in range(3):  # with synced_gpus all ranks go on until the last one is done
            model(tokens(0, 0, 0))
    step(2)
    assert engine.world.host_gather(0, "a test") == [0, 0]


def test_experts_are_spoken_of_where_modules_differ_only() -> None:
    """The names of other collectives have dots, too: ranks whose models differ send other parameters at the start."""
    for operation, names, hint in (
        ("all-gather", ("net.experts.0", "net.experts.1"), True),
        ("all-gather", ("net.experts.0", "net.head"), False),
        ("broadcast", ("net.up.weight", "net.up.bias"), False),
        ("flags", ("lt_zero.synced", "lt_zero.other"), False),
    ):
        one, other = (CollectiveId("collective", 1, operation, name) for name in names)
        assert ("leaf_module.names: [" in remedy(one, other)) == hint


@both
def test_the_remedies_work(pool: Pool, env: dict[str, str]) -> None:
    pool.run(2, _generates_gathered, env=env)


def _reads(rank: int, write: bool, stage: int) -> str:
    model = Net()
    _, step = trained(model, stage)

    def run() -> None:
        step(0)
        if dist.get_rank() == rank:
            with torch.no_grad(), lt_zero.gathered(model.blocks, write=write):
                pass
        step(1)

    return message_of(run)


@pytest.mark.parametrize(("write_at", "env"), cover([(False, 3), (True, 3), (True, 1)], CONNECTED), ids=str)
def test_gathered_on_one_rank(pool: Pool, env: dict[str, str], write_at: tuple[bool, int]) -> None:
    write, stage = write_at
    for rank, message in enumerate(messages := pool.run(2, _reads, 1, write, stage, env=env)):
        assert "`lt_zero.gathered` was called on rank 1 (tests/core/health/test_divergence.py:" in message, rank
        assert "and not on rank 0, which waits in " in message
        assert "call it on every rank" in message
    assert messages[0] == messages[1]


def _alone(stage: int) -> None:
    """What needs nobody else."""
    model = Net()
    engine, step = trained(model, stage)
    step(0)
    before = full_values(engine)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for number in range(3):
                model(tokens(number, 0, 0))
        if stage < 3:
            with lt_zero.gathered(model):
                model.blocks[0].up.weight.norm()
    step(1)
    assert not torch.equal(full_values(engine)["scale"], before["scale"]), "both ranks have stepped"


@pytest.mark.parametrize(("stage", "env"), cover([0, 1, 2], CONNECTED))
def test_evaluation_on_one_rank_where_weights_stay(pool: Pool, env: dict[str, str], stage: int) -> None:
    pool.run(2, _alone, stage, env=env)


def _slow(stage: int) -> None:
    model = Net()
    engine, step = trained(model, stage)
    for number in range(2):
        if dist.get_rank() == number % 2:
            time.sleep(0.8)  # a loader, or an evaluation, longer than a stuck rank may stay
        step(number)
    assert engine.world.host_gather(dist.get_rank(), "a test") == [0, 1]


@pytest.mark.parametrize(("stage", "env"), cover([3, 2], CONNECTED))
def test_a_slow_rank_is_no_divergence(pool: Pool, env: dict[str, str], stage: int) -> None:
    pool.run(2, _slow, stage, env=env)


class CallsAlone(Callback):
    """Calls on rank 1 only, in the second step, what needs all ranks."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1 and not trainer.is_global_zero:
            strategy: Any = trainer.strategy
            if self.what == "norm":
                module.net.embedding.weight.grad.norm(1)
            else:
                getattr(strategy, self.what)()


def _calls_alone(stage: int, what: str) -> str:
    return error_of_fit(stage, CallsAlone(what))


@pytest.mark.parametrize(
    ("stage", "what", "env"),
    [
        (3, "full_state_dict", CONNECTED[0]),
        (2, "full_state_dict", CONNECTED[1]),
        (3, "grad_norm", CONNECTED[1]),
        (1, "grad_norm", CONNECTED[0]),
        (3, "norm", CONNECTED[0]),
    ],
)
def test_a_call_on_one_rank(pool: Pool, stage: int, what: str, env: dict[str, str]) -> None:
    for message in pool.run(2, _calls_alone, stage, what, env=env):
        name = f"`{what}` was called" if what != "norm" else "The all-reduce of 'gradient norms' was begun"
        assert f"{name} on rank 1 (tests/core/health/test_divergence.py:" in message
        assert "and not on rank 0, which waits in " in message
        assert "on every rank" in message if what != "norm" else "the same calls that need all ranks" in message


def _compared(run: Callable[[], object]) -> list[str]:
    """The operations of the collectives that ranks compare before their launch."""
    agreed, agree = [], LaunchOrder._compare

    def note(order: LaunchOrder, launch: Any) -> None:
        agreed.append(launch.operation)
        agree(order, launch)

    LaunchOrder._compare = note  # type: ignore[method-assign]
    try:
        run()
    finally:
        LaunchOrder._compare = agree  # type: ignore[method-assign]
    return agreed


def _steady() -> list[str]:
    """What is agreed upon in a step like the last one."""
    _, step = trained(Net())
    for number in range(3):
        step(number)
    return _compared(lambda: step(3))


def test_a_step_like_the_last_one_costs_nothing(pool: Pool) -> None:
    assert pool.run(2, _steady, env=CONNECTED[1]) == [[], []]
    assert pool.run(2, _steady, env=CONNECTED[0]) == [["fence", "fence"]] * 2  # as many barriers as ever


def _started(widths: tuple[int, int]) -> list[str] | str:
    """What is agreed upon while a model with one layer of another width on each rank is sharded, or the error."""
    model = Net()
    model.blocks[1].extra = nn.Linear(1, widths[dist.get_rank()])
    try:
        return _compared(lambda: lt_zero.shard(model, config_of(3, RELEASE)))
    except RuntimeError as error:
        return str(error)


@both
def test_the_broadcasts_of_a_start_are_compared_at_once(pool: Pool, env: dict[str, str]) -> None:
    for agreed in pool.run(2, _started, (64, 64), env=env):
        assert "flags" in agreed
        assert "broadcast" not in agreed


@both
def test_different_models_are_found_at_the_start(pool: Pool, env: dict[str, str]) -> None:
    first, second = pool.run(2, _started, (64, 96), env=env)
    assert first == second
    assert "'blocks.1.extra.weight' (of Linear) is (64, 1) float32 on rank 0 and (96, 1) float32 on rank 1" in first
