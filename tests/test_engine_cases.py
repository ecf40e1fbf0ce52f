"""What real models do to a sharding engine, each compared with one process at every stage."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from lt_zero.core.engine import Engine
from tests.models import VOCAB, WIDTH, Block, Net, next_token_loss, tokens
from tests.parity import Case, check, config_of, full_values
from tests.pool import Pool

RELEASE = {"stage3_max_reuse_distance": 0}
STAGES = [0, 1, 2, 3]


def run(pool: Pool, world: int, fn: Any, *args: Any) -> None:
    pool.run(world, fn, *args)


# ---- tied, frozen, checkpointed, called twice --------------------------------------------------------------------


def _net(stage: int, zero: dict[str, Any], kwargs: dict[str, Any], micro: int = 1) -> None:
    check(Case(lambda: Net(**kwargs), next_token_loss, stage, micro=micro, zero=zero))


@pytest.mark.parametrize("zero", [{}, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"tied": False},
        {"checkpointed": "inside"},
        {"checkpointed": "outside"},
        {"twice": True},
        {"twice": True, "checkpointed": "outside"},
    ],
    ids=lambda k: "-".join(f"{a}={b}" for a, b in k.items()),
)
def test_model_kinds(pool: Pool, zero: dict[str, Any], kwargs: dict[str, Any]) -> None:
    for stage in (1, 3):
        run(pool, 3, _net, stage, zero, kwargs)


@pytest.mark.parametrize("stage", STAGES)
def test_small_parameters_stay_whole(pool: Pool, stage: int) -> None:
    run(pool, 3, _net, stage, {"stage3_param_persistence_threshold": 100, **RELEASE}, {})


@pytest.mark.parametrize("stage", STAGES)
def test_tiny_buckets(pool: Pool, stage: int) -> None:
    run(pool, 2, _net, stage, {"reduce_bucket_size": 50, "allgather_bucket_size": 50}, {}, 2)


@pytest.mark.parametrize("key", ["overlap_comm", "reduce_scatter", "contiguous_gradients"])
def test_switches_do_not_change_results(pool: Pool, key: str) -> None:
    for stage in STAGES:
        run(pool, 3, _net, stage, {key: False}, {}, 2)


def _reentrant(stage: int) -> None:
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        check(Case(lambda: Net(checkpointed="outside-reentrant"), next_token_loss, stage))


def test_reentrant_checkpoint_is_refused(pool: Pool) -> None:
    run(pool, 2, _reentrant, 3)


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
    assert all(b.master is None and b.grad is None for b in frozen), "frozen weights cost no master and no gradient"


@pytest.mark.parametrize("checkpointed", ["", "inside", "outside"])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_lora(pool: Pool, stage: int, checkpointed: str) -> None:
    run(pool, 2, _lora, stage, checkpointed, RELEASE)


# ---- unused parameters and routing -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_unused_parameters(pool: Pool, stage: int, optimizer: str) -> None:
    run(pool, 3, _branchy, stage, optimizer)


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
    engine = check(Case(Mixture, _mixture_loss, stage, "adamw", steps=6, zero=RELEASE))
    assert [u.name for u in engine.units] == ["embedding", "layers.0", "layers.1"], "experts are not units"


@pytest.mark.parametrize("stage", STAGES)
def test_routing_that_differs_per_rank(pool: Pool, stage: int) -> None:
    run(pool, 2, _mixture, stage)


# ---- outputs -----------------------------------------------------------------------------------------------------


@dataclass
class Out:
    hidden: Tensor
    extra: Any


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Like the output classes of transformers: a mapping with attributes."""


class Cache:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x: Tensor) -> Any:
        y = self.block(x)
        if self.kind == "dataclass":
            return Out(hidden=y, extra={"more": [y * 2]})
        if self.kind == "mapping":
            return ModelOutput(hidden=y, more=(y * 2,))
        if self.kind == "object":
            return Cache(y)
        if self.kind == "view":
            return y.flatten(0, 1)
        return {"hidden": (y, [None, 1])}


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Wrapped(kind) for _ in range(2))
        self.kind = kind

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            out = block(x)
            if self.kind == "dataclass":
                x = out.hidden + 0.1 * out.extra["more"][0]
            elif self.kind == "mapping":
                x = out["hidden"] + 0.1 * out["more"][0]
            elif self.kind == "object":
                x = out.value
            elif self.kind == "view":
                out += 1.0  # in place on a view: tensor hooks would be lost
                x = out.view(x.shape)
            else:
                x = out["hidden"][0]
        return x @ self.embedding.weight.t()


def _outputs(stage: int, kind: str) -> None:
    engine = check(Case(lambda: Outputs(kind), next_token_loss, stage, zero=RELEASE))
    assert stage < 3 or not any(u.resident for u in engine.units if u.sharded), "all released after backward"


@pytest.mark.parametrize("kind", ["dataclass", "mapping", "object", "nested", "view"])
@pytest.mark.parametrize("stage", [2, 3])
def test_nested_outputs(pool: Pool, stage: int, kind: str) -> None:
    run(pool, 2, _outputs, stage, kind)


STASH: list[Tensor] = []


class Hidden(nn.Module):
    """Hides its output where no hook can be put, or in an attribute, where one can."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.block, self.attribute = Block(), attribute

    def forward(self, x: Tensor) -> None:
        y = self.block(x)
        if self.attribute:
            self.result = y
        else:
            STASH.append(y)


class HidesOutputs(nn.Module):
    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hidden(attribute) for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        x = F.one_hot(batch, WIDTH + 1)[..., :WIDTH].float()
        for block in self.blocks:
            block(x)
            x = block.result if block.attribute else STASH.pop()
        return x


def _square(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return model(tokens(step, micro, rank)).square().mean()


def _hides() -> None:
    check(Case(lambda: HidesOutputs(True), _square, 3, zero=RELEASE))
    with pytest.raises(RuntimeError, match=r"'blocks\.[01]'.*no hook saw"):
        check(Case(lambda: HidesOutputs(False), _square, 3, zero=RELEASE))


def test_hidden_outputs_are_found_or_an_error(pool: Pool) -> None:
    run(pool, 2, _hides)


class Routed(nn.Module):
    """A block with an auxiliary loss that it leaves in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.router = Block(), nn.Linear(WIDTH, 3)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.auxiliary = F.softmax(self.router(self.router.weight.sum() * y), -1).square().mean()
        return y


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(block.auxiliary for block in self.blocks)


def _auxiliary(stage: int) -> None:
    check(Case(Auxiliary, lambda m, s, i, r: m(tokens(s, i, r)), stage, zero=RELEASE))


@pytest.mark.parametrize("stage", STAGES)
def test_auxiliary_losses_in_attributes(pool: Pool, stage: int) -> None:
    run(pool, 2, _auxiliary, stage)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class Positions(nn.Module):
    """A unit that returns a view of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), Table()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch) * self.positions(batch.shape[1])
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.t()


def _positions(stage: int) -> None:
    check(Case(Positions, next_token_loss, stage, zero=RELEASE))


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_that_returns_its_weight(pool: Pool, stage: int) -> None:
    run(pool, 2, _positions, stage)


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


@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_whose_gradients_are_complete_on_one_rank_only(pool: Pool, stage: int, shared: str) -> None:
    pool.run(3, _partly, stage, env={"LT_ZERO_SHARED_MEMORY": shared, "LT_ZERO_DEBUG": "1"})


def _aborted(stage: int) -> None:
    torch.manual_seed(0)
    model, fail = Net(), [True]
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, RELEASE))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    lt_zero.ShardedOptimizer(engine, optimizers[0])

    def explode(grad: Tensor) -> None:
        if fail[0]:
            raise ValueError("on purpose")

    for explicit in (False, True):
        fail[0] = True
        handle = model.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(explode) and None)
        loss = next_token_loss(model, 0, 0, 0)
        handle.remove()
        with pytest.raises(ValueError, match="on purpose"), engine.backward_pass() if explicit else nullcontext():
            loss.backward()
        fail[0] = False
        for optimizer in optimizers:
            optimizer.zero_grad()
        for net, optimizer in zip((model, reference), optimizers, strict=True):
            next_token_loss(net, 1, 0, 0).backward()
            optimizer.step()
        for name, value in full_values(engine).items():
            torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach())


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_leaves_nothing_behind(pool: Pool, stage: int) -> None:
    run(pool, 2, _aborted, stage)


# ---- forwards and backwards --------------------------------------------------------------------------------------


def _two_forwards(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return next_token_loss(model, step, micro, rank) + next_token_loss(model, step, micro + 5, rank)


def _split_backward(engine: Engine | None, loss: Tensor, step: int) -> None:
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()


def _forwards(stage: int, zero: dict[str, Any], micro: int, sync_every: bool) -> None:
    check(Case(Net, _two_forwards, stage, zero=zero, micro=micro, sync_every=sync_every))
    check(Case(Net, _two_forwards, stage, zero=zero, micro=micro, sync_every=True, backward=_split_backward))


@pytest.mark.parametrize("zero", [{}, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize("stage", STAGES)
def test_several_forwards_and_backwards(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    run(pool, 2, _forwards, stage, zero, 1, False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_window(pool: Pool, world: int, stage: int) -> None:
    run(pool, world, _forwards, stage, {}, 3, False)
    run(pool, world, _forwards, stage, RELEASE, 2, True)


def _penalty_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x = tokens(step, micro, rank).float() / VOCAB
    x = torch.nn.functional.pad(x, (0, WIDTH - x.shape[1])).requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (grad.norm(dim=1) - 1).square().mean()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _penalty(stage: int, zero: dict[str, Any]) -> None:
    check(Case(Critic, _penalty_loss, stage, zero=zero))


@pytest.mark.parametrize("zero", [{}, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_penalty(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    run(pool, 2, _penalty, stage, zero)


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


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_shared_by_all_blocks(pool: Pool, stage: int) -> None:
    run(pool, 2, _conditioned, stage)


def _evaluations(stage: int, zero: dict[str, Any]) -> None:
    def evaluate(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            before = model(tokens(9, 9, 9))
        with torch.inference_mode():
            again = model(tokens(9, 9, 9))
        assert torch.equal(before, again.clone())

    check(Case(Net, next_token_loss, stage, zero=zero, after_step=evaluate))


@pytest.mark.parametrize("zero", [{}, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_steps(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    run(pool, 2, _evaluations, stage, zero)


def _compiled(stage: int, zero: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def model() -> nn.Module:
        net = Net()
        for block in net.blocks:
            block.compile(backend="aot_eager")
        return net

    check(Case(model, next_token_loss, stage, zero=zero))


@pytest.mark.parametrize("zero", [{}, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    run(pool, 2, _compiled, stage, zero)


# ---- parameters outside of their module --------------------------------------------------------------------------


class OutsideUse(nn.Module):
    """Weights that other modules read: as they are, as a view, inside another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        x = x + F.linear(x, self.blocks[0].up.weight[:WIDTH])
        view = self.embedding.weight.t()
        return x @ view + self.blocks[1].norm.bias.sum()


def _outside(stage: int, zero: dict[str, Any]) -> None:
    zero = {"stage3_param_persistence_threshold": 5, **zero}
    check(Case(OutsideUse, next_token_loss, stage, zero=zero))
    check(Case(OutsideUse, next_token_loss, stage, zero=zero, sync_every=True, backward=_split_backward))


@pytest.mark.parametrize("zero", [{}, RELEASE], ids=["keep", "release"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_used_outside_their_module(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    run(pool, 2, _outside, stage, zero)


def _clamped(stage: int) -> None:
    def clamp(model: nn.Module, step: int) -> None:
        with torch.no_grad(), lt_zero.gathered([model.blocks[0].up.weight, model.scale], write=True):
            model.blocks[0].up.weight.clamp_(-0.1, 0.1)
            model.scale.mul_(1.5)

    check(Case(Net, next_token_loss, stage, "adamw", after_step=clamp))


@pytest.mark.parametrize("stage", STAGES)
def test_edits_inside_gathered(pool: Pool, stage: int) -> None:
    run(pool, 3, _clamped, stage)
