"""Activation checkpointing: gradients are those without it, bit by bit, whatever the model, the stage and the mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing
from tests.support.checkpointed_nets import FULL, MODES, Elaborate, ElaborateNet, net, run, same
from tests.support.matrix import only, only_rows
from tests.support.models import WIDTH, Block, Net, next_token_loss, tokens
from tests.support.parity import STAGES
from tests.support.pool import Pool


class Writing(nn.Module):
    """Writes in place: an activation, running statistics, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).mul_(2.0).transpose(1, 2)
        return self.down(self.norm(hidden).transpose(1, 2)).add_(x)


class Attending(nn.Module):
    """Attention that draws random numbers in front of a layer that does."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + F.dropout(self.out(heads.transpose(1, 2).flatten(2)), 0.3)


class Nested(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class Whole(nn.Module):
    """What is checkpointed contains units."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)


def frozen() -> nn.Module:
    """As with LoRA: the first layers are frozen, so the first blocks get inputs without a gradient."""
    made = net()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in ("blocks.1.norm.weight", "blocks.2.down.bias"))
    return made


def by_the_user() -> nn.Module:
    torch.manual_seed(0)
    return Net(checkpointed="outside")


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dropout": (net, {}),
    "attention, twice": (lambda: net(Attending, twice=True), {}),
    "in place": (lambda: net(Writing), {}),
    "attention": (lambda: net(lambda: Attending(0.0)), {}),
    "elaborate": (lambda: net(Elaborate, ElaborateNet), {}),
    "frozen": (frozen, {}),
    "the module's own": (lambda: net(Nested), {}),
    "by the user, too": (by_the_user, {}),
    "around units": (Whole, {"modules": ["Net"]}),
    "inside units": (net, {"modules": ["LayerNorm", "Linear"]}),
    "some": (net, {"every": 2}),
}


def _autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return next_token_loss(model, 0, 0, 0)


def compare(make: Callable[[], nn.Module], stage: int, what: Any, block: dict[str, Any], **options: Any) -> None:
    want = run(make(), stage, {"mode": "none"}, **options)
    for mode in MODES:
        same(run(make(), stage, {"mode": mode, **block}, **options), want, (what, mode))


def _of_kind(stage: int, name: str, forwards: int) -> None:
    make, block = KINDS[name]
    compare(make, stage, name, block, forwards=forwards)


@pytest.mark.filterwarnings("ignore:These keys have no effect here")
@pytest.mark.parametrize(
    ("stage", "name", "forwards"),
    only_rows(
        [(3, "attention, twice", 1), (3, "in place", 2), (3, "elaborate", 1), (3, "frozen", 1), (3, "inside units", 1)],
        [
            *((3, name, forwards) for name in KINDS for forwards in (1, 2)),
            *((stage, name, 1) for stage in STAGES[:3] for name in ("frozen", "attention, twice")),
            *((stage, "dropout", 2) for stage in STAGES[:3]),
        ],
    ),
)
def test_gradients_are_those_without(pool: Pool, stage: int, name: str, forwards: int) -> None:
    pool.run(2, _of_kind, stage, name, forwards)


class Remembering(nn.Module):
    """Forward changes buffers that it reads, in place and by others, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("never", torch.ones(WIDTH))
        self.mean: Tensor
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        return x + self.up(x * self.mean).tanh() * torch.rand(x.shape, generator=self.generator)


@pytest.mark.filterwarnings("ignore:These keys have no effect here")
@pytest.mark.parametrize(
    ("forwards", "twice"), only_rows([(1, False), (3, True)], itertools.product([1, 3], [False, True]))
)
def test_what_forward_remembers(pool: Pool, forwards: int, twice: bool) -> None:
    pool.run(1, _remembered, forwards, twice)


def _remembered(forwards: int, twice: bool) -> None:
    backward = _walked_twice if twice else Tensor.backward
    compare(lambda: net(Remembering), 3, forwards, {}, forwards=forwards, backward=backward)


def test_only_what_changes_is_remembered() -> None:
    model = net(Remembering)
    handle = Checkpointing(model, FULL)
    next_token_loss(model, 0, 0, 0)
    kept = {place[1] for block in model.blocks for place in vars(block)["forward"].state.changing}
    assert kept == {"mean", "_u", "_v"}, "what does not change is not copied at each forward"
    handle.remove()


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LOW: dict[str, dict[str, Any]] = {
    "autocast": {"loss": _autocast},
    "bf16": BF16,
    "islands inside": {**BF16, "fp16_override_modules": ["LayerNorm"]},
    "a block is one": {**BF16, "fp16_override_modules": ["blocks.1"]},
}


def _low_precision(name: str) -> None:
    twice = name in ("autocast", "bf16")
    compare(lambda: net(Attending, twice=True) if twice else net(), 3, name, {}, **LOW[name])


@pytest.mark.parametrize("name", only(["autocast", "islands inside"], LOW))
def test_autocast_and_islands(pool: Pool, name: str) -> None:
    pool.run(2, _low_precision, name)


class Made(Block):
    """Makes a tensor of the default dtype, which precision plugins set around the training step only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.full((WIDTH,), 1.5))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_default_dtype_is_that_of_forward() -> None:
    model = net(Made).bfloat16()
    handle = Checkpointing(model, FULL)
    with default_dtype(torch.bfloat16):
        loss = next_token_loss(model, 0, 0, 0)
    loss.backward()
    assert torch.get_default_dtype() == torch.float32
    got = [p.grad for p in model.parameters()]
    handle.remove()
    model.zero_grad()
    with default_dtype(torch.bfloat16):
        next_token_loss(model, 0, 0, 0).backward()
    for mine, parameter in zip(got, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(mine, parameter.grad)  # type: ignore[arg-type]


def _walked_twice(loss: Tensor) -> None:
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()


class Penalised(Net):
    """Returns what a gradient penalty needs."""

    def forward(self, batch: Tensor) -> Any:
        y = x = (self.embedding(batch) * self.scale).detach().requires_grad_()
        for block in self.blocks:
            y = block(y)
        return self.head(y), x


def _penalty(model: nn.Module) -> Tensor:
    y, x = model(tokens(0, 0, 0))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().mean() + grad.square().sum()


def _several_backwards(stage: int, name: str) -> None:
    if name == "create_graph":
        compare(lambda: net(cls=Penalised), stage, name, {}, loss=_penalty)
    else:
        kept = name == "kept products, twice"
        compare(lambda: net(lambda: Attending(0.0)) if kept else net(), stage, name, {}, backward=_walked_twice)


@pytest.mark.parametrize(
    ("stage", "name"),
    only_rows(
        [(3, "kept products, twice"), (1, "create_graph")],
        itertools.product([1, 3], ["twice", "kept products, twice", "create_graph"]),
    ),
)
def test_several_backwards(pool: Pool, stage: int, name: str) -> None:
    pool.run(2, _several_backwards, stage, name)


def _compiled(stage: int, wrap: bool) -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        model = net(Block)
        if wrap:
            model.blocks = nn.ModuleList(torch.compile(b, backend="aot_eager") for b in model.blocks)
        else:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        return model

    compare(make, stage, "compiled", {})


@pytest.mark.parametrize("wrap", only([False], [False, True]))
def test_compiled_blocks(pool: Pool, wrap: bool) -> None:
    pool.run(1, _compiled, 3, wrap)
