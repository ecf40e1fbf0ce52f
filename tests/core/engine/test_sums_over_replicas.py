"""Shard groups and several micro-batches: gradients are summed over replicas once, before anything needs the sums."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import lt_zero
from lt_zero.common import accelerator
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Backend, Groups, Mesh, Reduction, Replicas
from lt_zero.core.comm.work import CollectiveId
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.training.loop.access import local_grad
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import BATCH, GPT, sharded_trainer, weights
from tests.support.matrix import only_rows
from tests.support.mixtures import WIDTH, Mixture, start
from tests.support.models import Net, next_token_loss
from tests.support.parallel_nets import all_weights
from tests.support.parity import OPTIMIZERS, RELEASE, config_of, full_values
from tests.support.pool import Pool

SOCKETS = {"LT_ZERO_SHARED_MEMORY": "0"}  # ranks that share memory read the gradients of all ranks at once
PAIRS = {"mics_shard_size": 2}
# What happens in a step, and how often gradients are then summed over replicas. b: a micro-batch inside of no_sync,
# s: one outside; n: norms of ``p.grad``, f: one from ``full_grad``, h: halved, c: clamped, a: assigned, v: quarters are
# kept, w: and assigned, z: one is cleared, k: clipped to a norm.
SCRIPTS = {"s": 1, "bs": 1, "bbbs": 1, "bbk": 1, "bnbs": 2, "sbs": 2, "snb": 2, "bfbb": 2, "bhbs": 1, "bcbs": 2}
SCRIPTS |= {"babsk": 2, "bvbws": 2, "bvbw": 2, "bzbs": 1, "bzbh": 1}
STEPS = 2


@contextmanager
def counted(engine: Engine) -> Iterator[list[int]]:
    """Context that yields the elements of each sum over replicas."""
    found: list[int] = []
    every, own = dist.all_reduce, [group._row.across for group in engine.groups if group._row is not None]

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get("group") is group for group in own):
            found.append(tensor.numel())
        return every(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield found


def _norms(parameters: list[Parameter]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None])


def _edit(op: str, parameters: list[Parameter]) -> None:
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if op == "h":
            grad.mul_(0.5)
        elif op == "c":
            grad.clamp_(-0.01, 0.01)
        else:
            parameter.grad = grad * 0.25


def _keep(op: str, parameters: list[Parameter], kept: list[Any]) -> None:
    if op == "v":
        kept[:] = [p.grad * 0.25 if p.grad is not None else None for p in parameters]
        return
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.grad = value


def _train(script: str, stage: int, optimizer: str, zero: dict[str, Any], apart: bool = False) -> None:
    """Train in fp64 as ``script`` says, and compare with one process that does the same."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Net().double()
    reference = copy.deepcopy(model)
    with mock.patch.object(accelerator, "_apart", apart):
        engine = lt_zero.shard(model, config_of(stage, zero))
    made, expected = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    owner = lt_zero.ShardedOptimizer(engine, made)
    mine, theirs = list(model.parameters()), list(reference.parameters())
    kept: tuple[list[Any], list[Any]] = ([], [])
    for step in range(STEPS):
        made.zero_grad()
        expected.zero_grad()
        with counted(engine) as sums:
            for number, op in enumerate(script):
                if op in "bs":
                    with engine.no_sync() if op == "b" else nullcontext():
                        next_token_loss(model, step, number, rank).backward()
                    for other in range(world):
                        (next_token_loss(reference, step, number, other) / world).backward()
                elif op == "n":
                    torch.testing.assert_close(_norms(mine), _norms(theirs), rtol=1e-12, atol=0)
                elif op == "f":
                    torch.testing.assert_close(lt_zero.full_grad(mine[3]), theirs[3].grad, rtol=1e-12, atol=1e-15)
                elif op in "vw":
                    _keep(op, mine, kept[0])
                    _keep(op, theirs, kept[1])
                elif op == "z":
                    mine[0].grad = theirs[0].grad = None
                elif op == "k":
                    owner.grads.clip_norm(0.05)
                    torch.nn.utils.clip_grad_norm_(theirs, 0.05)
                else:
                    _edit(op, mine)
                    _edit(op, theirs)
            made.step()
        expected.step()
        assert len(sums) == SCRIPTS[script] * len(engine.buckets), (script, sums)
        for name, value in full_values(engine).items():
            want = reference.get_parameter(name)
            torch.testing.assert_close(value, want.detach(), rtol=1e-11, atol=1e-13, msg=f"{name}, step {step}")
    engine.offload_manager.close()


_ALL = itertools.product(SCRIPTS, [2, 3], ["sgd", "adamw"], [2, 1])
_FAST = [("bbbs", 3, "adamw", 2), ("bnbs", 2, "sgd", 2), ("sbs", 3, "sgd", 1), ("bcbs", 2, "adamw", 1)]
_FAST += [
    ("bvbws", 2, "sgd", 2),
    ("bzbh", 2, "sgd", 2),
    ("bfbb", 3, "sgd", 2),
    ("babsk", 2, "sgd", 1),
    ("snb", 2, "sgd", 2),
]


@pytest.mark.parametrize(("script", "stage", "optimizer", "size"), only_rows(_FAST, _ALL))
def test_as_one_process(pool: Pool, script: str, stage: int, optimizer: str, size: int) -> None:
    zero = {"mics_shard_size": size, **(RELEASE if stage == 3 else {})}
    pool.run(4, _train, script, stage, optimizer, zero, env=SOCKETS)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [{"mics_shard_size": 2}, {"mics_shard_size": 3}])
@pytest.mark.parametrize("script", ["bbbs", "snb", "babsk"])
def test_six_ranks(pool: Pool, script: str, groups: dict[str, Any]) -> None:
    pool.run(6, _train, script, 3, "sgd", {**groups, **RELEASE}, env=SOCKETS)


@needs("offload")
@pytest.mark.parametrize(
    ("script", "place", "apart", "overlap"),
    only_rows(
        [
            ("bbbs", "cpu", True, True),
            ("bbbs", "nvme", False, True),
            ("snb", "nvme", True, True),
            ("bnbs", "nvme", False, "auto"),
        ],
        itertools.product(["bbbs", "bbk", "bnbs", "snb"], ["cpu", "nvme"], [True, False], ["auto", True]),
    ),
)
def test_offloaded(pool: Pool, tmp_path: Path, script: str, place: str, apart: bool, overlap: bool | str) -> None:
    """``apart``: the accumulators are in host memory, or files, of a device with memory of its own."""
    where = {"device": place, "overlap_step": overlap, **({"nvme_path": str(tmp_path)} if place == "nvme" else {})}
    pool.run(4, _train, script, 3, "sgd", {**PAIRS, **RELEASE, "offload_optimizer": where}, apart, env=SOCKETS)


def _with_experts(stage: int, optimizer: str, shards: int, script: str) -> None:
    """Experts on two ranks; those with the same experts have replicas of their own."""
    run = start(stage, 2, optimizer, lambda: Mixture().double(), {"mics_shard_size": shards})
    reference = Mixture(dense=True).double()
    expected = OPTIMIZERS[optimizer](reference.parameters())
    crossing = [bucket for bucket in run.engine.buckets if bucket.group.mesh.shards < bucket.group.size]
    for step in range(STEPS):
        run.optimizer.zero_grad()
        expected.zero_grad()
        with counted(run.engine) as sums:
            for number, op in enumerate(script):
                micro = len(script) * step + number
                with run.engine.no_sync() if op == "b" else nullcontext():
                    _mixture_loss(run.model, micro, dist.get_rank()).backward()
                for other in range(dist.get_world_size()):
                    (_mixture_loss(reference, micro, other) / dist.get_world_size()).backward()
            run.optimizer.step()
        expected.step()
        assert len(sums) == len(crossing), (shards, sums)
        for name, value in all_weights(run.engine).items():
            want = reference.get_parameter(name).detach()
            torch.testing.assert_close(value, want, rtol=1e-11, atol=1e-13, msg=f"{name}, step {step}")
    of_experts = {run.engine.owner[id(p)][0] for name, p in run.model.named_parameters() if ".experts." in name}
    assert of_experts & set(crossing) if shards == 1 else not of_experts & set(crossing)
    assert set(crossing) - of_experts


def _mixture_loss(model: Mixture, micro: int, rank: int) -> Tensor:
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * micro + rank), dtype=torch.float64)
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("stage", "optimizer", "shards", "script"),
    only_rows(
        [(3, "sgd", 2, "bbs"), (2, "adamw", 1, "bbb")],
        itertools.product([2, 3], ["sgd", "adamw"], [2, 1], ["bbs", "bbb", "bs"]),
    ),
)
def test_experts(pool: Pool, stage: int, optimizer: str, shards: int, script: str) -> None:
    pool.run(4, _with_experts, stage, optimizer, shards, script, env=SOCKETS)


MICRO = 3


def _saved_in_a_window(folder: str, stage: int, zero: dict[str, Any], dtype: torch.dtype) -> None:
    """A loop saves after the first of three micro-batches, goes on, and resumes from there on other shard groups."""
    ranks = range(dist.get_world_size())
    rank = dist.get_rank()
    torch.manual_seed(0)
    reference = Net().to(dtype)
    expected = OPTIMIZERS["sgd"](reference.parameters())
    engine = _loop(stage, zero, dtype)
    wanted: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        with counted(engine.engine) as sums:
            for micro in range(MICRO):
                engine.backward(next_token_loss(engine, step, micro, rank))
                engine.step()
                for other in ranks:
                    (next_token_loss(reference, step, micro, other) / (len(ranks) * MICRO)).backward()
                if micro == 0:
                    engine.save_checkpoint(folder, f"in {step}")
                    assert not sums, "a save needs no gradients"
        expected.step()
        expected.zero_grad()
        wanted.append({name: value.detach().clone() for name, value in reference.named_parameters()})
        assert len(sums) == len(engine.engine.buckets)
        _require(engine.engine, wanted[-1], f"step {step}")
    engine.destroy()
    engine = _loop(stage, {"mics_shard_size": 1}, dtype)
    engine.load_checkpoint(folder, f"in {STEPS - 1}")
    _require(engine.engine, wanted[-2], "loaded")
    for micro in range(MICRO):  # its window begins anew
        engine.backward(next_token_loss(engine, STEPS - 1, micro, rank))
        engine.step()
    _require(engine.engine, wanted[-1], "resumed")
    engine.destroy()


def _loop(stage: int, zero: dict[str, Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = Net().to(dtype)
    block = {"stage": stage, "stage3_param_persistence_threshold": 0, **(RELEASE if stage == 3 else {}), **zero}
    config = {"zero_optimization": block, "gradient_accumulation_steps": MICRO, "train_micro_batch_size_per_gpu": 3}
    return lt_zero.initialize(model=model, optimizer=OPTIMIZERS["sgd"](model.parameters()), config=config)[0]


def _require(engine: Engine, wanted: dict[str, Tensor], when: str) -> None:
    for name, value in full_values(engine).items():
        close = {"rtol": 1e-11, "atol": 1e-13} if value.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(value, wanted[name], msg=f"{name}, {when}", **close)


@pytest.mark.parametrize(
    ("stage", "offload"),
    only_rows([(3, True)], itertools.product([2, 3], [False, True])),
)
def test_a_save_in_the_middle_of_a_window(pool: Pool, tmp_path: Path, stage: int, offload: bool) -> None:
    """``offload``: to files, whose steps run beside the next forward."""
    if offload:
        skip_without("offload")
    where = {"device": "nvme", "nvme_path": str(tmp_path), "overlap_step": True}
    zero = {**PAIRS, "offload_optimizer": where} if offload else PAIRS
    dtype = torch.float32 if offload else torch.float64  # kernels step that
    pool.run(4, _saved_in_a_window, str(tmp_path / "saved"), stage, zero, dtype, env=SOCKETS)


def _beside_backward(folder: str) -> int:
    """Step buckets beside the last backward of a window, in fp32; returns how many were.

    The weights are those of one process after each step.
    """
    from lt_zero.features.offload.overlap import Overlap

    early = 0
    landed = Overlap._landed

    def counts(self: Overlap, bucket: Bucket) -> bool:
        nonlocal early
        stepped = landed(self, bucket)
        early += stepped
        return stepped

    world = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    where = {"device": "nvme", "nvme_path": folder, "overlap_step": True}
    engine = lt_zero.shard(model, config_of(3, {**PAIRS, **RELEASE, "offload_optimizer": where}))
    made = OPTIMIZERS["sgd"](model.parameters())
    expected = OPTIMIZERS["sgd"](reference.parameters())
    owner = lt_zero.ShardedOptimizer(engine, made)
    for step in range(STEPS):
        made.zero_grad()
        expected.zero_grad()
        with counted(engine) as sums, mock.patch.object(Overlap, "_landed", counts):
            for micro in range(MICRO):
                loss = next_token_loss(model, step, micro, rank)
                with engine.no_sync() if micro < MICRO - 1 else owner.overlap.beside_backward():
                    loss.backward()
                for other in range(world):
                    (next_token_loss(reference, step, micro, other) / world).backward()
            made.step()
        expected.step()
        assert len(sums) == len(engine.buckets)
        _require(engine, {name: p.detach() for name, p in reference.named_parameters()}, f"step {step}")
    engine.offload_manager.close()
    return early


@needs("offload")
def test_a_step_beside_backward_waits_for_the_sums(pool: Pool, tmp_path: Path) -> None:
    assert all(early > 0 for early in pool.run(4, _beside_backward, str(tmp_path), env=SOCKETS))


def _own_part() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(2, PAIRS))
    lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    with engine.no_sync():
        next_token_loss(model, 0, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match="not reduced yet"):
        local_grad(weight)
    whole = lt_zero.full_grad(weight)
    mine = local_grad(weight)
    assert whole is not None
    assert mine is not None
    bucket, index = engine.owner[id(weight)]
    assert torch.equal(
        mine, torch.cat([whole.view(-1)[:0], *(whole.view(-1)[p.lo : p.hi] for p in bucket.pieces_of(index))])
    )


def test_a_part_is_refused_until_it_is_summed(pool: Pool) -> None:
    """Reading it is not collective."""
    pool.run(4, _own_part, env=SOCKETS)


def _kept() -> None:
    """Code keeps ``p.grad`` of whole gradients over a micro-batch, and then reads and edits it."""
    torch.manual_seed(0)
    net = Net().double()
    plain = copy.deepcopy(net)
    engine = lt_zero.shard(net, config_of(2, {"mics_shard_size": 1}))
    lt_zero.ShardedOptimizer(engine, torch.optim.SGD(net.parameters(), lr=0.1))
    ranks = range(dist.get_world_size())
    for micro in range(2):
        with engine.no_sync() if micro else nullcontext():
            next_token_loss(net, 0, micro, dist.get_rank()).backward()
        if micro == 0:
            kept: Any = net.scale.grad
        for rank in ranks:
            (next_token_loss(plain, 0, micro, rank) / len(ranks)).backward()
    wanted: Any = plain.scale.grad
    torch.testing.assert_close(kept.norm(), wanted.norm())
    kept.add_(1.0)
    torch.testing.assert_close(lt_zero.full_grad(net.scale), wanted + 1.0)


def test_a_gradient_that_is_kept_over_a_micro_batch(pool: Pool) -> None:
    pool.run(2, _kept, env=SOCKETS)


# ---- dimensions, dtypes --------------------------------------------------------------------------------------------


def _in_dimensions() -> None:
    """Shard groups of four on two nodes of two are crossed in two dimensions, by a thread."""
    with mock.patch.object(ShardGroup, "_choose", _on_nodes):
        _train("bbbs", 2, "sgd", {"mics_shard_size": 4})


_choose = ShardGroup._choose


def _on_nodes(self: ShardGroup, division: int, topology: Any, scatters: bool) -> None:
    self.nodes = [list(range(first, first + 2)) for first in range(0, self.size, 2)]
    _choose(self, division, 2 if division < self.size else topology, scatters)
    assert division == self.size or self.topology.sizes == (2, 2)


@pytest.mark.slow
def test_shard_groups_of_several_nodes(pool: Pool) -> None:
    pool.run(8, _in_dimensions, env=SOCKETS)


def _device_sums(accumulator: torch.dtype, wire: torch.dtype) -> float:
    """Sum three gradients as an accelerator's backend does; the largest error, relative to the largest element."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    numel = 64
    row = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    column = [dist.new_group([first, first + 2]) for first in (0, 1)][rank % 2]
    whole = dist.new_group()
    everyone = ShardGroup.of_all(World.join(torch.device("cpu")))
    transport = Backend(everyone.connections(Mesh(world, rank, 2), Groups(whole, row, row, column)))
    every = torch.randn(3, world, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = torch.full((numel // 2,), float("nan"), dtype=accumulator)
    launch = CollectiveId("reduction", 1, "reduce-scatter", "x", numel)
    with mock.patch.object(accelerator, "use", return_value=nullcontext()):
        for number in range(3):
            flat = every[number, rank].to(wire, copy=True)
            replicas = Replicas.RESULT if number == 2 else Replicas.NOTHING
            reduction = Reduction(out, flat, flat, number > 0, 1.0 / world, replicas)
            transport.reduce_scatter(reduction, launch).wait()
    want = every.sum((0, 1)).chunk(2)[rank % 2] / world
    worst = (out.double() - want).abs().max()

    again = every[0, rank].to(accumulator)[: numel // 2].clone()
    transport.sum_replicas(again, wire, launch).wait()
    summed = sum(every[0, other][: numel // 2] for other in (rank % 2, rank % 2 + 2))
    assert isinstance(summed, Tensor)
    return float(max(worst / want.abs().max(), (again.double() - summed).abs().max() / summed.abs().max()))


@pytest.mark.parametrize(
    ("accumulator", "wire"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_the_collectives_of_a_device(pool: Pool, accumulator: torch.dtype, wire: torch.dtype) -> None:
    """Four roundings to the dtype that is sent, of numbers as large as the result: what is sent, two sums, the last."""
    eps = torch.finfo(wire).eps
    assert max(pool.run(4, _device_sums, accumulator, wire)) < 4 * eps


def _fp16() -> tuple[list[int], dict[str, np.ndarray]]:
    """Skipped steps, and weights after four; a gradient of the last rank overflows in the middle of the second one."""
    torch.manual_seed(0)
    model = Net()
    config = {
        "zero_optimization": {"stage": 2, **PAIRS},
        "fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
    }
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = lt_zero.initialize(model=model, optimizer=made, config=config)
    skipped = []
    with counted(engine.engine) as sums:
        for step, micro in itertools.product(range(4), range(3)):
            loss = next_token_loss(engine, step, micro, dist.get_rank()).float()
            bad = step == 1 and micro == 1 and dist.get_rank() == dist.get_world_size() - 1
            engine.backward(loss * float("inf") if bad else loss)
            engine.step()
            if micro == 2:
                skipped.append(engine.skipped_steps)
    if engine.engine.peers.mesh.shards == 2:
        assert len(sums) == 4 * len(engine.engine.buckets)
    values = {name: value.float().numpy() for name, value in full_values(engine.engine).items()}
    engine.destroy()
    return skipped, values


def test_an_overflow_in_a_micro_batch_skips_the_step(pool: Pool) -> None:
    found = pool.run(4, _fp16, env=SOCKETS)
    for skipped, values in found:
        assert skipped == [0, 1, 1, 1]
        for name, value in values.items():
            assert np.isfinite(value).all()
            np.testing.assert_array_equal(value, found[0][1][name], err_msg=name)


# ---- a Trainer -----------------------------------------------------------------------------------------------------


class _Counting(GPT):
    """Steps after every third of four batches, and in the end; ``sums`` counts sums over replicas in each step.

    ``manual``: by manual optimization.
    """

    def __init__(self, world: int, manual: bool) -> None:
        super().__init__(world, rows=4 * world * (BATCH * 3 // world))
        self.automatic_optimization = not manual
        self.sums: list[float] = []

    def on_train_start(self) -> None:
        self._counts = counted(self.trainer.strategy.engine)  # type: ignore[attr-defined]
        self._found = self._counts.__enter__()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx in (2, 3):
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        return torch.zeros(())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx in (2, 3):
            self.sums.append(len(self._found) / len(self.trainer.strategy.engine.buckets))  # type: ignore[attr-defined]
            self._found.clear()

    def on_train_end(self) -> None:
        self._counts.__exit__(None, None, None)


def _fitted(manual: bool, zero: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    accumulates = {} if manual else {"accumulate_grad_batches": 3}
    trainer = sharded_trainer(2, zero, max_epochs=1, limit_val_batches=0, **accumulates)
    module = _Counting(dist.get_world_size(), manual)
    trainer.fit(module)
    assert trainer.global_step == 2
    return module.sums, weights(trainer)


@pytest.mark.parametrize("manual", [True, False])
def test_once_a_step_of_a_trainer(pool: Pool, manual: bool) -> None:
    """Also in a last step of fewer micro-batches."""
    sums, values = pool.run(4, _fitted, manual, PAIRS, env=SOCKETS)[0]
    assert sums == [1.0, 1.0]
    _, plain = pool.run(4, _fitted, manual, {}, env=SOCKETS)[0]
    for name, value in plain.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
