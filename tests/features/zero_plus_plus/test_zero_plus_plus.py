"""ZeRO++: quantised gathers, the second copy inside a node, quantised reductions."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lt_zero
from lt_zero import ConfigError
from lt_zero.core.engine.compute_copy import State
from lt_zero.features.zero_plus_plus.zero_plus_plus import GRADIENTS, GRADIENTS_INSIDE, WEIGHTS
from tests.support.checkpoint_tools import copied, resume, same, train
from tests.support.features import skip_without
from tests.support.matrix import cover, only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.nodes import NodePool, Traffic
from tests.support.parity import RELEASE, Case, check, config_of, full_grads, full_values
from tests.support.pool import Pool

QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
HPZ = {"zero_hpz_partition_size": 2}


def _exact(stage: int, optimizer: str, zero: dict[str, Any], micro: int) -> None:
    check(Case(Net, next_token_loss, stage, optimizer, steps=3, micro=micro, zero=zero))


@pytest.mark.parametrize(
    ("optimizer", "release", "micro", "shared"), cover(["sgd", "adamw"], [True, False], [1, 2], ["1", "0"])
)
def test_second_copies_change_nothing(pool: Pool, optimizer: str, release: bool, micro: int, shared: str) -> None:
    zero = HPZ | (RELEASE if release else {})
    pool.run(4, _exact, 3, optimizer, zero, micro, env={"LT_ZERO_SHARED_MEMORY": shared})


def _wide(stage: int) -> None:
    check(Case(lambda: Net().double(), next_token_loss, stage, zero=QWZ | HPZ | QGZ))


def test_64_bits_are_sent_as_they_are(pool: Pool) -> None:
    for stage in (2, 3):
        pool.run(2, _wide, stage)


def _changed_by_hand() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3, HPZ | RELEASE))
    first, values = next(p for p in model.parameters() if p.ndim > 1), full_values(engine)
    before = next_token_loss(model, 0, 0, 0).item()
    with lt_zero.gathered(first, write=True), torch.no_grad():
        first.mul_(2)
    assert next_token_loss(model, 0, 0, 0).item() != before
    model.load_state_dict(values, strict=False)  # the tied weight has one name
    assert next_token_loss(model, 0, 0, 0).item() == before


def test_edits_reach_the_second_copies(pool: Pool) -> None:
    pool.run(2, _changed_by_hand)


def _edited_twice(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    engine = lt_zero.shard(model, config_of(2, QWZ))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    engine.finish_steps()
    wanted = {name: value.clone() for name, value in full_values(engine).items()}
    for place in (0, 1000):  # the first changes the scale of its block
        if how == "load":
            wanted["bias"][place % 64] = 3.0
            model.load_state_dict({"bias": wanted["bias"]}, strict=False)
        with lt_zero.gathered(model.weight, write=True), torch.no_grad():
            model.weight.view(-1)[place] = wanted["weight"].view(-1)[place] = 3.0
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["gathered", "load"])
def test_edits_of_rounded_weights_leave_the_others_exact(pool: Pool, how: str) -> None:
    pool.run(2, _edited_twice, how)


def _resumed(folder: str) -> None:
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    whole = train(2, callbacks=[saves], max_steps=4, enable_checkpointing=True, zero=QWZ)
    _, again = resume(f"{folder}/step=2.ckpt", 2, steps=4, zero=QWZ)
    wanted, got = (copied(trainer.strategy.full_state_dict()) for trainer in (whole, again))  # type: ignore[attr-defined]
    same(got, wanted)


def test_rounded_updates_resume_exactly(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _resumed, str(tmp_path))


def _unfrozen() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
    exact, saw = layer.weight.detach().clone(), []
    model = nn.Sequential(layer)
    lt_zero.shard(model, config_of(3, HPZ | RELEASE | {"zero_quantized_nontrainable_weights": True}))
    layer.register_forward_hook(lambda module, *_: saw.append(module.weight.detach().clone()))
    with torch.no_grad():
        model(torch.ones(1, 64))
    model.requires_grad_(True)
    model(torch.ones(1, 64)).sum().backward()
    assert not torch.equal(saw[0], exact)
    torch.testing.assert_close(saw[1], exact, rtol=0, atol=0)


def test_unfrozen_weights_are_not_rounded(pool: Pool) -> None:
    pool.run(2, _unfrozen)


class _Short(nn.Module):
    """Leaves out its last layer at times."""

    short = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[: 2 if self.short else 3]:
            x = layer(x)
        return x


@torch.no_grad()
def _written_under_way(zero: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = _Short(), torch.ones(2, 16)
    engine = lt_zero.shard(model, config_of(3, zero))
    plain = copy.deepcopy({name: value.clone() for name, value in full_values(engine).items()})
    reference = _Short()
    for factor in (0.5, 2.0):  # the second time the second copy is filled by the gather that is under way
        model(x)
        for bucket in engine.buckets:
            bucket.release()
        model.short = True
        model(x)
        model.short = False
        assert any(bucket.state is State.GATHERING for bucket in engine.buckets)
        plain = {name: value * factor for name, value in plain.items()}
        model.load_state_dict(plain)
        reference.load_state_dict(plain)
        torch.testing.assert_close(model(x), reference(x))


@pytest.mark.parametrize("zero", [{}, HPZ])
def test_weights_that_are_written_while_they_are_gathered(pool: Pool, zero: dict[str, Any]) -> None:
    pool.run(2, _written_under_way, zero, env={"LT_ZERO_SHARED_MEMORY": "0"})


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(33, 33, bias=False) for _ in range(3)))
    model[1].requires_grad_(False)
    return model


def _rounded_gathers(zero: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Compares what forward and backward see of each weight with the owners' codes."""
    model = _model()
    engine = lt_zero.shard(model, config_of(3, zero | RELEASE, dtype))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    saw: dict[nn.Module, list[Tensor]] = {}
    for layer in model:
        layer.register_forward_hook(lambda module, *_: saw[module].append(module.weight.detach().clone()))
        layer.register_full_backward_pre_hook(lambda module, *_: saw[module].append(module.weight.detach().clone()))
    for _ in range(2):
        exact = full_values(engine)
        expected = {}
        for layer, name in zip(model, exact, strict=True):
            bucket, index = engine.owner[id(layer.weight)]
            flat, span = torch.zeros(bucket.layout.numel, dtype=bucket.dtype), bucket.layout.spans[index]
            flat[span.lo : span.hi] = exact[name].flatten()
            if zero.get("zero_quantized_weights") or not bucket.wants_grad:
                flat = torch.cat([WEIGHTS.decoded(shard) for shard in flat.chunk(dist.get_world_size())])
            expected[layer] = flat[span.lo : span.hi].view(span.shape)
            saw[layer] = []
        optimizer.zero_grad()
        x = torch.ones(2, 33, dtype=dtype or torch.float32, requires_grad=True)
        model(x).float().sum().backward()
        for layer, seen in saw.items():
            assert len(seen) == 2
            for weight in seen:
                torch.testing.assert_close(weight, expected[layer], rtol=0, atol=0)
        optimizer.step()
        with lt_zero.gathered(model, write=True):  # what is written back is not rounded
            for layer, value in zip(model, full_values(engine).values(), strict=True):
                torch.testing.assert_close(layer.weight.detach(), value.to(layer.weight.dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("zero", "dtype"),
    only_rows(
        [(QWZ | HPZ, torch.bfloat16), ({"zero_quantized_nontrainable_weights": True}, None)],
        itertools.product([QWZ, QWZ | HPZ, {"zero_quantized_nontrainable_weights": True}], [None, torch.bfloat16]),
    ),
)
def test_passes_compute_with_decoded_weights(pool: Pool, zero: dict[str, Any], dtype: torch.dtype | None) -> None:
    pool.run(2, _rounded_gathers, zero, dtype)


def _rounded_updates(stage: int, offload: str) -> None:
    """Compares master weights and compute copies with a reference whose gradients are those of decoded weights."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, QWZ | {"offload_optimizer": {"device": offload}}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    exact = {name: value.detach().clone() for name, value in plain.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        next_token_loss(model, step, 0, dist.get_rank()).backward()
        for rank in range(dist.get_world_size()):
            next_token_loss(plain, step, 0, rank).backward()
        optimizer.step()
        engine.finish_steps()
        for name, parameter in plain.named_parameters():
            exact[name] -= 0.1 * parameter.grad / dist.get_world_size()
        found = full_values(engine)
        for name, value in found.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-5, atol=1e-6)
        for bucket in engine.buckets:
            flat = torch.zeros(bucket.layout.numel)
            for span in bucket.layout.spans:
                flat[span.lo : span.hi] = found[span.name].flatten()
            flat = torch.cat([WEIGHTS.decoded(shard) for shard in flat.chunk(dist.get_world_size())])
            torch.testing.assert_close(bucket.compute.flat, flat, rtol=0, atol=0)
            for span in bucket.layout.spans:
                plain.get_parameter(span.name).data.copy_(flat[span.lo : span.hi].view(span.shape))
    with torch.no_grad():
        model.head.weight.data[0, 0] = 7.0  # every rank edits its compute copy
    next_token_loss(model, 0, 0, 0).backward()
    for name, value in full_values(engine).items():
        assert int((value != found[name]).sum()) == int((value == 7.0).any()), name
    engine.offload_manager.close()


@pytest.mark.parametrize(
    ("stage", "offload"), only_rows([(1, "none"), (2, "cpu")], itertools.product([1, 2], ["none", "cpu"]))
)
def test_updates_are_gathered_rounded(pool: Pool, stage: int, offload: str) -> None:
    if offload != "none":
        skip_without("offload")
    pool.run(2, _rounded_updates, stage, offload)


def _sums(stage: int, nodes: int) -> None:
    """Compares gradients with a reference that quantises those of all ranks in the same places."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, QGZ))
    next_token_loss(plain, 0, 0, dist.get_rank()).backward()
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    found = full_grads(engine)
    world, inner = dist.get_world_size(), dist.get_world_size() // nodes
    for bucket in engine.buckets:
        mine = torch.zeros(bucket.layout.numel)
        for span in bucket.layout.spans:
            mine[span.lo : span.hi] = grads[span.name].flatten()
        every = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(every, mine)
        shards = []
        for owner in range(world):
            place, sums = owner % inner, []
            for node in range(nodes):
                parts = [rank.view(nodes, inner, -1)[:, place].flatten() for rank in every[node * inner :][:inner]]
                total = sum(GRADIENTS_INSIDE.decoded(part) for part in parts)
                sums.append(total.chunk(nodes)[owner // inner])
            shards.append(sum(GRADIENTS.decoded(one) for one in sums) if nodes > 1 else sums[0])
        want = torch.cat(shards) / world
        for span in bucket.layout.spans:
            torch.testing.assert_close(found[span.name].flatten(), want[span.lo : span.hi], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("stage", only([3], [1, 2, 3]))
def test_gradients_are_quantised_once_on_one_host(pool: Pool, stage: int) -> None:
    pool.run(2, _sums, stage, 1)


@pytest.mark.nodes
@pytest.mark.parametrize("stage", only([2], [1, 2, 3]))
def test_gradients_are_quantised_inside_and_between_nodes(node_pool: NodePool, stage: int) -> None:
    node_pool.run(_sums, stage, 2)


def _sent(zero: dict[str, Any]) -> float:
    """Bytes from this rank's node in a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    engine = lt_zero.shard(model, config_of(3, RELEASE | zero, torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        with Traffic() as traffic:
            optimizer.zero_grad()
            model(torch.ones(2, 256, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
    return traffic.sent


@pytest.mark.nodes
def test_a_quarter_of_the_bytes_between_nodes(node_pool: NodePool) -> None:
    """Section 3: 3 M become 0.75 M, and a scale per block. Flags and headers of packets are a few KB of both."""
    plain, short = (node_pool.run(_sent, zero)[0] for zero in ({}, QWZ | HPZ | QGZ))
    assert short < 0.27 * plain


def _skips(zero: dict[str, Any]) -> None:
    """An overflow on one rank reaches all of them through the codes."""
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3, zero))
    loss = next_token_loss(model, 0, 0, dist.get_rank())
    (loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    assert not all(grad.isfinite().all() for grad in full_grads(engine).values())


def test_overflows_are_seen(pool: Pool) -> None:
    pool.run(2, _skips, QGZ)


@pytest.mark.parametrize(
    ("world", "keys", "words"),
    [
        (3, {"zero_optimization": HPZ}, ["zero_hpz_partition_size=2", "3", "1, 3"]),
        (2, {"zero_optimization": HPZ | {"mics_shard_size": 2}}, ["zero_hpz_partition_size=2", "mics_shard_size=2"]),
        (2, {"zero_optimization": QGZ | {"mics_shard_size": 2}}, ["zero_quantized_gradients", "mics_shard_size=2"]),
        (
            2,
            {"zero_optimization": QGZ, "gradient_compression": {"algorithm": "1bit"}},
            ["zero_quantized_gradients", "gradient_compression.algorithm='1bit'"],
        ),
    ],
)
def test_refused(pool: Pool, world: int, keys: dict[str, Any], words: list[str]) -> None:
    skip_without(keys)
    for text in pool.run(world, _refused, keys):
        for word in words:
            assert word in text


def _refused(keys: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        lt_zero.shard(Net(), {**keys, "zero_optimization": {"stage": 3, **keys["zero_optimization"]}})
    return str(caught.value)
