"""Activation checkpointing: which modules, what they save, and that they stay what they are."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lt_zero
from lt_zero import ActivationCheckpointing
from lt_zero.common.errors import ConfigError
from lt_zero.core.engine.engine import Engine
from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing, find_modules, installed
from lt_zero.features.activation_checkpointing.selective import keeps
from tests.support.checkpointed_nets import FULL, MODES, Elaborate, ElaborateNet, net
from tests.support.models import VOCAB, WIDTH, Block, next_token_loss, tokens
from tests.support.parity import config_of
from tests.support.pool import Pool
from tests.support.reach_activation import recomputed

# ---- what is saved, what is recomputed -----------------------------------------------------------------------------


def test_products_are_not_recomputed_in_mode_selective() -> None:
    for mode, want in (("none", []), ("selective", ["cheap"]), ("full", ["products", "cheap"])):
        model = net(Block)
        handle = Checkpointing(model, ActivationCheckpointing(mode=mode)) if mode != "none" else None
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
        if tensor.numel():  # torch 2.10 also packs one without elements
            self.log.append(("pack", tuple(tensor.shape)))
        return tensor.clone()

    def unpack(self, packed: Tensor) -> Tensor:
        if packed.numel():
            self.log.append(("unpack", tuple(packed.shape)))
        return packed

    def end_backward(self) -> None: ...

    def saving(self, name: str, tensors: list[Tensor]) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    @contextmanager
    def around(self, name: str, recompute: bool) -> Iterator[None]:
        what = "recompute" if recompute else "forward"
        self.log.append((what, name))
        try:
            yield
        finally:
            self.log.append((f"end of {what}", name))


@pytest.mark.parametrize("mode", MODES)
def test_inputs_and_nothing_else_go_to_the_store(mode: Any) -> None:
    model, store = net(Elaborate, ElaborateNet), Count()
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    mask, context = torch.ones(WIDTH), torch.randn(3, 1, WIDTH)
    block = ActivationCheckpointing(mode=mode, every=3)
    handle = Checkpointing(model, block, store, store.around)
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
    Checkpointing(model, FULL, store)
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
    handle = Checkpointing(model, FULL)
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
    handle = Checkpointing(model, FULL)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    assert torch.equal(model.blocks[0](x), 2.0 * x)
    handle.remove()
    assert model.blocks[0].forward is mine
    handle = Checkpointing(model, FULL)
    with pytest.raises(RuntimeError, match="A Dropping is checkpointed already"):
        Checkpointing(model, FULL)
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
    assert str(installed(_engine(mode="full", every=2))).endswith("full, 2 of 3 Dropping modules")


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
    assert names_of(net(Mixture), modules=("tests.support.models.Block",)) == blocks, "bases count"
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
