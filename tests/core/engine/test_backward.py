"""What happens around backward: accumulation, several backwards, gradient penalties, evaluation, failures."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lt_zero
from lt_zero.core.comm.transport import SendBuffers
from tests.support.features import needs, skip_without
from tests.support.matrix import cover, only, only_rows
from tests.support.models import VOCAB, WIDTH, Block, Net, next_token_loss, tokens
from tests.support.parity import RELEASE, STAGES, Case, check, config_of, full_grads, full_values, split_backward
from tests.support.pool import Pool


def _two_forwards(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return next_token_loss(model, step, micro, rank) + next_token_loss(model, step, micro + 5, rank)


def _forwards(stage: int, zero: dict[str, Any], micro: int, sync_every: bool) -> None:
    check(Case(Net, _two_forwards, stage, zero=zero, micro=micro, sync_every=sync_every))
    check(Case(Net, _two_forwards, stage, zero=zero, micro=micro, sync_every=True, backward=split_backward))


@pytest.mark.parametrize(("stage", "zero"), only_rows([(3, RELEASE)], itertools.product(STAGES, [{}, RELEASE])))
def test_several_forwards_and_backwards(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    pool.run(2, _forwards, stage, zero, 1, False)


@pytest.mark.parametrize(("stage", "world"), only_rows([(0, 2), (3, 3)], itertools.product(STAGES, [2, 3])))
def test_accumulation_window(pool: Pool, world: int, stage: int) -> None:
    zero, micro, sync_every = ({}, 3, False) if stage % 2 else (RELEASE, 2, True)
    pool.run(world, _forwards, stage, zero, micro, sync_every)


def _zeroed_in_a_window(stage: int, set_to_none: bool) -> None:
    """The first micro-batch's gradients are dropped for one of two optimizers whose parameters share buckets."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, RELEASE))

    def optimizers(net: nn.Module) -> list[Optimizer]:
        kinds = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() < 2]
        return [torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1) for params in kinds]

    mine, theirs = optimizers(model), optimizers(reference)
    for optimizer in mine:
        lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        for optimizer in (*mine, *theirs):
            optimizer.zero_grad()
        for micro in range(3):
            with engine.no_sync() if micro < 2 else nullcontext():
                next_token_loss(model, step, micro, rank).backward()
            for r in range(world):
                (next_token_loss(reference, step, micro, r) / world).backward()
            if micro == 0:
                for optimizer in (mine[0], theirs[0]):
                    optimizer.zero_grad(set_to_none)
        for optimizer in (*mine, *theirs):
            optimizer.step()
        got = full_values(engine)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(got[name], p.detach(), rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}\n{t}")


@pytest.mark.parametrize(
    ("stage", "set_to_none"), only_rows([(1, True), (3, False)], itertools.product(STAGES, [True, False]))
)
def test_zero_grad_inside_a_window(pool: Pool, stage: int, set_to_none: bool) -> None:
    pool.run(2, _zeroed_in_a_window, stage, set_to_none)


def _parts(stage: int, threshold: int) -> None:
    """Small parts of a model are called in turn instead of it, and nothing is around their backwards."""
    torch.manual_seed(0)
    nets = nn.ModuleList([Block(), nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))])
    plain = copy.deepcopy(nets)
    engine = lt_zero.shard(nets, config_of(stage, {"stage3_param_persistence_threshold": threshold}))
    mine, theirs = ([torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in both] for both in (nets, plain))
    for optimizer in mine:
        lt_zero.ShardedOptimizer(engine, optimizer)
    rows = torch.rand(dist.get_world_size(), 3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for number in range(2):
            for (maker, critic), optimizers, batch in ((nets, mine, rows[dist.get_rank()]), (plain, theirs, rows)):
                with engine.forward_scope() if maker is nets[0] else nullcontext():
                    made = maker(batch)
                    loss = critic(made).square().mean() if number == 0 else -critic(made.detach()).sin().mean()
                    optimizers[number].zero_grad()
                    loss.backward()
                    optimizers[number].step()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=name)


@pytest.mark.parametrize(("stage", "threshold"), only_rows([(0, 0), (3, 10**6)], itertools.product(STAGES, [0, 10**6])))
def test_parts_are_called_by_themselves(pool: Pool, stage: int, threshold: int) -> None:
    pool.run(2, _parts, stage, threshold)


def _layers(stage: int, order: str) -> None:
    """Layers inside of units are used by themselves, in backwards of their own beside those of the model."""
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    engine = lt_zero.shard(net, config_of(stage))
    mine, theirs = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (net, plain))
    lt_zero.ShardedOptimizer(engine, mine)
    ranks = range(dist.get_world_size())
    for step in range(2):
        for micro, part in enumerate(order):
            with lt_zero.gathered(list(net.parameters())) if part != "m" else nullcontext():
                loss = _use(net, part, step, micro, dist.get_rank())
            loss.backward()
            for rank in ranks:
                (_use(plain, part, step, micro, rank) / len(ranks)).backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), msg=name)


def _use(model: Net, part: str, step: int, micro: int, rank: int) -> Tensor:
    if part == "m":
        return next_token_loss(model, step, micro, rank)
    block: Any = model.blocks[1]
    rows = tokens(step, micro, rank).float().mean() / VOCAB + torch.arange(WIDTH) / WIDTH
    made: Tensor = block.up(rows) if part == "l" else block.norm.weight * rows
    return made.square().mean()


@pytest.mark.parametrize(
    ("stage", "order"),
    only_rows([(0, "mw"), (1, "ll"), (3, "ml")], itertools.product(STAGES, ["mw", "wm", "ll", "mlw", "ml"])),
)
def test_layers_of_units_are_used_by_themselves(pool: Pool, stage: int, order: str) -> None:
    pool.run(2, _layers, stage, order)


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


@pytest.mark.parametrize(
    ("stage", "zero"), only_rows([(1, {}), (3, RELEASE)], itertools.product(STAGES, [{}, RELEASE]))
)
def test_gradient_penalty(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    pool.run(2, _penalty, stage, zero)


class Force(Net):
    """What it returns is, in part, a gradient that its forward took on the way; blocks are used again afterwards."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        (force,) = torch.autograd.grad(self.blocks[0](x).square().sum(), x, create_graph=True)
        y = (x + force) * self.scale
        for block in self.blocks:
            y = block(y)
        (force,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return self.head(y + force)


def _penalty_first(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return _penalty_loss(model, step, micro, rank) + model(torch.ones(2, WIDTH)).mean()  # forward while a graph waits


def _gradient_inside(zero: dict[str, Any], mode: str) -> None:
    keys: dict[str, Any] = {"zero": zero, "micro": 2, "steps": 2, "activation_checkpointing": {"mode": mode}}
    check(Case(Force, next_token_loss, rtol=1e-3, atol=1e-5, **keys))  # rounding grows with each graph
    engine = check(Case(Critic, _penalty_first, **keys))
    assert not any(b.resident for unit in engine.units for b in unit.sharded), (
        "nothing stays for a graph that was walked"
    )


@pytest.mark.parametrize(("zero", "mode"), cover([{}, RELEASE], ["none", "full"]))
def test_graphs_of_gradients(pool: Pool, zero: dict[str, Any], mode: str) -> None:
    if mode != "none":
        skip_without("activation_checkpointing")
    pool.run(2, _gradient_inside, zero, mode)


class Collecting(Block):
    """Puts its output into a dict and a list that it is given, as caches work, and needs one object to stay one."""

    def forward(self, x: Tensor, again: Tensor, state: dict[str, Any]) -> None:  # type: ignore[override]
        assert x is again
        state["x"] = x + self.mlp(x) + sum(state["all"])
        state["all"].append(state["x"].mean(1, keepdim=True))


class CollectingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collecting() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        every: list[Tensor] = []
        state: dict[str, Any] = {"x": x, "all": every}
        for block in self.blocks:
            block(state["x"], state["x"], state)
        assert len(every) == 3
        assert state["all"] is every
        return self.head(state["x"] + every[0])


def _collected(stage: int) -> None:
    for mode in ("none", "full", "selective") if stage == 3 else ("full",):
        block = {"mode": mode}
        check(Case(CollectingNet, next_token_loss, stage, steps=1, zero=RELEASE, activation_checkpointing=block))


@needs("activation_checkpointing")
@pytest.mark.parametrize("stage", only([3], [1, 3]))
def test_what_a_module_puts_into_a_list_that_it_is_given(pool: Pool, stage: int) -> None:
    pool.run(2, _collected, stage)


def _evaluations(stage: int, zero: dict[str, Any]) -> None:
    def evaluate(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            before = model(tokens(9, 9, 9))
        with torch.inference_mode():
            again = model(tokens(9, 9, 9))
        assert torch.equal(before, again.clone())

    check(Case(Net, next_token_loss, stage, zero=zero, after_step=evaluate))


@pytest.mark.parametrize(
    ("stage", "zero"), only_rows([(2, {}), (3, RELEASE)], itertools.product(STAGES, [RELEASE, {}]))
)
def test_evaluation_between_steps(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    pool.run(2, _evaluations, stage, zero)


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


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_a_backward_that_fails_leaves_nothing_behind(pool: Pool, stage: int) -> None:
    pool.run(2, _aborted, stage)


def _out_of_memory(stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(stage, RELEASE))
    for attempt in range(6):  # more often than there are buffers
        model.zero_grad()
        fails = mock.patch.object(engine.buckets[1].grads, "take", side_effect=MemoryError)
        with fails, pytest.raises(MemoryError), engine.backward_pass():
            next_token_loss(model, attempt, 0, 0).backward()
    model.zero_grad()
    with engine.backward_pass():
        next_token_loss(model, 0, 0, 0).backward()  # raised, as no buffer was left


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_reductions_that_fail_keep_their_buffers(pool: Pool, stage: int) -> None:
    pool.run(2, _out_of_memory, stage)


def _local_without_memory() -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Net()
        engine = lt_zero.shard(model, config_of(1))
        with engine.no_sync(), engine.backward_pass():
            next_token_loss(model, 0, 0, dist.get_rank()).backward()
        if fails:
            with mock.patch.object(SendBuffers, "_scratch", side_effect=MemoryError), pytest.raises(MemoryError):
                engine.finish_reductions()
        found.append(list(full_grads(engine).values()))
    return found[0], found[1]


def test_gradients_that_wait_are_kept_if_there_is_no_memory_to_send_them(pool: Pool) -> None:
    """They were lost: the bucket had handed them over before the buffer was there."""
    for plain, repeated in pool.run(2, _local_without_memory):
        assert len(plain) > 3
        torch.testing.assert_close(repeated, plain, rtol=0, atol=0)


def _stand_ins(stage: int) -> None:
    """One stand-in serves a backward, with the norms of what has been accumulated; the next backward has its own."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    engine = lt_zero.shard(model, config_of(stage, RELEASE))
    parameter, plain = model.blocks[0].up.weight, reference.blocks[0].up.weight
    before = None
    for step in range(2):
        next_token_loss(model, step, 0, rank).backward()
        for other in range(dist.get_world_size()):
            (next_token_loss(reference, step, 0, other) / dist.get_world_size()).backward()
        shown = parameter.grad
        assert shown is not None
        assert shown is not before
        assert plain.grad is not None
        assert repr(shown) == f"ShardedGrad(shape={tuple(parameter.shape)}, dtype=torch.float32, device='cpu')"
        engine.finish_reductions()
        assert parameter.grad is shown
        torch.testing.assert_close(shown.norm(), plain.grad.norm())
        assert shown.detach().cpu().float().to("cpu", torch.float32) is shown, "conversions that change nothing"
        for wrong in (lambda grad: grad.to("cpu", copy=True), lambda grad: grad.to("meta")):
            with pytest.raises(RuntimeError, match="needs all of a gradient"):
                wrong(shown)
        for dtype in (torch.float32, torch.float64):
            norms = [torch.linalg.vector_norm(grad, 3, dtype=dtype) for grad in (shown, plain.grad)]
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
        shown.mul_(3)
        engine.finish_reductions()
        torch.testing.assert_close(shown.norm(), 3 * plain.grad.norm())
        before, parameter.grad, plain.grad = shown, None, None
    assert before is not None
    engine.root.zero_grad()
    model.blocks[1](torch.ones(2, WIDTH)).sum().backward()  # other parameters only
    engine.finish_reductions()
    assert parameter.grad is None
    with pytest.raises(RuntimeError, match="'blocks.0.up.weight' is that of an earlier step. Read p.grad again"):
        before.norm()


@pytest.mark.parametrize("stage", only([3], [2, 3]))
def test_stand_ins(pool: Pool, stage: int) -> None:
    pool.run(2, _stand_ins, stage)


@pytest.mark.parametrize("stage", only([0, 3], STAGES))
def test_gradients_that_change_between_two_looks_of_a_step(stage: int) -> None:
    model = Net(depth=1)
    engine = lt_zero.shard(model, config_of(stage, RELEASE))
    next_token_loss(model, 0, 0, 0).backward()
    (bucket, index), second = engine.owner[id(model.head.weight)], engine.owner[id(model.scale)]
    assert (bucket, index) in engine.finish_reductions()
    model.head.weight.grad = None
    used = engine.finish_reductions()
    assert (bucket, index) not in used
    assert second in used
    bucket.grads.clear({second[1]})
    assert second not in engine.finish_reductions()


@pytest.mark.parametrize("stage", only([0, 3], STAGES))
def test_a_gradient_is_set_between_two_looks_of_a_step(stage: int) -> None:
    model = Net(depth=2)
    engine = lt_zero.shard(model, config_of(stage, RELEASE))
    weight = model.blocks[1].up.weight
    model.blocks[0](torch.ones(2, WIDTH)).sum().backward()
    bucket, index = engine.owner[id(weight)]
    assert (bucket, index) not in engine.finish_reductions()
    weight.grad = torch.full(weight.shape, 0.5)
    assert (bucket, index) in engine.finish_reductions()
    assert bool((bucket.grads.of(bucket.pieces_of(index)[0]) == 0.5).all())


def _assigned(stage: int) -> None:
    """A loop over all gradients, then one of a parameter that no rank has used; the other has none, and stays."""
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("trained", "assigned", "idle")})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = lt_zero.shard(model, config_of(stage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    lt_zero.ShardedOptimizer(engine, optimizer)
    for _ in range(2):
        model["trained"](torch.ones(2, 3)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = 0.5 * parameter.grad if parameter.grad is not None else None
        model["assigned"].weight.grad = torch.ones(3, 3)
        optimizer.step()
        optimizer.zero_grad()
    values = full_values(engine)
    assert torch.equal(values["idle.weight"], before["idle.weight"])
    expected = before["assigned.weight"].clone().requires_grad_()
    plain = torch.optim.AdamW([expected], lr=0.1, weight_decay=0.5)
    for _ in range(2):
        expected.grad = torch.ones(3, 3)
        plain.step()
    torch.testing.assert_close(values["assigned.weight"], expected.detach())


def test_a_gradient_is_assigned_to_an_unused_parameter(pool: Pool) -> None:
    pool.run(2, _assigned, 0)
