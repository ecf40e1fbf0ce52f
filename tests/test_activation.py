"""Activation checkpointing: gradients are those without it, bit by bit, whatever the model, the stage and the mode."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lt_zero
from lt_zero import ActivationCheckpointing
from lt_zero.activation.apply import apply
from lt_zero.activation.find import find_modules
from lt_zero.activation.install import installed
from lt_zero.activation.selective import keeps
from lt_zero.config.errors import ConfigError
from lt_zero.core.engine import Engine
from tests.models import VOCAB, WIDTH, Block, Net, next_token_loss, tokens
from tests.parity import RELEASE, STAGES, config_of, full_grads
from tests.pool import Pool
from tests.reach_activation import recomputed

MODES = ("full", "selective")
FULL = ActivationCheckpointing(mode="full")


class Dropping(Block):
    """Notes how often its forward began."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.began = 0

    def forward(self, x: Tensor) -> Tensor:
        self.began += 1
        return x + self.drop(self.mlp(self.drop(x)))


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


@dataclass
class Output:
    x: Tensor
    aux: Tensor


class Elaborate(Dropping):
    """Tensors in keywords, dicts and tuples; a dataclass is returned."""

    def forward(self, x: Tensor, *, mask: Tensor, more: dict[str, Any]) -> Output:  # type: ignore[override]
        x = super().forward(x * mask) + more["context"][0] * len(more["context"])
        return Output(x, x.square().mean())


class ElaborateNet(Net):
    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch) * self.scale
        context, aux = x.mean(1, keepdim=True), torch.zeros(())
        for block in self.blocks:
            output = block(x, mask=torch.full((WIDTH,), 0.5), more={"context": (context, 2)})
            x, aux = output.x, aux + output.aux
        return self.head(x) + aux


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


def net(block: Callable[[], nn.Module] = Dropping, cls: type[Net] = Net, twice: bool = False) -> Net:
    torch.manual_seed(0)
    made = cls(twice=twice)
    made.blocks = nn.ModuleList(block() for _ in range(3))
    return made


def frozen() -> nn.Module:
    """As with LoRA: the first layers are frozen, so the first blocks get inputs without a gradient."""
    made = net()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in ("blocks.1.norm.weight", "blocks.2.down.bias"))
    return made


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dropout": (net, {}),
    "attention, twice": (lambda: net(Attending, twice=True), {}),
    "in place": (lambda: net(Writing), {}),
    "attention": (lambda: net(lambda: Attending(0.0)), {}),
    "elaborate": (lambda: net(Elaborate, ElaborateNet), {}),
    "frozen": (frozen, {}),
    "the module's own": (lambda: net(Nested), {}),
    "by the user, too": (lambda: Net(checkpointed="outside"), {}),
    "around units": (Whole, {"modules": ["Net"]}),
    "inside units": (net, {"modules": ["LayerNorm", "Linear"]}),
    "some": (net, {"every": 2}),
}


def _autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return next_token_loss(model, 0, 0, 0)


Look = dict[str, Tensor]


def run(
    model: nn.Module,
    stage: int,
    block: dict[str, Any],
    loss: Callable[[nn.Module], Tensor] | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
    forwards: int = 1,
    **keys: Any,
) -> Look:
    """Gradients and buffers after forwards and then their backwards."""
    config = config_of(stage, RELEASE if stage == 3 else {}, activation_checkpointing=block, **keys)
    engine = lt_zero.shard(model, config)
    torch.manual_seed(5)
    rank = dist.get_rank()
    found = [loss(model) if loss else next_token_loss(model, 0, micro, rank) for micro in range(forwards)]
    for entry in found:
        backward(entry)
    seen = {**full_grads(engine), **{name: buffer.clone() for name, buffer in model.named_buffers()}}
    assert seen
    engine.detach()
    return seen


def same(got: Look, want: Look, what: Any) -> None:
    assert got.keys() == want.keys(), what
    for name in want:
        assert torch.equal(got[name], want[name]), (what, name)
        assert torch.isfinite(got[name]).all(), (what, name)


def compare(make: Callable[[], nn.Module], stage: int, what: Any, block: dict[str, Any], **options: Any) -> None:
    want = run(make(), stage, {"mode": "none"}, **options)
    for mode in MODES:
        same(run(make(), stage, {"mode": mode, **block}, **options), want, (what, mode))


def _kinds(stage: int) -> None:
    for name, (make, block) in KINDS.items():
        if stage == 3 or name in ("frozen", "attention, twice"):
            compare(make, stage, name, block)
    compare(net, stage, "several forwards", {}, forwards=2)


@pytest.mark.filterwarnings("ignore:These keys do nothing here")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_without(pool: Pool, stage: int) -> None:
    pool.run(2, _kinds, stage)


def _low_precision(stage: int) -> None:
    def twice() -> nn.Module:
        return net(Attending, twice=True)

    bf16 = {"enabled": True}
    compare(twice, stage, "autocast", {}, loss=_autocast)
    compare(twice, stage, "bf16", {}, bf16=bf16)
    compare(net, stage, "islands inside", {}, bf16=bf16, fp16_override_modules=["LayerNorm"])
    compare(net, stage, "a block is one", {}, bf16=bf16, fp16_override_modules=["blocks.1"])


def test_autocast_and_islands(pool: Pool) -> None:
    pool.run(2, _low_precision, 3)


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
    handle = apply(model, FULL)
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


def _several_backwards(stage: int) -> None:
    compare(net, stage, "twice", {}, backward=_walked_twice)
    compare(lambda: net(lambda: Attending(0.0)), stage, "kept products, twice", {}, backward=_walked_twice)
    compare(lambda: net(cls=Penalised), stage, "create_graph", {}, loss=_penalty)


@pytest.mark.parametrize("stage", [1, 3])
def test_several_backwards(pool: Pool, stage: int) -> None:
    pool.run(2, _several_backwards, stage)


def _compiled(stage: int) -> None:
    for wrap in (False, True):

        def make(wrap: bool = wrap) -> nn.Module:
            torch._dynamo.reset()
            model = net(Block)
            if wrap:
                model.blocks = nn.ModuleList(torch.compile(b, backend="aot_eager") for b in model.blocks)
            else:
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            return model

        compare(make, stage, f"wrap={wrap}", {})


def test_compiled_blocks(pool: Pool) -> None:
    pool.run(1, _compiled, 3)


# ---- what is saved, what is recomputed -----------------------------------------------------------------------------


def test_products_are_not_recomputed_in_mode_selective() -> None:
    for mode, want in (("none", []), ("selective", ["cheap"]), ("full", ["products", "cheap"])):
        model = net(Block)
        handle = apply(model, ActivationCheckpointing(mode=mode)) if mode != "none" else None
        assert recomputed(next_token_loss(model, 0, 0, 0)) == want
        if handle is not None:
            handle.remove()


def test_what_draws_random_numbers_is_recomputed() -> None:
    aten, x = torch.ops.aten, torch.zeros(1, 1, 2, 2)
    flash = aten._scaled_dot_product_flash_attention.default
    for op, before in ((flash, ()), (aten._scaled_dot_product_efficient_attention.default, (None, True))):
        assert keeps(op, (x, x, x, *before), {})
        assert keeps(op, (x, x, x, *before, 0.0), {})
        assert not keeps(op, (x, x, x, *before, 0.1), {})
        assert not keeps(op, (x, x, x, *before), {"dropout_p": 0.1})
    assert not any(keeps(op, (), {}) for op in (aten.native_dropout.default, aten.bernoulli.p, aten.gelu.default))
    kept = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default, aten._scaled_mm.default)
    assert all(keeps(op, (), {}) for op in kept)
    assert keeps(torch.ops.higher_order.flex_attention, (), {})


class Count:
    """A store that counts, and the order in which things happen."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def pack(self, tensor: Tensor) -> Tensor:
        self.log.append(("pack", tuple(tensor.shape)))
        return tensor.clone()

    def unpack(self, packed: Tensor) -> Tensor:
        self.log.append(("unpack", tuple(packed.shape)))
        return packed

    def end_backward(self) -> None: ...

    def around(self, what: str) -> Callable[[str], Any]:
        @contextmanager
        def entered(name: str) -> Iterator[None]:
            self.log.append((what, name))
            try:
                yield
            finally:
                self.log.append((f"end of {what}", name))

        return entered


@pytest.mark.parametrize("mode", MODES)
def test_inputs_and_nothing_else_go_to_the_store(mode: Any) -> None:
    model, store = net(Elaborate, ElaborateNet), Count()
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    mask, context = torch.ones(WIDTH), torch.randn(3, 1, WIDTH)
    block = ActivationCheckpointing(mode=mode, every=3)
    handle = apply(model, block, store, store.around("forward"), store.around("recompute"))
    call = lambda: model.blocks[0](x, mask=mask, more={"context": (context, x)})  # noqa: E731
    loss = call().x.sum()
    shapes = [(3, 5, WIDTH), (WIDTH,), (3, 1, WIDTH)]  # x is given twice
    forward = [("forward", "blocks.0"), ("end of forward", "blocks.0")]
    again = [("recompute", "blocks.0"), ("end of recompute", "blocks.0")]
    assert store.log == [*(("pack", shape) for shape in shapes), *forward]
    loss.backward()
    assert store.log[5:] == [*(("unpack", shape) for shape in shapes), *again]
    handle.remove()
    del store.log[:]
    call()
    assert store.log == []


def test_no_recomputation_without_gradients() -> None:
    model, store = net(), Count()
    apply(model, FULL, store)
    with torch.no_grad():
        next_token_loss(model, 0, 0, 0)
    model.requires_grad_(False)
    model.head = nn.Linear(WIDTH, VOCAB)  # all blocks are in front of it
    next_token_loss(model, 0, 0, 0).backward()
    assert [block.began for block in model.blocks] == [2, 2, 2]
    assert store.log == []
    model.eval()  # a frozen model is often in eval mode, and gradients pass through it
    model.blocks[1].requires_grad_(True)
    next_token_loss(model, 0, 0, 0).backward()
    assert [block.began for block in model.blocks] == [3, 4, 4]


# ---- modules stay what they are ------------------------------------------------------------------------------------


def test_copies_have_the_ordinary_forward() -> None:
    model = net()
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    handle = apply(model, FULL)
    assert [n for n, _ in model.named_modules()] == names
    assert list(model.state_dict()) == state
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x"]
    assert b"lt_zero" not in pickle.dumps(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(2.0)
        next_token_loss(copied, 0, 0, 0).backward()
        assert [block.began for block in copied.blocks] == [1, 1, 1], "its own forward ran, and once"
        assert all(p.grad is not None for p in copied.parameters())
    assert [block.began for block in model.blocks] == [0, 0, 0]
    handle.remove()
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_forward_that_was_set_on_the_module_comes_back() -> None:
    model = net()
    mine = model.blocks[0].forward = lambda x: 2.0 * x
    handle = apply(model, FULL)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    assert torch.equal(model.blocks[0](x), 2.0 * x)
    handle.remove()
    assert model.blocks[0].forward is mine
    handle = apply(model, FULL)
    with pytest.raises(RuntimeError, match="A Dropping is checkpointed already"):
        apply(model, FULL)
    ours = model.blocks[1].forward
    model.blocks[1].forward = lambda x: ours(x)  # somebody came after us, and stays
    handle.remove()
    next_token_loss(model, 0, 0, 0).backward()
    assert model.blocks[1].began == 1


def _engine(**keys: Any) -> Engine:
    return lt_zero.shard(net(), config_of(3, activation_checkpointing=keys))


def _installed() -> None:
    engine = _engine(mode="full")
    assert str(installed(engine)) == "activation checkpointing: full, 3 of 3 Dropping modules"
    engine.detach()
    assert not any("forward" in vars(module) for module in engine.root.modules())
    assert installed(_engine(mode="none")) is None
    assert (
        installed(lt_zero.shard(net(), config_of(3, activation_checkpointing=FULL.model_dump()), training=False))
        is None
    )
    with pytest.warns(UserWarning, match="no tensor- or sequence-parallel group"):
        assert str(installed(_engine(partition_activations=True, every=2))).endswith("full, 2 of 3 Dropping modules")


def test_from_the_configuration(pool: Pool) -> None:
    pool.run(1, _installed)


# ---- which modules -------------------------------------------------------------------------------------------------


def names_of(model: nn.Module, **keys: Any) -> list[str]:
    return [name for name, _ in find_modules(model, ActivationCheckpointing(mode="full", **keys)).chosen]


class Mixture(Block):
    """A block with repeated experts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))


def test_the_outermost_repeated_blocks_are_found() -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert names_of(net(Mixture)) == blocks
    assert names_of(net(Mixture), every=2) == ["blocks.0", "blocks.2"]
    assert names_of(net(Mixture), modules=("Mixture", "Linear")) == [*blocks, "head"], "what is inside another is not"
    assert names_of(net(Mixture), modules=("tests.models.Block",)) == blocks, "bases count"
    compiled = net(Block)
    compiled.blocks = nn.ModuleList(torch.compile(b, backend="eager") for b in compiled.blocks)
    assert names_of(compiled) == names_of(compiled, modules=("Block",)) == blocks
    both = find_modules(net(), ActivationCheckpointing(mode="full", modules=("Embedding", "Dropping"), every=2))
    assert str(both) == "1 of 1 Embedding and 1 of 3 Dropping modules"


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (("Droping",), r"activation_checkpointing.modules: 'Droping': .* Did you mean 'Dropping'\?"),
        (("Net",), "activation_checkpointing.modules: 'Net': no module inside the model is of this class"),
        (("ModuleList",), "'ModuleList': no module inside the model"),
    ],
)
def test_a_name_that_matches_nothing(modules: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        names_of(net(), modules=modules)


def test_nothing_to_checkpoint() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))
    before = list(map(type, model.parameters()))
    with pytest.raises(ConfigError, match=r"Sequential has no repeated blocks .*\.modules=\[\w+\], or .*mode='none'"):
        names_of(model)
    with pytest.raises(ConfigError, match="no repeated blocks"):
        lt_zero.shard(model, config_of(3, activation_checkpointing={"mode": "full"}))
    assert list(map(type, model.parameters())) == before
    model(tokens(0, 0, 0)).sum().backward()
