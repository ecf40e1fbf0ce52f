"""Blocks with a cache of keys and values, as those of transformers: recomputed, and released in backward."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_zero
from lt_zero.common.errors import ConfigError
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing, find_modules
from tests.support.matrix import only
from tests.support.models import WIDTH, next_token_loss, tokens
from tests.support.parity import RELEASE, STAGES, Case, check, config_of
from tests.support.pool import Pool


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None


class Cache:
    """Of one class with transformers' in what is asked of it: layers come and grow as they are used."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, keys: Tensor, number: int) -> Tensor:
        while len(self.layers) <= number:
            self.layers.append(Layer())
        layer = self.layers[number]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys], dim=1)
        return layer.keys

    def get_seq_length(self) -> int:
        return 0 if not self.layers or self.layers[0].keys is None else self.layers[0].keys.shape[1]


class Attention(nn.Module):
    """With a relative bias in the first block only."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.qkv, self.number = nn.Linear(WIDTH, 2 * WIDTH, bias=False), number
        if number == 0:
            self.relative = nn.Embedding(7, 1)

    def forward(self, x: Tensor, bias: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor]:
        query, keys = self.qkv(x).chunk(2, -1)
        if cache is not None:
            keys = cache.update(keys, self.number)
        if bias is None:
            bias = self.relative(torch.arange(keys.shape[1]) % 7).squeeze(-1)
        weights = (query @ keys.transpose(1, 2) + bias).softmax(-1)
        return weights @ keys, bias


class DecoderBlock(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Attention(number), nn.Linear(WIDTH, WIDTH, bias=False)])
        self.seen: list[bool] = []  # with a cache

    def forward(
        self, x: Tensor, bias: Tensor | None = None, past_key_values: Any = None, losses: Any = None
    ) -> tuple[Tensor, Tensor]:
        self.seen.append(past_key_values is not None)
        attended, bias = self.layer[0](x, bias, past_key_values)
        if losses is not None:
            losses.found.append(attended.square().mean())
        hidden = F.dropout(self.layer[1](attended), 0.2, self.training)
        return x + hidden, bias


class Losses:
    def __init__(self) -> None:
        self.found: list[Tensor] = []


class Decoder(nn.Module):
    """Makes a cache while ``use_cache`` is on, with what ``prefix`` puts there."""

    def __init__(self, depth: int = 2, prefix: bool = False, use_cache: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = nn.ModuleList(DecoderBlock(number) for number in range(depth))
        self.prefix = nn.Parameter(torch.randn(depth, 1, 2, WIDTH)) if prefix else None
        self.use_cache = use_cache
        self.losses: Losses | None = None

    def forward(self, batch: Tensor) -> Tensor:
        x, bias = self.embedding(batch), None
        cache = Cache() if self.use_cache else None
        losses = Losses()
        if self.prefix is not None and cache is not None:
            for number, keys in enumerate(self.prefix):
                cache.update(keys.expand(len(batch), -1, -1), number)
        for number, block in enumerate(self.block):
            if number % 2:
                x, bias = block(x, bias, cache, losses)
            else:
                x, bias = block(x, bias, past_key_values=cache, losses=losses)
        self.losses = losses
        return x @ self.embedding.weight.t() + torch.stack(losses.found).sum()


def _grads(model: Decoder, **block: Any) -> dict[str, Tensor]:
    handle = Checkpointing(model, ActivationCheckpointing(**block)) if block else None
    torch.manual_seed(3)
    loss = next_token_loss(model, 0, 0, 0)
    loss.backward()
    assert model.losses is not None
    assert len(model.losses.found) == len(model.block), "a recomputation adds nothing"
    if handle is not None:
        handle.remove()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:Recomputed modules run without the Cache")
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_cache_is_not_filled_twice(mode: str, prefix: bool, every: int) -> None:
    model = Decoder(4, prefix)
    want = _grads(model)
    got = _grads(model, mode=mode, every=every)
    assert want.keys() == got.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_a_cache_that_was_made_for_a_forward_is_not_kept() -> None:
    """Or all keys stay until backward. Said once; generation has its cache, and so has a prefix."""
    model = Decoder(4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = Checkpointing(model, ActivationCheckpointing(mode="full", every=2))
        for _ in range(2):
            next_token_loss(model, 0, 0, 0).backward()
    assert [block.seen[0] for block in model.block] == [False, True, False, True]
    assert [str(entry.message) for entry in told if "use_cache" in str(entry.message)] == [
        "Recomputed modules run without the Cache of `use_cache=True` in training: `past_key_values` in the model's "
        "output stays empty. Set `model.config.use_cache = False` for training; generation is not affected."
    ]
    with torch.no_grad():
        model(tokens(0, 0, 0))
    assert [block.seen[-1] for block in model.block] == [True] * 4
    handle.remove()


@pytest.mark.filterwarnings("ignore:Recomputed modules run without the Cache")
@pytest.mark.parametrize("stage", only([3], STAGES))
def test_caches_in_training(pool: Pool, stage: int) -> None:
    pool.run(2, _trains, stage)


def _trains(stage: int) -> None:
    for prefix in (False, True):
        for mode in ("none", "full", "selective"):
            zero = RELEASE if stage == 3 else {}
            block = {"mode": mode}
            check(Case(partial(Steady, prefix), next_token_loss, stage, zero=zero, activation_checkpointing=block))


class Steady(Decoder):
    """Draws nothing, so that ranks can be compared with one process."""

    def __init__(self, prefix: bool) -> None:
        super().__init__(3, prefix)
        self.eval()


def test_layers_are_released_one_by_one() -> None:
    """Not when the gradients of all keys that the layers before have left in the cache are there: at the very end."""
    model = Decoder(4)
    engine = lt_zero.shard(model, config_of(3, RELEASE))
    most: list[int] = []
    blocks = [unit for unit in engine.units if unit.module in set(model.block)]
    ready = engine.unit_done

    def done(unit: Any, call: Any, grads: Any) -> None:
        most.append(sum(u.leases for u in blocks))
        ready(unit, call, grads)

    engine.unit_done = done  # type: ignore[method-assign]
    next_token_loss(model, 0, 0, 0).backward()
    engine.detach()
    assert len(most) >= len(blocks)
    assert max(most) <= 1


class Holder(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


def test_blocks_with_extras_are_repeated_blocks() -> None:
    def names(model: nn.Module) -> list[str]:
        return [name for name, _ in find_modules(model, ActivationCheckpointing(mode="full")).chosen]

    assert names(Decoder(2)) == ["block.0", "block.1"], "a relative bias in the first"
    both = Holder(Decoder(2), Decoder(2))
    assert names(both) == [f"{part}.block.{n}" for part in ("encoder", "decoder") for n in range(2)]
    stages = nn.ModuleList(
        nn.ModuleList(nn.Sequential(nn.Linear(w, w), nn.ReLU()) for _ in range(n)) for w, n in ((4, 2), (4, 3))
    )
    assert len(names(stages)) == 5, "stages are entered"
    with pytest.raises(ConfigError, match=re.escape("modules=[DecoderBlock]")):
        names(Holder(Decoder(1)))


class Adding(nn.Module):
    """Adds in place to a product of three dimensions: its memory is that of a product that mode selective keeps."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.inside:
            hidden += x
        return self.outer(hidden * hidden.sigmoid() + x)


@pytest.mark.parametrize("inside", [False, True])
def test_a_product_that_was_added_to_is_computed_again(inside: bool) -> None:
    model = nn.ModuleList(Adding(inside) for _ in range(2))
    start = torch.randn(2, 3, WIDTH)

    def grads() -> list[Tensor]:
        x = start
        for block in model:
            x = block(x)
            x += start
        x.square().sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    want = grads()
    Checkpointing(model, ActivationCheckpointing(mode="selective"))
    got = grads()
    assert len(got) == len(want) == 4
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
