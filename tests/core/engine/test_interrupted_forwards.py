"""Forwards that KeyboardInterrupt or SystemExit ends, for which torch calls no hook: nothing of them stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import lt_zero
from lt_zero.common.compat import saved_tensor_hooks
from lt_zero.core.engine.engine import Engine
from lt_zero.training.lightning.fabric_items import ShardedModule
from tests.support.models import VOCAB, WIDTH, Block, tokens
from tests.support.parity import RELEASE, config_of, full_grads
from tests.support.pool import Pool


class Interrupted(Block):
    """Raises ``error`` in a part of it, within a context of its own."""

    error: type[BaseException] | None = None

    def mlp(self, x: Tensor) -> Tensor:
        if self.error is not None:
            with save_on_cpu():
                raise self.error
        return super().mlp(x)


class Chain(nn.Module):
    """The error comes in the last block, which may be recomputed."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Interrupted() for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(batch))
        x = checkpoint(self.blocks[1], x, use_reentrant=False) if self.checkpointed else self.blocks[1](x)
        return x.square().mean()


def _scoped(model: nn.Module, engine: Engine) -> Callable[[Tensor], Tensor]:
    def call(batch: Tensor) -> Tensor:
        with engine.forward_scope():
            result: Tensor = model(batch)
            return result

    return call


def _in_fabric(model: nn.Module, engine: Engine) -> Callable[[Tensor], Tensor]:
    within: Callable[[nn.Module, bool], AbstractContextManager[None]] = lambda module, trains: nullcontext()  # noqa: E731
    return ShardedModule(model, engine, within)


def _passes(call: Callable[[Tensor], Tensor], engine: Engine) -> bool:
    """Whether two steps have the same gradients."""
    found = []
    for _ in range(2):
        engine.root.zero_grad()
        call(tokens(1, 0, 0)).backward()  # type: ignore[no-untyped-call]
        found.append(full_grads(engine))
    first, second = found
    return len(first) > 0 and all(torch.equal(grad, second[name]) for name, grad in first.items())


def _interrupted(wrap: Any, stage: int, error: type[BaseException]) -> None:
    """``wrap``: puts a context around the calls of a model; None: they have none."""
    torch.manual_seed(0)
    model: Any = Chain(checkpointed=wrap is not None)
    engine: Any = lt_zero.shard(model, config_of(stage, RELEASE))
    lt_zero.ShardedOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1))
    call = wrap(model, engine) if wrap is not None else model
    for _ in range(2):
        model.blocks[1].error = error
        with pytest.raises(error):
            call(tokens(0, 0, 0))
        model.blocks[1].error = None
        assert wrap is None or (saved_tensor_hooks() is None and not engine.running)
        assert _passes(call, engine)
        assert saved_tensor_hooks() is None
        assert not engine.running
    model.blocks[1].error = error
    with pytest.raises(error):
        call(tokens(0, 0, 0))
    kept = weakref.ref(engine)
    del model, engine, call
    if wrap is None:
        lt_zero.shard(Chain(), config_of(1))
    gc.collect()
    assert kept() is None


def _all() -> None:
    _interrupted(_scoped, 1, KeyboardInterrupt)
    _interrupted(_scoped, 3, KeyboardInterrupt)
    _interrupted(_in_fabric, 3, SystemExit)
    _interrupted(None, 1, KeyboardInterrupt)
    _interrupted(None, 3, SystemExit)


def test_nothing_of_an_interrupted_forward_stays(pool: Pool) -> None:
    pool.run(2, _all)
