"""What modules hand out: nested outputs, outputs in attributes, their own weights, weights read by other modules."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.matrix import cover, only, only_rows
from tests.support.models import VOCAB, WIDTH, Block, next_token_loss, tokens
from tests.support.parity import RELEASE, STAGES, Case, check, split_backward
from tests.support.pool import Pool


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
    assert stage < 3 or not any(b.resident for u in engine.units for b in u.sharded), "all released after backward"


@pytest.mark.parametrize(("stage", "kind"), cover([3, 2], ["dataclass", "mapping", "object", "nested", "view"]))
def test_nested_outputs(pool: Pool, stage: int, kind: str) -> None:
    pool.run(2, _outputs, stage, kind)


class KeepsOutput(nn.Module):
    """Returns nothing, and keeps its output in an attribute, where a hook can be put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> None:
        self.result = self.block(x)


class KeepsOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsOutput() for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        x = F.one_hot(batch, WIDTH + 1)[..., :WIDTH].float()
        for block in self.blocks:
            block(x)
            x = block.result
        return x


def _square(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return model(tokens(step, micro, rank)).square().mean()


def _kept_outputs() -> None:
    check(Case(KeepsOutputs, _square, 3, zero=RELEASE))


def test_outputs_in_attributes(pool: Pool) -> None:
    pool.run(2, _kept_outputs)


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


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_auxiliary_losses_in_attributes(pool: Pool, stage: int) -> None:
    pool.run(2, _auxiliary, stage)


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


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_a_unit_that_returns_its_weight(pool: Pool, stage: int) -> None:
    pool.run(2, _positions, stage)


# ---- weights that other modules read -------------------------------------------------------------------------------


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
    check(Case(OutsideUse, next_token_loss, stage, zero=zero, sync_every=True, backward=split_backward))


@pytest.mark.parametrize(("stage", "zero"), only_rows([(3, RELEASE)], itertools.product(STAGES, [RELEASE, {}])))
def test_weights_used_outside_their_module(pool: Pool, stage: int, zero: dict[str, Any]) -> None:
    pool.run(2, _outside, stage, zero)
