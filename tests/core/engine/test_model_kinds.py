"""Kinds of models, each compared with one process: tied, frozen, checkpointed, compiled, partly used, routed."""

from __future__ import annotations

import copy
import itertools
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import lt_zero
from tests.support.matrix import only, only_rows
from tests.support.models import VOCAB, WIDTH, Block, Net, next_token_loss, tokens
from tests.support.parity import RELEASE, STAGES, Case, check, config_of
from tests.support.pool import Pool, WorkerError

# ---- tied, frozen, checkpointed, called twice, compiled ------------------------------------------------------------


def _net(stage: int, zero: dict[str, Any], kwargs: dict[str, Any], micro: int = 1) -> None:
    check(Case(lambda: Net(**kwargs), next_token_loss, stage, micro=micro, zero=zero))


KINDS: list[dict[str, Any]] = [
    {"tied": False},
    {"checkpointed": "inside"},
    {"checkpointed": "outside"},
    {"twice": True},
    {"twice": True, "checkpointed": "outside"},
]


@pytest.mark.parametrize(
    ("stage", "kwargs", "zero"),
    only_rows(
        [(3, KINDS[1], RELEASE), (1, KINDS[3], {}), (3, KINDS[4], RELEASE)],
        itertools.product([3, 1], KINDS, [RELEASE, {}]),
    ),
)
def test_model_kinds(pool: Pool, stage: int, kwargs: dict[str, Any], zero: dict[str, Any]) -> None:
    pool.run(2, _net, stage, zero, kwargs)


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_small_parameters_stay_whole(pool: Pool, stage: int) -> None:
    pool.run(3 if stage == 3 else 2, _net, stage, {"stage3_param_persistence_threshold": 100, **RELEASE}, {})


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_tiny_buckets(pool: Pool, stage: int) -> None:
    pool.run(2, _net, stage, {"reduce_bucket_size": 50, "allgather_bucket_size": 50}, {}, 2)


SWITCHES = ["overlap_comm", "reduce_scatter", "contiguous_gradients"]


@pytest.mark.parametrize(
    ("stage", "key"),
    only_rows(zip([3, 2, 1], SWITCHES, strict=True), itertools.product(STAGES, SWITCHES)),
)
def test_switches_do_not_change_results(pool: Pool, stage: int, key: str) -> None:
    pool.run(3 if stage == 2 else 2, _net, stage, {key: False}, {}, 2)


def _reentrant(stage: int) -> None:
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        check(Case(lambda: Net(checkpointed="outside-reentrant"), next_token_loss, stage))


def test_reentrant_checkpoint_is_refused(pool: Pool) -> None:
    pool.run(2, _reentrant, 3)


class Lora(nn.Module):
    """Frozen blocks, frozen first layer, trainable low-rank additions in odd places."""

    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        self.net = Net(checkpointed=checkpointed)
        for parameter in self.net.parameters():
            parameter.requires_grad_(False)
        self.net.blocks[1].norm.weight.requires_grad_(True)
        self.net.blocks[2].down.bias.requires_grad_(True)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)


def _lora(stage: int, checkpointed: str, zero: dict[str, Any]) -> None:
    engine = check(Case(lambda: Lora(checkpointed), next_token_loss, stage, "adamw", zero=zero))
    frozen = [b for b in engine.buckets if not b.wants_grad]
    assert frozen
    assert all(b.weights.master is None and not b.grads.accumulated for b in frozen), (
        "frozen weights cost no master and no gradient"
    )


@pytest.mark.parametrize(
    ("stage", "checkpointed"),
    only_rows([(1, ""), (3, "outside")], itertools.product(STAGES, ["", "inside", "outside"])),
)
def test_frozen_and_lora(pool: Pool, stage: int, checkpointed: str) -> None:
    pool.run(2, _lora, stage, checkpointed, RELEASE)


class Conditioned(nn.Module):
    """A vector that feeds every block, and a skip connection over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, batch: Tensor) -> Tensor:
        first = x = self.embedding(batch)
        vector = self.condition(x.mean(1, keepdim=True))
        for block in self.blocks:
            x = block(x + vector)
            x = x + self.blocks[0](vector) if block is self.blocks[-1] else x
        return (x + first) @ self.embedding.weight.t()


def _conditioned(stage: int) -> None:
    check(Case(Conditioned, next_token_loss, stage, zero=RELEASE))


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_inputs_shared_by_all_blocks(pool: Pool, stage: int) -> None:
    pool.run(2, _conditioned, stage)


def _compiled(stage: int, zero: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()

    def model() -> nn.Module:
        net = Net(depth=2)
        for block in net.blocks:
            block.compile(backend=backend)
        return net

    check(Case(model, next_token_loss, stage, zero=zero))


@pytest.mark.slow  # test_released_weights.py compiles blocks, too
@pytest.mark.parametrize(("stage", "zero"), itertools.product([1, 3], [{}, RELEASE]))
def test_compiled_blocks(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    pool.run(2, _compiled, stage, zero, "aot_eager")


def _recompiled(stage: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, traced = Net(depth=2), []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        traced.append(torch.is_grad_enabled())
        return aot_eager(graph, inputs)

    plain = copy.deepcopy(net)
    for block in net.blocks:
        block.compile(backend=backend)
    lt_zero.shard(net, config_of(stage))
    next_token_loss(net, 0, 0, 0).backward()
    next_token_loss(plain, 0, 0, 0).backward()
    assert True in traced
    assert False not in traced
    with torch.no_grad():  # traced again, now with stand-ins in p.grad
        assert all(p.grad is not None for p in net.parameters())
        torch.testing.assert_close(net(tokens(0, 0, 0)), plain(tokens(0, 0, 0)))
    assert False in traced
    for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.norm(), theirs.grad.norm(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_recompilation_after_a_backward(pool: Pool, stage: int) -> None:
    pool.run(2, _recompiled, stage)


@pytest.mark.slow  # the C++ compiler takes 25 s once, the cached kernels less than a second
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++")
def test_blocks_compiled_by_inductor(pool: Pool) -> None:
    for stage in STAGES:
        pool.run(2, _compiled, stage, RELEASE, "inductor")


# ---- unused parameters and routing ---------------------------------------------------------------------------------


class Branchy(nn.Module):
    """Parameters that are unused on all ranks, on one rank, or in one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.never = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Parameter(torch.ones(WIDTH))
        self.on_one_rank = nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: Tensor, which: str) -> Tensor:
        x = self.embedding(batch)
        if which == "sometimes":
            x = x * self.sometimes
        if which == "rank 1":
            x = x * self.on_one_rank
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.t()


def _branchy_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    which = "sometimes" if step == 1 and micro == 1 else "rank 1" if rank == 1 and step > 0 else ""
    batch = tokens(step, micro, rank)
    return F.cross_entropy(model(batch, which).flatten(0, 1), batch.flatten())


def _branchy(stage: int, optimizer: str) -> None:
    check(Case(Branchy, _branchy_loss, stage, optimizer, micro=2, zero=RELEASE))


@pytest.mark.parametrize(
    ("optimizer", "stage"), only_rows([("sgd", 1), ("adamw", 3)], itertools.product(["sgd", "adamw"], STAGES))
)
def test_unused_parameters(pool: Pool, stage: int, optimizer: str) -> None:
    pool.run(3 if stage == 3 else 2, _branchy, stage, optimizer)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return x + self.experts[choice](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, batch: Tensor, choice: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x, choice)
        return x @ self.embedding.weight.t()


def _mixture_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    batch = tokens(step, micro, rank)
    return F.cross_entropy(model(batch, (rank + step) % 3).flatten(0, 1), batch.flatten())


def _mixture(stage: int) -> None:
    engine = check(Case(Mixture, _mixture_loss, stage, "adamw", steps=4, zero=RELEASE))  # each rank meets each expert
    assert [u.name for u in engine.units] == ["embedding", "layers.0", "layers.1"], "experts are not units"


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_routing_that_differs_per_rank(pool: Pool, stage: int) -> None:
    pool.run(2, _mixture, stage)


class Routing(nn.Module):
    """Has a list of experts; each rank calls one or two of them, other ones than the other rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.name = name
        self.add_module(name, nn.ModuleList(Block() for _ in range(4)))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        experts = self.get_submodule(self.name)
        for index in [choice % 4, 3][: 1 + choice % 2]:
            x = x + 0.3 * experts[index](x)  # type: ignore[index]
        return x * torch.sigmoid(self.gate(x))


class RoutedNet(Routing):
    """Routes by itself, beside blocks, or in one module that is not repeated."""

    def __init__(self, name: str, inside: bool) -> None:
        super().__init__(name)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixture = Routing(name) if inside else nn.Identity()
        if inside:
            self.add_module(name, nn.Identity())
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch: Tensor, choice: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        x = self.mixture(x, choice) if isinstance(self.mixture, Routing) else super().forward(x, choice)
        return self.head(x)


def _routed_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    batch = tokens(step, micro, rank)
    return F.cross_entropy(model(batch, rank + step).flatten(0, 1), batch.flatten())


def _routed(name: str, inside: bool, zero: dict[str, Any]) -> None:
    engine = check(Case(lambda: RoutedNet(name, inside), _routed_loss, 3, "sgd", steps=4, zero=RELEASE | zero))
    names = [unit.name for unit in engine.units]
    assert [n for n in names if name in n or n == "mixture"] == (["mixture"] if inside else [])


@pytest.mark.parametrize(
    ("name", "inside", "leaf"),
    only_rows(
        [("experts", True, []), ("towers", False, ["towers"])],
        [
            ("experts", True, []),
            ("experts", False, []),
            ("towers", True, ["mixture.towers"]),
            ("towers", False, ["towers"]),
        ],
    ),
)
def test_experts_outside_of_blocks(pool: Pool, name: str, inside: bool, leaf: list[str]) -> None:
    pool.run(2, _routed, name, inside, {"leaf_module": {"names": leaf}})


def test_experts_of_another_name_are_told_what_to_write(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r'leaf_module.names: \["mixture.towers"\]') as caught:
        pool.run(2, _routed, "towers", True, {})
    assert str(caught.value).count("The ranks called different members of 'mixture.towers'") == 2


class Passing(Block):
    """Returns its input, as a mixture does to which no token is sent."""

    passes = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else super().forward(x)


class PassingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(3))


def _passing_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.passes = step == 3 or (index > 0 and (rank + step) % 2 == 1)
    return next_token_loss(model, step, micro, rank)


def _passing() -> None:
    check(Case(PassingNet, _passing_loss, 3, "sgd", steps=5, zero=RELEASE | {"reduce_bucket_size": 300}))


def test_units_that_return_their_input_on_one_rank(pool: Pool) -> None:
    pool.run(2, _passing)


class Optional(Block):
    """Uses one of its parameters on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        return super().forward(x * self.extra if extra else x)


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Optional() for _ in range(4))

    def forward(self, batch: Tensor, extra: bool) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x, extra=extra)
        return x @ self.embedding.weight.t()


def _partly(stage: int) -> None:
    def loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        batch = tokens(step, micro, rank)
        return F.cross_entropy(model(batch, rank == 0).flatten(0, 1), batch.flatten())

    check(Case(PartlyUsed, loss, stage, zero=RELEASE))


@pytest.mark.parametrize(("stage", "shared"), only_rows([(1, "0"), (3, "1")], itertools.product(STAGES, ["1", "0"])))
def test_a_unit_whose_gradients_are_complete_on_one_rank_only(pool: Pool, stage: int, shared: str) -> None:
    pool.run(2, _partly, stage, env={"LT_ZERO_SHARED_MEMORY": shared, "LT_ZERO_DEBUG": "1"})
