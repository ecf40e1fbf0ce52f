"""``gradient_compression`` in training: equal replicas, warm-up, excluded parameters, skipped steps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lt_zero
from lt_zero import ConfigError, ZeroConfig
from lt_zero.checkpoint.native.residuals import load_residuals, residual_state
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.comm.costs import Costs
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.features.compression.gradient_compression import verdict
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_grads, full_values
from tests.support.pool import Pool

Block = dict[str, Any]
NONE: Block = {}
BLOCKS: dict[str, Block] = {
    "1bit": {"algorithm": "1bit"},
    "2bit": {"algorithm": "2bit"},
    "topk": {"algorithm": "topk", "topk_ratio": 0.1},
    "huffman": {"algorithm": "topk", "topk_ratio": 0.1, "huffman_coding": True},
}


def _train(stage: int, block: Block, steps: int, micro: int = 1, **zero: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of the first micro-batches, and weights."""
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, zero, gradient_compression=block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            loss = next_token_loss(model, step % 4, number, dist.get_rank())
            loss.backward()
            losses += [loss.item()] if number == 0 else []
        optimizer.step()
    return losses, {name: value.numpy() for name, value in full_values(engine).items()}


def _same(results: list[tuple[list[float], dict[str, Any]]]) -> dict[str, Any]:
    for _, weights in results[1:]:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)
    return results[0][1]


@pytest.mark.parametrize(
    ("name", "stage", "shared"),
    only_rows([("1bit", 0, "1"), ("topk", 3, "0")], itertools.product(BLOCKS, [0, 1, 2, 3], ["1", "0"])),
)
def test_trains_and_ranks_stay_equal(pool: Pool, name: str, stage: int, shared: str) -> None:
    env = {"LT_ZERO_SHARED_MEMORY": shared}
    want, _ = pool.run(2, _train, stage, NONE, 16, env=env)[0]
    found = pool.run(2, _train, stage, BLOCKS[name], 16, env=env)
    _same(found)
    got = found[0][0]
    assert got[0] == want[0]
    assert got[-1] < want[0] - 0.8 * (want[0] - want[-1])  # most of the progress


def test_sharded_stages_agree_to_the_bit(pool: Pool) -> None:
    first, *others = (_same(pool.run(3, _train, stage, BLOCKS["1bit"], 4)) for stage in (1, 2, 3))
    for other in others:
        for name, value in first.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize("stage", only([2], [0, 2]))
def test_warm_up_is_exact(pool: Pool, stage: int) -> None:
    for steps, equal in ((3, True), (4, False)):
        want = _same(pool.run(2, _train, stage, NONE, steps))
        found = _same(pool.run(2, _train, stage, {**BLOCKS["2bit"], "warmup_steps": 3}, steps))
        assert all(np.array_equal(found[name], want[name]) for name in want) == equal


def test_accumulates_micro_batches(pool: Pool) -> None:
    """At stage 2 each is compressed."""
    want, _ = pool.run(2, _train, 2, NONE, 12, 2)[0]
    found = pool.run(2, _train, 2, BLOCKS["2bit"], 12, 2)
    _same(found)
    assert found[0][0][-1] < want[0] - 0.8 * (want[0] - want[-1])


def _gradients(stage: int, block: Block) -> tuple[dict[str, Any], list[str]]:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, gradient_compression=block))
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    for bucket in engine.buckets:  # norms read them with their neighbours
        assert sum(int(bucket.grads.read()[lo:hi].count_nonzero()) for lo, hi in bucket.weights.gaps) == 0
    names = [span.name for bucket in engine.buckets if bucket.plan.compresses for span in bucket.layout.spans]
    return {name: value.numpy() for name, value in full_grads(engine).items()}, names


@pytest.mark.parametrize("stage", only([3], [0, 1, 2, 3]))
def test_excluded_gradients_are_exact(pool: Pool, stage: int) -> None:
    want, _ = pool.run(2, _gradients, stage, NONE)[0]
    for block, norms in ((BLOCKS["1bit"], True), ({**BLOCKS["2bit"], "exclude": "blocks.*"}, False)):
        found, names = pool.run(2, _gradients, stage, block)[0]
        assert names
        assert all(("weight" in name and "norm" not in name) if norms else "blocks" not in name for name in names)
        for name, value in want.items():
            assert np.array_equal(found[name], value) == (name not in names), name


# ---- steps that are skipped ----------------------------------------------------------------------------------------


def _residuals(engine: Engine) -> list[Tensor]:
    """In units without a loss scale."""
    found = [feedback for feedback in engine.exchange.of_bucket.values() if feedback.residuals is not None]
    return [(t / feedback.scale).clone() for feedback in found for t in (feedback.residuals or ())[:2] if t is not None]


def _skipped(stage: int, name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    config = config_of(
        stage, None, torch.float16, gradient_compression=BLOCKS[name], fp16={"initial_scale_power": 8, "hysteresis": 1}
    )
    policy = dtype_policy(config, resolve_mode(config, "16-true"))
    engine = lt_zero.shard(model, config, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded, controller = lt_zero.ShardedOptimizer(engine, optimizer), LossScaleController(policy)

    def step(number: int, factor: float) -> bool:
        optimizer.zero_grad()
        loss = next_token_loss(model, number, 0, dist.get_rank()).float()
        controller.before_backward([sharded])
        (loss * controller.scale * (factor if dist.get_rank() == 1 else 1.0)).backward()
        controller.examine(sharded)
        if taken := controller.proceeds(sharded):
            controller.unscale(sharded)
            optimizer.step()
        controller.conclude(sharded, 0)
        return taken

    assert step(0, 1.0)
    before = _residuals(engine)
    assert any(bool(t.any()) for t in before)
    scale = controller.scale
    for number in (1, 2):
        assert not step(number, 1e9)
        for now, then in zip(_residuals(engine), before, strict=True):
            assert torch.equal(now, then)
    assert controller.scale == scale / 4
    controller.before_backward([sharded])
    for feedback in engine.exchange.of_bucket.values():
        feedback.begin()  # rescales
        assert feedback.scale == scale / 4
    for now, then in zip(_residuals(engine), before, strict=True):
        assert torch.equal(now, then)
    assert step(3, 1.0)
    assert engine.exchange.steps == 2
    assert all(feedback.scale == controller.scale for feedback in engine.exchange.of_bucket.values())
    changed = zip(_residuals(engine), before, strict=True)
    assert not all(torch.equal(now, then) for now, then in changed)


@pytest.mark.parametrize(
    ("stage", "name"), only_rows([(0, "1bit"), (3, "topk")], itertools.product([0, 2, 3], ["1bit", "topk"]))
)
def test_skipped_steps_leave_residuals_alone(pool: Pool, stage: int, name: str) -> None:
    pool.run(2, _skipped, stage, name)


# ---- one rank, errors, the verdict ---------------------------------------------------------------------------------


def _loaded_within(stage: int) -> None:
    """Checkpoints are loaded into a run that has residuals: without any, of the warm-up, of another number of ranks."""
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, gradient_compression=BLOCKS["2bit"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)

    def step() -> dict[str, Any]:
        optimizer.zero_grad()
        next_token_loss(model, 0, 0, dist.get_rank()).backward()
        optimizer.step()
        state = residual_state(engine, sharded=False)
        assert state is not None
        return state

    state = step()
    for without in (None, {"steps": 0, "units": {}, "worker": {}, "server": {}}):
        step()
        assert any(rows.any() for rows in _residuals(engine))
        load_residuals(engine, without)
        assert not any(rows.any() for rows in _residuals(engine))
    step()
    wanted = [sum(float(rows.sum()) for kind in ("worker", "server") for rows in state[kind].values())]
    other = {key: {n: torch.cat([v, 0 * v[:1]]) for n, v in state[key].items()} for key in ("worker",)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (state | other, wanted[0]))
    load_residuals(engine, every[0][0])
    owed = torch.tensor(sum(float(rows.sum()) for rows in _residuals(engine)))
    dist.all_reduce(owed)
    assert owed.item() == pytest.approx(every[0][1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", only([2], [0, 2]))
def test_a_checkpoint_replaces_the_residuals_of_the_run(pool: Pool, stage: int) -> None:
    pool.run(2, _loaded_within, stage)


def test_a_single_rank_compresses_nothing() -> None:
    model = Net()
    engine = lt_zero.shard(model, config_of(2, gradient_compression=BLOCKS["1bit"]))
    assert not engine.exchange.remembers
    next_token_loss(model, 0, 0, 0).backward()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"algorithm": "topk", "topk_ratio": 0}, ["topk_ratio", "0"]),
        ({"algorithm": "topk", "topk_ratio": 1.5}, ["topk_ratio", "1.5"]),
        ({"algorithm": "3bit"}, ["algorithm", "3bit"]),
        ({"algorithm": "1bit", "warmup_steps": -1}, ["warmup_steps", "-1"]),
    ],
)
def test_bad_values_are_refused(block: Block, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.of({"gradient_compression": block})
    for word in words:
        assert word in str(caught.value)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="mics_shard_size=2"):
        config_of(2, {"mics_shard_size": 2}, gradient_compression=BLOCKS["1bit"])
    with pytest.raises(ConfigError, match=r"gradient_compression.exclude: 'blokcs.\*'"):
        lt_zero.shard(Net(), config_of(2, gradient_compression={"algorithm": "1bit", "exclude": ["blokcs.*"]}))


@pytest.mark.parametrize("off", [False, "none", {"algorithm": "none"}])
def test_is_off(off: Any) -> None:
    assert ZeroConfig.of({"gradient_compression": off}).gradient_compression.algorithm == "none"


@pytest.mark.parametrize(("rate", "pays"), [(1e6, True), (1e9, False)])
def test_the_verdict_compares_coding_with_the_transfer_it_saves(rate: float, pays: bool) -> None:
    line = verdict(Costs(dense=10_000_000, sent=1_000_000, coding=0.1), rate, 10, 20)
    assert (line == "") == pays
    if not pays:
        for part in ("step 20", "coding takes 10.0 ms", "would take 0.9 ms", "8000 Mbit/s", "1.00 MB become 100.00 kB"):
            assert part in line


def _judged() -> list[str]:
    model = Net()
    engine = lt_zero.shard(model, config_of(0, gradient_compression=BLOCKS["2bit"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    lt_zero.ShardedOptimizer(engine, optimizer)
    lines: list[str] = []
    engine.exchange.announce = lines.append
    for step in range(22):
        optimizer.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
        assert not lines or step >= 19
    return lines


def test_a_line_at_step_20_says_that_it_does_not_pay(pool: Pool) -> None:
    """A model of some hundred parameters in shared memory."""
    first, second = pool.run(2, _judged)
    assert len(first) == 1
    assert "step 20" in first[0]
    assert second == []
