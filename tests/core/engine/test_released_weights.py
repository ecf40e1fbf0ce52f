"""Stage 3, weights released after forward: exact whatever a unit returns, and whatever keeps a weight."""

from __future__ import annotations

import copy
import functools
import gc
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lt_zero
from lt_zero.common.compat import saved_tensor_hooks
from lt_zero.core.engine.compute_copy import State
from tests.support.features import needs, skip_without
from tests.support.matrix import only
from tests.support.models import VOCAB, WIDTH, Block, Net, next_token_loss, tokens
from tests.support.parity import RELEASE, Case, check, config_of, split_backward
from tests.support.pool import Pool

# ---- outputs that leave a unit where no walk over containers finds them ----------------------------------------------


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Early(Exception):  # noqa: N818
    """Carries an output out of a module that stops early."""

    value: Tensor


class Elsewhere:
    value: Tensor


_ELSEWHERE, _LIST = Elsewhere(), list[Tensor]()


def _in_array(y: Tensor) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = y
    return array


def _in_queue(y: Tensor) -> Any:
    found: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    found.put(y)
    return found


def _raise(y: Tensor) -> None:
    error = Early()
    error.value = y
    raise error


# How an output leaves a module, and how its caller gets it.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "deque": (lambda y: deque([y]), lambda out: out[0]),
    "generator": (lambda y: (value for value in [y]), next),
    "zip": (lambda y: zip([y], strict=True), lambda out: next(out)[0]),
    "map": (lambda y: map(torch.neg, [-y]), next),
    "dict.values()": (lambda y: {"y": y}.values(), lambda out: next(iter(out))),
    "partial": (lambda y: functools.partial(torch.mul, y, 1.0), lambda out: out()),
    "closure": (lambda y: lambda: y, lambda out: out()),
    "__slots__": (Slots, lambda out: out.value),
    "numpy": (_in_array, lambda out: out[0]),
    "queue": (_in_queue, lambda out: out.get()),
    "list elsewhere": (_LIST.append, lambda out: _LIST.pop()),
    "attribute elsewhere": (lambda y: setattr(_ELSEWHERE, "value", y), lambda out: _ELSEWHERE.value),
    "exception": (_raise, lambda out: out.value),
}


class Hiding(nn.Module):
    """A block whose last operation saves no weight, and whose output leaves it in ``way``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.way = Block(), way
        self.scale, self.bias = nn.Parameter(torch.full((WIDTH,), 1.1)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return WAYS[self.way][0](self.block(x) * self.scale + self.bias)


class HidingNet(nn.Module):
    """Each block hides its output in another way; the model's own output is hidden, too."""

    def __init__(self, ways: list[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Hiding(way) for way in ways)

    def forward(self, batch: Tensor) -> Any:
        x = self.embedding(batch)
        for block in self.blocks:
            try:
                out = block(x)
            except Early as error:
                out = error
            x = WAYS[block.way][1](out)
        return deque([x @ self.embedding.weight.t()])


def _hidden_loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    batch = tokens(step, micro, rank)
    return F.cross_entropy(model(batch)[0].flatten(0, 1), batch.roll(-1, 1).flatten())


def _hidden(optimizer: str, mode: str) -> None:
    net = functools.partial(HidingNet, list(WAYS))
    case = Case(net, _hidden_loss, optimizer=optimizer, zero=RELEASE, activation_checkpointing={"mode": mode})
    if mode == "full":
        case.activation_checkpointing["modules"] = ["Block"]
    check(case)
    if mode == "none":
        few = functools.partial(HidingNet, ["deque", "exception"])
        check(Case(few, _hidden_loss, zero=RELEASE, micro=2, sync_every=True, backward=split_backward))


@pytest.mark.parametrize(
    ("world", "optimizer", "mode"),
    [
        (2, "sgd", "none"),
        pytest.param(3, "adamw", "full", marks=[pytest.mark.slow, needs("activation_checkpointing")]),
    ],
)
def test_outputs_in_containers_that_cannot_be_walked(pool: Pool, world: int, optimizer: str, mode: str) -> None:
    pool.run(world, _hidden, optimizer, mode)


def _hidden_with(zero: dict[str, Any]) -> None:
    check(Case(functools.partial(HidingNet, ["deque", "closure"]), _hidden_loss, zero=zero))


@pytest.mark.parametrize(
    "zero",
    [
        {"stage3_max_live_parameters": 0},
        {**RELEASE, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        {**RELEASE, "zero_hpz_partition_size": 2},
    ],
    ids=["no live parameters", "offloaded", "hpz"],
)
def test_hidden_outputs_under_other_keys(pool: Pool, zero: dict[str, Any]) -> None:
    skip_without(zero)
    pool.run(2, _hidden_with, zero)


def _released_at_once() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = next_token_loss(model, 0, 0, dist.get_rank())
    kept = [
        bucket.name for unit in engine.units for bucket in unit.sharded if bucket.resident or bucket.state is State.LENT
    ]
    assert not kept, "what autograd has saved of an ordinary module keeps no memory"
    loss.backward()


def test_saved_weights_keep_no_memory(pool: Pool) -> None:
    pool.run(2, _released_at_once)


# ---- weights that something keeps while their unit is released -------------------------------------------------------


class _KeepsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.t()  # a view, and not by save_for_backward
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.weight.t(), grads[0].t() @ x


class _KeepsWeight(_KeepsView):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.t()
        out = _KeepsView.forward(ctx, x, weight)
        ctx.weight = _Transposed(weight)
        return out


class _KeepsStorage(_KeepsView):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = _KeepsView.forward(ctx, x, weight)
        ctx.weight = _Rebuilt(weight)
        return out


class _Rebuilt:
    """Keeps no tensor, but the storage."""

    def __init__(self, weight: Tensor) -> None:
        self.storage, self.place = weight.untyped_storage(), (weight.storage_offset(), weight.shape, weight.stride())

    def t(self) -> Tensor:
        return torch.empty(0).set_(self.storage, *self.place)


class _Transposed:
    """Keeps the parameter itself in a place that is not walked."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def t(self) -> Tensor:
        return self.weight


class Keeping(nn.Module):
    """Keeps weights, or views of them, in every way that is not ``save_for_backward``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.second, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Any:
        y = self.second(x)
        rows, weight = y.flatten(0, -2), self.linear.weight
        if self.way == "view in ctx":
            y = _KeepsView.apply(rows, weight).view(y.shape)  # type: ignore[no-untyped-call]
        elif self.way == "weight in ctx":
            y = _KeepsWeight.apply(rows, weight).view(y.shape)  # type: ignore[no-untyped-call]
        elif self.way == "storage in ctx":
            y = _KeepsStorage.apply(rows, weight).view(y.shape)  # type: ignore[no-untyped-call]
        elif self.way == "hook":
            column = weight.detach()[:, 0]
            y.register_hook(lambda grad: grad * column)
            y = self.linear(y)
        elif self.way == "hook of a module's weight":
            y.register_hook(lambda grad: grad * self.linear.weight.detach()[:, 0])
            y = self.linear(y)
        elif self.way == "view":
            return deque([self.linear(y), weight[:1]])
        return deque([self.linear(y), None])


class KeepingNet(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Keeping(way) for _ in range(2))

    def forward(self, batch: Tensor) -> Any:
        x = self.embedding(batch)
        for block in self.blocks:
            x, view = block(x)
            if view is not None:
                x = x * view + view.sum()
        return deque([x @ self.embedding.weight.t()])


def _kept(way: str) -> None:
    check(Case(functools.partial(KeepingNet, way), _hidden_loss, zero=RELEASE, lends=True))


@pytest.mark.parametrize(
    "way",
    only(
        ["weight in ctx", "storage in ctx", "hook", "view"],
        ["view in ctx", "weight in ctx", "storage in ctx", "hook", "hook of a module's weight", "view"],
    ),
)
def test_weights_that_user_code_keeps(pool: Pool, way: str) -> None:
    pool.run(2, _kept, way)


def _views_after_release() -> None:
    torch.manual_seed(0)
    model = Net()
    want = model.blocks[0].up.weight.detach().clone()
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    kept: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda m, args: kept.append(m.up.weight.detach()[1:]))
    with torch.no_grad():
        model(tokens(0, 0, 0))
    handle.remove()
    with lt_zero.gathered(model.blocks[0].up.weight):
        kept.append(model.blocks[0].up.weight.data[1:])
    bucket = engine.owner[id(model.blocks[0].up.weight)][0]
    assert bucket.state is State.LENT
    for view in kept:
        assert torch.equal(view, want[1:]), "readable as long as the weights do not change"
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    for view in kept:
        assert view.isnan().all(), "old values: never zeros, and never values of another step"
    del view
    kept.clear()
    with torch.no_grad():
        model(tokens(0, 0, 0))
    assert bucket.state is not State.LENT
    assert not bucket.resident

    with lt_zero.gathered(model.blocks[0].up.weight):
        view = model.blocks[0].up.weight.detach()
    assert bucket.state is State.LENT
    model.load_state_dict({name: torch.ones(value.shape) for name, value in model.state_dict().items()})
    assert torch.equal(view, torch.ones_like(view)), "a view follows weights that are loaded"
    view.mul_(2)
    model.zero_grad()
    next_token_loss(model, 0, 0, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*modified in place"):
        optimizer.step()


def test_views_that_outlive_the_gathered_weights(pool: Pool) -> None:
    pool.run(2, _views_after_release)


class EnablesGrad(nn.Module):
    """Builds a graph although it is called without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.second(self.linear(x.detach().requires_grad_()))


class EnablesGradNet(KeepingNet):
    def __init__(self) -> None:
        super().__init__("view")
        self.last = EnablesGrad()

    def forward(self, batch: Tensor) -> Any:
        (x,) = super().forward(batch)
        with torch.no_grad():
            y = self.last(self.embedding(batch))
        return deque([x + y @ self.embedding.weight.t()])


def _without_gradients() -> None:
    torch.manual_seed(0)
    want = KeepingNet("view")(tokens(0, 0, 0))[0].detach()
    torch.manual_seed(0)
    model = KeepingNet("view")
    lt_zero.shard(model, config_of(3, RELEASE))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = model(tokens(0, 0, 0))[0]
        torch.testing.assert_close(got, want, msg=lambda text: f"a view of a weight is used after its unit\n{text}")
    check(Case(EnablesGradNet, _hidden_loss, zero=RELEASE, lends=True))


def test_views_and_graphs_where_gradients_are_off(pool: Pool) -> None:
    pool.run(2, _without_gradients)


# ---- saved-tensor hooks and versions ---------------------------------------------------------------------------------


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class Nested(nn.Module):
    """Saves weights where the engine's hooks do not see it; the last one is frozen, and saved itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.more, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way
        self.frozen = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)

    def run(self, x: Tensor) -> Tensor:
        y: Tensor = self.more(self.linear(x)) if self.way != "weight" else x
        return y * self.frozen

    def forward(self, x: Tensor) -> Any:
        if self.way == "transform":
            return deque([torch.func.vjp(self.run, x)[0]])
        if self.way == "thread":
            with ThreadPoolExecutor(1) as pool:
                return deque([pool.submit(self.run, x).result()])
        if self.way == "checkpoint":
            return deque([checkpoint(self.run, x, use_reentrant=False)])
        with saved_tensors_hooks(_identity, _identity):
            return deque([self.run(x)])


class NestedNet(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding, self.way = nn.Embedding(VOCAB, WIDTH), way
        self.blocks = nn.ModuleList(Nested(way) for _ in range(2))

    def forward(self, batch: Tensor) -> Any:
        x = self.embedding(batch)
        for block in self.blocks:
            if self.way == "checkpoint":
                x = checkpoint(lambda value, block=block: block(value)[0], x, use_reentrant=False)
            else:
                x = block(x)[0]
        return deque([x @ self.embedding.weight.t()])


def _around(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    packed: list[int] = []

    def pack(tensor: Tensor) -> tuple[Tensor]:
        packed.append(1)
        return (tensor.detach(),)

    with save_on_cpu():
        first = _hidden_loss(model, step, micro, rank)
    with saved_tensors_hooks(pack, lambda saved: saved[0]):
        second = _hidden_loss(model, step, micro + 1, rank)
    assert len(packed) > 20, "hooks around the model get what its units save"
    return first + second


def _hooks_of_users() -> None:
    check(Case(functools.partial(HidingNet, ["deque", "closure"]), _around, zero=RELEASE))
    check(Case(lambda: Net(checkpointed="outside"), _around_plain, zero=RELEASE))
    for way in ("view", "weight", "transform", "thread", "checkpoint"):
        check(Case(functools.partial(NestedNet, way), _hidden_loss, zero=RELEASE))


def _around_plain(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    with saved_tensors_hooks(_identity, _identity):
        return next_token_loss(model, step, micro, rank)


def test_hooks_of_the_user_around_and_inside_of_units(pool: Pool) -> None:
    pool.run(2, _hooks_of_users)


class Edits(Block):
    """Edits in place an activation, or a weight, that autograd has saved."""

    edits = "activation"

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.up(x))
        with torch.no_grad():
            (y if self.edits == "activation" else self.down.weight).mul_(1.5 if self.edits == "activation" else 1.0)
        out = self.down(y)
        if self.edits == "weight":
            with torch.no_grad():
                self.down.weight.mul_(1.0)
        return out


def _edited() -> None:
    for edits in ("activation", "weight"):
        torch.manual_seed(0)
        model = Net()
        model.blocks = nn.ModuleList(Edits() for _ in range(2))
        for block in model.blocks:
            block.edits = edits
        plain = copy.deepcopy(model)
        lt_zero.shard(model, config_of(3, RELEASE))
        messages = []
        for net in (plain, model):
            with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version") as error:
                next_token_loss(net, 0, 0, 0).backward()
            messages.append(str(error.value).split("[")[0])
        assert messages[0] == messages[1]


def _stepped() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(lt_zero.shard(model, config_of(3, RELEASE)), optimizer)
    before = next_token_loss(model, 0, 0, 0)
    next_token_loss(model, 0, 1, 0).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version"):
        before.backward()


def test_backward_of_a_forward_from_before_a_step_is_torchs_error(pool: Pool) -> None:
    pool.run(2, _stepped)


def test_in_place_edits_of_saved_tensors_are_torchs_error(pool: Pool) -> None:
    pool.run(2, _edited)


# ---- compiled blocks, torch.func, memory -----------------------------------------------------------------------------


def _compiled() -> None:
    def net() -> nn.Module:
        model = HidingNet(["deque", "closure"])
        for block in model.blocks:
            assert isinstance(block, Hiding)
            block.block.compile(backend="aot_eager")
        return model

    gc.collect()  # a global hook of another test's engine would make other graphs
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    check(Case(net, _hidden_loss, zero=RELEASE, steps=3))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert made <= 4, f"{made} graphs: compiled again in each step"


def test_compiled_blocks(pool: Pool) -> None:
    pool.run(2, _compiled)


class Force(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda value: super(Force, self).forward(value).square().sum())(x)


class Mapped(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.vmap(super().forward)(x)
        return torch.func.jvp(super().forward, (y,), (x,))[1]


class TransformNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Force(), Mapped(), Force()])


def _transforms() -> None:
    check(Case(TransformNet, next_token_loss, zero=RELEASE))
    assert saved_tensor_hooks() is None, "nothing is left on the stack of hooks"


def test_transforms_inside_of_units(pool: Pool) -> None:
    pool.run(2, _transforms)
