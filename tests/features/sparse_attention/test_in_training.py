"""Sparse attention in sharded training, beside plain torch with full matrices."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.attention import SparseSelfAttention, pattern_of
from lt_zero.features.sparse_attention.sparse import allowed_elements, dense
from tests.support.features import skip_without
from tests.support.matrix import only_rows
from tests.support.pool import Pool

BLOCK = {"mode": "fixed", "block": 8, "num_local_blocks": 2, "attention": "unidirectional"}
WIDTH, HEADS, LENGTH = 12, 2, 44


class Block(nn.Module):
    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pattern = pattern_of(lt_zero.ZeroConfig.of({"sparse_attention": BLOCK}))
        assert pattern is not None
        allowed = allowed_elements(pattern, HEADS, LENGTH, LENGTH)
        return dense(query, key, value, allowed, None, 0.0, (WIDTH // HEADS) ** -0.5)


def _model(attend: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attend()) for _ in range(2)), nn.Linear(WIDTH, 1))


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _trains(stage: int, mode: str, precision: str, compiled: bool) -> None:
    config: dict[str, Any] = {
        "sparse_attention": BLOCK,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"mode": mode, "modules": "Block"} if mode != "none" else {},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "train_micro_batch_size_per_gpu": 2,
    }
    if precision != "fp32":
        config["torch_autocast" if precision == "autocast" else precision] = {"enabled": True}
    model, world = _model(SparseSelfAttention), dist.get_world_size()
    reference = _model(Dense)
    engine, *_ = lt_zero.initialize(model=model, config=config)
    run = torch.compile(engine, backend="aot_eager") if compiled else engine
    momenta = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        engine.backward(run(_batch(step, dist.get_rank())).float().square().mean())
        engine.step()
        optimizer.zero_grad()
        for rank in range(world):
            (reference(_batch(step, rank)).square().mean() / world).backward()
        optimizer.step()
    for (name, p), q, before in zip(
        model.named_parameters(), reference.parameters(), momenta.parameters(), strict=True
    ):
        moved = (q - before).abs().max().item()
        tolerance = 1e-5 if precision == "fp32" else 2 * 2**-8 * 4 * moved  # two steps of a few roundings each
        torch.testing.assert_close(lt_zero.full_master(p), q.detach(), rtol=1e-5, atol=tolerance, msg=name)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "mode", "precision", "compiled"),
    only_rows(
        # Compiled: tests/features/sparse_attention/test_sparse.py.
        [(1, "full", "bf16", False), (3, "selective", "fp32", False)],
        itertools.product([0, 1, 2, 3], ["none", "full", "selective"], ["fp32", "bf16", "autocast"], [False, True]),
    ),
)
def test_weights_are_those_of_plain_torch(pool: Pool, stage: int, mode: str, precision: str, compiled: bool) -> None:
    skip_without("activation_checkpointing" if mode != "none" else "")
    pool.run(2, _trains, stage, mode, precision, compiled)
